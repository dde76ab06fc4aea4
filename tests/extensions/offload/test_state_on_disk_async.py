"""Optimizer state, main weights and gradients of the device on a disk: numbers, order, memory,
errors."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_engine as fe
from fsdp_engine.comm.lanes import DeviceLane, ThreadLane, ThreadTicket
from fsdp_engine.memory import disk_memory, disk_staging, home
from fsdp_engine.memory.home import StagedHome
from fsdp_engine.offload import ROLES
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import (
    Job,
    assert_same,
    compare,
    differences,
    on_device,
    random_delays,
    state_of,
    train,
    train_with,
)
from tests.models import Transformer, token_batch
from tests.optim.optimizers import MAKERS, counting_chunks
from tests.pairs import EVERY_PAIR, PAIRS
from tests.pool import Ranks, on_ranks

ranks = device.ranks

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
FULL = ("optim_grads_params", "no_shard")
# Pairs whose main weights are no part of compute weights.
BF16_PAIRS = [pair for pair in PAIRS if pair[0].startswith("optim_grads")]
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FOLDER = tempfile.gettempdir()
STATE = fe.Offload(optimizer_state="disk", folder=FOLDER)
EVERYTHING = fe.Offload(folder=FOLDER, **dict.fromkeys(ROLES, "disk"))
ON_HOST = fe.Offload(**dict.fromkeys(ROLES, "host"))  # type: ignore[arg-type]
KINDS = {
    "everything": EVERYTHING,
    "weights and gradients": fe.Offload(main_weights="disk", gradients="disk", folder=FOLDER),
    "gradients on the host": fe.Offload("disk", FOLDER, main_weights="disk", gradients="host"),
    "state on the host": fe.Offload("host", FOLDER, main_weights="disk", gradients="disk"),
}
SMALL_PIECE = 4096


def make_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return fe.shard_optimizer(torch.optim.AdamW(params, lr=1e-2))


def job(pair: tuple[str, str] = FULL, offload: fe.Offload | None = STATE, **options: Any) -> Job:
    given = {"make_optimizer": make_adamw, "num_micro": 1, "sizes": (1,), **options}
    shard: dict[str, Any] = {} if offload is None else {"offload": offload}
    if pair[0] == "optim_grads" or pair[1] != "no_shard":
        shard["mp_policy"] = BF16
    return Job(pair=pair, options=tuple(shard.items()), **given)


@contextmanager
def small_pieces() -> Iterator[None]:
    """Within it homes are copied in many pieces."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (disk_memory, disk_staging, home):
            patch.setattr(module, "PIECE", SMALL_PIECE)
        yield


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Within it each read and write takes longer."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("preadv", "pwritev"):
            call = getattr(os, name)

            def late(*args: Any, call: Callable[..., int] = call) -> int:
                time.sleep(seconds)
                return call(*args)

            patch.setattr(os, name, late)
        yield


# Numbers.


@pytest.mark.parametrize(("inner", "outer"), EVERY_PAIR)
@on_ranks(2)
def test_two_ranks_train_as_on_the_cpu_bit_for_bit(inner: str, outer: str) -> None:
    for seed in range(2):
        with counting_chunks() as counts, small_pieces():
            assert not compare(job((inner, outer), sizes=(1, 2)), seed=seed)
        assert max(counts) == 2


@pytest.mark.parametrize(
    ("inner", "outer", "kind"),
    [
        *((*pair, "everything") for pair in BF16_PAIRS),
        *((*BF16_PAIRS[0], kind) for kind in KINDS if kind != "everything"),
    ],
)
@on_ranks(2)
def test_so_they_do_with_weights_and_gradients_there(inner: str, outer: str, kind: str) -> None:
    with counting_chunks() as counts, small_pieces():
        assert not compare(job((inner, outer), KINDS[kind], sizes=(1, 2)))
    assert max(counts) == 2


@sdpa_kernel(SDPBackend.MATH)
def train_all(
    pair: tuple[str, str], name: str, offload: fe.Offload | None, clips: bool
) -> dict[str, Tensor]:
    """Losses, weights and state after steps of two microbatches, one of which is skipped."""
    torch.manual_seed(1)
    given = job(pair, offload)
    engine = given.shard(given.make_model(), on.NAME)
    model: Any = engine.model
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]
    optimizer: Any = fe.shard_optimizer(MAKERS[name](groups), elementwise=name == "Lion")
    batches = [on_device(token_batch(2, seed), engine.mesh.device) for seed in range(8)]
    losses = []
    for number in range(4):
        for index in range(2):
            with nullcontext() if index else engine.no_sync():
                loss = model(*batches[2 * number + index]) / 2
                loss.backward()
            losses.append(loss.detach())
        if clips:
            losses.append(engine.clip_grad_norm_(0.5))
        if number != 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    found = {str(number): loss.cpu() for number, loss in enumerate(losses)}
    return found | {
        key: value if isinstance(value, Tensor) else torch.tensor(value)
        for key, value in state_of(engine, optimizer).items()
    }


@pytest.mark.parametrize("name", MAKERS)
@on_ranks(1)
def test_every_optimizer_steps_at_every_level_as_with_state_on_the_device(name: str) -> None:
    for number, level in enumerate(LEVELS):
        pair, clips = (level, "no_shard"), bool(number % 2)
        expected = train_all(pair, name, None, clips)
        for offload in (STATE, EVERYTHING)[: 1 + (number >= 2)]:
            with counting_chunks() as counts:
                found = train_all(pair, name, offload, clips)
            # At the level that has clipped gradients norms are sums in another order at home.
            if offload is EVERYTHING and clips:
                for key, value in expected.items():
                    torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
            else:
                assert_same(found, expected)
            assert max(counts) <= 2


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_microbatches_add_to_gradients_there(kind: str) -> None:
    given = job(offload=KINDS[kind], sizes=(2,), num_micro=3, clips=False)
    expected = train(job(offload=None, sizes=(2,), num_micro=3, clips=False), on.NAME)
    with random_delays(1), small_pieces():
        assert not differences(train(given, on.NAME), expected)


@on_ranks(1)
def test_a_slow_disk_and_a_slow_device_change_nothing() -> None:
    expected = train(job(offload=None, clips=False), on.NAME)
    for disk, delays in (
        (5e-3, {}),
        (0.0, {"copy": 1e-2}),
        (2e-3, {"copy": 5e-3, "compute": 1e-3}),
    ):
        with slow_disk(disk), on.delays(**delays):
            found = train(job(offload=EVERYTHING, clips=False), on.NAME)
        assert not differences(found, expected)


# Controls of these: what would be wrong is noticed.


def pieces_unmarked(patch: pytest.MonkeyPatch) -> None:
    """A piece is read, or written again, before the device has copied it."""
    patch.setattr(disk_staging.Staging, "copied", lambda self, piece: None)


def stream_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """The host waits for the thread, and no stream for the other."""
    wait = DeviceLane.wait

    def without(lane: DeviceLane, *tickets: Any) -> None:
        kept = []
        for each in tickets:
            if isinstance(each, ThreadTicket):
                each.finish()
            else:
                kept.append(each)
        wait(lane, *kept)

    patch.setattr(DeviceLane, "wait", without)


def copies_do_not_wait_for_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ThreadLane, "wait", lambda self, *tickets: None)


def nothing_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedHome, "take", lambda self, work: iter(()))


def nothing_is_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedHome, "bring", lambda self, *args: iter(()))


@pytest.mark.parametrize(
    "leave_out",
    [
        pieces_unmarked,
        stream_is_not_awaited,
        copies_do_not_wait_for_compute,
        nothing_is_written,
        nothing_is_read,
    ],
)
@on_ranks(1)
def test_without_a_wait_or_a_copy_training_is_wrong(leave_out: Any) -> None:
    given = job(offload=EVERYTHING, clips=False)
    expected = train(job(offload=None, clips=False), on.NAME)
    with pytest.MonkeyPatch.context() as patch, on.delays(copy=2e-2), slow_disk(2e-3):
        leave_out(patch)
        assert differences(train(given, on.NAME), expected)


# Memory, and the host.


def trained(
    offload: fe.Offload = EVERYTHING, num_steps: int = 1
) -> tuple[fe.Engine, Any, Callable[[], None]]:
    """An engine, its optimizer, and a function that trains a step."""
    torch.manual_seed(1)
    given = job(offload=offload, sizes=(dist.get_world_size(),))
    engine = given.shard(given.make_model(), on.NAME)
    model: Any = engine.model
    optimizer = make_adamw(model.parameters())
    batch = on_device(token_batch(4, 0), engine.mesh.device)

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    for _ in range(num_steps):
        step()
    return engine, optimizer, step


@on_ranks(2)
def test_memory_on_the_host_is_staging_alone_and_is_shown() -> None:
    engine, optimizer, step = trained(num_steps=2)
    assert not engine.memory_bytes()
    assert engine.memory_bytes("host") == {"staging": disk_staging.NUM_BYTES}
    there = engine.memory_bytes("disk")
    elements = sum(param.local.numel() for param in engine.model.parameters())
    for role, num_bytes in (("optimizer", 8), ("main", 4), ("grad", 4)):
        assert there[role] >= num_bytes * elements
    shown = str(engine.describe())
    assert "disk" in shown
    assert "staging" in shown
    for param in engine.model.parameters():
        assert param.device.type == param.grad.device.type == "cpu"
    del optimizer, step
    gc.collect()
    assert "optimizer" not in engine.memory_bytes("disk")


@on_ranks(1)
def test_a_disk_is_read_and_written_at_once() -> None:
    """The read of the second chunk ends when the write of the first one has begun."""
    _, _, step = trained(STATE, num_steps=2)
    both = threading.Barrier(2, timeout=30)

    def meeting(call: Callable[..., int], number: int) -> Callable[..., int]:
        calls = itertools.count()

        def met(*args: Any) -> int:
            if next(calls) == number:
                both.wait()
            return call(*args)

        return met

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", meeting(os.preadv, 1))
        patch.setattr(os, "pwritev", meeting(os.pwritev, 0))
        step()
    assert not both.broken


@on_ranks(1)
def test_waits_for_the_disk_are_measured() -> None:
    engine, _, step = trained(num_steps=1)
    with slow_disk(5e-3), engine.measure() as measured:
        step()
    by_lane: dict[str, float] = {}
    for each in measured.waited:
        by_lane[each.lane] = by_lane.get(each.lane, 0.0) + each.seconds
    assert by_lane["state in"] >= 5e-3
    assert by_lane["state out"] >= 5e-3


def count_descriptors() -> int:
    """Of files with state."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("fsdp_engine-state" in os.readlink(each) for each in links if os.path.islink(each))


@on_ranks(1)
def test_a_deleted_optimizer_and_engine_free_their_files() -> None:
    gc.collect()
    before = count_descriptors()
    engine, optimizer, step = trained()
    with_both = count_descriptors()
    with on.delays(copy=1e-2), slow_disk(1e-2):
        step()
        del optimizer, step
    gc.collect()
    torch.accelerator.synchronize()
    assert before < count_descriptors() < with_both
    for param in engine.model.parameters():
        param.grad = None
    del param, engine
    gc.collect()
    assert count_descriptors() == before


# Users and checkpoints.


@on_ranks(2)
def test_changes_and_reads_of_parameters_on_a_disk_are_ordered() -> None:
    results = []
    for device_type in ("cpu", on.NAME):
        torch.manual_seed(1)
        given = job(offload=EVERYTHING, sizes=(2,))
        engine = given.shard(given.make_model(), device_type)
        model: Any = engine.model
        optimizer = make_adamw(model.parameters())
        batch = on_device(token_batch(4, 0), engine.mesh.device)
        found = []
        with on.delays(copy=5e-3, compute=1e-3), sdpa_kernel(SDPBackend.MATH):
            for number in range(3):
                model(*batch).backward()
                found += [param.grad.local.clone() for param in model.parameters()]
                optimizer.step()
                found += [param.detach().clone() for param in model.parameters()]
                optimizer.zero_grad()
                with torch.no_grad():
                    loss = model(*batch)
                    for param in model.parameters():
                        param.mul_(1.0 + number / 16)
                found += [loss.cpu(), *(param.full_tensor() for param in model.parameters())]
                model.load_state_dict(engine.full_state_dict())
        results.append([getattr(each, "local", each).cpu() for each in found])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def prepare(offload: fe.Offload | None, seed: int = 1) -> tuple[fe.Engine, Any]:
    torch.manual_seed(seed)
    given = job(offload=offload, sizes=(dist.get_world_size(),))
    model = given.make_model()
    return given.shard(model, on.NAME), make_adamw(model.parameters())


def save_and_load(folder: str) -> None:
    """Saves in the background and trains at once; each offload loads what each has saved."""
    data = job(sizes=(dist.get_world_size(),)).data()
    offloads = {"disk": EVERYTHING, "device": None, "host": ON_HOST}
    expected: dict[str, dict[str, Tensor]] = {}
    for name, offload in offloads.items():
        engine, optimizer = prepare(offload)
        with on.delays(copy=1e-3):
            train_with(engine, optimizer, data, clips=False)
            at_the_call = state_of(engine, optimizer)
            checkpointer = fe.Checkpointer(f"{folder}/{name}", engine, optimizer)
            checkpointer.save_async(0)
            train_with(engine, optimizer, data, clips=False)
            checkpointer.close()
        at_the_end = state_of(engine, optimizer)
        for found in (at_the_call, at_the_end):
            assert_same(found, expected.setdefault(str(found is at_the_end), found))
    pairs = [("disk", each) for each in offloads.values()]
    for saved, offload in [*pairs, *((each, EVERYTHING) for each in offloads)]:
        for has_stepped in (False, True):
            engine, optimizer = prepare(offload, seed=2)
            if has_stepped:
                train_with(engine, optimizer, data, clips=False)
            fe.Checkpointer(f"{folder}/{saved}", engine, optimizer).load()
            assert_same(state_of(engine, optimizer), expected["False"])
            train_with(engine, optimizer, data, clips=False)
            assert_same(state_of(engine, optimizer), expected["True"])
    packed = copy.deepcopy(optimizer.state_dict())
    other_engine, other = prepare(EVERYTHING, seed=3)
    other_engine.model.load_state_dict(engine.model.state_dict())
    with counting_chunks() as counts:
        other.load_state_dict(packed)
    assert counts == [0]
    assert_same(state_of(other_engine, other), expected["True"])


def test_checkpoints_are_those_of_other_offloads(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_and_load, str(tmp_path), world_size=2)


# Errors.


@contextmanager
def failing(name: str, number: int, result: int | OSError) -> Iterator[list[int]]:
    """Within it the call of that number fails or is short."""
    call, calls = getattr(os, name), [0]

    def broken(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == number + 1:
            if isinstance(result, OSError):
                raise result
            return result
        found: int = call(*args)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, broken)
        yield calls


EIO, ENOSPC = OSError(errno.EIO, "Input/output error"), OSError(errno.ENOSPC, "No space left")
FAILURES = {
    "read": ("preadv", EIO, r"state on disk: .*Input/output error"),
    "short read": ("preadv", 0, r"state on disk: .*expected \d+ bytes of state; found 0"),
    "write": ("pwritev", EIO, r"state on disk: .*Input/output error"),
    "full": ("pwritev", ENOSPC, r"state on disk: .*No space left"),
    "short write": ("pwritev", 512, r"state on disk: .*expected to write \d+ bytes.*found 512"),
}


@pytest.mark.parametrize("what", FAILURES)
@on_ranks(1)
def test_an_error_of_the_disk_is_raised_wherever_it_comes_and_the_next_step_steps(
    what: str,
) -> None:
    name, result, problem = FAILURES[what]
    engine, _, step = trained(num_steps=2)
    with failing(name, -1, 0) as calls:
        step()
    num_calls = calls[0]
    assert num_calls >= 4
    for number in range(num_calls):
        with failing(name, number, result), pytest.raises(ValueError, match=problem):
            step()
        engine.reset()
        assert not {"optimizer", "staging"} & engine.memory_bytes().keys()
        assert not any(each.drain() for each in engine._offloadings)
    step()
    assert all(bool(torch.isfinite(param.local).all()) for param in engine.model.parameters())


@on_ranks(1)
def test_an_error_of_a_copy_that_is_not_awaited_is_raised_by_the_next_wait() -> None:
    engine, _, _step = trained()
    offloading = engine._offloadings[0]
    weights = engine.buffers[0].weights
    memory = torch.zeros(len(weights.home.bytes), dtype=torch.uint8, device=on.DEVICE)
    with failing("pwritev", 0, EIO):
        offloading.state_out.submit("return it", lambda: weights.home.take(memory))
        offloading.state_out.submit("return it again", lambda: weights.home.take(memory))
        with pytest.raises(ValueError, match="state on disk"):
            offloading.wait()
    offloading.wait()


@on_ranks(1)
def test_a_copy_after_a_failed_one_fails_too() -> None:
    engine, _, _step = trained()
    offloading = engine._offloadings[0]
    kept = engine.buffers[0].weights.home
    memory = torch.zeros(len(kept.bytes), dtype=torch.uint8, device=on.DEVICE)
    with failing("pwritev", 0, EIO):
        out = offloading.state_out.submit("return", lambda: kept.take(memory))
        into = offloading.state_in.submit("bring", lambda: kept.bring(memory), after=[out])
        with pytest.raises(ValueError, match="Input/output error"):
            offloading.compute.wait(into)
    assert len(offloading.drain()) == 1


@on_ranks(1)
def test_a_full_disk_is_an_error_before_training() -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"expected \d+ bytes for state; found \d+"):
            fe.shard(Transformer(2).to(on.NAME), offload=EVERYTHING)


@on_ranks(1)
def test_places_that_cannot_be_are_refused() -> None:
    model = Transformer(2).to(on.NAME)
    for offload, level, problem in (
        ({"main_weights": "disk"}, FULL[0], "offload.gradients: expected 'disk', where main_w"),
        ({"gradients": "disk"}, FULL[0], "offload.gradients: expected 'device', where main_w"),
        (
            dict.fromkeys(ROLES, "disk"),
            "optim_grads",
            "offload.main_weights: expected main weights of .* found .optim_grads, no_shard.",
        ),
    ):
        with pytest.raises(ValueError, match=problem):
            fe.shard(model, strategy=level, offload=fe.Offload(folder=FOLDER, **offload))
    with pytest.raises(ValueError, match="optimizer_state: expected 'host', since optimizers"):
        fe.Offload(folder=FOLDER, step_on="host", **dict.fromkeys(ROLES, "disk"))
    fe.shard(model)
