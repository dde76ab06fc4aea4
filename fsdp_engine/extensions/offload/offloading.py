"""The homes of an engine's state, and the lanes by which it comes to the device and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fsdp_engine import backend
from fsdp_engine.comm.copy_lanes import make_copy_lanes, make_other_lanes, mark
from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.comm.lanes import ComputeLane, Lane
from fsdp_engine.comm.pending_steps import finish_pending_steps
from fsdp_engine.extensions.offload.disk_memory import DiskFile, DiskThreads
from fsdp_engine.extensions.offload.disk_staging import Staging
from fsdp_engine.extensions.offload.home import DiskHome, Home, Homes, HostHome, StagedHome
from fsdp_engine.extensions.offload.places import (
    DISK,
    HOST,
    ROLES,
    OffloadPlaces,
    computes_elsewhere,
)
from fsdp_engine.extensions.offload.thread_lane import ThreadLane
from fsdp_engine.memory.allocator import Memory

# Of ledgers, by role of :class:`~fsdp_engine.Offload`.
LEDGER_ROLES = {"optimizer_state": "optimizer", "main_weights": "main", "gradients": "grad"}
STAGING_ROLE = "staging"
# Names of copies of state, and of the lane of steps beside forward.
STATE_COPIES, STEP_LANE = "state", "optimizer step"


class Offloading:
    """What moves the state of one engine. See ``docs/internals/offload.md``.

    Args:
        offload: says where state lies.
        memory: The memory of the engine, on its device.
        compute: the engine's lane.
        files: by role, those that there are already.

    Attributes:
        offload, memory: see the arguments.
        compute: the engine's lane; within :meth:`beside_compute` the one that steps.
        state_in, state_out: lanes.
        overlaps_forward: steps can run beside the next forward.
        steps_on_host: optimizers step where state lies.
    """

    def __init__(
        self, offload: OffloadPlaces, memory: Memory, compute: Lane, files: Mapping[str, DiskFile]
    ) -> None:
        self.memory = memory
        self.compute = compute
        is_staged = DISK in offload.places.values() and computes_elsewhere(memory.device)
        kind = ThreadLane if is_staged else DeviceLane
        self.state_in, self.state_out = make_copy_lanes(memory.device, STATE_COPIES, kind)
        self.overlaps_forward = offload.overlap_forward and compute.runs_ahead
        self._step_lane: ComputeLane | None = None
        if self.overlaps_forward:
            (self._step_lane,) = make_other_lanes(memory.device, [STEP_LANE])
        self.steps_on_host = offload.step_on == HOST
        self.offload = offload
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
        place, memory = self.offload.places[role], self.memory

        def book(home: Home) -> None:
            memory.book_elsewhere(home, place, LEDGER_ROLES[role], home.bytes)

        if place != DISK or not backend.current().has_values:
            return Homes(book, partial(HostHome, pinned=self.offload.pin_memory))
        assert self.offload.folder is not None
        file = self._files.pop(role, None) or DiskFile(Path(self.offload.folder))
        if self._staging:
            into, out = self._staging
            return Homes(book, partial(StagedHome, file=file, into=into, out=out))
        return Homes(book, partial(DiskHome, file=file, threads=self._threads))

    def _make_staging(self) -> list[Staging]:
        """One for each direction."""
        device, pinned = self.memory.device, self.offload.pin_memory
        made = [Staging(partial(mark, device), pinned=pinned) for _ in self.lanes]
        for each in made:
            self.memory.book_elsewhere(each, HOST, STAGING_ROLE, each.bytes)
        return made

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Those of copies to the device and from it."""
        return self.state_in, self.state_out

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        """Within it, steps are submitted to a lane of their own, behind the work of compute."""
        lane, compute = self._step_lane, self.compute
        assert lane is not None
        lane.wait(compute.record())
        self.compute = lane
        try:
            with lane.entered():
                yield
        finally:
            self.compute = compute

    def drain(self) -> list[Exception]:
        """End all copies and steps; what failed is returned, not raised."""
        steps = () if self._step_lane is None else (self._step_lane,)
        return [error for lane in (*steps, *self.lanes) for error in lane.drain()]

    def wait(self) -> None:
        """Until all copies to homes are done; compute waits for pending steps.

        Raises:
            ValueError, RuntimeError: one failed.
        """
        finish_pending_steps()
        for error in self.state_out.drain():
            raise error
