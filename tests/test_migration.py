"""The program of ``examples/migration`` with the engine trains as the one with DDP does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.pool import Ranks
from tests.snippets import ROOT, execute

LINE = re.compile(r"step (\d+)  norm (\S+)  held-out loss (\S+)|best held-out loss (\S+)")


def run(ranks: Ranks, name: str, num_ranks: int, num_steps: int, folder: Path) -> list[float]:
    """Returns the numbers that a program prints."""
    source = (ROOT / "examples" / "migration" / name).read_text(encoding="utf-8")
    source = source.replace("dist.init_process_group()\n", "")  # the ranks have a group
    arguments = ["--steps", str(num_steps), "--width", "16"]
    call = (execute, source, name, str(folder), arguments)
    first, *others = ranks.run(*call, world_size=num_ranks)
    assert set(others) <= {""}
    return [float(number) for found in LINE.findall(first) for number in found if number]


@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2))]
)
def test_both_programs_train_alike_also_after_a_resume(
    ranks: Ranks, tmp_path: Path, num_ranks: int
) -> None:
    expected = run(ranks, "with_ddp.py", 2, 20, tmp_path)
    begun = run(ranks, "with_fsdp_engine.py", 2, 10, tmp_path)
    resumed = run(ranks, "with_fsdp_engine.py", num_ranks, 20, tmp_path)
    assert len(expected) == 2 * 3 + 1
    assert [*begun[:3], *resumed] == pytest.approx(expected, rel=1e-3)

    weights = torch.load(tmp_path / "runs" / "ddp" / "best.pt")
    exported = load_file(tmp_path / "runs" / "fsdp_engine" / "best" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, values in weights.items():
        torch.testing.assert_close(exported[name], values, rtol=1e-2, atol=1e-3)
