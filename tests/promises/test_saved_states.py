"""``torch.save`` and ``torch.load`` of states, a file for each rank; and
``torch.distributed.checkpoint.async_save`` of sharded models and optimizers, as in torchtitan."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp_engine as fe
from fsdp_engine.flat_dtensor import FlatDTensor
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.pool import Ranks, on_ranks
from tests.promises.everywhere import Place, everywhere
from tests.torch_versions import stages_classes

Shard = Callable[[nn.Module], Any]


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return fe.shard_optimizer(adamw(model))


def run(shard: Shard, optimizer_of: Any = adamw, *seeds: int) -> tuple[nn.Module, Any]:
    """A model and its optimizer, after a step for each seed."""
    model = make()
    shard(model)
    optimizer = optimizer_of(model)
    steps(model, optimizer, *seeds)
    return model, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(num_steps: int) -> nn.Module:
    """One process, after so many steps."""
    return run(reference.nothing, adamw, *range(num_steps))[0]


# --- torch.save ---


def after_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@everywhere
def test_states_of_each_rank_resume_a_run(place: Place) -> None:
    expected = alone(3)
    for optimizer_of in (adamw, sharded_adamw):
        for assign in (False, True):
            model, optimizer = run(place.shard, optimizer_of, 0, 1)
            saved = after_torch_save((model.state_dict(), optimizer.state_dict()))
            for name, tensor in model.state_dict().items():
                assert torch.equal(reference.full(saved[0][name]), reference.full(tensor))
            model, optimizer = run(place.shard, optimizer_of)
            model.load_state_dict(saved[0], assign=assign)
            optimizer.load_state_dict(saved[1])
            steps(model, optimizer, 2)
            reference.assert_same_weights(model, expected)


@on_ranks(4)
def test_what_was_loaded_can_be_gathered_within_rows_of_a_mesh() -> None:
    model, _ = run(lambda model: fe.shard(model, (2, 2), "optim_grads"))
    for name, tensor in after_torch_save(model.state_dict()).items():
        assert torch.equal(reference.full(tensor), make().state_dict()[name])


def save_to(folder: Path) -> None:
    """Each rank's weights, and its optimizer state after a step."""
    model, optimizer = run(fe.shard)
    name = f"{dist.get_world_size()}-{dist.get_rank()}"
    torch.save(model.state_dict(), folder / f"{name}.pt")
    steps(model, optimizer, 0)
    torch.save(optimizer.state_dict(), folder / f"{name}-optimizer.pt")


def test_a_process_without_groups_loads_slices(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_to, tmp_path, world_size=2)
    parts = [torch.load(tmp_path / f"2-{rank}.pt", weights_only=True) for rank in (0, 1)]
    for key, expected in make().state_dict().items():
        first, second = (part[key] for part in parts)
        if not isinstance(first, FlatDTensor):
            assert torch.equal(first, expected)
            continue
        values = torch.cat([first.to_local(), second.to_local()])
        assert torch.equal(values.view(expected.shape), expected)
        with pytest.raises(RuntimeError, match=rf"^{key}: expected the process groups of"):
            first.full_tensor()


def use_slices_of(folder: Path, num_ranks: int) -> None:
    model, optimizer = run(fe.shard)
    weights = model.state_dict()
    path = folder / f"{num_ranks}-{dist.get_rank() % num_ranks}"
    for name, tensor in torch.load(f"{path}.pt", weights_only=True).items():
        if not isinstance(tensor, FlatDTensor):
            continue
        uses: list[Callable[[], Any]] = [
            tensor.full_tensor,
            lambda t=tensor, n=name: weights[n].copy_(t),
            lambda t=tensor, n=name: weights[n].lerp_(t, 0.5),
            lambda t=tensor, n=name: torch._foreach_add_([weights[n]], [t]),
        ]
        for use in uses:
            with pytest.raises((RuntimeError, ValueError), match=r"process groups|mixes"):
                use()
    reference.assert_same_weights(model, make())
    if (num_ranks, dist.get_world_size()) == (2, 1):
        optimizer.load_state_dict(torch.load(f"{path}-optimizer.pt", weights_only=True))
        over = r"elements \[0, 35\) of shape \(7, 5\) over 2 ranks\) and .* over 1 rank\)"
        with pytest.raises(ValueError, match="mixes two different slices") as caught:
            steps(model, optimizer, 1)
        assert re.search(over, str(caught.value)), caught.value


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1), (2, 4)])
def test_slices_of_other_ranks_are_not_taken(
    ranks: Ranks, tmp_path: Path, saved: int, loaded: int
) -> None:
    ranks.run(save_to, tmp_path, world_size=saved)
    ranks.run(use_slices_of, tmp_path, saved, world_size=loaded)


@on_ranks(1)
def test_a_sharded_tensor_has_no_address() -> None:
    model, _ = run(fe.shard)
    assert {param.data_ptr() for param in model.parameters()} == {0}
    assert {param.storage_offset() for param in model.parameters()} == {0}


# --- async_save ---


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def save_in_background(state: dict[str, Any], folder: str, **options: Any) -> None:
    """As torchtitan does: nothing changes the state until it is staged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls functions that it deprecates
        response: Any = dcp.async_save(state, checkpoint_id=folder, **options)
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
            response = response.upload_completion
    for value in state["model"].values():
        with torch.no_grad():
            value.zero_()
    response.result()


def assert_saves_and_saves_again(place: Place, **options: Any) -> None:
    """Checkpoints after one step and after two continue as a run of one process does."""
    model, optimizer = run(place.shard)
    loaded, other = run(place.shard, adamw, 9)
    for seed in range(2):
        steps(model, optimizer, seed)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        folder = shared_folder()
        save_in_background(state_of(model, optimizer), folder, **options)
        model.load_state_dict(kept)
        state = state_of(loaded, other)
        dcp.load(state, checkpoint_id=folder)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(loaded, other, **parts)
        steps(loaded, other, seed + 1)
        reference.assert_same_weights(loaded, alone(seed + 2))


@everywhere
def test_the_default_stager_saves_and_saves_again(place: Place) -> None:
    assert_saves_and_saves_again(place)


@stages_classes
@everywhere
def test_a_stager_that_keeps_its_memory_saves_and_saves_again(place: Place) -> None:
    stager = DefaultStager(StagingOptions(False, True, True, False))
    assert_saves_and_saves_again(place, async_stager=stager)
    stager.close()
