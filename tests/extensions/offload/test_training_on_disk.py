"""Training with state, main weights and gradients on a disk has the bits of training in memory,
whatever users do to parameters, gradients and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.engine import engine_of
from fsdp_engine.extensions.offload.places import ROLES
from tests import models
from tests.checkpoint.scene import shared_folder, update
from tests.extensions.offload import offloaded
from tests.optim.optimizers import MAKERS, Lion, counting_chunks
from tests.pairs import FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.reference import full
from tests.scenario import Run


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", offloaded.LEVELS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_steps_as_in_memory_in_two_chunks(
    name: str, level: str, micro: int, tmp_path: Path
) -> None:
    given = offloaded.scenario((level, "no_shard"), name).but(microbatches=micro)
    has_state = any(value.ndim for value in given.sharded().state().values())
    roles = (offloaded.STATE, offloaded.all_roles(level))[micro - 1]
    with counting_chunks() as counts:
        offloaded.compare(tmp_path, [roles], given)
    most = 2 if has_state else 0
    # If the optimizer has no state, gradients and weights are still copied to the device.
    assert max(counts) in {most, most if roles is offloaded.STATE else 2}


@pytest.mark.parametrize("roles", offloaded.COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("level", offloaded.LEVELS[2:])
@pytest.mark.parametrize("policy", offloaded.POLICIES)
def test_all_combinations_of_places_and_dtypes_train_as_in_memory(
    policy: str, level: str, roles: tuple[str, ...], tmp_path: Path
) -> None:
    offloaded.compare(
        tmp_path,
        [roles],
        offloaded.scenario((level, "no_shard"), mp_policy=offloaded.POLICIES[policy]),
    )


def skip_by_turns(model: Any, number: int) -> None:
    if isinstance(model, models.Skipping):
        model.skip = number % 2 == 0


# Frozen, tied, empty, scalar, unused and sometimes used parameters.
MODELS = (models.lora_model, models.shared_model, models.unused_model, models.Skipping)


@pytest.mark.parametrize("pair", FEW_PAIRS, ids="-".join)
@on_ranks(4)
def test_so_they_do_on_two_axes(pair: tuple[str, str]) -> None:
    folder, roles = shared_folder(), offloaded.all_roles(pair[0])
    offloaded.compare(folder, [offloaded.STATE, roles], offloaded.scenario(pair, "Lion"))
    given = offloaded.scenario(pair, mp_policy=offloaded.BF16)
    offloaded.compare(folder, [roles], given)
    given = given.but(steps=2, before_step=skip_by_turns)
    for make in MODELS:
        offloaded.compare(folder, [roles], given.but(model=make))
    odd = partial(models.vector_batch, width=7)
    offloaded.compare(folder, [roles], given.but(model=models.odd_model, batch=odd))


# Changes of users between steps.

PARTS = [offloaded.STATE, ROLES[1:2], ROLES[2:], ROLES]


def edit_weights(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """Change weights in place, by loading, and within ``unsharded``."""
    if number == 1:
        full = engine.full_state_dict()
        model.load_state_dict({key: value * 1.5 for key, value in full.items()})
    with engine.unsharded() if number == 2 else nullcontext(), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + number / 8)
        model.last.weight.copy_(torch.full_like(model.last.weight, 0.1 * number))


def keep_gradients(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """Run a backward without a step; the next backward adds to its gradients."""
    model(*models.vector_batch(4, number)).backward()
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
    model(*models.vector_batch(4, number)).backward()
    engine.reset()
    with torch.no_grad():
        model(*models.vector_batch(4, number))
    with engine.together():
        model(*models.vector_batch(4, number)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def edit_groups(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """Move a parameter to another group, add an empty group, and change gradients in a hook."""
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
    """The closure is called once for all units, with another batch in each call."""
    calls = []

    def closure() -> Tensor:
        calls.append(number)
        optimizer.zero_grad()
        loss: Tensor = model(*models.vector_batch(4, 50 + 10 * number + len(calls)))
        loss.backward()
        return loss

    assert optimizer.step(closure).isfinite()
    assert len(calls) == 1
    optimizer.zero_grad()


CHANGES: list[Callable[[Any, fe.Engine, Any, int], None]] = [
    *(edit_weights, keep_gradients, set_gradients_alone),
    *(reset_evaluate_and_clip, edit_groups, step_with_a_closure),
]


def compare_change(folder: str, change: Any, policy: Any, roles: list[Any]) -> None:
    optimizers = []

    def wrap(optimizer: Any) -> None:
        optimizers.append(fe.shard_optimizer(optimizer))

    def before_step(model: Any, number: int) -> None:
        change(model, engine_of(model), optimizers[-1], number)

    given = offloaded.scenario(mp_policy=policy).but(wrap=wrap, before_step=before_step, steps=4)
    offloaded.compare(folder, roles, given)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("policy", [None, offloaded.BF16], ids=["fp32", "bf16"])
def test_what_users_do_between_steps_counts(
    ranks: Ranks, change: Any, policy: fe.MixedPrecisionPolicy | None, tmp_path: Path
) -> None:
    arguments = (compare_change, str(tmp_path), change, policy)
    ranks.run(*arguments, PARTS, world_size=1)
    ranks.run(*arguments, [ROLES], world_size=2)


# Other kinds of models and optimizers. A program returns its results with an offload at a level.

Program = Callable[[fe.Offload | None, str], list[Any]]


def shard(model: nn.Module, offload: fe.Offload | None, level: str) -> fe.Engine:
    return fe.shard(model, strategy=level, offload=offload, min_unit_size=0)


def result(engine: fe.Engine, *optimizers: Any) -> list[Any]:
    """Weights, and the state of each optimizer."""
    states = [Run([], engine.model, engine, each).state() for each in optimizers]
    return [dict(engine.full_state_dict()), *states]


def train_with(engine: fe.Engine, *optimizers: Any, num_steps: int = 3) -> list[Any]:
    for number in range(num_steps):
        engine.model(*models.vector_batch(4, number)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return result(engine, *optimizers)


def hooks_after_a_step(offload: fe.Offload | None, level: str) -> list[Any]:
    """Hooks see the state and attributes that the step has stored."""
    model = models.Small(2)
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
    """Sets the state of parameters that have none, and has state of its own: a count that changes
    in place, and the learning rate of its first step."""

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
            update(model(torch.ones(2, 3)).sum() * other.sum(), optimizer)
        packed = optimizer.state_dict()
        assert packed["state"].pop("all") == {"first": 0.1}
        assert packed["state"].pop("count") == 3
        state = [packed["state"][index]["average"] for index in sorted(packed["state"])]
        found += [*map(full, state), dict(engine.full_state_dict()), other.detach()]
    return found


def a_loss_scaler_that_skips_a_step(offload: fe.Offload | None, level: str) -> list[Any]:
    found: list[Any] = []
    for fused in (True, False):
        model: Any = models.Small(2)
        engine = shard(model, offload, level)
        optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(3):
            loss = scaler.scale(model(*models.vector_batch(4, number)))
            (loss * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
        assert scaler.get_scale() == 4.0
        found += result(engine, optimizer)
    return found


def frozen_units_and_two_optimizers_that_share_units(
    offload: fe.Offload | None, level: str
) -> list[Any]:
    model = models.Small(2)
    model.blocks[0].requires_grad_(False)
    engine = shard(model, offload, level)
    params = [param for param in model.parameters() if param.requires_grad]
    first, second = (torch.optim.AdamW(part, lr=1e-2) for part in (params[::2], params[1::2]))
    return train_with(engine, fe.shard_optimizer(first), fe.shard_optimizer(second))


def a_model_that_is_converted_first(offload: fe.Offload | None, level: str) -> list[Any]:
    model = models.Small(2)
    block: Any = model.blocks[0]
    block.register_forward_hook(lambda *args: args[2].float())
    block.register_forward_pre_hook(lambda _, args: args[0].to(block.up.weight.dtype))
    engine = shard(model, offload, level)
    block.double()
    return train_with(engine, fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2)))


def parameters_of_a_unit_that_are_added(offload: fe.Offload | None, level: str) -> list[Any]:
    model = models.Small(2)
    engine = shard(model, offload, level)
    params = list(model.parameters())
    optimizer = fe.shard_optimizer(torch.optim.AdamW(params[:4], lr=1e-2))
    train_with(engine, optimizer, num_steps=1)
    optimizer.add_param_group({"params": params[6:]})
    return train_with(engine, optimizer)


ALL_LEVELS: dict[Program, tuple[str, ...]] = {
    hooks_after_a_step: offloaded.LEVELS[1:2],
    scalars_other_tensors_and_none: offloaded.LEVELS,
    a_loss_scaler_that_skips_a_step: offloaded.LEVELS[3:],
    frozen_units_and_two_optimizers_that_share_units: offloaded.LEVELS[3:],
    a_model_that_is_converted_first: offloaded.LEVELS[3:],
    parameters_of_a_unit_that_are_added: offloaded.LEVELS[2:],
}


@pytest.mark.parametrize("program", ALL_LEVELS)
def test_a_program_finds_what_it_finds_in_memory(program: Program, tmp_path: Path) -> None:
    for level in ALL_LEVELS[program]:
        torch.manual_seed(0)
        expected = program(None, level)
        for roles in PARTS:
            if set(roles) <= set(offloaded.all_roles(level)):
                torch.manual_seed(0)
                found = program(offloaded.on_disk(tmp_path, roles), level)
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
