"""Optimizer state saved and loaded by hand, as FSDP2's tutorial does: ``full_tensor`` of each
value, later ``distribute_tensor`` of each into ``optimizer.load_state_dict``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from tests.pool import Ranks

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, amsgrad=True),
    "adamw, each": lambda params: torch.optim.AdamW(params, lr=0.05, foreach=False),
    "adamw, fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def _sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        seed = 10 * step + dist.get_rank()
        batch = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _full(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, Tensor) else value


def _full_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    state["state"] = {
        key: {name: _full(value) for name, value in each.items()}
        for key, each in state["state"].items()
    }
    return state


def _load(optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
    _init_optim_state(optimizer)
    state = optimizer.state_dict()
    for group, full_group in zip(state["param_groups"], full["param_groups"], strict=True):
        for key, value in full_group.items():
            if key != "params":
                group[key] = value
        for key, full_key in zip(group["params"], full_group["params"], strict=True):
            mine = state["state"].get(key, {})
            for name, value in full["state"][full_key].items():
                like = mine[name]
                if isinstance(like, DTensor):
                    value = distribute_tensor(value, like.device_mesh, like.placements)
                mine[name] = value
    optimizer.load_state_dict(state)


def _continued(name: str, wrapped: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](model.parameters())
        return fe.shard_optimizer(optimizer) if wrapped else optimizer

    model = _sharded()
    optimizer = make(model)
    _train(model, optimizer, range(2))
    saved = _full_state(optimizer)
    weights = {key: value.full_tensor() for key, value in model.state_dict().items()}
    expected = _train(model, optimizer, range(2, 5))
    state_then = _full_state(optimizer)

    other = _sharded()
    present: dict[str, Any] = other.state_dict()
    sharded = {
        key: nn.Parameter(
            distribute_tensor(value, present[key].device_mesh, present[key].placements)
        )
        for key, value in weights.items()
    }
    other.load_state_dict(sharded, assign=True)
    again = make(other)
    _load(again, saved)
    assert _full_state(again)["state"].keys() == saved["state"].keys()
    torch.testing.assert_close(_full_state(again), saved, rtol=0, atol=0)
    torch.testing.assert_close(_train(other, again, range(2, 5)), expected, rtol=0, atol=0)
    torch.testing.assert_close(_full_state(again), state_then, rtol=0, atol=0)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_state_loaded_by_hand_trains_as_if_uninterrupted(
    ranks: Ranks, num_ranks: int, name: str, wrapped: bool
) -> None:
    ranks.run(_continued, name, wrapped, world_size=num_ranks)
