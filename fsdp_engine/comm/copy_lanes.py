"""Additional lanes for extensions, and waits of the host and of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_engine import backend
from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.comm.host_lane import HostLane
from fsdp_engine.comm.lanes import COPY_IN, Lane


def names_of_copies(what: str) -> tuple[str, str]:
    """Returns the names of the lanes that copy ``what`` to the device and from the device."""
    return f"{what} in", f"{what} out"


def copied_on(lane: str) -> str:
    """Returns the name of the tensors that a lane of :func:`make_copy_lanes` copies, or "" for any
    other lane.

    Args:
        lane: The name of the lane.
    """
    what, _, direction = lane.rpartition(" ")
    return what if direction in ("in", "out") and lane != COPY_IN else ""


def make_copy_lanes(
    device: torch.device, what: str, kind: type[DeviceLane] = DeviceLane
) -> tuple[Lane, Lane]:
    """Returns the lanes that copy ``what`` to ``device`` and from ``device``.

    Args:
        device: The device of the copies.
        what: Name of the copied tensors, which is part of the names of the lanes.
        kind: The class of the lanes on an accelerator.
    """
    into, out = make_other_lanes(device, names_of_copies(what), kind)
    return into, out


def make_other_lanes(
    device: torch.device, names: Sequence[str], kind: type[DeviceLane] = DeviceLane
) -> Sequence[Any]:
    """Returns new lanes with these names.

    On an accelerator they are instances of ``kind``, with the interface
    :class:`~.lanes.ComputeLane`. On a CPU they have the interface :class:`~.lanes.Lane`.
    """
    if (made := backend.current().other_lanes(names)) is not None:
        given: Sequence[Any] = made
        return given
    if is_accelerator(device):
        stream = module_of(device).Stream
        return [kind(device, stream(device=device), name=name) for name in names]
    return [HostLane(name=name) for name in names]


def compute_waits_for(event: torch.Event) -> None:
    """Make the model's stream wait for ``event``.

    Work that is submitted to this stream afterwards runs after ``event``. A lane that then waits
    for this stream also waits for ``event``.
    """
    event.wait()


def finish_compute(device: torch.device) -> None:
    """Wait on the host for all work submitted so far to the model's stream on ``device``."""
    if is_accelerator(device):
        module_of(device).current_stream(device).synchronize()


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits on the host for the work submitted so far to the current stream
    of this thread on ``device``."""
    module = module_of(device)
    event = module.Event()
    event.record(module.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Returns the seconds that the device takes for the work that ``action`` submits. The host
    waits for the work."""
    module = module_of(device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    stream = module.current_stream(device)
    begin.record(stream)
    action()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
