"""Lanes beside those of every engine, which extensions use; waits of the host and the device."""

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
    """Returns the names of the lanes on which ``what`` is copied to the device and from it."""
    return f"{what} in", f"{what} out"


def copied_on(lane: str) -> str:
    """Returns the ``what`` of a lane of :func:`make_copy_lanes`; "": it is another lane.

    Args:
        lane: The name of the lane.
    """
    what, _, direction = lane.rpartition(" ")
    return what if direction in ("in", "out") and lane != COPY_IN else ""


def make_copy_lanes(
    device: torch.device, what: str, kind: type[DeviceLane] = DeviceLane
) -> tuple[Lane, Lane]:
    """Returns the lanes on which ``what`` is copied to ``device`` and from it.

    Args:
        kind: The class of an accelerator's lanes.
    """
    into, out = make_other_lanes(device, names_of_copies(what), kind)
    return into, out


def make_other_lanes(
    device: torch.device, names: Sequence[str], kind: type[DeviceLane] = DeviceLane
) -> Sequence[Any]:
    """Returns lanes of these names beside those of every engine: on an accelerator objects of
    ``kind``, which are a :class:`~.lanes.ComputeLane`; on a CPU a :class:`~.lanes.Lane`."""
    if (made := backend.current().other_lanes(names)) is not None:
        given: Sequence[Any] = made
        return given
    if is_accelerator(device):
        stream = module_of(device).Stream
        return [kind(device, stream(device=device), name=name) for name in names]
    return [HostLane(name=name) for name in names]


def compute_waits_for(event: torch.Event) -> None:
    """What the model's own stream is given from here on comes after ``event``, and so does what
    lanes are given behind it."""
    event.wait()


def finish_compute(device: torch.device) -> None:
    """The host waits for what the model's own stream on ``device`` was given so far."""
    if is_accelerator(device):
        module_of(device).current_stream(device).synchronize()


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes the host wait for what the current stream of this thread on
    ``device`` was given so far."""
    module = module_of(device)
    event = module.Event()
    event.record(module.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """How long an accelerator works on what ``action`` gives it; the host waits for that."""
    module = module_of(device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    stream = module.current_stream(device)
    begin.record(stream)
    action()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
