"""The example: one script, two engines, equal losses."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SIZES = ["--steps", "4", "--batch-size", "4"]


def run(out: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(ROOT / "examples" / "train_fsdp2.py")]
    return subprocess.run(
        [*command, *SIZES, "--out", str(out), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def losses(out: Path, *arguments: str, ranks: int = 2) -> list[float]:
    done = run(out, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    with (out / "losses.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (("--grad-accumulation", "2"), 2),
        (("--dtype", "bf16"), 2),
        (("--outer", "2"), 4),
    ],
    ids=["accumulation", "bf16", "HSDP"],
)
def test_losses_are_those_of_fsdp2(arguments: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    expected = losses(tmp_path / "fsdp2", "--engine", "fsdp2", *arguments, ranks=ranks)
    found = losses(tmp_path / "own", "--engine", "fsdp_engine", *arguments, ranks=ranks)
    assert found == pytest.approx(expected, rel=1e-3 if "bf16" in arguments else 1e-5)
    assert len(found) == 4
    assert found[-1] < found[0]


def test_every_level_has_these_losses(tmp_path: Path) -> None:
    expected = losses(tmp_path / "fsdp2", "--engine", "fsdp2")
    for level in ("no_shard", "optim", "optim_grads"):
        assert losses(tmp_path / level, "--strategy", level) == pytest.approx(expected, rel=1e-5)


def test_a_level_for_fsdp2_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--engine", "fsdp2", "--strategy", "optim", ranks=1)
    assert done.returncode != 0
    assert "--strategy: expected it with --engine fsdp_engine" in done.stderr
