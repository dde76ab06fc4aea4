"""Steps of offloaded state beside the next forward: order, memory, and reads of users."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.comm.pending_steps import PENDING, finish_pending_steps
from fsdp_engine.extensions.offload import offloaded_step
from fsdp_engine.extensions.offload.step_beside_forward import StepBesideForward
from fsdp_engine.flat_dtensor import functions, tensor
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import on_device, state_of
from tests.async_device.waits import memory_is_overwritten
from tests.extensions.offload.device_jobs import job, trained
from tests.extensions.offload.offloaded import FULL, offloadings_of
from tests.models import vector_batch
from tests.pool import on_ranks

ranks = device.ranks

AFTER, BESIDE = "state on the host", "beside forward"
SLOW = 5e-3  # seconds that a copy takes: steps then stay pending while the host continues


def batch_of(seed: int) -> tuple[Tensor, ...]:
    return on_device(vector_batch(4, seed), on.DEVICE)


@contextmanager
def held_step(engine: Any) -> Iterator[None]:
    """Steps run only after all other work that is submitted within the block."""
    (offloading,) = offloadings_of(engine)
    with on.held(offloading._step_lane._target()):
        yield
        torch.deferred.current_stream().synchronize()


@pytest.mark.parametrize("level", ["optim", "optim_grads", "optim_grads_params"])
@on_ranks(1)
def test_forward_begins_before_the_last_chunk_is_stepped(level: str) -> None:
    engine, optimizer, _ = trained(BESIDE, 2, (level, "no_shard"))
    batch = batch_of(7)
    model: Any = engine.model
    lane: Any = offloadings_of(engine)[0]._step_lane
    torch.accelerator.synchronize()
    with on.held(lane._target()), on.count_host_syncs() as syncs:
        model(*batch).backward()
        optimizer.step()
        num_pending = len([each for each in PENDING if each() is not None])
        optimizer.zero_grad()
        now = torch.deferred.Event()
        now.record()
        held = engine.memory_bytes()["grad"]
        assert num_pending == len(engine.buffers)
        with torch.no_grad():
            model(*batch)
        assert not syncs
        now.synchronize()  # would never end if compute had waited for the step
    assert held > engine.memory_bytes().get("grad", 0) == 0


@on_ranks(1)
def test_gathers_of_all_buffers_of_a_unit_wait_for_its_step() -> None:
    given = job(BESIDE)
    model: Any = given.make_model()
    model.blocks[1].up.weight.gradient_divisor = 2.0  # a buffer of its own
    engine = given.shard(model, on.NAME)
    assert max(len(unit.trainable) for unit in engine.units) == 2
    optimizer: Any = given.make_optimizer(model.parameters())
    lane: Any = offloadings_of(engine)[0]._step_lane
    model(*batch_of(7)).backward()
    with on.held(lane._target()):
        optimizer.step()
        assert all(buffer.weights.pending.tickets for buffer in engine.buffers)


# Accesses of users after a step. They return the values that they find. ``kept`` are tensors that
# the user has made before the step.


def change_gradients(engine: fe.Engine, optimizer: Any, kept: Any) -> None:
    """Changes the gradients that the pending step reads."""
    for param in engine.model.parameters():
        param.grad.mul_(0.0)


def change_weights(engine: fe.Engine, optimizer: Any, kept: Any) -> None:
    with torch.no_grad():
        for param in engine.model.parameters():
            param.mul_(0.5)


def on_another_stream(engine: fe.Engine, optimizer: Any, kept: Any) -> None:
    """After a read on another stream, the stream that stepped must still wait."""
    with torch.deferred.stream(torch.deferred.Stream()):
        assert all(param.local.ndim for param in engine.model.parameters())


def assign_gradients(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    """The user's own gradients are kept until they are read, and no other tensor gets their memory
    before."""
    optimizer.zero_grad()
    engine.model(*batch_of(6)).backward()
    for param in engine.model.parameters():
        param.grad = param.grad * 2
    optimizer.step()
    optimizer.zero_grad()
    made = [torch.full((size,), float("nan"), device=on.DEVICE) for size in (64, 1024, 4096) * 20]
    return [each.isnan().all().float() for each in made]


def average(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    averages = [torch.zeros_like(each) for each in kept]
    torch._foreach_lerp_(averages, kept, 0.5)
    return [each.local for each in averages]


def step_another(engine: fe.Engine, optimizer: Any, kept: Any) -> None:
    other = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    fe.shard_optimizer(other).step()


Access = Callable[[fe.Engine, Any, Any], Any]
ACCESSES: dict[str, Access] = {
    "clone slices": lambda engine, *_: [
        each.to_local().clone() for each in engine.model.parameters()
    ],
    "clone locals": lambda engine, *_: [p.local.clone() for p in engine.model.parameters()],
    "gather": lambda engine, *_: [p.full_tensor().clone() for p in engine.model.parameters()],
    "average": average,
    "full state": lambda engine, *_: list(engine.full_state_dict().values()),
    "change gradients": change_gradients,
    "zero gradients": lambda engine, optimizer, _: optimizer.zero_grad(set_to_none=False),
    "clip again": lambda engine, *_: [engine.clip_grad_norm_(1e-3)],
    "change weights": change_weights,
    "on another stream": on_another_stream,
    "all state": lambda engine, optimizer, _: list(state_of(engine, optimizer).values()),
    "step again": lambda engine, optimizer, _: optimizer.step(),
    "step another": step_another,
    "accumulate": lambda engine, *_: engine.model(*batch_of(5)).backward(),
    "convert": lambda _, __, kept: [*(x.float() for x in kept), *(x.half().local for x in kept)],
    "assign gradients": assign_gradients,
    "reset": lambda engine, optimizer, _: (optimizer.zero_grad(), engine.reset())[1],
}


def after_steps(
    accesses: Mapping[str, Access], place: str, level: str = FULL[0], *, holds: bool = False
) -> list[tuple[str, Tensor]]:
    """Values that each access finds right after a step, with the loss of the next forward, and the
    final weights.

    Args:
        holds: on the device, the step runs after the access, which must not wait for it.
    """
    engine, optimizer, _ = trained(place, pair=(level, "no_shard"))
    batches = [batch_of(seed) for seed in range(3)]
    kept = [param.data for param in engine.model.parameters()]
    found: list[tuple[str, Tensor]] = []
    name = ""
    with on.delays(copy=SLOW), memory_is_overwritten():
        for number, (access, call) in enumerate([("", None), *accesses.items(), ("", None)]):
            optimizer.zero_grad()
            loss = engine.model(*batches[number % 3])
            found.append((name, loss.detach()))
            loss.backward()
            with held_step(engine) if holds and call else nullcontext():
                optimizer.step()
                if call:
                    name = access
                    found += [(name, each) for each in call(engine, optimizer, kept) or ()]
        found += engine.full_state_dict().items()
        torch.deferred.synchronize()
    return [(name, each.detach().cpu()) for name, each in found]


def differing(found: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> list[str]:
    assert [name for name, _ in found] == [name for name, _ in expected]
    pairs = zip(found, expected, strict=True)
    return [name for (name, one), (_, other) in pairs if not torch.equal(one, other)]


@pytest.mark.parametrize(
    "level", [pytest.param("optim", marks=pytest.mark.thorough), "optim_grads_params"]
)
@on_ranks(1)
def test_what_users_do_after_a_step_comes_after_it(level: str) -> None:
    found = after_steps(ACCESSES, BESIDE, level)
    assert len(found) > len(ACCESSES)
    assert all(getattr(each, "local", each).isfinite().all() for _, each in found)
    assert not differing(found, after_steps(ACCESSES, AFTER, level))


@pytest.mark.parametrize("access", ["full state", "clone slices", "change gradients"])
@on_ranks(1)
def test_accesses_without_a_wait_are_wrong(access: str) -> None:
    """A control for three kinds of access: each is wrong if it does not wait."""
    accesses = {access: ACCESSES[access]}
    with pytest.MonkeyPatch.context() as patch:
        for module in (functions, tensor):
            patch.setattr(module, "PENDING", ())
        if access == "full state":
            patch.setattr(StepBesideForward, "finish", lambda self: None)
        found = after_steps(accesses, BESIDE, holds=True)
    finish_pending_steps()
    assert differing(found, after_steps(accesses, AFTER))


@on_ranks(1)
def test_tensors_that_the_user_may_change_are_read_at_once() -> None:
    """A learning rate in a tensor."""
    results = []
    for place in (AFTER, BESIDE):
        engine, _, _ = trained(place)
        lr = torch.full((), 1e-2, device=on.DEVICE)
        sgd = torch.optim.SGD(engine.model.parameters(), lr=lr, foreach=False)
        optimizer = fe.shard_optimizer(sgd)
        batch = batch_of(0)
        with on.delays(copy=SLOW):
            for _ in range(3):
                engine.model(*batch).backward()
                optimizer.step()
                assert not PENDING
                lr.mul_(0.5)
                optimizer.zero_grad()
            results.append(engine.model(*batch).detach().cpu())
    assert torch.equal(*results)


@on_ranks(1)
def test_a_deleted_engine_waits_for_steps_into_its_memory() -> None:
    engine, optimizer, step = trained(BESIDE, 1)
    with on.delays(copy=0.05):
        step(1)
        tickets: Any = [
            each for buffer in engine.buffers for each in buffer.weights.pending.tickets
        ]
        assert len(tickets) == len(engine.buffers)
        assert not all(each.event.query() for each in tickets)
        del engine, optimizer, step
        gc.collect()
        assert all(each.event.query() for each in tickets)


@on_ranks(1)
def test_a_step_that_fails_leaves_nothing_on_the_device() -> None:
    engine, optimizer, step = trained(BESIDE, 1)
    taken, calls = offloaded_step._Chunk.begin_return, []

    def fail(chunk: Any) -> None:
        calls.append(chunk)
        if len(calls) == 2:
            raise RuntimeError("no")
        taken(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded_step._Chunk, "begin_return", fail)
        with pytest.raises(RuntimeError, match="no"):
            step(1)
    assert "optimizer" not in engine.memory_bytes()
    optimizer.zero_grad()
    step(2)
    assert all(each.isfinite().all() for each in engine.full_state_dict().values())
