"""Training with state, main weights and gradients on a disk has the bits of training in memory,
whatever users do to parameters, gradients and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.offload.places import ROLES
from tests.extensions.offload.offloaded import (
    BF16,
    COMBINATIONS,
    LEVELS,
    POLICIES,
    STATE,
    Change,
    all_roles,
    assert_same,
    compare,
    on_disk,
    train,
    values,
    weights,
)
from tests.models import Small, vector_batch
from tests.optim.optimizers import MAKERS, Lion, counting_chunks
from tests.pairs import FEW_PAIRS
from tests.pool import Ranks


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_steps_as_in_memory_in_two_chunks(
    name: str, level: str, micro: int, tmp_path: Path
) -> None:
    given: Any = {"pair": (level, "no_shard"), "name": name, "micro": micro}
    expected = train(None, **given)
    has_state = any(isinstance(each, tuple) and each[1] and each[2].ndim for each in expected)
    for roles in (STATE, all_roles(level))[:micro]:
        with counting_chunks() as counts:
            assert_same(train(on_disk(tmp_path, roles), **given), expected)
        # Of an optimizer without state, gradients and weights are brought all the same.
        most = 2 if has_state else 0
        assert max(counts) in {most, most if roles is STATE else 2}


@pytest.mark.parametrize("roles", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("level", LEVELS[2:])
@pytest.mark.parametrize("policy", POLICIES)
def test_all_combinations_of_places_and_dtypes_train_as_in_memory(
    policy: str, level: str, roles: tuple[str, ...], tmp_path: Path
) -> None:
    compare(tmp_path, [roles], (level, "no_shard"), mp_policy=POLICIES[policy])


class Odd(nn.Module):
    """Frozen, tied, tiny, unused and sometimes used layers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.one, self.tied = (nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.tied.weight = self.one.weight
        self.tiny, self.unused = nn.Linear(1, 1), nn.Linear(2, 2)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: Tensor, number: int) -> Tensor:
        y = self.tied(self.one(self.frozen(x)))
        if number % 2:
            y = self.sometimes(y)
        return (y.sum(-1, keepdim=True) + self.tiny(x[..., :1])).square().mean()


def train_odd(offload: fe.Offload | None, pair: tuple[str, str]) -> list[Any]:
    """Units without gradients or elements."""
    torch.manual_seed(0)
    model = Odd()
    options = {"units": [nn.Linear], "min_unit_size": 0}
    engine = fe.shard(model, (2, 2), *pair, offload=offload, **options)
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for number in range(4):
        torch.manual_seed(number + dist.get_rank())
        model(torch.randn(2, 3), number).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 3 == 0)
    return [*values(optimizer), *weights(engine)]


def compare_pair(folder: str, pair: tuple[str, str]) -> None:
    for name, policy in (("Lion", None), ("AdamW-fused", BF16)):
        roles = [STATE, all_roles(pair[0])] if policy is None else [all_roles(pair[0])]
        compare(folder, roles, pair, name=name, mp_policy=policy)
    assert_same(train_odd(on_disk(folder), pair), train_odd(None, pair))


@pytest.mark.parametrize("pair", FEW_PAIRS, ids="-".join)
def test_so_they_do_on_two_axes(ranks: Ranks, pair: tuple[str, str], tmp_path: Path) -> None:
    ranks.run(compare_pair, str(tmp_path), pair, world_size=4)


# What users do between steps.

PARTS = [STATE, ROLES[1:2], ROLES[2:], ROLES]


def edit_weights(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """In place, as loaded, and within ``unsharded``."""
    if number == 1:
        full = engine.full_state_dict()
        model.load_state_dict({key: value * 1.5 for key, value in full.items()})
    with engine.unsharded() if number == 2 else nullcontext(), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + number / 8)
        model.last.weight.copy_(torch.full_like(model.last.weight, 0.1 * number))


def keep_gradients(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """A backward without a step, whose gradients the next ones are added to."""
    model(*vector_batch(4, number)).backward()
    for param in model.parameters():
        if number == 1:
            param.grad.mul_(3.0)
        elif number == 2:
            param.grad = torch.ones_like(param)
    if number == 3:
        optimizer.zero_grad(set_to_none=False)


def set_gradients_alone(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1)
    optimizer.step()
    optimizer.zero_grad()


def reset_evaluate_and_clip(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    model(*vector_batch(4, number)).backward()
    engine.reset()
    with torch.no_grad():
        model(*vector_batch(4, number))
    with engine.together():
        model(*vector_batch(4, number)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def edit_groups(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """A parameter moves, a group without any is added, and a hook changes what a step reads."""
    first, second, *_ = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    optimizer.add_param_group({"params": []})

    def change(optimizer: Any, *args: object) -> None:
        engine.clip_grad_norm_(0.01)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    if number == 0:
        optimizer.register_step_pre_hook(change)


def step_with_a_closure(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """It is called once for all units, with another batch in each call."""
    calls = []

    def closure() -> Tensor:
        calls.append(number)
        optimizer.zero_grad()
        loss: Tensor = model(*vector_batch(4, 50 + 10 * number + len(calls)))
        loss.backward()
        return loss

    assert optimizer.step(closure).isfinite()
    assert len(calls) == 1
    optimizer.zero_grad()


CHANGES: list[Change] = [
    *(edit_weights, keep_gradients, set_gradients_alone),
    *(reset_evaluate_and_clip, edit_groups, step_with_a_closure),
]


def compare_change(folder: str, change: Change, policy: Any, roles: list[Any]) -> None:
    compare(folder, roles, change=change, mp_policy=policy)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_what_users_do_between_steps_counts(
    ranks: Ranks, change: Change, policy: fe.MixedPrecisionPolicy | None, tmp_path: Path
) -> None:
    ranks.run(
        compare_change,
        str(tmp_path),
        change,
        policy,
        [STATE, ROLES, ROLES[1:2], ROLES[2:]],
        world_size=1,
    )
    ranks.run(compare_change, str(tmp_path), change, policy, [ROLES], world_size=2)


# Models and optimizers of other kinds: what a program with an offload, at a level, finds.

Program = Callable[[fe.Offload | None, str], list[Any]]


def shard(model: nn.Module, offload: fe.Offload | None, level: str) -> fe.Engine:
    return fe.shard(model, strategy=level, offload=offload, min_unit_size=0)


def train_with(
    engine: fe.Engine, *optimizers: Any, numbers: tuple[int, ...] = (0, 1, 2)
) -> list[Any]:
    """Weights and state after steps of all optimizers."""
    for number in numbers:
        engine.model(*vector_batch(4, number)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = [each for optimizer in optimizers for each in values(optimizer)]
    return [*weights(engine), *state]


def hooks_after_a_step(offload: fe.Offload | None, level: str) -> list[Any]:
    """They see what it stored."""
    model = Small(2)
    engine = shard(model, offload, level)
    optimizer: Any = Lion(model.parameters())
    seen: list[Any] = []

    def look(optimizer: Any, *args: object) -> None:
        has_state = [len(optimizer.state[param]) for param in optimizer.state]
        seen.append([has_state, optimizer.param_groups[0]["k"], optimizer.num_steps])

    optimizer.register_step_post_hook(look)
    fe.shard_optimizer(optimizer, elementwise=True)
    train_with(engine, optimizer)
    assert len(seen) == 3
    return seen


class Scalars(nn.Module):
    """A vector, if there is one, and parameters of no dimension."""

    def __init__(self, has_vector: bool) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.tensor(k)) for k in (1.0, 2.0))
        self.vector = nn.Parameter(torch.ones(3)) if has_vector else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift
        return x if self.vector is None else x * self.vector


class Remembering(torch.optim.Optimizer):
    """Sets the state of a parameter that has none, and keeps some of no parameter: a count that
    changes in place, and what it finds in its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state["count"] = torch.zeros(())  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.state["count"].add_(1)  # type: ignore[index]
        if "all" not in self.state:
            self.state["all"] = {"first": self.param_groups[0]["lr"]}  # type: ignore[index]
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self.state:
                    self.state[param] = {"average": torch.zeros_like(param), "none": None}
                average = self.state[param]["average"]
                param.sub_(average.mul_(0.9).add_(param.grad) / count, alpha=group["lr"])
                group["lr"] *= 0.5  # of the next step


def scalars_other_tensors_and_none(offload: fe.Offload | None, level: str) -> list[Any]:
    found: list[Any] = []
    for has_vector in (True, False):
        model, other = Scalars(has_vector), nn.Parameter(torch.ones(3))
        engine = fe.shard(model, strategy=level, offload=offload)
        groups = [{"params": [param]} for param in [*model.parameters(), other]]
        optimizer = fe.shard_optimizer(Remembering(groups), elementwise=True)
        assert optimizer.state["count"] == 0
        for _ in range(3):
            (model(torch.ones(2, 3)).sum() * other.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        packed = optimizer.state_dict()
        assert packed["state"].pop("all") == {"first": 0.1}
        assert packed["state"].pop("count") == 3
        state = [packed["state"][index]["average"] for index in sorted(packed["state"])]
        local = [("", "state", getattr(each, "local", each).clone()) for each in state]
        found += [*local, *weights(engine), ("", "other", other.detach())]
    return found


def a_loss_scaler_that_skips_a_step(offload: fe.Offload | None, level: str) -> list[Any]:
    found: list[Any] = []
    for fused in (True, False):
        model: Any = Small(2)
        shard(model, offload, level)
        optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(3):
            loss = scaler.scale(model(*vector_batch(4, number)))
            (loss * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
        assert scaler.get_scale() == 4.0
        found += values(optimizer)
    return found


def frozen_units_and_two_optimizers_that_share_units(
    offload: fe.Offload | None, level: str
) -> list[Any]:
    model = Small(2)
    model.blocks[0].requires_grad_(False)
    engine = shard(model, offload, level)
    params = [param for param in model.parameters() if param.requires_grad]
    first, second = (torch.optim.AdamW(part, lr=1e-2) for part in (params[::2], params[1::2]))
    return train_with(engine, fe.shard_optimizer(first), fe.shard_optimizer(second))


def a_model_that_is_converted_first(offload: fe.Offload | None, level: str) -> list[Any]:
    model = Small(2)
    block: Any = model.blocks[0]
    block.register_forward_hook(lambda *args: args[2].float())
    block.register_forward_pre_hook(lambda _, args: args[0].to(block.up.weight.dtype))
    engine = shard(model, offload, level)
    block.double()
    return train_with(engine, fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2)))


def parameters_of_a_unit_that_are_added(offload: fe.Offload | None, level: str) -> list[Any]:
    model = Small(2)
    engine = shard(model, offload, level)
    params = list(model.parameters())
    optimizer = fe.shard_optimizer(torch.optim.AdamW(params[:4], lr=1e-2))
    train_with(engine, optimizer, numbers=(9,))
    optimizer.add_param_group({"params": params[6:]})
    return train_with(engine, optimizer)


ALL_LEVELS: dict[Program, tuple[str, ...]] = {
    hooks_after_a_step: LEVELS[1:2],
    scalars_other_tensors_and_none: LEVELS,
    a_loss_scaler_that_skips_a_step: LEVELS[3:],
    frozen_units_and_two_optimizers_that_share_units: LEVELS[3:],
    a_model_that_is_converted_first: LEVELS[3:],
    parameters_of_a_unit_that_are_added: LEVELS[2:],
}


@pytest.mark.parametrize("program", ALL_LEVELS)
def test_a_program_finds_what_it_finds_in_memory(program: Program, tmp_path: Path) -> None:
    for level in ALL_LEVELS[program]:
        torch.manual_seed(0)
        expected = program(None, level)
        for roles in PARTS:
            if set(roles) <= set(all_roles(level)):
                torch.manual_seed(0)
                assert_same(program(on_disk(tmp_path, roles), level), expected)
