"""The example: killed in the middle, and started again on another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.lightning_scene import is_checkpoint

ROOT = Path(__file__).parents[2]
SIZES = ("--layers", "2", "--width", "32", "--sequence-length", "32", "--batch-size", "8")
RUN = ("--grad-accumulation", "2", "--eval-sequences", "16", "--eval-every", "20")
SECONDS = 240


def command(out: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> list[str]:
    example = str(ROOT / "examples/train_lightning.py")
    shared = ("--accelerator", "cpu", "--data", str(ROOT / "docs"), "--out", str(out))
    return [sys.executable, *launcher, example, *SIZES, *RUN, *shared, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train(out: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    run = command(out, *arguments, launcher=launcher)
    subprocess.run(run, check=True, env=environment(), timeout=SECONDS)
    found: dict[str, Any] = json.loads((out / "losses.json").read_text())
    return found


def kill_after_a_checkpoint(out: Path, *arguments: str) -> None:
    """SIGKILL to all ranks, as soon as there is a checkpoint to continue from."""
    job = subprocess.Popen(command(out, *arguments), env=environment(), start_new_session=True)
    try:
        deadline = time.monotonic() + SECONDS
        while not is_checkpoint(out / "checkpoints/last.ckpt"):
            assert job.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert not (out / "losses.json").exists()


@pytest.mark.thorough
def test_a_killed_run_goes_on_along_its_curve_on_another_number_of_ranks(tmp_path: Path) -> None:
    steps = ("--steps", "40", "--save-every", "3")
    # By Lightning's own launcher; then by torchrun.
    kill_after_a_checkpoint(tmp_path / "x", *steps, "--devices", "2")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    resumed = train(tmp_path / "x", *steps, "--strategy", "optim", launcher=launcher)
    whole = train(tmp_path / "whole", *steps, "--devices", "1")
    assert len(whole["steps"]) == 40
    assert whole["steps"][-1] < whole["steps"][0] - 0.5
    assert resumed["steps"] == pytest.approx(whole["steps"], rel=2e-5)
    assert resumed["held_out"] == pytest.approx(whole["held_out"], rel=2e-5)
