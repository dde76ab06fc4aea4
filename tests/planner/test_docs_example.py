"""The first example of docs/planner.md runs as it is printed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_engine.planner import planner_cli

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def first_block(language: str, after: str) -> str:
    """The first block of a language in the page after a text."""
    text = PAGE.read_text(encoding="utf-8").partition(after)[2]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_example_prints_what_the_page_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").write_text(first_block("python", "With this file, `my_model.py`:"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    monkeypatch.setattr(planner_cli, "terminal_width", lambda: 100)
    program, *arguments = shlex.split(first_block("bash", "are planned by"))
    assert program == "fsdp-engine"
    result = CliRunner().invoke(planner_cli.app, arguments, env={"COLUMNS": "100", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 100
    assert lines == first_block("text", "which prints in a terminal of 100").splitlines()
