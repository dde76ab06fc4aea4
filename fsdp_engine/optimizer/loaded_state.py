"""Converts optimizer state that the user has distributed as DTensors.

FSDP2's tutorial loads full optimizer state with ``distribute_tensor(value, param.device_mesh,
param.placements)`` for each value, and ``optimizer.load_state_dict``. The results are DTensors over
this rank's slices. Before the next step they are replaced by FlatDTensors over the same memory.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.elementwise import slice_of_distributed

# The state dict of each optimizer at its last conversion. Loading replaces the dict.
_CONVERTED: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


def adopt_loaded_state(optimizer: Optimizer, *args: object) -> None:
    """Step pre-hook: convert the state of sharded parameters from DTensors to FlatDTensors."""
    state = optimizer.__dict__["state"]
    if _CONVERTED.get(optimizer) is state:
        return
    _CONVERTED[optimizer] = state
    for param, values in state.items():
        if not isinstance(param, FlatDTensor):
            continue
        for key, value in values.items():
            if isinstance(value, DTensor) and not isinstance(value, FlatDTensor):
                local = slice_of_distributed(value, param.flat_placement)
                if local is not None:
                    values[key] = FlatDTensor.from_flat_local(local, param.flat_placement)
