"""Planted defects give wrong numbers; the same programs without them give right ones.

Streams are held instead of slowed: no test here depends on a clock.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.pool import on_ranks

ranks = device.ranks
either = pytest.mark.parametrize("waits", [True, False], ids=["waits", "does_not_wait"])


@pytest.mark.parametrize("records", [True, False], ids=["recorded", "not_recorded"])
@on_ranks(1)
def test_memory_that_another_stream_reads_is_reused_at_once_unless_it_is_recorded(
    records: bool,
) -> None:
    side = torch.deferred.Stream()
    x = torch.full((1000,), 3.0, device=on.DEVICE)
    address = x.data_ptr()
    torch.accelerator.synchronize()
    with on.held(side):
        with torch.deferred.stream(side):
            y = x + 1
        if records:
            x.record_stream(side)
        del x
        again = torch.full((1000,), 8.0, device=on.DEVICE)
        assert (again.data_ptr() == address) == (not records)
        torch.deferred.current_stream().synchronize()
    with torch.deferred.stream(side):
        assert (y.cpu() == (4 if records else 9)).all()
        # A freed block goes to its own stream only.
        del again
        assert torch.empty(1000, device=on.DEVICE).data_ptr() != address


@on_ranks(1)
def test_a_block_is_filled_with_nan_before_it_is_used_again() -> None:
    x = torch.full((777,), 3.0, device=on.DEVICE)
    address = x.data_ptr()
    # A freed block is not filled at once: until its own stream waits, other streams may read it.
    side = torch.deferred.Stream()
    torch.accelerator.synchronize()
    with on.held(side):
        with torch.deferred.stream(side):
            y = x * 1
        del x
        torch.deferred.current_stream().wait_stream(side)
        z = torch.empty(777, device=on.DEVICE)
        assert z.data_ptr() == address
    assert z.isnan().all()
    with torch.deferred.stream(side):
        assert (y.cpu() == 3).all()


@either
@on_ranks(1)
def test_pinned_memory_that_is_overwritten_too_early_copies_the_wrong_numbers(waits: bool) -> None:
    source, target = torch.full((300,), 3.0).pin_memory(), torch.zeros(300).pin_memory()
    number = torch.tensor(2.0)
    with on.held():
        copied = source.to(on.DEVICE, non_blocking=True)
        event = torch.deferred.Event()
        event.record()
        scaled = copied * number
        number.fill_(50.0)  # CPU operands are read at the call
        target.copy_(copied, non_blocking=True)
        assert (target == 0).all()
        if not waits:
            source.fill_(5.0)
    if waits:
        event.synchronize()
        source.fill_(5.0)
    assert (copied.cpu() == (3 if waits else 5)).all()
    assert (target == copied.cpu()).all()
    assert (scaled.cpu() == 2 * target).all()


@either
@on_ranks(2)
def test_a_collective_that_is_not_waited_for_is_read_too_early(waits: bool) -> None:
    rank = dist.get_rank()
    x = torch.full((6,), rank + 1.0, device=on.DEVICE)
    read = None
    gate = on.held() if rank == 1 else on.held(torch.deferred.Stream())
    with gate:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        if waits:
            work.wait()
        if rank == 0:
            read = x + 0
            if not waits:
                torch.deferred.current_stream().synchronize()
        # Over gloo: rank 1 opens its gate once rank 0 has read.
        dist.all_reduce(torch.zeros(1))
    work.wait()
    if read is not None:
        assert (read.cpu() == (3 if waits else 1)).all()
    assert (x.cpu() == 3).all()


@on_ranks(2)
def test_ranks_that_issue_different_collectives_fail_and_say_which() -> None:
    x = torch.ones(4, device=on.DEVICE)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)
    with pytest.raises(RuntimeError, match="rank 0 issued all_reduce, Float, 4 elements") as error:
        torch.accelerator.synchronize()
    assert "rank 1 issued broadcast, Float, 4 elements" in str(error.value)
