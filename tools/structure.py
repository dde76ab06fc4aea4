"""Measure the structure of the package: ``python -m tools.structure [--write]``.

Prints four values of each figure: the first one in ``tools/structure.json``, the last one that was
written there, the current one, and the goal. A test fails where a figure is more than
:data:`TOLERANCE` worse than the file's. ``--write`` writes better figures into the file, and the
table into ``docs/design.md``; ``--accept`` writes worse ones, too.

- Code lines are those without comments, docstrings and blank lines.
- The closure of ``fe.shard`` is the modules that its module imports at module level, transitively,
  with the packages that contain them. Imports under TYPE_CHECKING or in functions do not count, and
  neither do those of ``fsdp_engine/__init__.py``.
- Words of extensions are those of :data:`WORDS`, counted also within other words, in code,
  comments and docstrings of the kernel, which is the package without :data:`BESIDE_THE_KERNEL`.
- ``tools/traced_step.py`` describes the traced step.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fsdp_engine"
FILE = ROOT / "tools" / "structure.json"
PAGE = ROOT / "docs" / "design.md"
TOP = PACKAGE.name
TOLERANCE = 0.01
# Folders that are no part of the kernel: extensions, interfaces and formats.
BESIDE_THE_KERNEL = {
    *("checkpoint", "extensions", "extension_list", "fsdp2", "integrations", "megatron"),
    *("hardware", "kernel_interface", "pipelining", "planner", "pretrained"),
}
# Words that only an extension needs.
WORDS = (
    *("activation", "adapter", "arena", "checkpointing", "conversion", "encoding", "home"),
    *("mean_loss", "nccl_pool", "offload", "owner", "pipeline", "recomput", "rounds", "scratch"),
    "together()",
)
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_PLACE = re.compile(r"(<!-- structure -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)


def code_lines(path: Path) -> int:
    """Lines of a file without comments, docstrings and blank lines."""
    source = path.read_text(encoding="utf-8")
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for each in node.body:
                match each:
                    case ast.Expr(value=ast.Constant(value=str())):
                        texts.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


@functools.cache
def modules() -> dict[str, Path]:
    """The files of the package by the name of their module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [TOP, *path.relative_to(PACKAGE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def _imports_of(body: list[ast.stmt], package: str) -> Iterator[str]:
    """Yields the names that statements import when the module is loaded."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = module or ""
                if level:
                    parents = package.split(".")
                    parents = parents[: len(parents) - level + 1]
                    base = ".".join([*parents, *([module] if module else [])])
                yield base
                yield from (f"{base}.{each.name}" for each in names)
            case ast.If(test=test, body=first, orelse=second):
                if "TYPE_CHECKING" not in ast.dump(test):
                    yield from _imports_of(first, package)
                yield from _imports_of(second, package)
            case ast.Try(body=first, handlers=handlers, orelse=second, finalbody=last):
                for each in (first, second, last, *(handler.body for handler in handlers)):
                    yield from _imports_of(each, package)
            case ast.With(body=inner) | ast.ClassDef(body=inner):
                yield from _imports_of(inner, package)


def closure(module: str) -> set[str]:
    """The modules of the package that ``module`` imports, transitively."""
    done: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in done or name not in modules() or name == TOP:
            continue
        done.add(name)
        path = modules()[name]
        parent = name.rpartition(".")[0]
        package = name if path.name == "__init__.py" else parent
        for each in _imports_of(ast.parse(path.read_text(encoding="utf-8")).body, package):
            todo += [each, each.rpartition(".")[0]]
        todo.append(parent)
    return done


def most_parameters() -> tuple[int, str]:
    """The largest number of parameters of a function of the package, and its name."""
    found = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                found.append((count, f"{name}.{node.name}"))
    return max(found)


def _run(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()[-1500:]}")
    return done.stdout


def traced(*arguments: str) -> dict[str, Any]:
    """The result of ``tools/traced_step.py``."""
    found: dict[str, Any] = json.loads(_run("-m", "tools.traced_step", *arguments).splitlines()[-1])
    return found


_IMPORTED = """
import inspect, json, sys, fsdp_engine as fe
loaded = sum(each.partition(".")[0] == "fsdp_engine" for each in sys.modules)
parameters = len(inspect.signature(fe.shard).parameters)
print(json.dumps([loaded, len(fe.__all__), parameters, fe.shard.__module__]))
"""


def _of_trace(ran: dict[str, Any]) -> dict[str, int]:
    """The figures of a traced step."""
    return {
        "lines that run in a steady step": ran["step"]["lines"],
        "lines that run in `fe.shard`": ran["shard"]["lines"],
        "files of a gather": ran["gather"]["files"],
        "changes of file of a gather": ran["gather"]["switches"],
        "files of a reduction": ran["reduction"]["files"],
        "changes of file of a reduction": ran["reduction"]["switches"],
    }


def measured() -> dict[str, int]:
    """Every figure that the file has, as it is now. Less is better."""
    lines = {name: code_lines(path) for name, path in modules().items()}
    loaded, public_names, parameters, module = json.loads(_run("-c", _IMPORTED))
    inside = closure(module)
    ran = traced()
    tests = (ROOT / "tests").rglob("*.py")
    return {
        "code lines of the package": sum(lines.values()),
        "modules that `fe.shard` imports": len(inside),
        "their code lines": sum(lines[name] for name in inside),
        "modules that `import fsdp_engine` loads": loaded,
        "code lines loaded after a training step": sum(
            lines[name] for name in ran["loaded"] if name in lines
        ),
        **_of_trace(ran),
        "parameters of a function, at most": most_parameters()[0],
        "parameters of `fe.shard`": parameters,
        "public names": public_names,
        "mentions of extensions in the kernel": words_of_extensions(),
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
    }


def words_of_extensions() -> int:
    """How often the kernel has a word that only an extension needs."""
    pattern = re.compile("|".join(map(re.escape, WORDS)), re.IGNORECASE)
    return sum(
        len(pattern.findall(path.read_text(encoding="utf-8")))
        for name, path in modules().items()
        if name.split(".")[1:2] and name.split(".")[1] not in BESIDE_THE_KERNEL
    )


def of_fsdp2() -> dict[str, int]:
    """The figures of torch's ``fully_shard`` that have a counterpart."""
    import torch.distributed.fsdp._fully_shard as package

    assert package.__file__ is not None
    files = sorted(Path(package.__file__).parent.rglob("*.py"))
    return {
        "modules that `fe.shard` imports": len(files),
        "their code lines": sum(map(code_lines, files)),
        **_of_trace(traced("--fsdp2")),
    }


def kept() -> dict[str, dict[str, int]]:
    """The figures of the file: for each ``first``, ``now``, ``goal``."""
    found: dict[str, dict[str, int]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def worse(now: dict[str, int], file: dict[str, dict[str, int]]) -> list[str]:
    """One line for each figure that is worse than the file's by more than the tolerance."""
    return [
        f"{name}: expected at most {file[name]['now']:,}, {TOLERANCE:.0%} more allowed; found "
        f"{figure:,}"
        for name, figure in now.items()
        if figure > file[name]["now"] * (1 + TOLERANCE)
    ]


def table(file: dict[str, dict[str, int]]) -> str:
    """The file's figures, in Markdown."""
    rows = ["| figure | first | now | goal | FSDP2 |", "|---|---|---|---|---|"]
    for name, each in file.items():
        cells = (
            f"{each[key]:,}" if key in each else "" for key in ("first", "now", "goal", "fsdp2")
        )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """A page with the table between its two comments."""
    return _PLACE.sub(lambda found: f"{found[1]}{table(kept())}\n{found[2]}", page)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write figures that are better")
    parser.add_argument("--accept", action="store_true", help="write figures that are worse, too")
    given = parser.parse_args()
    now, file = measured(), kept()
    width = max(map(len, now))
    print(f"{'':{width}} {'first':>8} {'file':>8} {'now':>8} {'goal':>8}")
    for name, figure in now.items():
        each = file[name]
        goal = f"{each['goal']:,}" if "goal" in each else ""
        print(f"{name:{width}} {each['first']:8,} {each['now']:8,} {figure:8,} {goal:>8}")
        if given.accept or (given.write and figure < each["now"]):
            each["now"] = figure
    print(f"most parameters: {most_parameters()[1]}")
    if given.write or given.accept:
        for name, figure in of_fsdp2().items():
            file[name]["fsdp2"] = figure
        FILE.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if found := worse(now, file):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
