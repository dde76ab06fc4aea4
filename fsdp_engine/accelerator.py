"""The accelerator of this process: CUDA, XPU, NPU, HPU, or one of another package.

An accelerator here is a device with streams: submitted work runs later, in the order of its stream.
The CPU and the meta device are not accelerators. The package calls an accelerator through the
module that torch registers for it. ``memory/cuda.py`` contains everything that only CUDA has; no
other file uses ``torch.cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist


def is_accelerator(device: torch.device) -> bool:
    """Returns whether ``device`` has streams, on which it runs work that the host has submitted."""
    # torch.mps has no streams. torch.cpu has a class Stream that does nothing.
    return device.type not in ("cpu", "meta") and hasattr(
        getattr(torch, device.type, None), "Stream"
    )


def module_of(device: torch.device) -> Any:
    """Returns the module that torch registers for ``device``, such as ``torch.xpu`` for XPU."""
    return torch.get_device_module(device)


def capture_check(device: torch.device) -> Callable[[], bool]:
    """Returns a function that returns whether the current stream of ``device`` is being captured
    into a graph. For a device without graphs, the function always returns False."""
    module = None if device.type == "meta" else module_of(device)
    found: Callable[[], bool] = getattr(module, "is_current_stream_capturing", lambda: False)
    return found


def current_accelerator() -> torch.device | None:
    """Returns the current accelerator of this process, with its index; None if there is none."""
    found = torch.accelerator.current_accelerator()
    if found is None or not is_accelerator(found) or not torch.accelerator.is_available():
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def default_backend(device: torch.device | None) -> str:
    """Returns the default backend of torch.distributed for ``device``, or for the CPU if None."""
    return dist.Backend.default_device_backend_map.get(device.type if device else "cpu", "gloo")


def device_type_of(group: dist.ProcessGroup | None = None) -> str:
    """Returns the device type of ``group``, or of the default group: the accelerator's type if the
    group has the accelerator's default backend, else "cpu"."""
    device = current_accelerator()
    if device is None:
        return "cpu"
    backends = str(dist.get_backend_config(group)).split(",")
    return device.type if f"{device.type}:{default_backend(device)}" in backends else "cpu"


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context that restores the random states of the CPU and of ``device`` at its end."""
    devices: Sequence[torch.device] = [device] if is_accelerator(device) else []
    return torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda")
