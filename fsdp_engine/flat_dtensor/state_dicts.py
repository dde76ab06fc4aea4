"""Patches ``torch.distributed.checkpoint.state_dict`` to load full tensors into FlatDTensors.

``set_model_state_dict`` and ``set_optimizer_state_dict`` with ``full_state_dict=True`` shard each
full tensor by the placements of the target tensor. ``FlatShard`` does not describe that for torch,
and there is no hook for it. The two functions that shard (torch 2.11 to 2.13) are therefore
replaced here, and FlatDTensors are set by ``copy_``.
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
    """After a broadcast from rank 0: entries are pairs of a DTensor and the full tensor."""
    for key in keys:
        pair = state.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], FlatDTensor):
            state[key] = pair[0].detach().copy_(pair[1])
    _distribute_pairs(state, keys, *rest, **options)


def _distribute_or_keep(
    tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], **options: Any
) -> DTensor:
    """If every rank has the full tensor: keep it replicated; ``copy_`` takes the slice later."""
    if any(isinstance(placement, FlatShard) for placement in placements):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    distributed: DTensor = _distribute(tensor, mesh, placements, **options)
    return distributed


_torch_utils._distribute_tensors = _distribute_or_copy
_torch_utils.distribute_tensor = _distribute_or_keep
