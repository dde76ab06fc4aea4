"""Reductions left in flight by a backward that is not the step's last, and who waits for them.

Lanes are those of a Tracer: they continue without the host, as on CUDA, and accesses are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.flat_dtensor.parameter_access import GradientAccess
from tests import reference
from tests.comm.happens_before import RaceError
from tests.models import Small, vector_batch
from tests.pool import on_ranks
from tests.training import mesh_of, traced

# On one axis, and on two.
LEVELS = [("optim_grads",), ("optim_grads_params", "optim_grads_params")]


@dataclass(frozen=True)
class Training:
    """A sharded model and its optimizer."""

    model: nn.Module
    engine: Any
    optimizer: torch.optim.Optimizer

    @property
    def first(self) -> Any:
        return next(self.model.parameters())

    def microbatch(self, number: int) -> None:
        with self.engine.no_sync():
            self.model(*vector_batch(2, 10 * number + dist.get_rank())).backward()

    def to_the_end(self, number: int) -> None:
        self.model(*vector_batch(2, number + dist.get_rank())).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def sum_all(t: Training) -> None:
    for param in t.model.parameters():
        assert param.grad is not None
        param.grad.to_local().sum()


def keep(t: Training) -> None:
    held = t.first.grad.to_local()
    t.microbatch(5)
    held.sum()


def keep_zeroed(t: Training) -> None:
    held = t.first.grad
    t.optimizer.zero_grad(set_to_none=False)
    t.microbatch(5)
    held.to_local().sum()


def clear_unseen(t: Training) -> None:
    for param in t.model.parameters():
        Tensor.grad.__set__(param, None)  # type: ignore[attr-defined]


LOOKS: dict[str, Callable[[Training], object]] = {
    "read": sum_all,
    "read past the property": lambda t: Tensor.grad.__get__(t.first).to_local().sum(),  # type: ignore[attr-defined]
    "kept over the next microbatch": keep,
    "kept and zeroed": keep_zeroed,
    "one cleared": lambda t: setattr(t.first, "grad", None),
    "all cleared": lambda t: t.optimizer.zero_grad(),
    "all cleared unseen": clear_unseen,
    "all zeroed": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "replaced": lambda t: setattr(t.first, "grad", torch.ones_like(t.first)),
    "clipped": lambda t: t.engine.clip_grad_norm_(1.0),
    "scaled": lambda t: t.engine.scale_gradients(0.5),
    "stepped": lambda t: t.optimizer.step(),
    "stepped by slices": lambda t: t.optimizer.step(),
    "buffer zeroed": lambda t: t.engine.zero_grad_buffer(),
    "finished": lambda t: t.engine.finish_grad_sync(),
    "started": lambda t: (t.engine.start_grad_sync(), t.engine.finish_grad_sync()),
    "reset": lambda t: t.engine.reset(),
}


def trace(
    levels: tuple[str, ...], body: Callable[[Training], None], by_slices: bool = False
) -> None:
    def train(model: nn.Module, engine: Any) -> None:
        optimizer = reference.adamw(model.parameters())
        body(Training(model, engine, fe.shard_optimizer(optimizer) if by_slices else optimizer))

    strategy, *outer = levels
    traced(
        lambda: Small(num_blocks=2),
        train,
        mesh=mesh_of(2, 2) if outer else None,
        strategy=strategy,
        outer_strategy=outer[0] if outer else None,
    )


@pytest.mark.parametrize("levels", LEVELS, ids="-".join)
@on_ranks(4)
def test_reductions_are_in_flight_until_the_next_backward_or_a_look(
    levels: tuple[str, ...],
) -> None:
    def body(t: Training) -> None:
        in_flight = t.engine.reductions._pending
        for number in range(2):
            t.microbatch(number)
            assert in_flight
            assert t.first.backref.gradients.in_flight is not None
        t.to_the_end(20)
        assert not in_flight
        t.microbatch(0)
        sum_all(t)
        t.microbatch(1)
        assert not in_flight  # finished, since the user may hold a gradient
        t.to_the_end(2)  # clears gradients
        t.microbatch(3)
        assert in_flight
        t.to_the_end(4)
        assert not in_flight

    trace(levels, body)


@on_ranks(world_size=2)
def test_where_the_host_drives_lanes_backward_waits() -> None:
    model = Small()
    engine = fe.shard(model)
    Training(model, engine, reference.sgd(model.parameters())).microbatch(0)
    assert not engine.reductions._pending


@pytest.mark.parametrize("levels", LEVELS, ids="-".join)
@pytest.mark.parametrize("look", LOOKS)
@on_ranks(4)
def test_a_look_at_gradients_and_their_clearing_wait(levels: tuple[str, ...], look: str) -> None:
    def body(t: Training) -> None:
        for number in range(2):  # in the second round, after an optimizer step
            t.microbatch(10 * number)
            LOOKS[look](t)
            t.microbatch(10 * number + 1)
            t.to_the_end(30 + number)

    trace(levels, body, by_slices=look == "stepped by slices")


@on_ranks(world_size=2)
@pytest.mark.parametrize("look", ["read", "read past the property", "stepped", "all cleared"])
def test_a_look_that_does_not_wait_is_caught(look: str) -> None:
    def body(t: Training) -> None:
        t.microbatch(0)
        LOOKS[look](t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientAccess, "wait", lambda self: None)
        with pytest.raises((RaceError, AssertionError)):
            trace(("optim_grads_params",), body, by_slices=True)
