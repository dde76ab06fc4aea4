"""Checks parameters that are DTensors before ``shard``, and finds the ranks of their meshes.

See [Note: Parameters that are DTensors] in ``flat_dtensor/tensor_parallel_spec.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.spec import ParamRecord
from fsdp_engine.comm.groups import Ranks, members_of
from fsdp_engine.comm.mesh import DataMesh, joint_mesh
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec


def ranks_of_model(
    params: Iterable[tuple[str, Tensor]], data: DataMesh, experts: DataMesh | None = None
) -> Ranks:
    """Returns all ranks of a model. Collective among them.

    These are the ranks of ``data``, and the corresponding ranks at every coordinate of the mesh
    dimensions over which DTensor parameters are distributed (tensor parallelism, for example).

    Args:
        params: The model's parameters by name.
        data: The data-parallel ranks.
        experts: The data-parallel ranks that share the experts of this rank. A DTensor over ranks
            of ``data`` is an expert parameter, sharded over ranks that hold different experts.

    Raises:
        ValueError: A DTensor is distributed over ranks over which the engine would shard it, or is
            on another device type; or its mesh and the data-parallel mesh are not slices of one
            mesh. The message names the parameter.
    """
    meshes: list[DeviceMesh] = []
    others: dict[str, DeviceMesh] = {}
    within = set(data.ranks)
    for name, param in params:
        mesh = _other_mesh(param)
        if mesh is None or mesh in meshes:
            continue
        meshes.append(mesh)
        if mesh.device_type != data.device_mesh.device_type:
            raise ValueError(
                f"{name}: expected a DTensor on {data.device_mesh.device_type}, like the mesh; "
                f"found a DTensor on {mesh.device_type}"
            )
        sharing, argument = data, "mesh"
        if experts is not None and is_of_experts(param, data):
            sharing, argument = experts, "expert_mesh"
        try:
            joint_mesh(sharing.device_mesh, mesh, name=argument)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for dim in mesh.mesh_dim_names or ():
            if not within.issuperset(members_of(mesh[dim])):
                others[dim] = mesh[dim]
    return data.joined_with(list(others.values()))


def is_of_experts(param: Tensor, data: Ranks) -> bool:
    """Returns whether a parameter is a DTensor that is sharded over data-parallel ranks."""
    mesh = _other_mesh(param)
    return mesh is not None and len(set(data.ranks).intersection(members_of(mesh))) > 1


def _other_mesh(param: Tensor) -> DeviceMesh | None:
    """Returns the mesh of a DTensor without the engine's dimensions; None for a plain tensor."""
    if isinstance(param, FlatDTensor):
        spread = param.flat_placement.spread
        return None if spread is None else spread.mesh
    return param.device_mesh if isinstance(param, DTensor) else None


def choose_written(records: Sequence[ParamRecord], data: Ranks, ranks: Ranks) -> None:
    """Set ``record.is_written``: whether checkpoints take the elements from this rank.

    Where a parameter is replicated along a mesh dimension that is not the engine's, only the first
    rank of this dimension writes it.

    Args:
        records: The model's parameters.
        data: The data-parallel ranks.
        ranks: All ranks of the model.
    """
    if ranks is data:
        return
    first = data.device_mesh.ndim  # the engine's mesh dimensions are the first ones of the mesh
    coordinate, names = ranks.device_mesh.get_coordinate(), ranks.device_mesh.mesh_dim_names
    assert coordinate is not None
    assert names is not None
    others = dict(zip(names[first:], coordinate[first:], strict=True))
    for record in records:
        shards = set() if record.spread is None else record.spread.shard_names
        record.is_written = not any(place for name, place in others.items() if name not in shards)


def mark_experts(params: Iterable[Tensor], data: Ranks) -> None:
    """Set Megatron-Core's mark of experts, ``allreduce=False``, on DTensor experts.

    These are the DTensors that are sharded over data-parallel ranks.
    """
    known: dict[DeviceMesh | None, bool] = {}
    for param in params:
        mesh = _other_mesh(param)
        if mesh not in known:
            known[mesh] = is_of_experts(param, data)
        if known[mesh]:
            param.allreduce = False  # type: ignore[attr-defined]


def set_spreads(records: Sequence[ParamRecord]) -> None:
    """Record the mesh and the placements of parameters that are DTensors.

    Raises:
        ValueError: A placement is neither ``Shard`` nor ``Replicate``. The message names the
            parameter.
    """
    for record in records:
        if isinstance(record.param, DTensor) and not isinstance(record.param, FlatDTensor):
            try:
                record.spread = TensorParallelSpec.of(record.param)
            except ValueError as error:
                raise ValueError(f"{record.name}: {error}") from error
