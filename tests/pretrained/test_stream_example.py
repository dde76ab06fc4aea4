"""``examples/stream_weights.py``: the receiver has the trainer's weights after every round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--steps 4 --send-every 2 --layers 1 --width 16 --sequence-length 32 --batch-size 2"


def run(*launcher: str) -> list[str]:
    """What it prints, a line for each round; it raises where checksums differ."""
    script = str(ROOT / "examples" / "stream_weights.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *launcher, script, *SMALL.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [line for line in found.stdout.splitlines() if line.startswith("step")]


def check(rounds: list[str]) -> None:
    assert [line.split()[1] for line in rounds] == ["0", "2", "4"]
    assert all("the same weights" in line for line in rounds)


@pytest.mark.thorough
def test_one_rank() -> None:
    check(run())


@pytest.mark.thorough
def test_two_ranks() -> None:
    check(run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
