"""Optimizer state that a program has distributed by itself.

FSDP2's tutorial loads whole state by ``distribute_tensor(value, param.device_mesh,
param.placements)`` of each value and ``optimizer.load_state_dict``. What that makes are DTensors
over this rank's slices. Before the next step they become FlatDTensors, over the same memory.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.elementwise import slice_of_distributed

# The state that each optimizer had when it was looked through: loading replaces the dict.
_SEEN: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


def adopt_loaded_state(optimizer: Optimizer, *args: object) -> None:
    """Make state of sharded parameters FlatDTensors; a pre-hook of steps."""
    state = optimizer.__dict__["state"]
    if _SEEN.get(optimizer) is state:
        return
    _SEEN[optimizer] = state
    for param, values in state.items():
        if not isinstance(param, FlatDTensor):
            continue
        for key, value in values.items():
            if isinstance(value, DTensor) and not isinstance(value, FlatDTensor):
                local = slice_of_distributed(value, param.flat_placement)
                if local is not None:
                    values[key] = FlatDTensor.from_flat_local(local, param.flat_placement)
