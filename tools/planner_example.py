"""The first example of docs/internals/planner.md: its model, its command, and its output.

    python tools/planner_example.py            # fails if the page has another output
    python tools/planner_example.py --write    # writes the output into the page

The command runs in this process, in a folder with the page's model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from fsdp_engine import terminal
from fsdp_engine.planner import planner_cli

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "planner.md"
WIDTH = 100
# The texts before the blocks.
_BEFORE = {
    "python": "With this file, `my_model.py`:",
    "bash": "plans a job on eight H100s",
    "text": f"which prints in a terminal of {WIDTH} columns",
}


def printed_in_page() -> str:
    """The output that the page has."""
    return _block("text")


def printed_by_command() -> str:
    """The output of the page's command with the page's model."""
    program, *arguments = shlex.split(_block("bash"))
    assert program == "fsdp-engine"
    with tempfile.TemporaryDirectory() as folder, _working_in(Path(folder)):
        Path("my_model.py").write_text(_block("python"), encoding="utf-8")
        environment = {"COLUMNS": str(WIDTH), "TERM": "dumb"}
        result = CliRunner().invoke(planner_cli.app, arguments, env=environment)
    if result.exit_code:
        raise RuntimeError(f"{PAGE.name}: expected a command that plans; found {result.output}")
    return "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())


def _block(language: str) -> str:
    text = PAGE.read_text(encoding="utf-8").partition(_BEFORE[language])[2]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Context with another working directory and a terminal of ``WIDTH`` columns. At its end the
    page's model is removed from the imported modules."""
    before = Path.cwd()
    with (
        mock.patch.object(terminal, "terminal_width", return_value=WIDTH),
        mock.patch.object(sys, "path", [*sys.path]),
    ):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.modules.pop("my_model", None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the output into the page")
    settings = parser.parse_args()
    page, command = printed_in_page(), printed_by_command()
    if settings.write:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(page, command), encoding="utf-8")
    elif page != command:
        sys.exit(f"{PAGE.name}: expected the output of its example; found another one. Run --write")


if __name__ == "__main__":
    main()
