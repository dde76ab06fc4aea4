"""Planted defects are seen as wrong numbers, and the right programs beside them are right.

Streams are held instead of slowed: no test here depends on a clock.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.pool import on_ranks

ranks = device.ranks


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does_not_wait"])
@on_ranks(1)
def test_a_stream_that_does_not_wait_for_another_reads_what_is_not_there_yet(waits: bool) -> None:
    side = torch.deferred.Stream()
    x = torch.full((5,), 3.0, device=on.DEVICE)
    torch.accelerator.synchronize()
    with on.held():
        y = x * 2
        if waits:
            side.wait_stream(torch.deferred.current_stream())
        with torch.deferred.stream(side):
            z = y + 1
        if not waits:
            side.synchronize()
    side.synchronize()
    with torch.deferred.stream(side):
        assert (z.cpu() == 7).all() if waits else z.cpu().isnan().all()


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
    assert (again.cpu() == 8).all()


@on_ranks(1)
def test_a_block_is_filled_with_nan_before_it_is_used_again() -> None:
    x = torch.full((777,), 3.0, device=on.DEVICE)
    address = x.data_ptr()
    # Not when it is freed: others may read it until its own stream is made to wait for them.
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


@on_ranks(1)
def test_a_freed_block_goes_to_its_own_stream_only() -> None:
    side = torch.deferred.Stream()
    x = torch.full((1234,), 3.0, device=on.DEVICE)
    address = x.data_ptr()
    del x
    with torch.deferred.stream(side):
        assert torch.empty(1234, device=on.DEVICE).data_ptr() != address
    assert torch.empty(1234, device=on.DEVICE).data_ptr() == address


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does_not_wait"])
@on_ranks(1)
def test_pinned_memory_that_is_overwritten_too_early_copies_the_wrong_numbers(waits: bool) -> None:
    source = torch.full((300,), 3.0).pin_memory()
    assert source.is_pinned()
    with on.held():
        copied = source.to(on.DEVICE, non_blocking=True)
        event = torch.deferred.Event()
        event.record()
        if not waits:
            source.fill_(5.0)
    if waits:
        event.synchronize()
        source.fill_(5.0)
    assert (copied.cpu() == (3 if waits else 5)).all()


@on_ranks(1)
def test_pinned_memory_that_is_freed_is_not_handed_out_before_the_copy() -> None:
    source = torch.full((300,), 3.0).pin_memory()
    with on.held():
        copied = source.to(on.DEVICE, non_blocking=True)
        del source
        other = torch.full((300,), 6.0).pin_memory()
    assert (copied.cpu() == 3).all()
    assert (other == 6).all()


@on_ranks(1)
def test_the_host_reads_a_copy_that_it_did_not_wait_for_too_early() -> None:
    target = torch.zeros(10).pin_memory()
    x = torch.full((10,), 3.0, device=on.DEVICE)
    with on.held():
        target.copy_(x, non_blocking=True)
        assert (target == 0).all()
    torch.accelerator.synchronize()
    assert (target == 3).all()


@on_ranks(1)
def test_host_operands_count_as_they_were_at_the_call() -> None:
    x = torch.ones(3, device=on.DEVICE)
    number = torch.tensor(2.0)
    with on.held():
        y = x * number
        number.fill_(50.0)
    assert y.tolist() == [2, 2, 2]


@on_ranks(1)
def test_a_full_queue_stops_the_host() -> None:
    x = torch.ones(3, device=on.DEVICE)

    def run_ahead() -> None:
        for _ in range(2000):
            x.add_(1)

    host = threading.Thread(target=run_ahead)
    with on.held():
        host.start()
        host.join(0.5)
        assert host.is_alive()
    host.join()
    assert x.tolist() == [2001] * 3


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does_not_wait"])
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
def test_collectives_of_a_group_run_in_the_order_of_issue_on_any_streams() -> None:
    side = torch.deferred.Stream()
    x = torch.full((6,), dist.get_rank() + 1.0, device=on.DEVICE)
    y = torch.full((6,), 10.0, device=on.DEVICE)
    torch.accelerator.synchronize()
    with on.held():
        dist.all_reduce(x)  # on the current stream, which is held
        with torch.deferred.stream(side):
            dist.all_reduce(y)
        assert not side.query()
    torch.accelerator.synchronize()
    assert x.tolist() == [3] * 6
    assert y.tolist() == [20] * 6


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


@on_ranks(1)
def test_a_wait_that_is_left_out_by_its_number_is_found() -> None:
    side = torch.deferred.Stream()

    def program() -> torch.Tensor:
        x = torch.zeros(4, device=on.DEVICE)
        side.wait_stream(torch.deferred.current_stream())
        with torch.deferred.stream(side):
            y = x + 1
        torch.deferred.current_stream().wait_stream(side)
        return (y * 2).cpu()

    with on.without_wait(-1):
        assert program().tolist() == [2] * 4
        assert on.num_stream_waits() == 2
    for index, slow in enumerate([torch.deferred.current_stream(), side]):
        with on.delays(streams={slow.stream_id: 0.3}), on.without_wait(index):
            assert program().isnan().all()
