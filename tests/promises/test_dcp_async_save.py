"""``torch.distributed.checkpoint.async_save`` of sharded models and optimizers, as torchtitan's."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp_engine as fe
from tests import reference
from tests.pool import on_ranks
from tests.promises.everywhere import Place, everywhere
from tests.torch_versions import stages_classes


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def sharded(place: Place) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()[0]
    place.shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def folder_for_all() -> Path:
    """One folder, the same on every rank."""
    named: list[Any] = [tempfile.mkdtemp() if not dist.get_rank() else None]
    dist.broadcast_object_list(named)
    return Path(named[0])


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    """As torchtitan does: nothing changes the state until it is staged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it deprecates in itself
        response: Any = dcp.async_save(state, checkpoint_id=folder, **options)
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
            response = response.upload_completion
    for value in state["model"].values():
        with torch.no_grad():
            value.zero_()
    response.result()


def check(folder: Path, place: Place, num_steps: int) -> None:
    """Whether the checkpoint after ``num_steps`` continues as a run of one process does."""
    alone = make()
    for seed in range(num_steps + 1):
        step(*alone, seed)
    model, optimizer = sharded(place)
    step(model, optimizer, 9)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    step(model, optimizer, num_steps)
    reference.assert_same_weights(model, alone[0])


@everywhere
def test_the_default_stager_saves_and_saves_again(place: Place) -> None:
    model, optimizer = sharded(place)
    for seed in range(2):
        step(model, optimizer, seed)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        folder = folder_for_all()
        save(state_of(model, optimizer), folder)
        model.load_state_dict(kept)
        check(folder, place, seed + 1)


@stages_classes
@everywhere
def test_a_stager_that_keeps_its_memory_saves_and_saves_again(place: Place) -> None:
    model, optimizer = sharded(place)
    stager = DefaultStager(StagingOptions(False, True, True, False))
    for seed in range(2):
        step(model, optimizer, seed)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        folder = folder_for_all()
        save(state_of(model, optimizer), folder, async_stager=stager)
        model.load_state_dict(kept)
        check(folder, place, seed + 1)
    stager.close()


@on_ranks(world_size=1)
def test_a_sharded_tensor_has_no_address() -> None:
    model = make()[0]
    fe.shard(model, strategy="optim_grads_params")
    assert {param.data_ptr() for param in model.parameters()} == {0}
    assert {param.storage_offset() for param in model.parameters()} == {0}
