"""The hardware of this process, on which the operations of engines are measured.

Measurements use the same lanes for copies between a device and pinned host memory, and the same
communicators for collectives, as an engine. The planner's ``calibrate`` measures machines with
this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.accelerator import is_accelerator
from fsdp_engine.comm.collectives import Communicator, Steps, all_reduce_
from fsdp_engine.comm.copy_lanes import device_seconds, finish_compute, make_copy_lanes
from fsdp_engine.comm.make_lanes import make_lanes
from fsdp_engine.comm.mesh import DataMesh, device_of, init_from_environment
from fsdp_engine.memory import allocator
from fsdp_engine.memory.host_memory import HostBlock
from fsdp_engine.strategies import Axis

Action = Callable[[], object]


class Hardware:
    """The device of this process, and the ranks that measure their devices at the same time.

    Args:
        device: The device of this process.
        mesh: The ranks that measure, with nodes on the outer axis and the ranks of a node on the
            inner axis. None: this process alone.
    """

    def __init__(self, device: torch.device, mesh: DataMesh | None = None) -> None:
        self.device = device
        self._mesh = mesh

    @classmethod
    def of_process(cls) -> Hardware:
        """Returns the hardware of this process alone, with its device."""
        return cls(device_of(None))

    @classmethod
    def of_all_ranks(cls, num_nodes: int, what: str) -> Hardware:
        """Returns the hardware of all ranks, with this rank's device. Collective.

        Args:
            num_nodes: Number of nodes. Each has the same number of consecutive ranks.
            what: The name of the operation, for error messages.
        """
        if not dist.is_initialized():
            init_from_environment(what)
        mesh = DataMesh.create(None, num_instances=num_nodes, what=what)
        return cls(mesh.device, mesh)

    @property
    def is_host(self) -> bool:
        """Whether the device is a CPU."""
        return not is_accelerator(self.device)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a node."""
        return 1 if self._mesh is None else self._mesh.inner.size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return 1 if self._mesh is None else self._mesh.outer.size

    @property
    def rank(self) -> int:
        """Index of this rank in the mesh."""
        return 0 if self._mesh is None else self._mesh.rank

    def agree(self, value: float) -> float:
        """Returns the maximum of ``value`` over all ranks. Collective."""
        if self._mesh is None:
            return value
        found = allocator.zeros(1, torch.float64, self.device).fill_(value)
        return float(all_reduce_(found, self._mesh.control_group, "max"))

    def seconds(self, action: Action) -> float:
        """Returns the seconds that the device takes for the work that ``action`` submits."""
        if not self.is_host:
            return device_seconds(self.device, action)
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    def finish(self) -> None:
        """Wait until the device has finished all submitted work."""
        finish_compute(self.device)

    def gather(self, axis: Axis) -> Callable[[Tensor], Iterator[Sequence[Any]]] | None:
        """Returns the in-place all-gather over the ranks of one axis; None: the axis has one rank.

        All groups of the axis gather at the same time. The result is an operation of a lane: a
        generator that yields the works to wait for.
        """
        group = None if self._mesh is None else self._mesh.axis(axis).gather_group
        return None if group is None else Communicator(group, self.device).all_gather

    def host_copies(self, num_bytes: int, small: int) -> dict[str, Action]:
        """Returns functions that copy between an accelerator and pinned host memory, by name:
        "into" the device, "out" of the device, "both" directions at the same time, and "small",
        a small copy into the device.

        Args:
            num_bytes: Size of each copy.
            small: Size of the copy "small" in bytes.
        """
        compute = make_lanes(self.device).compute
        lane_in, lane_out = make_copy_lanes(self.device, "state")
        blocks = [HostBlock(num_bytes, pinned=True) for _ in range(2)]
        hosts = [block.bytes.zero_() for block in blocks]
        there = [allocator.zeros(num_bytes, torch.uint8, self.device) for _ in range(2)]

        def both() -> None:
            begin = [compute.record()]
            compute.wait(
                lane_in.submit("bring", partial(_copied, there[0], hosts[0]), after=begin),
                lane_out.submit("return", partial(_copied, hosts[1], there[1]), after=begin),
            )

        return {
            "small": lambda: there[0][:small].copy_(hosts[0][:small], non_blocking=True),
            "into": lambda: there[0].copy_(hosts[0], non_blocking=True),
            "out": lambda: hosts[1].copy_(there[1], non_blocking=True),
            "both": both,
        }


def _copied(target: Tensor, source: Tensor) -> Steps:
    """Copy ``source`` to ``target``. An operation of a lane."""
    target.copy_(source, non_blocking=True)
    yield from ()
