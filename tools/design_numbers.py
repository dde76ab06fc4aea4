"""Figures about the structure of the package: ``python tools/design_numbers.py``.

- Lines of code of the core, without docstrings, comments and blank lines; files of the package.
- Files that a forward gather passes, from the hook of its module to the collective, and that a
  gradient passes, from its hook to the collective: every file with a function that runs in between,
  in a traced step at level 3 and at level 1 (three units, two ranks, one of them simulated). In
  brackets the folders that are entered more than once on the way.
- Nouns: names in the table of ``docs/design.md``, section 2.
- Attributes with a leading underscore that are read or set on another object than ``self``.
- Words that CONTRIBUTING.md replaces by terms of the field, in code and docs.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.mesh import simulated_ranks

PACKAGE = Path(fe.__file__).parent
ROOT = PACKAGE.parent
CORE = (
    "layout",
    "comm",
    "memory",
    "buffers",
    "units",
    "runtime",
    "strategies",
    "codecs/base.py",
    "codecs/cast.py",
    "accelerator.py",
    "engine.py",
    "sharding.py",
)
SHORT_FILE_LINES = 60
COLLECTIVES = "comm/collectives.py"
# From where to where a path is followed, by level: (file, function), (file, functions).
GATHER = ("runtime/hooks.py", "before")
GRADIENT = ("runtime/hooks.py", "on_grad")
LEVELS = {"level 3": "optim_grads_params", "level 1": "optim"}
WORDS = (
    "whoever",
    "nobody",
    "somebody",
    "anybody",
    "wishes",
    "likewise",
    "beforehand",
    "aside",
    r"hand(?:s|ed|ing)? back",
    r"let(?:s|ting)? go",
    r"give(?:s|n)? back",
    r"goes on",
    r"go on",
    r"under way",
    r"on (?:its|their) way",
    r"what (?:is|was|are|has|have|comes|came|lies|stays|travels|accumulates)",
)


# Private names of torch and of named tuples that the package also defines on classes of its own.
FOREIGN = (
    "torch.",
    "._modules",
    "._buffers",
    "._version",
    "._timeout",
    "._replace",
    "._flat_weight_refs",
    "._compiled_call_impl",
    "._torchdynamo_disable",
)


class Trace:
    """Files of the package whose functions run from one function's call to another's.

    Args:
        begins: (file below the package, name of the function).
        ends: file of the collectives, names of the functions.
    """

    def __init__(self, begins: tuple[str, str], ends: Iterable[str]) -> None:
        self._begins, self._ends = begins, set(ends)
        self._now: list[str] | None = None
        self.found: list[list[str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(str(PACKAGE)):
            return
        file = str(Path(path).relative_to(PACKAGE))
        if (file, frame.f_code.co_name) == self._begins:
            self._now = []
        if self._now is not None:
            self._now.append(file)
            if file == COLLECTIVES and frame.f_code.co_name in self._ends:
                self.found.append(self._now)
                self._now = None


def traced(run: Callable[[], None], begins: tuple[str, str], ends: Iterable[str]) -> list[str]:
    """Of all paths from ``begins`` to ``ends`` during ``run``, the one through most files: the file
    of each call, in order."""
    trace = Trace(begins, ends)
    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return max(trace.found, key=lambda calls: len(set(calls)))


def paths_of(level: str) -> dict[str, list[str]]:
    """The files of the calls of a gather and of a gradient in a step."""
    with simulated_ranks((2,)) as mesh:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=0)
        engine = fe.shard(
            model, mesh, strategy=level, config=config, initial_values="rank0", min_unit_size=0
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        assert engine.units
        return {
            "gather": traced(step, GATHER, ["all_gather"]),
            "gradient": traced(step, GRADIENT, ["reduce_scatter"]),
        }


def shown(calls: list[str]) -> tuple[str, str]:
    """Number of files, with the folders that are entered more than once; the files."""
    files = list(dict.fromkeys(calls))
    folders = [folder for folder, _ in groupby(file.split("/")[0] for file in calls)]
    again = {folder: folders.count(folder) for folder in folders if folders.count(folder) > 1}
    listed = ", ".join(f"{folder} {count} times" for folder, count in again.items())
    return f"{len(files)} ({listed})" if listed else str(len(files)), ", ".join(files)


def files_of_the_package() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def is_core(file: Path) -> bool:
    path = str(file.relative_to(PACKAGE))
    return any(path == each or path.startswith(f"{each}/") for each in CORE)


def code_lines(file: Path) -> int:
    """Lines that hold code: no docstrings, comments or blank lines."""
    text = file.read_text()
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENCODING, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def nouns() -> list[str]:
    """The names in the table of nouns."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.split("## 2. Nouns")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def private_attributes(tree: ast.AST, own: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and text of uses of ``other._name``, of the names ``own``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in own:
            continue
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_super = isinstance(node.value, ast.Call)
        use = ast.unparse(node)
        if not (is_own or is_super or use.startswith(FOREIGN) or use.endswith(FOREIGN)):
            yield node.lineno, use


def own_private_names() -> set[str]:
    """Names with a leading underscore that classes of the package define or set on ``self``."""
    names = set()
    for file in files_of_the_package():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def words_to_replace() -> dict[str, int]:
    """Occurrences of each of :data:`WORDS`, in the package, its tests, tools, and docs."""
    folders = ("fsdp_engine", "tests", "benchmarks", "examples", "tools", "docs")
    files = [
        file
        for folder in folders
        for kind in ("*.py", "*.md")
        for file in (ROOT / folder).rglob(kind)
        if file != Path(__file__)
    ]
    return count_words(
        "\n".join(file.read_text(encoding="utf-8") for file in (*files, *ROOT.glob("*.md")))
    )


def count_words(text: str) -> dict[str, int]:
    """Occurrences of each of :data:`WORDS`, in upper or lower case."""
    text = text.lower()
    return {word: len(re.findall(rf"\b{word}\b", text)) for word in WORDS}


def main() -> None:
    """Print the figures as rows of a table."""
    files = files_of_the_package()
    core = [file for file in files if is_core(file)]
    short = sum(len(file.read_text().splitlines()) <= SHORT_FILE_LINES for file in files)
    own = own_private_names()
    private = [
        f"{file.relative_to(PACKAGE)}:{line}: {use}"
        for file in core
        for line, use in private_attributes(ast.parse(file.read_text()), own)
    ]
    words = words_to_replace()
    print("| figure | now | shall be | |")
    print("|---|---|---|---|")
    lines = sum(map(code_lines, core))
    print(f"| code lines of the core | {lines:,} | 7,500 | {', '.join(CORE)} |")
    print(f"| files of the package | {len(files)} | 160 | {short} of at most 60 lines |")
    for title, level in LEVELS.items():
        for what, calls in paths_of(level).items():
            count, listed = shown(calls)
            limit = 7 if what == "gather" else 9
            print(f"| files of a {what}, {title} | {count} | {limit}, no folder twice | {listed} |")
    found = nouns()
    print(f"| nouns of `docs/design.md` | {len(found)} | 28 | |")
    print(f"| private attributes of other objects, in the core | {len(private)} | 0 | |")
    most = sorted(words.items(), key=lambda item: -item[1])[:6]
    listed = ", ".join(f"{word} {count}" for word, count in most)
    print(f"| words to replace, in code and docs | {sum(words.values()):,} | 0 | most: {listed} |")
    if "--list" in sys.argv:
        print("\n".join(private))


if __name__ == "__main__":
    main()
