"""Checkpoints without frozen parameters are small, fit any number of ranks, and do not load as
complete ones."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.checkpoint.cli import app
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.models import LoraLinear
from tests.pool import Ranks, on_ranks

WIDTH = 128


class Adapted(LoraLinear):
    """A LoRA layer with a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def made(
    level: str = "optim_grads_params", seed: int = 0
) -> tuple[nn.Module, fe.Engine, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(), Adapted())
    engine = fe.shard(model, strategy=level, min_unit_size=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return model, engine, optimizer


def trained(
    model: nn.Module, engine: fe.Engine, optimizer: torch.optim.Optimizer, first: int, last: int
) -> list[float]:
    """Returns losses. Ranks have the same batch, so the number of ranks does not matter."""
    losses = []
    for step in range(first, last):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def changed(engine: fe.Engine) -> dict[str, Tensor]:
    """Add 1 to each parameter; returns the values before."""
    before = reference.full_weights(engine.model)
    with torch.no_grad():
        for param in engine.model.parameters():
            param.add_(1)
    return before


def assert_frozen_ones_stay(engine: fe.Engine, before: dict[str, Tensor]) -> None:
    for name, value in reference.full_weights(engine.model).items():
        assert torch.equal(value, before[name] + (1 if "base" in name else 0)), name


def save_after(folder: str, level: str, num_steps: int) -> None:
    job = made(level)
    trained(*job, 0, num_steps)
    with contextlib.closing(fe.Checkpointer(folder, *job[1:], trainable_only=True)) as checkpointer:
        checkpointer.save_async(3)
    fe.save_checkpoint(f"{folder}/whole", *job[1:])
    fe.save_checkpoint(f"{folder}/part", *job[1:], trainable_only=True)


def go_on(folder: str, level: str) -> tuple[list[float], int]:
    """Returns losses of the steps 4 and 5, resumed or not interrupted, and the count of calls."""
    job = made(level)
    if not folder:
        return trained(*job, 0, 5)[3:], int(job[0][0].calls)
    # Adapters get other values, and the base keeps its values.
    with torch.no_grad():
        for param in job[0].parameters():
            if param.requires_grad:
                param.mul_(2)
    checkpointer = fe.Checkpointer(folder, *job[1:], trainable_only=True)
    with contextlib.closing(checkpointer):
        report = checkpointer.load()
    assert (report.step, report.problems) == (3, [])
    return trained(*job, 3, 5), int(job[0][0].calls)


def test_a_run_goes_on_from_adapters_alone_on_any_ranks(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(go_on, "", "no_shard", world_size=1)[0][0]
    ranks.run(save_after, str(tmp_path), "optim_grads_params", 3, world_size=2)
    for world_size, level in ((4, "optim"), (1, "no_shard"), (2, "optim_grads_params")):
        for losses, calls in ranks.run(go_on, str(tmp_path), level, world_size=world_size):
            assert losses == pytest.approx(expected, rel=1e-5)
            assert calls == 5
    (step,) = tmp_path.glob("step-*")
    rows = json.loads((step / "manifest.json").read_text())["tensors"]
    shapes = {row["name"]: row["shape"] for row in rows}
    assert shapes["model.0.calls"] == []
    # Two adapters of two matrices each, with two moments.
    assert sum(math.prod(shape) for shape in shapes.values() if shape) == 3 * 4 * 2 * WIDTH
    assert not [name for name in shapes if "base" in name]
    small, whole = (
        sum(path.stat().st_size for path in folder.glob("*.distcp"))
        for folder in (tmp_path / "part", tmp_path / "whole")
    )
    num_frozen = 2 * (WIDTH * WIDTH + WIDTH)
    assert small < whole - num_frozen * 4


@on_ranks(2)
def test_a_checkpoint_without_frozen_parameters_is_not_taken_for_a_whole_one() -> None:
    folder = shared_folder()
    _, engine, optimizer = made()
    fe.save_checkpoint(f"{folder}/one", engine, optimizer, trainable_only=True)
    fe.save_checkpoint(f"{folder}/whole", engine)
    told = "found only those that were trainable, since it was saved with trainable_only=True"
    with contextlib.closing(fe.Checkpointer(f"{folder}/many", engine, trainable_only=True)) as some:
        some.save(1)
    before = changed(engine)
    whole = fe.Checkpointer(f"{folder}/many", engine)
    for load in (
        lambda: fe.load_checkpoint(f"{folder}/one", engine, optimizer),
        whole.load,
        lambda: whole.load(strict=False),
    ):
        with pytest.raises(ValueError, match=told):
            load()
    expected = {name: value + 1 for name, value in before.items()}
    torch.testing.assert_close(reference.full_weights(engine.model), expected, rtol=0, atol=0)
    fe.load_checkpoint(f"{folder}/one", engine, optimizer, trainable_only=True)
    assert_frozen_ones_stay(engine, before)
    # From a whole checkpoint, only trainable parameters are loaded. None of them may be missing.
    before = changed(engine)
    fe.load_checkpoint(f"{folder}/whole", engine, trainable_only=True)
    assert_frozen_ones_stay(engine, before)
    other = fe.shard(nn.Sequential(Adapted(), Adapted(), Adapted()), initial_values="rank0")
    with pytest.raises(ValueError, match=r"missing model\.2\.down\.weight") as caught:
        fe.load_checkpoint(f"{folder}/whole", other, trainable_only=True)
    assert "base" not in str(caught.value)


@on_ranks(2)
def test_frozen_parameters_that_have_no_values_wait_for_them() -> None:
    folder = shared_folder()
    _, engine, _ = made()
    fe.save_checkpoint(f"{folder}/adapters", engine, trainable_only=True)
    fe.export_safetensors(engine, f"{folder}/whole")
    expected = reference.full_weights(engine.model)
    with torch.device("meta"):
        model = nn.Sequential(Adapted(), Adapted())
    engine = fe.shard(model, initial_values="empty", min_unit_size=0)
    fe.load_checkpoint(f"{folder}/adapters", engine, trainable_only=True)
    assert torch.equal(engine.full_tensor("1.up.weight"), expected["1.up.weight"])
    for use in (
        lambda: model(torch.ones(2, WIDTH)),
        lambda: fe.save_checkpoint(f"{folder}/again", engine, trainable_only=True),
    ):
        with pytest.raises(RuntimeError, match="weights: expected values; found none"):
            use()
    fe.load_safetensors(engine, f"{folder}/whole")
    assert model(torch.ones(2, WIDTH)).isfinite().all()


@on_ranks(2)
def test_engines_by_name_leave_out_what_is_frozen_in_each() -> None:
    folder = shared_folder()
    _, actor, _ = made()
    critic = fe.shard(nn.Linear(4, 4).requires_grad_(requires_grad=False), initial_values="rank0")
    both = {"actor": actor, "critic": critic}
    with contextlib.closing(fe.Checkpointer(folder, both, trainable_only=True)) as checkpointer:
        checkpointer.save(1)
        assert checkpointer.load().problems == []
    if dist.get_rank() == 0:
        text = Path(f"{folder}/step-00000001/manifest.json").read_text()
        rows = json.loads(text)["tensors"]
        assert {row["name"].split(".")[1] for row in rows} == {"actor"}


def test_tools_without_ranks_know_what_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    for num_steps, run in enumerate(("a", "b"), start=1):
        ranks.run(save_after, str(tmp_path / run), "optim", num_steps, world_size=1)

    def tool(*arguments: Any, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    assert '"trainable_only": true' in tool("inspect", tmp_path / "a", "--json")
    assert "frozen ones were not saved" in tool("inspect", tmp_path / "a")
    tool("verify", tmp_path / "a")
    assert "down.weight" in tool("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "trainable_only=True" in tool("export", tmp_path / "a", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()
