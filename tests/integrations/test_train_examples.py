"""The examples for Lightning and transformers' ``Trainer``, started as in their documentation,
killed, and started again on another number of ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launching import ROOT, Launched, kill, wait_until
from tests.integrations.lightning_scene import is_checkpoint
from tests.processes import torchrun

pytestmark = pytest.mark.thorough
SIZES = ("--layers", "2", "--width", "32", "--sequence-length", "32", "--batch-size", "8")


def test_lightnings_example_continues_along_its_curve(tmp_path: Path, launched: Launched) -> None:
    def command(out: str, *arguments: str) -> list[str]:
        run = ("--grad-accumulation", "2", "--eval-sequences", "16", "--eval-every", "20")
        paths = ("--accelerator", "cpu", "--data", "docs", "--out", str(tmp_path / out))
        steps = ("--steps", "40", "--save-every", "3")
        return ["examples/train_lightning.py", *SIZES, *run, *paths, *steps, *arguments]

    def losses(out: str) -> dict[str, Any]:
        return json.loads((tmp_path / out / "losses.json").read_text())

    # By Lightning's own launcher; then by torchrun.
    job = launched.start("killed", [sys.executable, *command("x", "--devices", "2")])
    last = tmp_path / "x" / "checkpoints/last.ckpt"
    wait_until(lambda: is_checkpoint(last) or job.poll() is not None, "a checkpoint")
    assert job.poll() is None, "it ended by itself"
    kill(*launched.all_with())
    assert not (tmp_path / "x" / "losses.json").exists()
    launched.run("resumed", [*torchrun(1), *command("x", "--strategy", "optim")], seconds=240)
    launched.run("whole", command("whole", "--devices", "1"), seconds=240)
    whole, resumed = losses("whole"), losses("x")
    assert len(whole["steps"]) == 40
    assert whole["steps"][-1] < whole["steps"][0] - 0.5
    assert resumed["steps"] == pytest.approx(whole["steps"], rel=2e-5)
    assert resumed["held_out"] == pytest.approx(whole["held_out"], rel=2e-5)


def curve(out: Path) -> dict[tuple[int, str], float]:
    log = json.loads((out / "metrics.json").read_text())["log"]
    names = ("loss", "grad_norm", "eval_loss")
    return {(row["step"], name): row[name] for row in log for name in names if name in row}


def test_transformers_example_continues_along_its_curve(tmp_path: Path, launched: Launched) -> None:
    from safetensors.torch import load_file

    out, texts = tmp_path / "out", tmp_path / "texts"
    texts.mkdir()
    for number, file in enumerate(sorted((ROOT / "fsdp_engine").glob("*.py"))[:8]):
        (texts / f"{number}.txt").write_bytes(file.read_bytes())
    steps = ("--steps", "60", "--microbatch", "2", "--eval-every", "4", "--heads", "2")
    saves = ("--save-every", "1", "--keep", "3", "--data", str(texts), "--out", str(out))
    command = ["examples/train_transformers.py", *SIZES, *steps, *saves]

    process = launched.start("killed", [sys.executable, *torchrun(2), *command])
    saving = (out / "checkpoint-5", out / ".saving")
    wait_until(
        lambda: all(each.exists() for each in saving) or process.poll() is not None, "a save"
    )
    assert process.poll() is None
    kill(*launched.all_with())  # amid a save
    saved = sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    assert len(saved) <= 4  # three, and perhaps an older one that is not removed yet
    assert saved[-1] < 60

    printed = launched.run("resumed", command, seconds=240)
    assert f"continues from {out}/checkpoint-{saved[-1]}" in printed
    assert "--- sample ---" in printed
    names = sorted(path.name for path in out.glob("*checkpoint-*"))
    assert names == [f"checkpoint-{step}" for step in (58, 59, 60)]
    found, weights = curve(out), load_file(out / "model" / "model.safetensors")
    assert found[1, "loss"] - found[60, "loss"] > 0.5

    out.rename(tmp_path / "resumed")
    launched.run("whole", [*torchrun(2), *command, "--save-every", "60"], seconds=240)
    assert found == pytest.approx(curve(out), rel=1e-3, abs=1e-4)
    for name, value in load_file(out / "model" / "model.safetensors").items():
        assert (weights[name] - value).abs().max() < 1e-2
