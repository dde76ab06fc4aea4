"""Figures about the structure of the engine, measured: ``python tools/design_numbers.py``.

- Files of ``fsdp_engine`` that one unit's forward gather passes, from the hook of its module to the
  collective, and that one unit's last gradient passes, from its hook to the collective: every file
  of which a function runs in between, in a real forward and backward at level 3 (two ranks, of
  which the other does not exist).
- Attributes that classes set in ``__init__``, and arguments of constructors.
- Lines of code without docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.devices.mesh import pretended_ranks

PACKAGE = Path(fe.__file__).parent
COUNTED = ("planning", "runtime", "buffers", "strategies", "codecs/base.py", "codecs/cast.py")
CLASSES = {
    "runtime/unit.py": "Unit",
    "buffers/gradients.py": "Gradients",
    "runtime/reductions.py": "Reductions",
}
WORDS = ("plane", "slot", "bucket")


class Passed:
    """Files of the package whose functions run from one function's call to another's.

    Args:
        begins, ends: (file below the package, name of the function).
    """

    def __init__(self, begins: tuple[str, str], ends: tuple[str, str]) -> None:
        self._begins, self._ends = begins, ends
        self._now: list[str] | None = None
        self.found: list[list[str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(str(PACKAGE)):
            return
        file = str(Path(path).relative_to(PACKAGE))
        where = (file, frame.f_code.co_name)
        if where == self._begins:
            self._now = []
        if self._now is not None:
            if file not in self._now:
                self._now.append(file)
            if where == self._ends:
                self.found.append(self._now)
                self._now = None


def passed(run: Callable[[], None], begins: tuple[str, str], ends: tuple[str, str]) -> list[str]:
    """Of all ways from ``begins`` to ``ends`` while ``run`` runs, the one through most files."""
    watch = Passed(begins, ends)
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return max(watch.found, key=len)


def gather_and_gradient() -> tuple[list[str], list[str]]:
    """See the module docstring."""
    with pretended_ranks((2,)) as mesh:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=0)
        engine = fe.shard(model, mesh, config=config, initial_values="rank0", min_unit_size=0)

        def step() -> None:
            model(torch.ones(2, 8)).sum().backward()
            for param in model.parameters():
                param.grad = None

        step()
        collective = "devices/collectives.py"
        gather = passed(step, ("runtime/hooks.py", "before"), (collective, "all_gather"))
        gradient = passed(step, ("runtime/hooks.py", "on_grad"), (collective, "reduce_scatter"))
        assert engine.units
    return gather, gradient


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Files of the package by path below it."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text())


def attributes(tree: ast.Module, name: str) -> int:
    """Attributes that class ``name`` sets in its ``__init__``."""
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    (init,) = (n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    names = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return len(names)


def most_arguments() -> tuple[int, str]:
    """Of all constructors, the most arguments, and whose."""
    most = (0, "")
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for init in node.body:
                if isinstance(init, ast.FunctionDef) and init.name == "__init__":
                    count = len(init.args.args) - 1 + len(init.args.kwonlyargs)
                    most = max(most, (count, f"{path}: {node.name}"))
    return most


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


def main() -> None:
    """Print the figures as rows of a table."""
    gather, gradient = gather_and_gradient()
    print(f"| files that a unit's forward gather passes | {len(gather)} | {', '.join(gather)} |")
    print(f"| files that a gradient passes | {len(gradient)} | {', '.join(gradient)} |")
    by_path = dict(trees())
    for path, name in CLASSES.items():
        print(f"| attributes of {name} | {attributes(by_path[path], name)} | {path} |")
    count, where = most_arguments()
    print(f"| arguments of a constructor, at most | {count} | {where} |")
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if _is_counted(f)]
    print(f"| code lines | {sum(map(code_lines, files)):,} | {', '.join(COUNTED)} |")
    longest = max((len(f.read_text().splitlines()), str(f.relative_to(PACKAGE))) for f in files)
    print(f"| longest file of these, lines | {longest[0]} | {longest[1]} |")
    texts = [f.read_text().lower() for f in (PACKAGE / "runtime").glob("*.py")]
    for word in WORDS:
        print(f"| mentions of '{word}' in runtime/ | {sum(t.count(word) for t in texts)} | |")


def _is_counted(file: Path) -> bool:
    path = str(file.relative_to(PACKAGE))
    return any(path == each or path.startswith(f"{each}/") for each in COUNTED)


if __name__ == "__main__":
    main()
