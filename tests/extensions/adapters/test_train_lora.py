"""The example: adapters over a frozen base, killed, and on another number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.adapters.peft_models import ENVIRONMENT

ROOT = Path(__file__).parents[3]
SMALL = ["--base-steps", "5", "--width", "32", "--batch-size", "4", "--sequence-length", "32"]
SMALL += ["--steps", "24", "--save-every", "4", "--eval-every", "12", "--eval-batches", "1"]


def start(out: Path, num_ranks: int, *more: str) -> subprocess.Popen[str]:
    """The example, under torchrun if there are several ranks, in a session of its own."""
    launcher = [sys.executable, "-W", "ignore"]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(num_ranks)]
    command = [*launcher, str(ROOT / "examples/train_lora.py"), "--out", str(out), *SMALL, *more]
    paths = f"{ROOT}:{ROOT / 'examples'}"
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


def last_step(out: Path) -> int:
    steps = [int(path.parent.name[5:]) for path in out.glob("checkpoints/step-*/manifest.json")]
    return max(steps, default=0)


@pytest.mark.thorough
def test_it_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed, 2, "--steps", "1000")
    deadline = time.monotonic() + 240
    while not last_step(killed):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank_0 = int((killed / "checkpoints" / ".lock").read_text().split()[1])
    os.kill(rank_0, signal.SIGKILL)
    process.communicate(timeout=120)  # torchrun ends the other one
    assert process.returncode != 0
    steps = last_step(killed) + 12
    whole.mkdir()
    shutil.copytree(killed / "base", whole / "base")
    runs = [start(out, 1, "--steps", str(steps)) for out in (killed, whole)]
    resumed, _ = map(finish, runs)
    assert f"resumed after step {steps - 12}" in resumed
    found, expected = metrics(killed), metrics(whole)
    # Parts of a batch are rounded to bf16 otherwise than the whole of it.
    assert found["train"] == pytest.approx(expected["train"], rel=5e-3)
    assert len(expected["train"]) == steps
    last = str(steps)
    assert found["held_out"][last] == pytest.approx(expected["held_out"][last], rel=5e-3)
    assert expected["held_out"][last] < expected["held_out"]["0"]
    for each in (found, expected):
        assert each["difference"] == 0
        assert each["at_rest"] == each["expected_at_rest"]
    manifest = killed / "checkpoints" / f"step-{steps:08d}" / "manifest.json"
    rows = json.loads(manifest.read_text())["tensors"]
    assert rows
    assert all("lora_" in row["name"] for row in rows)
    files = {path.name for path in (killed / "adapter").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.thorough
def test_every_option_trains(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = finish(start(out, 2, "--fp8-base", "--gradient-checkpointing"))
    found = metrics(out)
    assert found["held_out"]["24"] < found["held_out"]["0"]
    assert found["at_rest"] == found["expected_at_rest"]
    # The engine computes with weights that were rounded to fp8, and PEFT with those of the base.
    assert 0 < found["difference"] < 0.5, output
    shutil.rmtree(out / "checkpoints")
    output = finish(start(out, 4, "--strategy", "optim", "--gradient-checkpointing"))
    assert metrics(out)["difference"] == 0
    assert metrics(out)["at_rest"] == metrics(out)["expected_at_rest"]
