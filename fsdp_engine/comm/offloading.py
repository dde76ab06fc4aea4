"""The homes of an engine's state, and the lanes by which it comes to the device and returns."""

from __future__ import annotations

from pathlib import Path

from fsdp_engine.comm.lanes import Lane, make_state_lanes
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.memory.disk_memory import DiskThreads
from fsdp_engine.memory.home import Homes
from fsdp_engine.offload import DISK, ROLES, Offload


class Offloading:
    """What moves the state of one engine. See ``docs/offload.md``.

    Args:
        offload: says where state lies.
        memory: of the engine, on its device.
        compute: the engine's lane.

    Attributes:
        memory, compute: see the arguments.
        state_in, state_out: lanes.
        steps_on_host: optimizers step where state lies.
    """

    def __init__(self, offload: Offload, memory: Memory, compute: Lane) -> None:
        self.memory = memory
        self.compute = compute
        self.state_in, self.state_out = make_state_lanes(memory.device)
        self.steps_on_host = offload.step_on == "host"
        disk = None
        if DISK in offload.places.values():
            assert offload.folder is not None
            disk = Homes(Path(offload.folder), DiskThreads())
        self._homes = {
            role: disk if getattr(offload, role) == DISK and disk is not None else Homes()
            for role in ROLES
            if offload.moves(role, memory.device)
        }

    def homes(self, role: str) -> Homes | None:
        """Makes those of a role of :class:`~fsdp_engine.Offload`; None: it stays on the device."""
        return self._homes.get(role)

    def moves(self, role: str) -> bool:
        """Whether a role of :class:`~fsdp_engine.Offload` lies elsewhere."""
        return role in self._homes

    def wait(self) -> None:
        """Until all copies to homes are done.

        Raises:
            ValueError: one failed.
        """
        for error in self.state_out.drain():
            raise error
