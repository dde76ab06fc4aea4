"""Patches ``torch.distributed.checkpoint.state_dict`` to load full tensors into FlatDTensors.

``set_model_state_dict`` and ``set_optimizer_state_dict`` with ``full_state_dict=True`` shard each
full tensor by the placements of the target tensor. torch cannot do this for ``FlatShard``, and has
no hook for it. This module therefore replaces the two functions of torch that shard (2.11 to 2.13),
and sets FlatDTensors by ``copy_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_engine.flat_dtensor.flat_placement import FlatShard
from fsdp_engine.flat_dtensor.tensor import FlatDTensor

_torch_utils: Any = _state_dict_utils
_distribute_pairs = _torch_utils._distribute_tensors
_distribute = _torch_utils.distribute_tensor


def _distribute_or_copy(
    state: dict[str, Any], keys: Sequence[str], *rest: Any, **options: Any
) -> None:
    """Replace pairs of a target tensor and a full tensor, after a broadcast from the first rank.

    FlatDTensors are set by ``copy_``. torch's function handles all other pairs.
    """
    for key in keys:
        pair = state.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], FlatDTensor):
            state[key] = pair[0].detach().copy_(pair[1])
    _distribute_pairs(state, keys, *rest, **options)


def _distribute_or_keep(
    tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], **options: Any
) -> DTensor:
    """Shard a full tensor that every rank has. For FlatDTensors, return a replicated DTensor.

    ``copy_`` of the FlatDTensor later takes its slice.
    """
    if any(isinstance(placement, FlatShard) for placement in placements):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    distributed: DTensor = _distribute(tensor, mesh, placements, **options)
    return distributed


_torch_utils._distribute_tensors = _distribute_or_copy
_torch_utils.distribute_tensor = _distribute_or_keep
