"""The device does what torch expects of an accelerator."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest
import torch
from torch import nn

from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.pool import on_ranks

ranks = device.ranks


@on_ranks(1)
def test_torch_names_it_as_the_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("deferred")
    assert torch.accelerator.device_count() == 1
    module = torch.get_device_module("deferred")
    assert module is torch.deferred
    assert module.current_stream() == module.default_stream()
    side = module.Stream()
    with module.stream(side):
        assert module.current_stream() == side == torch.accelerator.current_stream()
    assert module.current_stream() == module.default_stream()
    with pytest.raises(RuntimeError, match="expected device 0"):
        torch.accelerator.set_device_index(1)


@on_ranks(1)
def test_operations_return_before_they_are_done() -> None:
    x = torch.ones(3, device=on.DEVICE)
    torch.accelerator.synchronize()
    stream = torch.deferred.current_stream()
    assert stream.query()
    with on.held():
        y = x + 1
        event = torch.deferred.Event()
        event.record()
        assert not event.query()
        assert not stream.query()
    event.synchronize()
    assert event.query()
    assert y.tolist() == [2, 2, 2]


@on_ranks(1)
def test_events_measure_the_time_between_them() -> None:
    first, second = (torch.deferred.Event(enable_timing=True) for _ in range(2))
    x = torch.ones(3, device=on.DEVICE)
    with on.delays(compute=0.02):
        first.record()
        x.mul_(2)
        x.mul_(2)
        second.record()
    second.synchronize()  # torch 2.11 does not wait
    assert first.elapsed_time(second) >= 40


@on_ranks(1)
def test_the_host_is_not_let_at_device_memory() -> None:
    x = torch.full((4,), 7.0, device=on.DEVICE)
    torch.accelerator.synchronize()
    with pytest.raises(TypeError):
        x.numpy()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 2)
        ctypes.c_float.from_address(x.data_ptr()).value  # noqa: B018
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as messages:
        said = messages.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert "the host read or wrote device memory without a copy" in said


@on_ranks(1)
def test_new_memory_is_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.empty(9, dtype=dtype, device=on.DEVICE).isnan().all()


@on_ranks(1)
def test_mistakes_in_shapes_are_found_at_the_call_and_those_in_values_later() -> None:
    x = torch.ones(3, device=on.DEVICE)
    with pytest.raises(RuntimeError, match="must match"):
        x + torch.ones(4, device=on.DEVICE)
    with pytest.raises(RuntimeError, match="must match"):
        x.add_(torch.ones(4, device=on.DEVICE))
    table = torch.ones(3, 2, device=on.DEVICE)
    found = nn.functional.embedding(torch.tensor([5], device=on.DEVICE), table)
    with pytest.raises(RuntimeError, match="failed on the device"):
        torch.accelerator.synchronize()
    assert found.shape == (1, 2)
    assert x.sum().item() == 3  # said once


@on_ranks(1)
def test_host_syncs_are_counted_where_they_happen() -> None:
    x = torch.ones(3, device=on.DEVICE)
    pinned = torch.ones(3).pin_memory()
    with on.count_host_syncs() as syncs:
        y = (x * 2).sum()
        y += pinned.to(on.DEVICE, non_blocking=True).sum()
        event = torch.deferred.Event()
        event.record()
        torch.deferred.Stream().wait_event(event)
    assert not syncs
    with on.count_host_syncs() as syncs:
        for _ in range(3):
            y.item()
        y.cpu()
        torch.ones(3).to(on.DEVICE, non_blocking=True)
        torch.nonzero(x)
        event.synchronize()
        torch.deferred.synchronize()
        torch.deferred.current_stream().synchronize()
    assert {reason: count for (reason, _), count in syncs.items()} == {
        "item": 3,
        "copy to host": 1,
        "copy from host": 1,
        "aten::nonzero": 1,
        "Event.synchronize": 1,
        "synchronize": 1,
        "Stream.synchronize": 1,
    }
    assert all(site.startswith("test_device.py:") for _, site in syncs)


@on_ranks(1)
def test_random_numbers_follow_the_devices_seed_and_state_and_wait_for_nothing() -> None:
    torch.manual_seed(3)
    with on.count_host_syncs() as syncs:
        first = torch.randn(20, device=on.DEVICE)
        state = torch.deferred.get_rng_state()
        second = nn.functional.dropout(first)
        torch.deferred.set_rng_state(state)
        third = nn.functional.dropout(first)
        generator = torch.Generator(on.DEVICE).manual_seed(8)
        drawn = [torch.rand(5, generator=generator, device=on.DEVICE) for _ in range(2)]
    assert not syncs
    torch.manual_seed(3)
    assert torch.equal(torch.randn(20, device=on.DEVICE), first)
    assert torch.equal(second, third)
    assert not torch.equal(*drawn)
    assert 0.5 < first.std().item() < 1.5


@on_ranks(1)
def test_storages_grow_shrink_and_move_as_on_other_devices() -> None:
    x = torch.arange(6.0, device=on.DEVICE)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.data_ptr() == 0
    storage.resize_(24)
    x.copy_(torch.arange(6.0))
    view = torch.empty(0, device=on.DEVICE).set_(storage, 2, (2, 2), (2, 1))
    assert view.tolist() == [[2, 3], [4, 5]]
    storage.resize_(48)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    before = torch.accelerator.memory_allocated()
    kept = torch.empty(1000, device=on.DEVICE)
    assert torch.accelerator.memory_allocated() - before == 4096
    del kept
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == before
