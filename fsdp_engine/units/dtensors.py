"""Requirements for parameters that are DTensors before ``shard``, and the ranks of their meshes.

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
    """All ranks over which a model lies: ``data``, and its like at every place of the mesh
    dimensions that DTensor parameters are over. Collective among all of these.

    Args:
        params: the model's, by name.
        data: the data-parallel ranks.
        experts: those that share experts. DTensors over ranks of ``data`` are experts, cut over
            those that share none.

    Raises:
        ValueError: a DTensor is over ranks that share it, on another device type, or over a mesh
            that theirs is not cut from; names it.
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
                f"{name}: expected a DTensor on {data.device_mesh.device_type}, as the mesh; found "
                f"one on {mesh.device_type}"
            )
        sharing = experts if experts is not None and is_of_experts(param, data) else data
        try:
            joint_mesh(sharing.device_mesh, mesh)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for dim in mesh.mesh_dim_names or ():
            if not within.issuperset(members_of(mesh[dim])):
                others[dim] = mesh[dim]
    return data.joined_with(list(others.values()))


def is_of_experts(param: Tensor, data: Ranks) -> bool:
    """Whether a parameter is a DTensor that is cut over data-parallel ranks."""
    mesh = _other_mesh(param)
    return mesh is not None and len(set(data.ranks).intersection(members_of(mesh))) > 1


def _other_mesh(param: Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor, without the engine's dimensions; None of a plain tensor."""
    if isinstance(param, FlatDTensor):
        spread = param.flat_placement.spread
        return None if spread is None else spread.mesh
    return param.device_mesh if isinstance(param, DTensor) else None


def choose_written(records: Sequence[ParamRecord], data: Ranks, ranks: Ranks) -> None:
    """Note from where checkpoints take each parameter, of the ranks that hold the same elements at
    several places of others' mesh dimensions.

    Args:
        data: the data-parallel ranks.
        ranks: all ranks of the model.
    """
    if ranks is data:
        return
    first = data.device_mesh.ndim  # others' dimensions come after
    coordinate, names = ranks.device_mesh.get_coordinate(), ranks.device_mesh.mesh_dim_names
    assert coordinate is not None
    assert names is not None
    others = dict(zip(names[first:], coordinate[first:], strict=True))
    for record in records:
        shards = set() if record.spread is None else record.spread.shard_names
        record.is_written = not any(place for name, place in others.items() if name not in shards)


def mark_experts(params: Iterable[Tensor], data: Ranks) -> None:
    """Give DTensors that are cut over data-parallel ranks Megatron-Core's mark of experts."""
    known: dict[DeviceMesh | None, bool] = {}
    for param in params:
        mesh = _other_mesh(param)
        if mesh not in known:
            known[mesh] = is_of_experts(param, data)
        if known[mesh]:
            param.allreduce = False  # type: ignore[attr-defined]


def set_spreads(records: Sequence[ParamRecord]) -> None:
    """Note how parameters that are DTensors lie.

    Raises:
        ValueError: a placement is neither ``Shard`` nor ``Replicate``; names the parameter.
    """
    for record in records:
        if isinstance(record.param, DTensor) and not isinstance(record.param, FlatDTensor):
            try:
                record.spread = TensorParallelSpec.of(record.param)
            except ValueError as error:
                raise ValueError(f"{record.name}: {error}") from error
