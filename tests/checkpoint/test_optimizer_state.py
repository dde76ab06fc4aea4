"""Optimizer state that differs from the state of the loading job's optimizer."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp_engine as fe
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from fsdp_engine.memory import allocator
from tests import models, reference
from tests.checkpoint.moved_state import (
    Maker,
    Move,
    check_missing_state,
    check_plain_dict_state,
    check_wider_dtypes,
    make,
    state_dtypes,
    steps,
    with_moves,
)
from tests.checkpoint.scene import (
    contents,
    different,
    shared_folder,
    small,
    step,
    train,
    two_groups,
    update,
)
from tests.models import Mlp
from tests.pool import on_few_ranks, on_ranks

MAKERS: dict[str, Maker] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    # Keeps means of rows and columns, so it steps on full parameters only.
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "wrapped": lambda p: fe.shard_optimizer(torch.optim.AdamW(p, lr=1e-2)),
}


@with_moves
@pytest.mark.parametrize("name", list(MAKERS))
@on_few_ranks
def test_state_follows_its_parameter_into_a_wider_dtype(name: str, moves: list[Move]) -> None:
    if name == "adafactor":
        moves = [move for move in moves if move[0] == move[2] == "no_shard"]
    alone = MAKERS["adamw"] if name == "wrapped" else None
    check_wider_dtypes(MAKERS[name], moves, alone)


@on_ranks(2)
def test_state_that_was_wider_than_its_parameter_stays_wide() -> None:
    folder = shared_folder()
    model, engine, optimizer = make(MAKERS["sgd"], torch.bfloat16, "optim_grads_params")
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = param.detach().float()
    save_checkpoint(folder, engine, optimizer)
    for dtype in (torch.bfloat16, torch.float64):
        model, engine, optimizer = make(MAKERS["sgd"], dtype, "optim_grads_params")
        load_checkpoint(folder, engine, optimizer)
        assert state_dtypes(optimizer) == {torch.float32}


@on_few_ranks
def test_a_group_without_parameters_gets_its_hyperparameters_back() -> None:
    folder = shared_folder()

    def made(position: int, lr: float) -> tuple[fe.Engine, Any]:
        model = Mlp()
        engine = fe.shard(model)
        groups = [{"params": [p], "lr": lr} for p in (model.up.weight, model.down.weight)]
        groups.insert(position, {"params": [], "lr": lr / 7, "betas": (0.5, 0.6)})
        return engine, torch.optim.AdamW([*groups, {"params": [], "lr": lr / 3}])

    for position in (0, 1, 2):
        (engine, saved), (other, loaded) = made(position, 1e-2), made(position, 1.0)
        save_checkpoint(f"{folder}/{position}", engine, saved)
        load_checkpoint(f"{folder}/{position}", other, loaded)
        for one, two in zip(saved.param_groups, loaded.param_groups, strict=True):
            assert {**one, "params": 0} == {**two, "params": 0}


@on_ranks(2)
def test_state_of_another_program_loads_where_a_scheduler_is_built_already() -> None:
    """A scheduler adds ``initial_lr`` to the groups, which the other program did not save."""
    folder = shared_folder()
    model, engine, first = small(steps=1)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, first)}
    dcp.save(state, checkpoint_id=folder)
    model, engine, second = small(steps=0)
    torch.optim.lr_scheduler.LambdaLR(second, lambda step: 0.5)
    load_checkpoint(folder, engine, second)
    for one, two in zip(first.state.values(), second.state.values(), strict=True):
        assert torch.equal(one["exp_avg"].to_local(), two["exp_avg"].to_local())


class MyAdamW(torch.optim.AdamW):
    """A user's own class."""


@on_ranks(2)
def test_a_subclass_takes_the_state_of_its_base_and_no_other() -> None:
    folder = shared_folder()
    model, engine, base = small(steps=0)
    first, other = reference.sgd(model.parameters()), MyAdamW(model.parameters(), lr=0.3)
    save_checkpoint(f"{folder}/sgd", engine, first)
    with pytest.raises(ValueError, match="expected the state of MyAdamW; found that of SGD"):
        load_checkpoint(f"{folder}/sgd", engine, other)
    save_checkpoint(f"{folder}/mine", engine, other)
    load_checkpoint(f"{folder}/mine", engine, base)
    assert base.param_groups[0]["lr"] == 0.3
    save_checkpoint(f"{folder}/base", engine, base)
    load_checkpoint(f"{folder}/base", engine, other)


@on_ranks(2)
def test_a_checkpoint_from_before_the_first_step_has_no_state() -> None:
    folder = shared_folder()
    model, engine, _ = small(steps=0)
    optimizer = two_groups(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    before = contents(model, optimizer)
    save_checkpoint(folder, engine, optimizer)
    train(model, optimizer)
    assert optimizer.state
    optimizer.param_groups[0]["lr"] = 0.5
    load_checkpoint(folder, engine, optimizer)
    assert not any(optimizer.state.values())
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert different(contents(model, optimizer), before) == []


class HalfMomentum(torch.optim.Optimizer):
    """State of three kinds: a bf16 momentum, an int count, and None."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                momentum = torch.zeros_like(param).bfloat16()
                state |= {"momentum": momentum, "count": 0, "later": None}
            state["count"] += 1
            state["momentum"].add_(param.grad)
            param.add_(state["momentum"].float(), alpha=-0.1)


@on_ranks(2)
def test_state_keeps_its_dtype_and_may_be_numbers() -> None:
    folder = shared_folder()
    for level in fe.strategies.LEVELS:
        model = models.odd_model()
        engine = fe.shard(model, strategy=level)
        optimizer = HalfMomentum(model.parameters())
        step(model, optimizer, 1, width=7)
        scale: Any = model.get_parameter("blocks.0.scale")
        state = optimizer.state[scale]
        expected = reference.full(state["momentum"])
        save_checkpoint(folder, engine, optimizer)
        state["momentum"].zero_()
        state["count"] = 7
        load_checkpoint(folder, engine, optimizer)
        state = optimizer.state[scale]
        assert state.keys() == {"momentum", "count", "later"}
        assert (state["count"], state["later"]) == (1, None)
        assert state["momentum"].dtype == torch.bfloat16
        assert torch.equal(reference.full(state["momentum"]), expected)
        state["list"] = [1]
        with pytest.raises(ValueError, match=r"found a list in 'list'"):
            save_checkpoint(folder, engine, optimizer)


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return (self.number * x).sin().sum()


@on_ranks(2)
def test_a_0d_parameter_alone_keeps_its_step_apart_from_its_state() -> None:
    """Step and state have the same shape for such a parameter; only the names tell them apart."""
    folder = shared_folder()
    model = OneNumber()
    engine = fe.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        step(model, optimizer, number)
    before = contents(model, optimizer)
    save_checkpoint(folder, engine, optimizer)
    other = torch.optim.AdamW(model.parameters(), lr=0.7)
    load_checkpoint(folder, engine, other)
    assert different(contents(model, other), before) == []
    state = other.state[model.number]
    assert isinstance(state["exp_avg"], fe.FlatDTensor)
    assert not isinstance(state["step"], fe.FlatDTensor)


@pytest.mark.parametrize(
    ("name", "key"), [("adamw", "exp_avg"), ("wrapped", "exp_avg_sq"), ("adamw", "step")]
)
@on_few_ranks
def test_state_without_one_of_its_tensors_is_refused_by_name(name: str, key: str) -> None:
    check_missing_state(MAKERS[name], key)


@on_few_ranks
def test_state_that_an_optimizer_does_not_have_yet_is_not_missed() -> None:
    folder = shared_folder()
    model, engine, optimizer = make(MAKERS["adamw"], torch.float32, "optim_grads_params")
    model.up(torch.ones(2, model.up.in_features)).sum().backward()  # down has no gradient
    optimizer.step()
    save_checkpoint(folder, engine, optimizer)
    model, engine, _ = make(MAKERS["adamw"], torch.float32, "optim_grads_params")
    # The saved hyperparameter says that there is no third moment.
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    load_checkpoint(folder, engine, optimizer)
    assert len(optimizer.state_dict()["state"]) == 2
    steps(model, optimizer, range(1))


WRAPPERS: dict[str, Any] = {
    "none": lambda optimizer: optimizer,
    "shard": fe.shard_optimizer,
    "elementwise": lambda optimizer: fe.shard_optimizer(optimizer, elementwise=True),
}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
@on_few_ranks
def test_an_optimizer_whose_state_is_a_plain_dict(wrapper: str) -> None:
    check_plain_dict_state(WRAPPERS[wrapper])


@on_ranks(2)
def test_a_load_does_not_allocate_full_states_of_sharded_parameters() -> None:
    model = nn.Linear(64, 32, bias=False)
    engine = fe.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    update(model(torch.ones(2, 64)).sum(), optimizer)
    folder = shared_folder()
    fe.save_checkpoint(folder, engine, optimizer)
    zeros, shapes = allocator.zeros, []

    def recorded(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        made = zeros(shape, dtype, device)
        shapes.append((tuple(made.shape), made.device.type))
        return made

    with patch.object(allocator, "zeros", recorded):
        fe.load_checkpoint(folder, engine, optimizer)
    assert ((32, 64), "cpu") not in shapes
