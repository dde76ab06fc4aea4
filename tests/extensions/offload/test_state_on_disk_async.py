"""State of the device on a disk: order, memory, checkpoints, errors."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_engine.extensions.offload import disk_staging
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.extensions.offload.device_jobs import slow_disk, trained
from tests.extensions.offload.offloaded import failing, offloadings_of, state_files
from tests.pool import on_ranks

ranks = device.ranks

EVERYTHING = "all on a disk"


@on_ranks(2)
def test_memory_on_the_host_is_staging_alone_and_is_shown() -> None:
    engine, optimizer, step = trained(EVERYTHING, 2)
    assert not engine.memory_bytes()
    assert engine.memory_bytes("host") == {"staging": disk_staging.NUM_BYTES}
    there = engine.memory_bytes("disk")
    elements = sum(param.local.numel() for param in engine.model.parameters())
    for role, num_bytes in (("optimizer", 8), ("main", 4), ("grad", 4)):
        rounding = 1024 * len(engine.buffers)
        assert 0 <= there[role] - num_bytes * elements < rounding, role
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
    _, _, step = trained("state on a disk", 2)
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
        step(2)
    assert not both.broken


@on_ranks(1)
def test_a_deleted_optimizer_and_engine_free_their_files() -> None:
    gc.collect()
    before = state_files()
    engine, optimizer, step = trained(EVERYTHING, 1)
    with_both = state_files()
    with on.delays(copy=1e-2), slow_disk(1e-2):
        step(1)
        del optimizer, step
    gc.collect()
    torch.accelerator.synchronize()
    assert before < state_files() < with_both
    for param in engine.model.parameters():
        param.grad = None
    del param, engine
    gc.collect()
    assert state_files() == before


EIO = OSError(errno.EIO, "Input/output error")
FAILURES = [
    ("preadv", EIO, r"state on disk: .*Input/output error"),
    ("preadv", 0, r"state on disk: .*expected \d+ bytes of state; found 0"),
    ("pwritev", EIO, r"state on disk: .*Input/output error"),
    ("pwritev", 512, r"state on disk: .*expected to write \d+ bytes.*found 512"),
]


@on_ranks(1)
def test_an_error_of_the_disk_is_raised_wherever_it_comes_and_the_next_step_steps() -> None:
    engine, _, step = trained(EVERYTHING, 2)
    for name, result, problem in FAILURES:
        with failing(name, -1, 0) as calls:
            step(0)
        num_calls = calls[0]
        assert num_calls >= 4
        for number in range(num_calls):
            with failing(name, number, result), pytest.raises(ValueError, match=problem):
                step(1)
            engine.reset()
            assert not {"optimizer", "staging"} & engine.memory_bytes().keys()
            assert not any(each.drain() for each in offloadings_of(engine))
    step(2)
    assert all(bool(torch.isfinite(param.local).all()) for param in engine.model.parameters())
