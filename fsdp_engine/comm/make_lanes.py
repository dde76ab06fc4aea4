"""Makes the lanes of an engine, for an accelerator, a CPU, or another backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_engine import backend
from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.comm.activity import monitor
from fsdp_engine.comm.lanes import COPY_IN, LANES, Lanes


def make_lanes(device: torch.device, ranks: Sequence[int] = ()) -> Lanes:
    """Make the lanes of ``device``: streams on an accelerator, FIFOs of asynchronous works on CPU.

    Args:
        device: The device of the model.
        ranks: Global ranks that take part, for messages. Empty: all.
    """
    if (made := backend.current().lanes(device)) is not None:
        given: Lanes = made
        return given
    if is_accelerator(device):
        from fsdp_engine.comm.device_lane import DeviceLane

        # Streams have high priority because the model waits for a gather that starts late.
        compute, *others = (*LANES, COPY_IN)
        streams = [module_of(device).Stream(device=device, priority=-1) for _ in others]
        lanes = [
            DeviceLane(device, stream, ranks, name)
            for stream, name in zip(streams, others, strict=True)
        ]
        monitor().watch(lanes)
        return Lanes(DeviceLane(device, None, name=compute), *lanes)
    from fsdp_engine.comm.host_lane import HostLane

    return Lanes(*(HostLane(ranks, name) for name in LANES))
