"""The accelerator of this process: CUDA, XPU, NPU, HPU, one of another package, or a simulated one.

An accelerator here is a device with streams: submitted work runs later, in the order of its stream.
The CPU and the meta device are none. The package calls an accelerator by the module that torch
registers for it. ``memory/cuda.py`` contains everything that only CUDA has, and no other file names
``torch.cuda``.

In a simulation tensors are on the CPU, and the backend is torch's "fake" one. A host that computes
itself, with gloo, and a device with collectives of its own differ in the idle memory that the
engine keeps, and in the scratch memory of a reduction, so a simulation says which of them it
simulates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

_ON_HOST: list[bool] = []


@contextmanager
def simulated(*, on_host: bool) -> Iterator[None]:
    """Within it, this process is taken to compute on the host, or on a device."""
    _ON_HOST.append(on_host)
    try:
        yield
    finally:
        _ON_HOST.pop()


def is_simulated() -> bool:
    """Whether this process simulates ranks: tensors have no memory."""
    return bool(_ON_HOST)


def simulates_host() -> bool:
    """Whether "fake" stands for gloo on CPUs."""
    return bool(_ON_HOST) and _ON_HOST[-1]


def simulates_device() -> bool:
    """Whether "fake" and the CPU stand for a device and its backend."""
    return bool(_ON_HOST) and not _ON_HOST[-1]


def is_accelerator(device: torch.device) -> bool:
    """Returns whether ``device`` runs what the host submits by streams of its own."""
    # torch.mps has no streams; torch.cpu has stand-ins.
    return device.type not in ("cpu", "meta") and hasattr(
        getattr(torch, device.type, None), "Stream"
    )


def module_of(device: torch.device) -> Any:
    """Returns the module that torch registers for ``device``, as ``torch.xpu`` for XPU."""
    return torch.get_device_module(device)


def current_accelerator() -> torch.device | None:
    """Returns the accelerator of this process, with its current index; None if there is none."""
    found = torch.accelerator.current_accelerator()
    if found is None or not is_accelerator(found) or not torch.accelerator.is_available():
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def default_backend(device: torch.device | None) -> str:
    """Returns the backend that torch.distributed names for ``device``; None: the CPU."""
    return dist.Backend.default_device_backend_map.get(device.type if device else "cpu", "gloo")


def device_type_of(group: dist.ProcessGroup | None = None) -> str:
    """Returns the type of the device that ``group``, or the default group, is for: the accelerator
    if its own backend is among the group's, else the CPU."""
    device = current_accelerator()
    if device is None:
        return "cpu"
    backends = str(dist.get_backend_config(group)).split(",")
    return device.type if f"{device.type}:{default_backend(device)}" in backends else "cpu"


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Within it, draws on the CPU and on ``device`` leave no trace in their generators."""
    devices: Sequence[torch.device] = [device] if is_accelerator(device) else []
    return torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda")
