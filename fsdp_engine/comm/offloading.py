"""The homes of an engine's state, and the lanes by which it comes to the device and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fsdp_engine.accelerator import is_simulated
from fsdp_engine.comm.lanes import Lane, make_state_lanes, mark
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.memory.disk_memory import DiskFile, DiskThreads
from fsdp_engine.memory.disk_staging import Staging
from fsdp_engine.memory.home import DiskHome, Home, HomePart, Homes, HostHome, StagedHome
from fsdp_engine.offload import DISK, HOST, ROLES, Offload, computes_elsewhere

# Of ledgers, by role of :class:`~fsdp_engine.Offload`.
LEDGER_ROLES = {"optimizer_state": "optimizer", "main_weights": "main", "gradients": "grad"}
STAGING_ROLE = "staging"


class OffloadedBuffer(NamedTuple):
    """Homes of a buffer.

    Attributes:
        params: its sharded parameters.
        main: the home of their slices; None: they are on the device.
        gradients: the home of their gradients; None: they are on the device.
    """

    params: Sequence[Tensor]
    main: Home | None
    gradients: HomePart | None


class Offloading:
    """What moves the state of one engine. See ``docs/offload.md``.

    Args:
        offload: says where state lies.
        memory: of the engine, on its device.
        compute: the engine's lane.
        files: by role, those that there are already.

    Attributes:
        memory, compute: see the arguments.
        state_in, state_out: lanes.
        steps_on_host: optimizers step where state lies.
    """

    def __init__(
        self, offload: Offload, memory: Memory, compute: Lane, files: Mapping[str, DiskFile]
    ) -> None:
        self.memory = memory
        self.compute = compute
        is_staged = DISK in offload.places.values() and computes_elsewhere(memory.device)
        self.state_in, self.state_out = make_state_lanes(memory.device, in_threads=is_staged)
        self.steps_on_host = offload.step_on == HOST
        self._offload = offload
        self._files = dict(files)
        self._threads = DiskThreads()  # start with their first work
        self._staging = self._make_staging() if is_staged else []
        self._moved = {role for role in ROLES if offload.moves(role, memory.device)}

    def moves(self, role: str) -> bool:
        """Whether a role of :class:`~fsdp_engine.Offload` lies elsewhere."""
        return role in self._moved

    def homes(self, role: str) -> Homes:
        """Returns what makes homes of a role that lies elsewhere: on a disk in a file of its own.

        Raises:
            OSError: the folder cannot be written.
        """
        place, memory = self._offload.places[role], self.memory

        def book(home: Home) -> None:
            memory.book_elsewhere(home, place, LEDGER_ROLES[role], home.bytes)

        if place != DISK or is_simulated():
            return Homes(book, partial(HostHome, pinned=self._offload.pin_memory))
        assert self._offload.folder is not None
        file = self._files.pop(role, None) or DiskFile(Path(self._offload.folder))
        if self._staging:
            into, out = self._staging
            return Homes(book, partial(StagedHome, file=file, into=into, out=out))
        return Homes(book, partial(DiskHome, file=file, threads=self._threads))

    def _make_staging(self) -> list[Staging]:
        """One for each direction."""
        device, pinned = self.memory.device, self._offload.pin_memory
        made = [Staging(partial(mark, device), pinned=pinned) for _ in self.lanes]
        for each in made:
            self.memory.book_elsewhere(each, HOST, STAGING_ROLE, each.bytes)
        return made

    @property
    def casts_at_home(self) -> bool:
        """Whether the host casts main weights where they lie. A disk would have to write them."""
        return self._offload.main_weights == HOST

    @cached_property
    def main_weights(self) -> Homes | None:
        """Makes homes of main weights; None: they stay on the device."""
        return self.homes("main_weights") if self.moves("main_weights") else None

    @cached_property
    def gradients(self) -> Homes | None:
        """Makes homes of gradients; None: they stay on the device."""
        return self.homes("gradients") if self.moves("gradients") else None

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Those of copies to the device and from it."""
        return self.state_in, self.state_out

    def drain(self) -> list[Exception]:
        """End all copies; what failed is returned, not raised."""
        return [error for lane in self.lanes for error in lane.drain()]

    def wait(self) -> None:
        """Until all copies to homes are done.

        Raises:
            ValueError, RuntimeError: one failed.
        """
        for error in self.state_out.drain():
            raise error
