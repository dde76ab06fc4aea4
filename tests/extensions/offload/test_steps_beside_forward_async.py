"""Steps of offloaded state beside the next forward: numbers, order, memory, what users read."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_engine as fe
from fsdp_engine.comm.offloading import Offloading
from fsdp_engine.comm.pending_steps import PENDING, PendingStep, finish_pending_steps
from fsdp_engine.flat_dtensor import functions, tensor
from fsdp_engine.optim import offloaded_step
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import (
    Job,
    compare,
    differences,
    on_device,
    random_delays,
    state_of,
    step_by_step,
    train,
)
from tests.async_device.waits import memory_is_overwritten
from tests.models import Transformer, token_batch
from tests.optim.optimizers import MAKERS, counting_chunks
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks

ranks = device.ranks

BESIDE = fe.Offload(optimizer_state="host", overlap_forward=True)
AFTER = fe.Offload(optimizer_state="host")
FULL = ("optim_grads_params", "no_shard")
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Of a copy, so that steps are pending for long.
SLOW = 8e-3


def make_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return fe.shard_optimizer(torch.optim.AdamW(params, lr=1e-2))


def job(pair: tuple[str, str] = FULL, offload: fe.Offload = BESIDE, **options: Any) -> Job:
    given = {"num_micro": 1, "sizes": (1,), "make_optimizer": make_adamw, **options}
    return Job(pair=pair, options=(("offload", offload),), **given)


def sharded(offload: fe.Offload, level: str = FULL[0]) -> tuple[fe.Engine, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Transformer(3).to(on.NAME)
    engine = fe.shard(model, strategy=level, min_unit_size=0, offload=offload)
    return engine, make_adamw(model.parameters())


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(inner: str, outer: str) -> None:
    given = job((inner, outer), sizes=(1, 2))
    for seed in range(2):
        with counting_chunks() as counts:
            assert not compare(given, seed=seed)
        assert max(counts) == 2


@on_ranks(2)
def test_microbatches_train_as_with_steps_before_forward() -> None:
    """The CPU adds in another order: compared with the device."""
    expected = train(job(offload=AFTER, sizes=(2,), num_micro=3), on.NAME)
    with random_delays(1):
        assert not differences(train(job(sizes=(2,), num_micro=3), on.NAME), expected)


@pytest.mark.parametrize("name", MAKERS)
@on_ranks(1)
def test_every_optimizer_steps_as_with_state_on_the_device(name: str) -> None:
    def maker(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = MAKERS[name](params)
        return fe.shard_optimizer(found, elementwise=name == "Lion")

    given = job(make_optimizer=maker)
    here = train(dataclasses.replace(given, options=()), on.NAME)
    with on.delays(copy=2e-3), memory_is_overwritten():
        assert not differences(train(given, on.NAME), here)


@pytest.mark.parametrize("pair", [FULL, ("optim", "no_shard"), ("no_shard", "no_shard")])
@on_ranks(2)
def test_weights_in_another_dtype_train_as_on_the_cpu(pair: tuple[str, str]) -> None:
    given = job(pair, sizes=(2,))
    options = (*given.options, ("mp_policy", BF16))
    for seed in range(2):
        assert not compare(dataclasses.replace(given, options=options), seed=seed)


@pytest.mark.parametrize("level", ["optim", "optim_grads", "optim_grads_params"])
@on_ranks(1)
def test_forward_begins_before_the_last_chunk_is_stepped(level: str) -> None:
    engine, optimizer = sharded(BESIDE, level)
    step = step_by_step(engine, optimizer)
    step(0)
    step(1)
    lane: Any = engine._offloadings[0]._step_lane
    batch = on_device(token_batch(4, 7), engine.mesh.device)
    model: Any = engine.model
    with on.delays(copy=SLOW), on.count_host_syncs() as syncs:
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
        now.synchronize()
        assert not lane._target().query()  # compute has not waited for it
    assert held > engine.memory_bytes().get("grad", 0) == 0


def clone_slices(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    return [param.to_local().clone() for param in engine.model.parameters()]


def clone_locals(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    return [param.local.clone() for param in engine.model.parameters()]


def gather(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    return [param.full_tensor().clone() for param in engine.model.parameters()]


def average(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    """Of tensors that the user has made before."""
    averages = [torch.zeros_like(each) for each in kept]
    torch._foreach_lerp_(averages, kept, 0.5)
    return [each.local for each in averages]


def full_state(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    return [value for value in engine.full_state_dict().values() if isinstance(value, Tensor)]


def whole(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    with engine.unsharded():
        return [param.detach().clone() for param in engine.model.parameters()]


def all_state(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    return list(state_of(engine, optimizer).values())


def change_gradients(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    """Those that the step reads."""
    for param in engine.model.parameters():
        param.grad.mul_(0.0)
    return []


def zero_gradients(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    optimizer.zero_grad(set_to_none=False)
    return []


def clear_and_allocate(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    """Memory that the step reads is not given to others."""
    optimizer.zero_grad()
    made = [torch.full((size,), float("nan"), device=on.DEVICE) for size in (64, 1024, 4096) * 20]
    return [each.isnan().all().float() for each in made]


def clip_again(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    return [engine.clip_grad_norm_(1e-3)]


def change_weights(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    with torch.no_grad():
        for param in engine.model.parameters():
            param.mul_(0.5)
    return []


def step_again(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    optimizer.step()
    return []


def step_another(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    other = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    fe.shard_optimizer(other).step()
    return []


def accumulate(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    model: Any = engine.model
    model(*on_device(token_batch(4, 5), engine.mesh.device)).backward()
    return []


def on_another_stream(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    """The stream that has stepped waits, too, when another one reads first."""
    with torch.deferred.stream(torch.deferred.Stream()):
        assert all(param.local.ndim for param in engine.model.parameters())
    return []


def convert(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    return [each.float() for each in kept] + [param.half().local for param in kept]


def assign_gradients(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    """The user's own gradients are kept until they are read."""
    optimizer.zero_grad()
    model: Any = engine.model
    model(*on_device(token_batch(4, 6), engine.mesh.device)).backward()
    for param in model.parameters():
        param.grad = param.grad * 2
    optimizer.step()
    return clear_and_allocate(engine, optimizer, kept)


def reset(engine: fe.Engine, optimizer: Any, kept: Any) -> list[Tensor]:
    optimizer.zero_grad()
    engine.reset()
    return []


@contextmanager
def held_step(engine: Any) -> Iterator[None]:
    """Steps run when all else that the device was given within the block has run."""
    (offloading,) = engine._offloadings
    with on.held(offloading._step_lane._target()):
        yield
        torch.deferred.current_stream().synchronize()


ACCESSES: list[Callable[[fe.Engine, Any, Any], list[Tensor]]] = [
    *(clone_slices, clone_locals, gather, average, full_state, whole, all_state),
    *(change_gradients, zero_gradients, clear_and_allocate, clip_again, change_weights),
    *(step_again, step_another, accumulate, on_another_stream, convert, assign_gradients, reset),
]


def after_a_step(
    access: Any, level: str, offload: fe.Offload, *, holds: bool = False
) -> list[Tensor]:
    """What ``access`` finds right after a step, and the weights after another one.

    Args:
        access: what a user does.
        level: of the engine.
        offload: of the optimizer's state.
        holds: the step runs when ``access`` has run on the device, which must not wait for it.
    """
    engine, optimizer = sharded(offload, level)
    model: Any = engine.model
    batches = [on_device(token_batch(4, seed), engine.mesh.device) for seed in range(3)]
    kept = [param.data for param in model.parameters()]
    with sdpa_kernel(SDPBackend.MATH), on.delays(copy=SLOW), memory_is_overwritten():
        for number, batch in enumerate(batches[:2]):
            optimizer.zero_grad()
            model(*batch).backward()
            with held_step(engine) if holds and number else nullcontext():
                optimizer.step()
                if number:
                    found = access(engine, optimizer, kept)
        optimizer.zero_grad()
        model(*batches[2]).backward()
        optimizer.step()
        found += list(engine.full_state_dict().values())
        torch.deferred.synchronize()
    return [each.detach().cpu() for each in found]


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("access", ACCESSES)
@on_ranks(1)
def test_what_users_do_after_a_step_comes_after_it(access: Any, level: str) -> None:
    expected = after_a_step(access, level, AFTER)
    found = after_a_step(access, level, BESIDE)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def leave_out_gathers_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingStep, "tickets", ())


def leave_out_wait_for_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offloading, "beside_compute", unordered)


def leave_out_memory(patch: pytest.MonkeyPatch) -> None:
    """Gradients are freed at once."""
    patch.setattr(PendingStep, "free", lambda self, label, storage: storage.drain())


@contextmanager
def unordered(self: Any) -> Iterator[None]:
    """:meth:`Offloading.beside_compute` without the wait for compute."""
    compute, self.compute = self.compute, self._step_lane
    with self._step_lane.entered():
        yield
    self.compute = compute


@pytest.mark.parametrize(
    "left_out", [leave_out_gathers_wait, leave_out_wait_for_gradients, leave_out_memory]
)
@on_ranks(1)
def test_without_a_wait_training_is_wrong(left_out: Any) -> None:
    """The control of the others: they would notice."""
    given = job(clips=False)
    expected = train(given, "cpu")
    delays = on.delays(copy=SLOW, compute=2e-3)
    with pytest.MonkeyPatch.context() as patch, delays, memory_is_overwritten():
        assert not differences(train(given, on.NAME), expected)
        left_out(patch)
        assert differences(train(given, on.NAME), expected)


WAITING = [clone_slices, clone_locals, gather, average, full_state, change_gradients]
WAITING += [zero_gradients, clip_again, change_weights, on_another_stream]


@pytest.mark.parametrize("access", WAITING)
@on_ranks(1)
def test_accesses_without_a_wait_are_wrong(access: Any) -> None:
    """The control of the accesses."""
    expected = after_a_step(access, FULL[0], AFTER)
    with pytest.MonkeyPatch.context() as patch:
        for module in (functions, tensor):
            patch.setattr(module, "PENDING", ())
        if access in (full_state, clip_again):
            patch.setattr(PendingStep, "finish", lambda self: None)
        if access is on_another_stream:
            patch.undo()
            patch.setattr(PendingStep, "begin", begin_without_caller)
        found = after_a_step(access, FULL[0], BESIDE, holds=True)
        patch.undo()
        finish_pending_steps()
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


_begin = PendingStep.begin


def begin_without_caller(self: PendingStep, ticket: Any) -> None:
    _begin(self, ticket)
    self._caller = self._compute


@on_ranks(1)
def test_tensors_that_the_user_may_change_are_read_at_once() -> None:
    """A learning rate in a tensor."""
    results = []
    for offload in (AFTER, BESIDE):
        torch.manual_seed(1)
        model: Any = Transformer(2).to(on.NAME)
        fe.shard(model, min_unit_size=0, offload=offload)
        lr = torch.full((), 1e-2, device=on.DEVICE)
        sgd = torch.optim.SGD(model.parameters(), lr=lr, foreach=False)
        optimizer = fe.shard_optimizer(sgd)
        batch = on_device(token_batch(4, 0), on.DEVICE)
        with on.delays(copy=SLOW), sdpa_kernel(SDPBackend.MATH):
            for _ in range(3):
                model(*batch).backward()
                optimizer.step()
                assert not PENDING
                lr.mul_(0.5)
                optimizer.zero_grad()
            results.append(model(*batch).detach().cpu())
    assert torch.equal(*results)


@on_ranks(1)
def test_a_deleted_engine_waits_for_steps_into_its_memory() -> None:
    engine, optimizer = sharded(BESIDE)
    step = step_by_step(engine, optimizer)
    step(0)
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
    engine, optimizer = sharded(BESIDE)
    step = step_by_step(engine, optimizer)
    step(0)
    taken = offloaded_step._Chunk.take
    count = [0]

    def fail(chunk: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            raise RuntimeError("no")
        taken(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded_step._Chunk, "take", fail)
        with pytest.raises(RuntimeError, match="no"):
            step(1)
    assert "optimizer" not in engine.memory_bytes()
    optimizer.zero_grad()
    step(2)
    assert all(each.isfinite().all() for each in engine.full_state_dict().values())


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        ({}, "offload.optimizer_state: expected 'host' with overlap_forward"),
        (
            dict.fromkeys(("optimizer_state", "main_weights", "gradients"), "host"),
            "offload.main_weights: expected 'device' with overlap_forward",
        ),
    ],
)
def test_places_that_the_host_sees_are_refused(places: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        fe.Offload(overlap_forward=True, **places)  # type: ignore[arg-type]


@on_ranks(2)
def test_ranks_are_in_step() -> None:
    """Of one step several forwards: an evaluation between two steps."""
    results = []
    for offload in (AFTER, BESIDE):
        engine, optimizer = sharded(offload)
        model: Any = engine.model
        losses = []
        batch = on_device(token_batch(4, dist.get_rank()), engine.mesh.device)
        with on.delays(copy=5e-3, collective=1e-3), sdpa_kernel(SDPBackend.MATH):
            for _ in range(3):
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    losses.append(model(*batch))
        results.append([each.cpu() for each in losses])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
