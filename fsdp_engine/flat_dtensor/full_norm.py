"""Norms of sharded tensors: plain tensors with DTensor's method ``full_tensor``.

The norm of a DTensor is a DTensor, which scripts convert by ``full_tensor()`` before they log it.
The norm of a FlatDTensor is the norm of the full tensor, equal on all ranks; ``full_tensor()``
returns it unchanged.

``torch.nn.utils.clip_grad_norm_`` computes one norm from many. For parameters of ``fully_shard`` it
returns a DTensor that is replicated over the mesh, as FSDP2 does. If some norms are of plain
tensors, or of tensors over other meshes, the result is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement

# Functions used by ``torch.nn.utils.get_total_norm``; the results of all others are plain tensors.
_KEEPS = (torch.stack, torch.linalg.vector_norm, Tensor.to)


class FullNorm(Tensor):
    """The norm of a full tensor; see the module docstring.

    Attributes:
        mesh: the mesh over which the norm of several tensors is a DTensor. None: it is a plain
            tensor.
    """

    mesh: DeviceMesh | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain_kwargs = {key: _plain(value) for key, value in (kwargs or {}).items()}
        result = func(*map(_plain, args), **plain_kwargs)
        if func not in _KEEPS or type(result) is not Tensor:
            return result
        mesh = _common_mesh(args)
        if func is torch.linalg.vector_norm and mesh is not None and not result.requires_grad:
            placements = [Replicate()] * mesh.ndim
            return DTensor.from_local(result, mesh, placements, run_check=False)
        norm = result.as_subclass(FullNorm)
        norm.mesh = mesh
        return norm

    def full_tensor(self) -> Tensor:
        """The value as a plain tensor; it is already the norm of the full tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _plain(value: Any) -> Any:
    if isinstance(value, FullNorm):
        return value.full_tensor()
    if isinstance(value, (list, tuple)) and any(isinstance(each, FullNorm) for each in value):
        return type(value)(map(_plain, value))
    return value


def _norms(args: Any) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from _norms(value)
        elif isinstance(value, Tensor):
            yield value


def _common_mesh(args: Any) -> DeviceMesh | None:
    """The mesh of all norms; None if some are of plain tensors or have another mesh."""
    meshes = [norm.mesh if isinstance(norm, FullNorm) else None for norm in _norms(args)]
    first = meshes[0] if meshes else None
    return first if all(mesh == first for mesh in meshes) else None


def as_full_norm(norm: Tensor, flat: FlatPlacement) -> Tensor:
    """Returns ``norm`` as a :class:`FullNorm` with the same memory and graph.

    Args:
        norm: 0-d, of a full tensor.
        flat: placement of that tensor.
    """
    result = norm.as_subclass(FullNorm)
    if flat.norm_is_dtensor:
        result.mesh = flat.device_mesh
    return result
