"""Python snippets of README and docs, read from their pages and run as printed.

The Python blocks of a page form programs. A program is one namespace, run on two ranks in an empty
folder. Comments of the page, which a reader does not see, say what a program needs; each is the
line before a block:

    <!-- program -->                a program begins here; the first one of a page needs no comment
    <!-- program: ranks=4 -->       it runs on four ranks
    <!-- program: needs=peft -->    it needs packages, joined by commas
    <!-- program: gpu -->           it needs a GPU; elsewhere it is compiled only
    <!-- program: compile -->       it needs what no test has (a cluster, a download)
    <!-- setup                      lines of Python that run before the block and are not shown,
    x = 1                           such as a model and data
    -->

If a comment begins a program, its ``diff`` blocks show a change, and it runs without and with the
change. If both runs set ``final_loss``, the values must be equal.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent
_PARTS = re.compile(
    r"^ *<!-- program(?:: (?P<options>.*?))? -->$"
    r"|^ *<!-- setup\n(?P<setup>.*?)^ *-->$"
    r"|^(?P<indent> *)```(?P<language>python|diff)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Program:
    """Python blocks of a page that share a namespace."""

    page: str
    line: int
    ranks: int = 2
    needs: list[str] = field(default_factory=list)
    is_marked: bool = False  # a comment begins it
    is_gpu: bool = False
    is_compiled_only: bool = False
    blocks: list[tuple[int, str]] = field(default_factory=list)  # (line of the page, code)
    before: list[tuple[int, str]] = field(default_factory=list)  # the same, before the changes

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def compile(self) -> None:
        """Raises SyntaxError if a block is no Python."""
        for line, code in [*self.blocks, *self.before]:
            compile(_padded(code, line), self.page, "exec")

    @property
    def is_changed(self) -> bool:
        """Whether it has a block of the language ``diff``."""
        return self.blocks != self.before

    def missing_packages(self) -> list[str]:
        # Packages that another test has imported from a folder of its own count as missing.
        return [each for each in self.needs if PathFinder.find_spec(each) is None]


def programs(page: Path) -> list[Program]:
    """Returns the programs of a page.

    Raises:
        ValueError: An option is unknown, or setup is followed by no block.
    """
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    found = [Program(name, 1)]
    setup: list[tuple[int, str]] = []
    for match in _PARTS.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["language"] == "diff" and not found[-1].is_marked:
            continue
        if match["code"] is not None:
            indent = len(match["indent"])
            code = "\n".join(each[indent:] for each in match["code"].split("\n"))
            after, before = code, code
            if match["language"] == "diff":
                after, before = _side(code, "+"), _side(code, "-")
            found[-1].blocks += [*setup, (line + 1, after)]
            found[-1].before += [*setup, (line + 1, before)]
            setup = []
        elif match["setup"] is not None:
            setup.append((line + 1, match["setup"]))
        else:
            found.append(Program(name, line, is_marked=True))
            _read_options(found[-1], match["options"] or "")
    if setup:
        raise ValueError(f"{name}:{setup[0][0]}: expected a block after setup; found none")
    return [each for each in found if each.blocks]


def _side(diff: str, sign: str) -> str:
    """The lines of a diff with ``sign`` or without a sign; other lines become empty."""
    lines = (each[1:] if each[:1] in (sign, " ") else "" for each in diff.split("\n"))
    return "\n".join(lines)


def _read_options(program: Program, options: str) -> None:
    for each in options.split():
        name, _, value = each.partition("=")
        if name == "ranks":
            program.ranks = int(value)
        elif name == "needs":
            program.needs = value.split(",")
        elif each == "gpu":
            program.is_gpu = True
        elif each == "compile":
            program.is_compiled_only = True
        else:
            raise ValueError(f"{program}: expected ranks, needs, gpu or compile; found {each!r}")


def _padded(code: str, line: int) -> str:
    """Code after empty lines, so that line numbers in errors are those of the page."""
    return "\n" * (line - 1) + code


def run(blocks: list[tuple[int, str]], page: str, folder: str) -> float | None:
    """Runs the blocks of a program on this rank; ``folder`` is the current one meanwhile. Returns
    the program's ``final_loss``, or None."""
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    module = type(sys)("__main__")
    replaced = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        for line, code in blocks:
            exec(compile(_padded(code, line), page, "exec"), module.__dict__)
        loss = module.__dict__.get("final_loss")
        return None if loss is None else float(loss)
    finally:
        sys.modules["__main__"] = replaced
        sys.path[:] = path
        os.chdir(before)


def pages() -> Iterator[Path]:
    """README and the pages of the docs, with those in ``docs/internals/``."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def execute(source: str, name: str, folder: str, arguments: list[str]) -> str:
    """Run a file on this rank, as torchrun does; returns all that it prints."""
    if dist.is_initialized():
        os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    before, output = sys.argv, io.StringIO()
    sys.argv = [name, *arguments]
    try:
        with contextlib.redirect_stdout(output):
            run([(1, source)], name, folder)
    except SystemExit as end:
        output.write(str(end))
    finally:
        sys.argv = before
    return output.getvalue()
