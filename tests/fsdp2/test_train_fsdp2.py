"""The example: one script gives equal losses with FSDP2 and with this engine."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.processes import ROOT, printed, torchrun

pytestmark = pytest.mark.thorough

SIZES = ["--steps", "4", "--batch-size", "4"]


def run(out: Path, *arguments: str, ranks: int = 2, succeeds: bool = True) -> str:
    script = str(ROOT / "examples" / "train_fsdp2.py")
    command = (*torchrun(ranks), script, *SIZES, "--out", str(out), *arguments)
    return printed(*command, succeeds=succeeds)


def losses(out: Path, *arguments: str, ranks: int = 2) -> list[float]:
    run(out, *arguments, ranks=ranks)
    with (out / "losses.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("arguments", "variants", "ranks"),
    [
        ((), [("--strategy", each) for each in ("no_shard", "optim", "optim_grads")], 2),
        (("--grad-accumulation", "2"), [()], 2),
        (("--dtype", "bf16"), [()], 2),
        (("--outer", "2"), [()], 4),
    ],
    ids=["levels", "accumulation", "bf16", "HSDP"],
)
def test_losses_are_those_of_fsdp2(
    arguments: tuple[str, ...], variants: list[tuple[str, ...]], ranks: int, tmp_path: Path
) -> None:
    expected = losses(tmp_path / "fsdp2", "--engine", "fsdp2", *arguments, ranks=ranks)
    assert len(expected) == 4
    assert expected[-1] < expected[0]
    for number, more in enumerate(variants):
        found = losses(tmp_path / str(number), *arguments, *more, ranks=ranks)
        assert found == pytest.approx(expected, rel=1e-3 if "bf16" in arguments else 1e-5)


def test_a_level_for_fsdp2_is_refused(tmp_path: Path) -> None:
    text = run(tmp_path, "--engine", "fsdp2", "--strategy", "optim", ranks=1, succeeds=False)
    assert "--strategy: expected it with --engine fsdp_engine" in text
