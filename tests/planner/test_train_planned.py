"""The example that trains by a plan, and those of docs/internals/planner.md, print the documented
output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tools.planner_example import WIDTH, Example, examples, printed_by_command, printed_in_page

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_planned.py"


# The script with a model of one layer, which takes less time to plan.
SMALL = """
import functools, train_planned
train_planned.GPTConfig = functools.partial(train_planned.GPTConfig, num_layers=1, width=32)
train_planned.main()
"""


def run(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SMALL]
    if ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command[1:] = ["-m", *torchrun, str(SCRIPT)]
    return subprocess.run(
        [*command, "--steps", "3", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{SCRIPT.parent}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def trained(done: subprocess.CompletedProcess[str]) -> tuple[str, float, float]:
    """The strategy of the training, the first and the last loss."""
    assert done.returncode == 0, done.stderr
    found = re.search(r"trained with \((\w+), \w+\): loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return found[1], float(found[2]), float(found[3])


def test_one_rank_trains_without_torchrun() -> None:
    _, first, last = trained(run("--machine", "h100", "--data", str(ROOT / "docs"), ranks=1))
    assert last < first


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_less_memory_takes_another_level_and_has_the_same_losses(ranks: int) -> None:
    much = trained(run("--machine", "h100", ranks=ranks))
    little = trained(run("--machine", "h100", "--memory", "30", ranks=ranks))
    assert much[0] == "no_shard"
    assert little[0] != "no_shard"
    assert little[1:] == pytest.approx(much[1:], abs=2e-3)
    assert much[2] < much[1]


@pytest.mark.thorough
@pytest.mark.parametrize("example", examples(), ids=lambda each: next(iter(each.files)))
def test_an_example_prints_what_the_page_has(example: Example) -> None:
    found = printed_by_command(example).splitlines()
    assert max(map(len, found)) <= WIDTH
    assert any(line.startswith("Use ") for line in found)
    # After a change of the planner: python tools/planner_example.py --write
    assert found == printed_in_page(example).splitlines()


@pytest.mark.thorough
def test_the_example_of_questions_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "internals" / "planner.md").read_text(encoding="utf-8")
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
