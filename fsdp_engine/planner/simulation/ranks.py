"""The simulated ranks and their backend.

Tensors are on the CPU, and torch's backend is "fake". Two kinds of machines differ in the idle
memory that an engine keeps and in the scratch memory of a reduction: a host that computes itself
and communicates by gloo, and a device with collectives of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_engine.kernel_interface import Backend, lanes

if TYPE_CHECKING:
    from fsdp_engine.planner.simulation.clock import Clock, SimulatedLane


class SimulatedBackend(Backend):
    """The backend of a simulation, which the engine uses instead of a real one.

    Args:
        on_host, clock, moved: See :func:`simulated_ranks`.
    """

    has_values = False

    def __init__(
        self,
        on_host: bool,
        clock: Clock | None = None,
        moved: Callable[[Tensor, str], None] | None = None,
    ) -> None:
        self._on_host = on_host
        self._clock = clock
        self._moved = moved

    def runs_ahead(self, device: torch.device) -> bool:
        """See :meth:`Backend.runs_ahead`."""
        return not self._on_host

    def is_gloo(self, name: str) -> bool:
        """See :meth:`Backend.is_gloo`."""
        return self._on_host

    def lanes(self, device: torch.device) -> lanes.Lanes | None:
        """See :meth:`Backend.lanes`."""
        return None if self._clock is None else self._clock.make_lanes(device)

    def other_lanes(self, names: Sequence[str]) -> Sequence[SimulatedLane] | None:
        """See :meth:`Backend.other_lanes`."""
        return None if self._clock is None else self._clock.make_other_lanes(names)

    def booked_elsewhere(self, tensor: Tensor, place: str) -> None:
        """See :meth:`Backend.booked_elsewhere`."""
        if self._moved is not None:
            self._moved(tensor, place)


@contextmanager
def simulated_ranks(
    sizes: Sequence[int],
    *,
    on_host: bool = False,
    clock: Clock | None = None,
    moved: Callable[[Tensor, str], None] | None = None,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    pipeline_rank: int = 0,
) -> Iterator[DeviceMesh]:
    """Make this process a rank of a mesh of ``sizes`` whose other ranks do not exist. Sent data is
    dropped, and received data is undefined. The groups are destroyed at the end.

    Args:
        sizes: The sizes of each data-parallel axis.
        on_host: Communicate as with gloo between CPUs, not as between devices.
        clock: Makes the lanes of engines. None: engines have the lanes of CPUs.
        moved: Called with each tensor whose memory is on the host or on a disk, and with its place.
        context_parallel, tensor_parallel, pipeline: See :func:`data_mesh_beside`.
        pipeline_rank: This process' coordinate on "pp"; its other coordinates are 0.

    Raises:
        RuntimeError: torch.distributed is already initialized.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "simulate: expected a process without process groups; found torch.distributed "
            "initialised. Simulate before init_process_group, or in a process of its own"
        )
    # This import also registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    num_ranks = math.prod(sizes) * tensor_parallel
    hook = sys.excepthook  # torch replaces it, to prefix error lines by the rank
    dist.init_process_group(
        "fake", store=FakeStore(), rank=pipeline_rank * num_ranks, world_size=pipeline * num_ranks
    )
    try:
        with SimulatedBackend(on_host, clock, moved).used():
            yield data_mesh_beside("cpu", sizes, context_parallel, tensor_parallel, pipeline)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def data_mesh_beside(
    device_type: str,
    sizes: Sequence[int],
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline: int = 1,
) -> DeviceMesh:
    """Returns the axes that parameters are sharded over, as a submesh of a root mesh of all ranks.

    Args:
        device_type: The device type of the mesh.
        sizes: The sizes of these axes, (inner,) or (outer, inner).
        context_parallel: Number of consecutive ranks of the inner axis that share sequences. If it
            is more than 1, the root mesh has the dimensions "dp" and "cp" instead of "inner".
        tensor_parallel: Number of consecutive ranks at each coordinate of these axes. If it is more
            than 1, the innermost dimension of the root mesh is "tp".
        pipeline: Number of such meshes side by side. If it is more than 1, the outermost dimension
            of the root mesh is "pp".
    """
    names = ["outer", "inner"][-len(sizes) :]
    shape = {"pp": pipeline, **dict(zip(names, sizes, strict=True))}
    if context_parallel > 1:
        shape = {**shape, "dp": shape["inner"] // context_parallel, "cp": context_parallel}
        del shape["inner"]
    shape["tp"] = tensor_parallel
    for name in ("pp", "tp"):
        if shape[name] == 1:
            del shape[name]
    root = init_device_mesh(device_type, (*shape.values(),), mesh_dim_names=(*shape,))
    if context_parallel > 1:
        inner = root["dp", "cp"]._flatten("inner")
        return inner if len(sizes) == 1 else DeviceMesh._concatenate([root["outer"], inner])
    return root if list(shape) == names else root[(*names,)]
