"""The example of transformers' ``Trainer``, as people start it: killed, and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MODEL = ("--layers", "2", "--width", "32", "--heads", "2", "--sequence-length", "32")
STEPS = ("--steps", "60", "--batch-size", "8", "--microbatch", "2", "--eval-every", "4")
SAVES = ("--save-every", "1", "--keep", "3")


def start(folder: Path, num_ranks: int, *changes: str) -> subprocess.Popen[str]:
    """The example on some ranks; by python alone on one."""
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["examples/train_transformers.py"]
    command += ["--data", str(folder / "texts"), "--out", str(folder / "out")]
    command += [*MODEL, *STEPS, *SAVES, *changes]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/examples"}
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, stdout=pipe, stderr=out, text=True, cwd=ROOT, env=env)


def finished(process: subprocess.Popen[str]) -> str:
    """What it printed."""
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    return printed


def kill(process: subprocess.Popen[str]) -> None:
    """All of its processes, at once."""
    children = psutil.Process(process.pid).children(recursive=True)
    for each in [*children, psutil.Process(process.pid)]:
        each.kill()
    process.communicate(timeout=60)
    psutil.wait_procs(children, timeout=60)


def curve(out: Path) -> dict[tuple[int, str], float]:
    """The log, by step and name."""
    log: list[dict[str, Any]] = json.loads((out / "metrics.json").read_text())["log"]
    names = ("loss", "grad_norm", "eval_loss")
    return {(row["step"], name): row[name] for row in log for name in names if name in row}


@pytest.mark.thorough
def test_a_killed_run_goes_on_along_its_curve_on_other_ranks(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = tmp_path / "out"
    (tmp_path / "texts").mkdir()
    for number, file in enumerate(sorted((ROOT / "fsdp_engine").glob("*.py"))[:8]):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(file.read_bytes())

    process = start(tmp_path, 2)
    deadline = time.monotonic() + 200
    while not (out / "checkpoint-5").exists() or not (out / ".saving").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    kill(process)  # amid a save
    steps = sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    assert len(steps) <= 4  # three, and one that a rank has not removed yet
    assert steps[-1] < 60

    printed = finished(start(tmp_path, 1))
    assert f"continues from {out}/checkpoint-{steps[-1]}" in printed
    assert "--- sample ---" in printed
    assert sorted(path.name for path in out.glob("*checkpoint-*")) == [
        "checkpoint-58",
        "checkpoint-59",
        "checkpoint-60",
    ]
    found, weights = curve(out), load_file(out / "model" / "model.safetensors")
    assert found[1, "loss"] - found[60, "loss"] > 0.5

    out.rename(tmp_path / "resumed")
    finished(start(tmp_path, 2, "--save-every", "60"))
    whole = curve(out)
    assert found == pytest.approx(whole, rel=1e-3, abs=1e-4)
    for name, value in load_file(out / "model" / "model.safetensors").items():
        assert (weights[name] - value).abs().max() < 1e-2
