"""The device reveals mistakes: reads of memory that the host cannot reach, NaN in new memory,
errors of kernels. It counts host syncs and has the interface that torch expects."""

from __future__ import annotations

import copy
import ctypes
import os
import signal

import pytest
import torch
from torch import nn

from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.models import Chain, Mlp, vector_batch
from tests.pool import on_ranks

ranks = device.ranks


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
def test_new_memory_is_nan_and_a_kernel_that_fails_raises_at_the_next_wait() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.empty(9, dtype=dtype, device=on.DEVICE).isnan().all()
    x, table = torch.ones(3, device=on.DEVICE), torch.ones(3, 2, device=on.DEVICE)
    with pytest.raises(RuntimeError, match="must match"):
        x.add_(torch.ones(4, device=on.DEVICE))
    found = nn.functional.embedding(torch.tensor([5], device=on.DEVICE), table)
    with pytest.raises(RuntimeError, match="failed on the device"):
        torch.accelerator.synchronize()
    assert found.shape == (1, 2)
    assert x.sum().item() == 3  # the error is raised only once


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
def test_autocast_on_the_device_is_that_of_the_cpu() -> None:
    model = Chain(Mlp(), Mlp())
    on_device = copy.deepcopy(model).to(on.DEVICE)
    x, y = vector_batch(4, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x, y).backward()
    with torch.autocast("deferred", dtype=torch.bfloat16):
        assert on_device.blocks[0].up(x.to(on.DEVICE)).dtype == torch.bfloat16
        on_device(x.to(on.DEVICE), y.to(on.DEVICE)).backward()
    for a, b in zip(model.parameters(), on_device.parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad, atol=1e-6, rtol=1e-5)
