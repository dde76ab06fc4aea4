"""The data-parallel mesh: two axes, outer and inner, and the process groups along each.

Gathers and reductions have separate groups on every axis, because a communicator runs its
collectives one after the other. An axis of one rank has no groups and no communication.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_engine.accelerator import (
    current_accelerator,
    default_backend,
    device_type_of,
    is_accelerator,
    module_of,
)
from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.comm.groups import (
    Ranks,
    default_group,
    group_like,
    group_of_ranks,
    members_of,
    name_of_backend,
    timeout_of_group,
)
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.layout import Coordinate
from fsdp_engine.memory import allocator
from fsdp_engine.strategies import Axis


@dataclass(frozen=True)
class MeshAxis:
    """One axis: its size, this rank's index, and a group for each lane (None if the size is 1)."""

    axis: Axis
    size: int
    rank: int
    gather_group: dist.ProcessGroup | None
    reduce_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class DataMesh(Ranks):
    """The data-parallel ranks, and their two axes, outer and inner.

    Attributes:
        device_mesh: The mesh of the user, with one dimension or two (outer, inner).
        outer: The outer axis. Its size is 1 for a mesh of one dimension that is not divided into
            rows.
        inner: The inner axis.
        part_of: The mesh of which this one is a row. None: this mesh is not a row of another one.
    """

    outer: MeshAxis
    inner: MeshAxis
    part_of: DataMesh | None = None

    @classmethod
    @_disable_current_modes()  # a simulation's mode must not make the tensor of ranks fake
    def create(
        cls,
        device_mesh: DeviceMesh | None,
        *,
        num_instances: int = 1,
        what: str = "DataMesh.create",
        note: str = "",
    ) -> DataMesh:
        """Make the axes and their groups. Collective over the ranks of the mesh.

        Groups are made once for each set of ranks. A communicator costs memory and threads, and
        several engines (teacher and student, generator and discriminator) can share it.

        Args:
            device_mesh: A mesh of one axis (inner) or two (outer, inner). None: all ranks on one
                axis.
            num_instances: Size of the outer axis. A single axis is divided into this number of rows
                of consecutive ranks; two axes must already have this outer size.
            what: Name of the operation in messages.
            note: A text that must be the same on all ranks.

        Raises:
            TypeError: ``device_mesh`` is not a DeviceMesh.
            ValueError: The mesh has more than two axes, does not contain this rank, has MPI as its
                backend for an accelerator, or cannot be divided into ``num_instances`` rows. If the
                shapes of meshes or the notes differ, all ranks raise.
            RuntimeError: A rank did not arrive or has raised; see :func:`~.rendezvous.meet`.
        """
        with reporting(what, ranks_that_meet(device_mesh)):
            if device_mesh is None:
                device_mesh = _mesh_of_all_ranks()
            coordinate = check_device_mesh(device_mesh)
            ranks = device_mesh.mesh
            if num_instances > 1:
                ranks, coordinate = _in_rows(ranks, coordinate, num_instances)
        known = _KNOWN.setdefault(default_group(), {})
        device = _local_device(device_mesh.device_type)
        members = ranks.flatten().tolist()
        key = (device_mesh.device_type, *ranks.shape, *members)
        timeout = timeout_of_group(device_mesh.get_group(0), device)
        order = members if len(members) <= 16 else f"ranks with hash {hash(tuple(members))}"
        note = f"a mesh of shape {tuple(ranks.shape)} over {order}{note and '; '}{note}"
        met = meet(what, members, timeout, note=note, has=key in known)
        if not met.all_have:
            known[key] = _make_axes(ranks, coordinate, device_mesh, device, met.name)
        mesh = cls(device_mesh, device, *known[key])
        if not met.all_have:
            _connect(mesh.groups, device)
        return mesh

    def row(self) -> DataMesh:
        """Returns this rank's row as a mesh of one axis, with the groups of the inner axis.
        Collective over the row, on an accelerator."""
        group, none = self.inner.reduce_group, MeshAxis(Axis.OUTER, 1, 0, None, None)
        device_mesh = self.alone if group is None else mesh_of_group(group)
        messages = group
        if group is not None and is_accelerator(self.device):
            members = dist.get_process_group_ranks(group)
            messages = group_of_ranks(members, group, self.device, purpose="messages")
            _connect([messages], self.device)
        return DataMesh(device_mesh, self.device, group, messages, none, self.inner, self)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups in the same order on all ranks, first those for gathers and reductions."""
        axes = (self.inner, self.outer)
        found = [group for each in axes for group in (each.gather_group, each.reduce_group)]
        found += [self.control_group, self.message_group]
        return [group for group in dict.fromkeys(found) if group is not None]

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return self.outer.size * self.inner.size

    @property
    def coordinate(self) -> Coordinate:
        """The index of this rank on each axis."""
        return Coordinate(self.outer.rank, self.inner.rank)

    @cached_property
    def alone(self) -> DeviceMesh:
        """A mesh of this rank only, for tensors that every rank holds in full.

        Code that sums over the mesh of a tensor without regard to its placements (Megatron-Core's
        norms) would count such a tensor once for each rank of a larger mesh.
        """
        if self.device_mesh.ndim == 1 and self.size == 1:
            return self.device_mesh
        group = group_of_ranks([dist.get_rank()], self.device_mesh.get_group(0), self.device)
        return DeviceMesh.from_group(group, self.device_mesh.device_type)

    def joined_with(self, others: Sequence[DeviceMesh]) -> Ranks:
        """Returns all ranks of a model with DTensors on mesh dimensions other than this mesh's.

        These are this mesh's ranks, and the corresponding ranks at every coordinate of the other
        dimensions (tensor parallelism, for example). Collective over all of them.

        Args:
            others: A mesh for each of these dimensions. These meshes and this one are slices of one
                mesh.

        Raises:
            ValueError: See :func:`joint_mesh`.
        """
        if not others:
            return self
        joint = joint_mesh(self.device_mesh, *others)
        group = messages = None
        if joint.size() > 1:
            members, like = members_of(joint), self.device_mesh.get_group(0)
            group = messages = group_of_ranks(members, like, self.device)
            if is_accelerator(self.device):
                messages = group_of_ranks(members, like, self.device, purpose="messages")
            _connect((group, messages), self.device)
        return Ranks(joint, self.device, group, messages)

    def axis(self, axis: Axis) -> MeshAxis:
        """Returns the mesh axis for ``axis``."""
        return self.inner if axis is Axis.INNER else self.outer


# The control group, the message group, the outer axis and the inner axis of a mesh.
Axes = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, MeshAxis, MeshAxis]

# Axes with their groups. Outer keys: default groups. Inner keys: device type, shape and ranks.
_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Axes]] = (
    weakref.WeakKeyDictionary()
)


def ranks_that_meet(device_mesh: object) -> list[int]:
    """Returns the ranks that take part in a call: those of the mesh, or all ranks if the argument
    is not a mesh.

    For None, torch.distributed is initialised first, so that a rank can report its errors to the
    others.
    """
    if isinstance(device_mesh, DeviceMesh):
        return members_of(device_mesh)
    if device_mesh is None:
        init_from_environment()
    return list(range(dist.get_world_size())) if dist.is_initialized() else []


def check_device_mesh(device_mesh: DeviceMesh, name: str = "mesh") -> list[int]:
    """Check a mesh of one or two axes, and return this rank's coordinate.

    Args:
        device_mesh: The mesh.
        name: Name of the argument in messages.

    Raises:
        TypeError, ValueError: See :meth:`DataMesh.create`.
    """
    if not isinstance(device_mesh, DeviceMesh):
        found = type(device_mesh).__name__
        raise TypeError(f"{name}: expected a DeviceMesh or None; found {found}")
    if device_mesh.ndim not in (1, 2):
        raise ValueError(
            f"{name}: expected one axis (inner) or two (outer, inner); "
            f"found {device_mesh.ndim} axes of sizes {tuple(device_mesh.mesh.shape)}"
        )
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"{name}: expected a mesh that covers this rank, {dist.get_rank()}; "
            f"found ranks {device_mesh.mesh.flatten().tolist()[:16]}"
        )
    device = torch.device(device_mesh.device_type)
    sends = is_accelerator(device) and device_mesh.size() > 1
    if sends and name_of_backend(device_mesh.get_group(0), device) == "mpi":
        raise ValueError(
            f"{name}: expected a backend for {device.type} tensors whose collectives wait for the "
            "stream that computes their input, as NCCL, UCC and gloo do; found torch's MPI, which "
            "does not. Use init_process_group(backend="
            f"'cpu:mpi,{device.type}:{default_backend(device)}')"
        )
    return list(coordinate)


def joint_mesh(data: DeviceMesh, *others: DeviceMesh, name: str = "mesh") -> DeviceMesh:
    """Returns the mesh of the dimensions of all meshes, in this order, without making groups.

    Args:
        data: The mesh over which the engine shards parameters.
        others: The meshes of parameters that are DTensors.
        name: Name of the argument for ``data`` in messages.

    Raises:
        ValueError: The meshes are not slices of one mesh with named dimensions, or share ranks.
    """
    why = ""
    try:
        return DeviceMesh._concatenate([data, *others])
    except RuntimeError as error:  # not slices of one mesh, or shared ranks
        why = str(error)
    except (AssertionError, TypeError):  # dimensions without names
        why = "a mesh without dimension names"
    raise ValueError(
        f"{name}: expected this mesh and the mesh of DTensor parameters to be slices of one mesh "
        'with named dimensions (mesh["dp"] and mesh["tp"] of init_device_mesh("cuda", (2, 4), '
        f'mesh_dim_names=("dp", "tp"))); found {data} beside {", ".join(map(str, others))}: {why}'
    )


def mesh_of_group(group: dist.ProcessGroup) -> DeviceMesh:
    """Returns a mesh of one axis over the ranks of ``group``."""
    return DeviceMesh.from_group(group, device_type_of(group))


def _in_rows(
    ranks: torch.Tensor, coordinate: list[int], num_rows: int
) -> tuple[torch.Tensor, list[int]]:
    name = "num_distributed_optimizer_instances"
    if ranks.ndim == 2:
        if ranks.shape[0] != num_rows:
            raise ValueError(
                f"{name}: expected the outer size of the mesh, {ranks.shape[0]}, or 1; "
                f"found {num_rows}"
            )
        return ranks, coordinate
    if ranks.numel() % num_rows:
        raise ValueError(
            f"{name}: expected a divisor of the {ranks.numel()} data-parallel ranks; "
            f"found {num_rows}"
        )
    return ranks.view(num_rows, -1), list(divmod(coordinate[0], ranks.numel() // num_rows))


def init_from_environment(keys: str = "") -> None:
    """Initialise torch.distributed, unless it is initialised.

    torchrun's environment variables are used if they exist. Otherwise the group has one rank.

    Args:
        keys: A prefix for the keys of the group in torchrun's store. Without a prefix, the next
            default group of the job would read the addresses of this group after it is destroyed
            (gloo, torch 2.11 to 2.13).
    """
    if dist.is_initialized():
        return
    device = current_accelerator()
    if device is not None:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        options: dict[str, Any] = {}
        if keys:
            store, rank, size = next(iter(rendezvous("env://")))
            options = {"store": dist.PrefixStore(keys, store), "rank": rank, "world_size": size}
        dist.init_process_group(**options)
    else:
        dist.init_process_group(
            default_backend(device), store=dist.HashStore(), rank=0, world_size=1
        )


def device_of(device_mesh: DeviceMesh | None) -> torch.device:
    """Returns this rank's device in a mesh. None: in the mesh of all ranks."""
    if device_mesh is None:
        init_from_environment()
        return _local_device(device_type_of())
    return _local_device(device_mesh.device_type)


def _mesh_of_all_ranks() -> DeviceMesh:
    init_from_environment()
    return init_device_mesh(device_type_of(), (dist.get_world_size(),))


def _local_device(device_type: str) -> torch.device:
    device = torch.device(device_type)
    if is_accelerator(device):
        return torch.device(device_type, module_of(device).current_device())
    return device


def _make_axes(
    ranks: torch.Tensor,
    coordinate: list[int],
    device_mesh: DeviceMesh,
    device: torch.device,
    name: str,
) -> Axes:
    """Make the groups of a mesh of one row (inner) or a table (outer x inner) of ranks.

    They have the timeout and options of the group of ``device_mesh``. Their names begin with
    ``name``, which is the same on all ranks and unique.
    """

    def make(members: list[int], purpose: str) -> dist.ProcessGroup:
        return group_like(device_mesh.get_group(0), members, device, f"{name}/{purpose}")

    table = ranks if ranks.ndim == 2 else ranks.unsqueeze(0)
    row, column = coordinate if ranks.ndim == 2 else (0, coordinate[0])
    # Groups are made in the same order on all ranks.
    own_row, own_column = table[row].tolist(), table[:, column].tolist()
    inner = _make_axis(Axis.INNER, own_row, column, make, f"inner{row}")
    outer = _make_axis(Axis.OUTER, own_column, row, make, f"outer{column}")
    control = outer.reduce_group if inner.size == 1 else inner.reduce_group
    if outer.size > 1 and inner.size > 1:
        control = make(table.flatten().tolist(), "control")
    messages = control
    if control is not None and is_accelerator(device):
        messages = make(table.flatten().tolist(), "messages")
    return control, messages, outer, inner


def _make_axis(
    axis: Axis,
    ranks: list[int],
    place: int,
    make: Callable[[list[int], str], dist.ProcessGroup],
    name: str,
) -> MeshAxis:
    if len(ranks) == 1:
        return MeshAxis(axis, 1, 0, None, None)
    gather = make(ranks, f"{name}/gather")
    reduce = make(ranks, f"{name}/reduce")
    return MeshAxis(axis, len(ranks), place, gather, reduce)


def _connect(groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
    """Make the communicators of ``groups`` in this order. Collective.

    Otherwise the backend would make them at the first collective of each group, which runs in a
    hook of autograd, and the host would wait there.
    """
    if is_accelerator(device):
        for group in dict.fromkeys(each for each in groups if each is not None):
            probe = allocator.zeros(1, torch.float32, device)
            all_reduce_(probe, group, what="creation of communicators")
