"""Device meshes in a simulation, which the model's code creates under a fake mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._utils as dtensor_utils
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map


@contextmanager
def meshes_with_values() -> Iterator[None]:
    """Make torch compute ranks of meshes, and offsets and global shapes of shards, outside of the
    simulation's modes in this context. Within the modes, tensors would have no values, and these
    operations would advance the clock. At the end, clear torch's cache of sharded operations: its
    meshes name process groups that no longer exist, and a later mesh of the same ranks would be
    equal to them."""
    places: list[tuple[Any, str]] = [
        (DeviceMesh, name)
        for name in ("__init__", "_concatenate", "_flatten", "_unflatten", "from_group")
    ]
    places += [(DeviceMesh, "__getitem__"), (DeviceMesh, "get_coordinate")]
    places.append((dtensor_utils, "_compute_local_shape_and_global_offset"))
    # This method runs an operation on tensors of global shapes.
    places.append((type(_propagator()), "_propagate_tensor_meta_non_cached"))
    originals = [(owner, name, vars(owner)[name]) for owner, name in places if name in vars(owner)]
    for owner, name, original in originals:
        setattr(owner, name, _outside_of_modes(original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        _forget_sharded_operations()


def _forget_sharded_operations() -> None:
    # torch has a function that clears both caches, but it imports numpy.
    _propagator().propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def _outside_of_modes(original: Any) -> Any:
    if isinstance(original, staticmethod | classmethod):
        return type(original)(_outside_of_modes(original.__func__))

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            if original.__name__ == "__init__":
                args, kwargs = tree_map(_on_simulated_ranks, (args, kwargs))
            return original(*args, **kwargs)

    return wrapped


def _on_simulated_ranks(value: Any) -> Any:
    """Convert an argument of a mesh for simulated ranks: give values to a fake tensor, and replace
    accelerators by the CPU. A fake tensor without a constant value is assumed to be a result of
    ``torch.arange``, as in ``init_device_mesh``, or a view of one."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            return value.constant
        every = torch.arange(value.untyped_storage().nbytes() // value.itemsize, device="cpu")
        return every.as_strided(value.shape, value.stride(), value.storage_offset())
    return "cpu" if isinstance(value, str) and value in ("cuda", "xpu", "npu", "hpu") else value


def data_mesh_beside(model: nn.Module, data: DeviceMesh) -> DeviceMesh:
    """Returns the data-parallel dimensions of the mesh of the model's DTensor parameters: all
    dimensions of its root mesh that the parameters do not use.

    Args:
        model: A model whose parameters may be DTensors.
        data: The mesh to return if no parameter is a DTensor over a mesh with another root than
            this one's.

    Raises:
        ValueError: The root mesh does not have one or two unused dimensions, or lacks ranks.
    """
    found = [each for each in model.parameters() if isinstance(each, DTensor)]
    roots = [each.device_mesh._get_root_mesh() for each in found]
    root = next((each for each in roots if each is not data._get_root_mesh()), None)
    if root is None:
        return data
    used = {name for each in found for name in each.device_mesh.mesh_dim_names or ()}
    names = tuple(name for name in root.mesh_dim_names or () if name not in used)
    if root.size() != dist.get_world_size() or len(names) not in (1, 2):
        raise ValueError(
            f"build: expected DTensors over dimensions of a mesh of all {dist.get_world_size()} "
            "ranks, whose one or two other dimensions are data-parallel, "
            'such as init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]; found '
            f"{root}"
        )
    return root[names]
