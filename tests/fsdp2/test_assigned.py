"""Values assigned to parameters between ``fully_shard`` and the first forward, and optimizer state
loaded by hand, as in FSDP2's tutorial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.models import vector_batch
from tests.pool import on_few_ranks, on_ranks
from tests.reference import full, sgd

Maker = Callable[[], nn.Module]


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    return model


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6))


def values_of(make: Maker) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: value.detach().clone() for name, value in make().state_dict().items()}


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def losses_of(model: nn.Module, optimizer: Any, steps: Iterable[int] = range(3)) -> list[float]:
    """Train on the same batches on all ranks, so that one process has the same losses."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(vector_batch(4, step, 6)[0]).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def assert_trains_as_one_process(model: nn.Module, optimizer: Any, make: Maker = plain) -> None:
    alone = make()
    alone.load_state_dict(values_of(make))
    expected = losses_of(alone, adamw(alone.parameters()))
    torch.testing.assert_close(losses_of(model, optimizer), expected)


def sharded(make: Maker = plain, device: str = "meta") -> Any:
    with torch.device(device):
        model = make()
    if make is plain:
        for layer in (model[0], model[2]):
            fully_shard(layer)
    return fully_shard(model)


def distributed(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Any]:
    present: dict[str, Any] = model.state_dict()
    return {
        name: nn.Parameter(
            distribute_tensor(value, present[name].device_mesh, present[name].placements)
        )
        for name, value in values.items()
    }


WAYS = ["optimizer last", "optimizer first", "after to_empty", "in two parts", "tied"]


@pytest.mark.parametrize("when", WAYS)
@on_few_ranks
def test_assigned_values_train_as_one_process(when: str) -> None:
    make = tied if when == "tied" else plain
    model = sharded(make)
    optimizer = adamw(model.parameters()) if when == "optimizer first" else None
    if when == "after to_empty":
        model.to_empty(device="cpu")
    before = list(model.parameters())
    state = distributed(model, values_of(make))
    first = dict(list(state.items())[:1]) if when == "in two parts" else {}
    rest = {name: value for name, value in state.items() if name not in first}
    for part in (first, rest) if first else (rest,):
        model.load_state_dict(part, strict=not first, assign=True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    optimizer = optimizer or adamw(model.parameters())
    assert_trains_as_one_process(model, optimizer, make)
    if when == "optimizer last":
        # After a forward the engine handles assignments; the same optimizer remains valid.
        model.load_state_dict(distributed(model, values_of(make)), assign=True)
        optimizer.state.clear()
        assert_trains_as_one_process(model, optimizer, make)


@on_ranks(2)
def test_an_optimizer_may_be_built_on_the_meta_device() -> None:
    for is_early in (True, False):
        model = sharded()
        early = adamw(model.parameters())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, value in values_of(plain).items():
                model.get_parameter(name).copy_(value)
        assert_trains_as_one_process(model, early if is_early else adamw(model.parameters()))


def tied_and_more() -> nn.Sequential:
    """A model whose tied parameter gets its value before another parameter of its unit."""
    return nn.Sequential(tied(), nn.Linear(6, 6))


@pytest.mark.parametrize(("make", "name"), [(tied, "2.weight"), (tied_and_more, "0.2.weight")])
@on_few_ranks
def test_two_values_for_a_tied_parameter_raise_on_all_ranks(make: Maker, name: str) -> None:
    """The values of two names differ in one element, which one rank holds."""
    for element in (0, 35):
        values = values_of(make)
        model = sharded(make)
        model.load_state_dict(distributed(model, values), assign=True)  # equal ones are accepted
        model = sharded(make)
        values[name].view(-1)[element] += 1
        state = distributed(model, values)
        with pytest.raises(RuntimeError, match="assignment to one name of a parameter that is ti"):
            model.load_state_dict(state, assign=True)


@on_ranks(2)
def test_values_that_cannot_be_assigned_raise() -> None:
    model = sharded()
    state = distributed(model, values_of(plain))
    missing = state.pop("2.bias")
    model.load_state_dict(state, strict=False, assign=True)
    with pytest.raises(RuntimeError, match=r"still on meta device: \['2.bias'\]"):
        model(torch.zeros(1, 6))
    # As with FSDP2, to_empty() also discards values that were assigned before.
    model.to_empty(device="cpu")
    assert not any(param.is_meta for param in model.parameters())

    model, state["2.bias"] = sharded(), missing
    model.load_state_dict(state, assign=True)
    optimizer = adamw(list(state.values()))
    with pytest.raises(RuntimeError, match=r"found a AdamW that references [02]\.(weight|bias)"):
        model(torch.zeros(1, 6))
    del optimizer


@on_ranks(2)
def test_replicated_values_are_assigned_where_main_weights_are_whole() -> None:
    with torch.device("meta"):
        model = plain().bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    fully_shard(model, strategy="no_shard", mp_policy=policy)
    values = {name: value.bfloat16() for name, value in values_of(plain).items()}
    model.load_state_dict(distributed(model, values), assign=True)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), values[name])


@on_few_ranks
def test_an_assigned_value_decides_whether_its_parameter_is_trained() -> None:
    model = plain()
    fe.shard(model)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().clone(), layer is model[2])
    model(torch.ones(2, 6)).sum().backward()
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    assert frozen == ["0.weight"]
    assert [param.grad is None for param in model.parameters()] == [True, False, False, False]


# --- optimizer state: ``full_tensor`` of each value, later ``distribute_tensor`` of each ---

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "adamw, each": functools.partial(torch.optim.AdamW, lr=0.05, foreach=False),
    "adamw, fused": functools.partial(torch.optim.AdamW, lr=0.05, fused=True),
    "sgd": sgd,
}


def full_of(values: dict[str, Any]) -> dict[str, Any]:
    return {name: full(each) if isinstance(each, Tensor) else each for name, each in values.items()}


def full_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    state["state"] = {key: full_of(each) for key, each in state["state"].items()}
    return state


def load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    _init_optim_state(optimizer)
    state = optimizer.state_dict()
    for group, saved_group in zip(state["param_groups"], saved["param_groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key != "params"})
        for key, saved_key in zip(group["params"], saved_group["params"], strict=True):
            mine = state["state"].get(key, {})
            for name, value in saved["state"][saved_key].items():
                like = mine[name]
                if isinstance(like, DTensor):
                    value = distribute_tensor(value, like.device_mesh, like.placements)
                mine[name] = value
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_few_ranks
def test_state_loaded_by_hand_trains_as_if_uninterrupted(name: str, wrapped: bool) -> None:
    def make(model: nn.Module) -> Any:
        optimizer = OPTIMIZERS[name](model.parameters())
        return fe.shard_optimizer(optimizer) if wrapped else optimizer

    model = sharded(device="cpu")
    optimizer = make(model)
    losses_of(model, optimizer, range(2))
    saved = full_state(optimizer)
    weights = full_of(model.state_dict())
    expected = losses_of(model, optimizer, range(2, 4)), full_state(optimizer)

    other = sharded(device="cpu")
    other.load_state_dict(distributed(other, weights), assign=True)
    again = make(other)
    load(again, saved)
    torch.testing.assert_close(full_state(again), saved, rtol=0, atol=0)
    found = losses_of(other, again, range(2, 4)), full_state(again)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
