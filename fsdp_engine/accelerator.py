"""The accelerator of this process: CUDA, XPU, NPU, HPU, or one of another package.

An accelerator here is a device with streams: submitted work runs later, in the order of its stream.
The CPU and the meta device are none. The package calls an accelerator by the module that torch
registers for it. ``memory/cuda.py`` contains everything that only CUDA has, and no other file names
``torch.cuda``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist


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
