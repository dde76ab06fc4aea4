"""What a backward that is not the step's last leaves in flight, and who waits for it.

Lanes are a tracer's: they continue without the host, as on CUDA, and every access is checked.
"""

from __future__ import annotations

from collections.abc import Callable
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
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of, traced

Look = Callable[[nn.Module, Any, torch.optim.Optimizer], None]
# On an axis of two ranks, and on two axes.
LEVELS = [("optim_grads",), ("optim_grads_params", "optim_grads_params")]


def microbatch(model: nn.Module, engine: Any, number: int) -> None:
    with engine.no_sync():
        model(*vector_batch(2, 10 * number + dist.get_rank())).backward()


def first(model: nn.Module) -> Any:
    return next(model.parameters())


def train_to_the_end(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(*vector_batch(2, number + dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def sum_all(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.to_local().sum()


def read_raw(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer) -> None:
    Tensor.grad.__get__(first(model)).to_local().sum()  # type: ignore[attr-defined]


def keep(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer) -> None:
    held = first(model).grad.to_local()
    microbatch(model, engine, 5)
    held.sum()


def keep_zeroed(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer) -> None:
    held = first(model).grad
    optimizer.zero_grad(set_to_none=False)
    microbatch(model, engine, 5)
    held.to_local().sum()


def clear_one(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer) -> None:
    first(model).grad = None


def clear_unseen(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        Tensor.grad.__set__(param, None)  # type: ignore[attr-defined]


def replace(model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer) -> None:
    param = first(model)
    param.grad = torch.ones_like(param)


LOOKS: dict[str, Look] = {
    "read": sum_all,
    "read past the property": read_raw,
    "kept over the next microbatch": keep,
    "kept and zeroed": keep_zeroed,
    "one cleared": clear_one,
    "all cleared": lambda model, engine, optimizer: optimizer.zero_grad(),
    "all cleared unseen": clear_unseen,
    "all zeroed": lambda model, engine, optimizer: optimizer.zero_grad(set_to_none=False),
    "replaced": replace,
    "clipped": lambda model, engine, optimizer: engine.clip_grad_norm_(1.0),
    "scaled": lambda model, engine, optimizer: engine.scale_gradients(0.5),
    "stepped": lambda model, engine, optimizer: optimizer.step(),
    "stepped by slices": lambda model, engine, optimizer: optimizer.step(),
    "buffer zeroed": lambda model, engine, optimizer: engine.zero_grad_buffer(),
    "finished": lambda model, engine, optimizer: engine.finish_grad_sync(),
    "started": lambda model, engine, optimizer: (
        engine.start_grad_sync(),
        engine.finish_grad_sync(),
    ),
    "reset": lambda model, engine, optimizer: engine.reset(),
}


def trace(levels: tuple[str, ...], body: Callable[[nn.Module, Any], None]) -> None:
    strategy, *outer = levels
    traced(
        lambda: Small(num_blocks=2),
        body,
        mesh=mesh_of(*[2] * len(levels)),
        strategy=strategy,
        outer_strategy=outer[0] if outer else None,
    )


def look_in_each_step(levels: tuple[str, ...], look: str) -> None:
    def body(model: Any, engine: Any) -> None:
        optimizer = reference.adamw(model.parameters())
        if look == "stepped by slices":
            fe.shard_optimizer(optimizer)
        for number in range(2):  # the second time the optimizer has seen gradients
            microbatch(model, engine, 10 * number)
            LOOKS[look](model, engine, optimizer)
            microbatch(model, engine, 10 * number + 1)
            train_to_the_end(model, optimizer, 30 + number)

    trace(levels, body)


def in_flight_until_the_next_backward(levels: tuple[str, ...]) -> None:
    def body(model: Any, engine: Any) -> None:
        optimizer = reference.adamw(model.parameters())
        in_flight = engine.reductions._pending
        for number in range(2):
            microbatch(model, engine, number)
            assert in_flight
            assert first(model).backref.gradients.in_flight is not None
        train_to_the_end(model, optimizer, 20)
        assert not in_flight
        microbatch(model, engine, 0)
        sum_all(model, engine, optimizer)
        microbatch(model, engine, 1)
        assert not in_flight  # the user may hold a gradient
        train_to_the_end(model, optimizer, 2)  # clears gradients
        microbatch(model, engine, 3)
        assert in_flight
        train_to_the_end(model, optimizer, 4)
        assert not in_flight

    trace(levels, body)


@pytest.mark.parametrize("levels", LEVELS, ids="-".join)
def test_reductions_are_in_flight_until_the_next_backward_or_a_look(
    ranks: Ranks, levels: tuple[str, ...]
) -> None:
    ranks.run(in_flight_until_the_next_backward, levels, world_size=2 ** len(levels))


@on_ranks(world_size=2)
def test_where_the_host_drives_lanes_backward_waits() -> None:
    model = Small()
    engine = fe.shard(model)
    microbatch(model, engine, 0)
    assert not engine.reductions._pending


ON_TWO_AXES = ["read", "all cleared", "stepped by slices"]  # the others in ``make test-all``


@pytest.mark.parametrize(
    ("levels", "look"),
    [
        *((LEVELS[0], look) for look in LOOKS),
        *((LEVELS[1], look) for look in ON_TWO_AXES),
        *(
            pytest.param(LEVELS[1], look, marks=pytest.mark.thorough)
            for look in LOOKS
            if look not in ON_TWO_AXES
        ),
    ],
)
def test_a_look_at_gradients_and_their_clearing_wait(
    ranks: Ranks, levels: tuple[str, ...], look: str
) -> None:
    ranks.run(look_in_each_step, levels, look, world_size=2 ** len(levels))


@on_ranks(world_size=2)
@pytest.mark.parametrize("look", ["read", "read past the property", "stepped", "all cleared"])
def test_a_look_that_does_not_wait_is_caught(look: str) -> None:
    def body(model: Any, engine: Any) -> None:
        optimizer = fe.shard_optimizer(reference.adamw(model.parameters()))
        microbatch(model, engine, 0)
        LOOKS[look](model, engine, optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientAccess, "wait", lambda self: None)
        with pytest.raises((RaceError, AssertionError)):
            trace(("optim_grads_params",), body)
