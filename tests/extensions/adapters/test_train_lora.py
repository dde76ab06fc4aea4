"""The example: adapters over a frozen base, resumed on another number of ranks after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import tests.extensions.adapters.peft_models  # noqa: F401 - the example shall be offline, too
from tests.processes import ROOT, printed, start, torchrun

SMALL = ["--base-steps", "5", "--width", "32", "--batch-size", "4", "--sequence-length", "32"]
SMALL += ["--steps", "24", "--save-every", "4", "--eval-every", "12", "--eval-batches", "1"]


def command_of(out: Path, num_ranks: int, *more: str) -> list[str]:
    """The example, under torchrun if there are several ranks."""
    launcher = torchrun(num_ranks) if num_ranks > 1 else ()
    return [*launcher, str(ROOT / "examples/train_lora.py"), "--out", str(out), *SMALL, *more]


def metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


def last_step(out: Path) -> int:
    steps = [int(path.parent.name[5:]) for path in out.glob("checkpoints/step-*/manifest.json")]
    return max(steps, default=0)


@pytest.mark.thorough
def test_it_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(*command_of(killed, 2, "--steps", "1000"))
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
    resumed, _ = (printed(*command_of(each, 1, "--steps", str(steps))) for each in (killed, whole))
    assert f"resumed after step {steps - 12}" in resumed
    found, expected = metrics(killed), metrics(whole)
    # Rounding to bf16 differs between a batch and its parts.
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
    output = printed(*command_of(tmp_path, 2, "--fp8-base", "--gradient-checkpointing"))
    found = metrics(tmp_path)
    assert found["held_out"]["24"] < found["held_out"]["0"]
    assert found["at_rest"] == found["expected_at_rest"]
    # The engine computes with weights that were rounded to fp8, and PEFT with those of the base.
    assert 0 < found["difference"] < 0.5, output
    shutil.rmtree(tmp_path / "checkpoints")
    printed(*command_of(tmp_path, 4, "--strategy", "optim", "--gradient-checkpointing"))
    found = metrics(tmp_path)
    assert found["difference"] == 0
    assert found["at_rest"] == found["expected_at_rest"]
