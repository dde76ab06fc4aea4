"""Values assigned to parameters between ``fully_shard`` and the first forward, as in FSDP2's
tutorial, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from fsdp_engine.fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.pool import Ranks

_STEPS = 3


def _tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    return model


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def _values(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: value.detach().clone() for name, value in make().state_dict().items()}


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Of the same batch on all ranks, so that one process has the same."""
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(7))
    found = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _expected(make: Callable[[], nn.Module]) -> list[float]:
    model = make()
    model.load_state_dict(_values(make))
    return _losses(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def _sharded_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    if make is _plain:
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer)
    return fully_shard(model)


def _distributed(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    present: dict[str, Any] = model.state_dict()
    return {
        name: nn.Parameter(
            distribute_tensor(value, present[name].device_mesh, present[name].placements)
        )
        for name, value in values.items()
    }


def _train_assigned(make: Callable[[], nn.Module], when: str) -> list[float]:
    model = _sharded_on_meta(make)
    if when == "optimizer first":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if when == "after to_empty":
        model.to_empty(device="cpu")
    before = list(model.parameters())
    state = _distributed(model, _values(make))
    if when == "in two parts":
        names = list(state)
        model.load_state_dict({name: state[name] for name in names[:1]}, strict=False, assign=True)
        model.load_state_dict({name: state[name] for name in names[1:]}, strict=False, assign=True)
    else:
        model.load_state_dict(state, assign=True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    if when != "optimizer first":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return _losses(model, optimizer)


@pytest.mark.parametrize(
    "when", ["optimizer last", "optimizer first", "after to_empty", "in two parts"]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_assigned_values_train_as_one_process(ranks: Ranks, num_ranks: int, when: str) -> None:
    for losses in ranks.run(_train_assigned, _plain, when, world_size=num_ranks):
        torch.testing.assert_close(losses, _expected(_plain))


def test_the_names_of_a_tied_parameter_take_one_value(ranks: Ranks) -> None:
    for losses in ranks.run(_train_assigned, _tied, "optimizer last", world_size=2):
        torch.testing.assert_close(losses, _expected(_tied))


class _TiedAndMore(nn.Module):
    """A tied parameter that gets its value before another one of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = _tied()
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tied(x))


def _assign_different_ties(make: Callable[[], nn.Module], name: str, element: int) -> None:
    """Values of two names differ in one element, which one rank holds."""
    model = _sharded_on_meta(make)
    values = _values(make)
    state = _distributed(model, values)
    model.load_state_dict(state, assign=True)  # equal ones are accepted
    model = _sharded_on_meta(make)
    values[name] = values[name].clone()
    values[name].view(-1)[element] += 1
    state = _distributed(model, values)
    with pytest.raises(RuntimeError, match="assignment to one name of a parameter that is tied"):
        model.load_state_dict(state, assign=True)
    dist.barrier()


@pytest.mark.parametrize("element", [0, 35])
@pytest.mark.parametrize(
    ("make", "name"), [(_tied, "2.weight"), (_TiedAndMore, "tied.2.weight")], ids=["alone", "more"]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_values_for_a_tied_parameter_raise_on_all_ranks(
    ranks: Ranks, num_ranks: int, make: Callable[[], nn.Module], name: str, element: int
) -> None:
    ranks.run(_assign_different_ties, make, name, element, world_size=num_ranks)


def _train_emptied(early: bool) -> list[float]:
    model = _sharded_on_meta(_plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model.to_empty(device="cpu")
    values = _values(_plain)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])
    if not early:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return _losses(model, optimizer)


@pytest.mark.parametrize("early", [True, False])
def test_an_optimizer_may_be_built_on_the_meta_device(ranks: Ranks, early: bool) -> None:
    for losses in ranks.run(_train_emptied, early, world_size=2):
        torch.testing.assert_close(losses, _expected(_plain))


def _assign_again() -> None:
    model = _sharded_on_meta(_plain)
    values = _values(_plain)
    model.load_state_dict(_distributed(model, values), assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    first = _losses(model, optimizer)
    # After a forward the engine handles assignments; the same optimizer remains valid.
    model.load_state_dict(_distributed(model, values), assign=True)
    optimizer.state.clear()
    torch.testing.assert_close(_losses(model, optimizer), first)


def test_values_can_be_assigned_again_while_training(ranks: Ranks) -> None:
    ranks.run(_assign_again, world_size=2)


def _assign_some() -> None:
    model = _sharded_on_meta(_plain)
    state = _distributed(model, _values(_plain))
    del state["2.bias"]
    model.load_state_dict(state, strict=False, assign=True)
    with pytest.raises(RuntimeError, match=r"still on meta device: \['2.bias'\]"):
        model(torch.zeros(1, 6))
    # Values that were assigned before are lost with it, as with FSDP2.
    model.to_empty(device="cpu")
    assert not any(param.is_meta for param in model.parameters())
    dist.barrier()


def test_a_missing_value_is_an_error_that_names_the_parameter(ranks: Ranks) -> None:
    ranks.run(_assign_some, world_size=2)


def _hold_the_assigned() -> None:
    model = _sharded_on_meta(_plain)
    state = _distributed(model, _values(_plain))
    model.load_state_dict(state, assign=True)
    optimizer = torch.optim.AdamW(list(state.values()), lr=0.05)
    with pytest.raises(RuntimeError, match=r"found a AdamW that references [02]\.(weight|bias)"):
        model(torch.zeros(1, 6))
    del optimizer


def test_an_optimizer_of_the_assigned_tensors_is_refused(ranks: Ranks) -> None:
    ranks.run(_hold_the_assigned, world_size=2)


def _assigned_without_shards() -> list[float]:
    with torch.device("meta"):
        model = _plain().bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    fully_shard(model, strategy="no_shard", mp_policy=policy)
    values = {name: value.bfloat16() for name, value in _values(_plain).items()}
    model.load_state_dict(_distributed(model, values), assign=True)
    return [param.full_tensor().tolist() for param in model.parameters()]  # type: ignore[operator]


def test_replicated_values_are_assigned_where_main_weights_are_whole(ranks: Ranks) -> None:
    expected = [value.bfloat16().tolist() for value in _values(_plain).values()]
    assert ranks.run(_assigned_without_shards, world_size=2) == [expected, expected]
