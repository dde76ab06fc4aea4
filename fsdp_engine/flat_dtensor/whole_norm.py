"""Norms of sharded tensors: plain values, which also answer what DTensors are asked.

Where a DTensor's norm is partial, or has placements, scripts ask it for ``full_tensor()`` before
they log it. Ours is that of the whole tensor already, the same on all ranks, and says so.

``torch.nn.utils.clip_grad_norm_`` makes one norm of many. Under FSDP2's calls it returns a DTensor,
as with FSDP2: replicated over the mesh. It is plain beside norms of plain tensors, or of tensors
over other meshes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_engine.flat_dtensor.placement import FlatPlacement

# What makes one norm of many (``torch.nn.utils.get_total_norm``); everything else gives plain ones.
_KEEPS = (torch.stack, torch.linalg.vector_norm, Tensor.to)


class WholeNorm(Tensor):
    """See the module docstring.

    Attributes:
        mesh: over which a norm of several is a DTensor; None: it is a plain tensor.
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
        norm = result.as_subclass(WholeNorm)
        norm.mesh = mesh
        return norm

    def full_tensor(self) -> Tensor:
        """The value: it is the whole tensor's."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _plain(value: Any) -> Any:
    if isinstance(value, WholeNorm):
        return value.full_tensor()
    if isinstance(value, (list, tuple)) and any(isinstance(each, WholeNorm) for each in value):
        return type(value)(map(_plain, value))
    return value


def _norms(args: Any) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from _norms(value)
        elif isinstance(value, Tensor):
            yield value


def _common_mesh(args: Any) -> DeviceMesh | None:
    """The mesh of all norms; None: some are of plain tensors, or over another mesh."""
    meshes = [norm.mesh if isinstance(norm, WholeNorm) else None for norm in _norms(args)]
    first = meshes[0] if meshes else None
    return first if all(mesh == first for mesh in meshes) else None


def whole(norm: Tensor, flat: FlatPlacement) -> Tensor:
    """``norm``, with the same memory and graph, as one that answers.

    Args:
        norm: 0-d, of a whole tensor.
        flat: of that tensor.
    """
    made = norm.as_subclass(WholeNorm)
    if flat.norm_is_dtensor:
        made.mesh = flat.device_mesh
    return made
