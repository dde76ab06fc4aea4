"""The homes of an engine's state, and the lanes that copy it to the device and back."""

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

# Roles in the memory ledger, by role of `fe.Offload`.
LEDGER_ROLES = {"optimizer_state": "optimizer", "main_weights": "main", "gradients": "grad"}
STAGING_ROLE = "staging"
# Names of the lanes for copies, and of the lane for steps that run concurrently with forward.
STATE_COPIES, STEP_LANE = "state", "optimizer step"


class Offloading:
    """Moves the offloaded state of one engine. See ``docs/internals/offload.md``.

    Args:
        offload: The places of state.
        memory: The memory manager of the engine.
        compute: The compute lane of the engine.
        files: Existing files, by role.

    Attributes:
        offload, memory: The arguments.
        compute: The engine's compute lane; within :meth:`beside_compute` the lane that steps.
        state_in, state_out: The lanes for copies to the device and from it.
        overlaps_forward: Whether steps can run concurrently with the next forward.
        steps_on_host: Whether optimizers step in host memory.
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
        self._threads = DiskThreads()  # Threads start with their first call.
        self._staging = self._make_staging() if is_staged else []
        self._moved = {role for role in ROLES if offload.moves(role, memory.device)}

    def moves(self, role: str) -> bool:
        """Returns whether the state of a role is stored outside of the device."""
        return role in self._moved

    def homes(self, role: str) -> Homes:
        """Returns the factory for homes of an offloaded role. On a disk, each role has a file.

        Raises:
            OSError: The folder cannot be written.
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
        """Returns a staging buffer for each direction."""
        device, pinned = self.memory.device, self.offload.pin_memory
        made = [Staging(partial(mark, device), pinned=pinned) for _ in self.lanes]
        for each in made:
            self.memory.book_elsewhere(each, HOST, STAGING_ROLE, each.bytes)
        return made

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """The lanes for copies to the device and from it."""
        return self.state_in, self.state_out

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        """Context within which steps run on a separate lane, after the submitted compute work."""
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
        """Wait for all copies and steps; returns their errors and does not raise."""
        steps = () if self._step_lane is None else (self._step_lane,)
        return [error for lane in (*steps, *self.lanes) for error in lane.drain()]

    def wait(self) -> None:
        """Wait until all copies to homes are done. Compute waits for pending steps.

        Raises:
            ValueError, RuntimeError: A copy failed.
        """
        finish_pending_steps()
        for error in self.state_out.drain():
            raise error
