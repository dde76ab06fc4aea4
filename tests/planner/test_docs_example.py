"""The examples of docs/planner.md print what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tools.planner_example import WIDTH, printed_by_command, printed_in_page

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_the_first_example_prints_what_the_page_has() -> None:
    found = printed_by_command().splitlines()
    assert max(map(len, found)) <= WIDTH
    assert any(line.startswith("Use ") for line in found)
    # After a change of the planner: python tools/planner_example.py --write
    assert found == printed_in_page().splitlines()


@pytest.mark.thorough
def test_the_example_of_questions_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    section = page.split("## Global batch, quick plans, and questions")[1]
    (script,) = re.findall(r"```bash\n(.*?)```", section, re.S)[:1]
    (expected,) = re.findall(r"```text\n(.*?)```", section, re.S)[:1]
    command = f"{shlex.quote(sys.executable)} -m fsdp_engine"
    done = subprocess.run(
        ["bash", "-euc", script.replace("fsdp-engine", command)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(expected)
