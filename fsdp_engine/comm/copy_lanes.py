"""Lanes beside those of every engine: of copies between the device and other places, and of steps.

Optimizer state, main weights and gradients that lie elsewhere have two lanes, one for each
direction, and so have activations. Where state of an accelerator lies on a disk, a lane is a stream
and a thread, which submits the lane's operations and waits for files within. Waiting for a ticket
then blocks the host until the thread has submitted the operation. Optimizers that step beside the
next forward have a lane for that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fsdp_engine import backend
from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.comm.activity import ACTIVITY
from fsdp_engine.comm.lanes import (
    ComputeLane,
    DeviceLane,
    DeviceTicket,
    HostLane,
    Lane,
    Operation,
    PendingTicket,
    Ticket,
)

STATE_LANES = ("state in", "state out")
ACTIVATION_LANES = ("activations in", "activations out")
STEP_LANE = "optimizer step"


def make_state_lanes(device: torch.device, *, in_threads: bool = False) -> tuple[Lane, Lane]:
    """Lanes on which state that lies elsewhere comes to ``device`` and returns.

    Args:
        in_threads: their operations wait for files.
    """
    return make_copy_lanes(device, STATE_LANES, ThreadLane if in_threads else DeviceLane)


def make_step_lane(device: torch.device) -> ComputeLane:
    """A lane of an accelerator beside compute."""
    if (made := backend.current().step_lane(STEP_LANE)) is not None:
        given: ComputeLane = made
        return given
    return DeviceLane(device, module_of(device).Stream(device=device), name=STEP_LANE)


def make_copy_lanes(
    device: torch.device, names: tuple[str, str], kind: type[DeviceLane] | None = None
) -> tuple[Lane, Lane]:
    """Lanes of these names, for copies to ``device`` and from it; ``kind``: of an accelerator's."""
    if (made := backend.current().copy_lanes(names)) is not None:
        given: tuple[Lane, Lane] = made
        return given
    if is_accelerator(device):
        stream, kind = module_of(device).Stream, kind or DeviceLane
        into, out = (kind(device, stream(device=device), name=name) for name in names)
        return into, out
    into_host, out_of_host = (HostLane(name=name) for name in names)
    return into_host, out_of_host


def compute_waits_for(event: torch.Event) -> None:
    """What the model's own stream is given from here on comes after ``event``, and so does what
    lanes are given behind it."""
    event.wait()


def finish_compute(device: torch.device) -> None:
    """The host waits for what the model's own stream on ``device`` was given so far."""
    if is_accelerator(device):
        module_of(device).current_stream(device).synchronize()


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes the host wait for what the current stream of this thread on
    ``device`` was given so far."""
    module = module_of(device)
    event = module.Event()
    event.record(module.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """How long an accelerator works on what ``action`` gives it; the host waits for that."""
    module = module_of(device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    stream = module.current_stream(device)
    begin.record(stream)
    action()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


class ThreadTicket(PendingTicket):
    """An operation on a :class:`ThreadLane`.

    Attributes:
        label: its operation and unit.
        is_known: the host has waited for the thread, and so knows of an error.
    """

    __slots__ = ("_future", "_lane", "is_known", "label")
    done = False

    def __init__(self, lane: ThreadLane, label: str, future: Future[DeviceTicket]) -> None:
        self._lane = lane
        self._future = future
        self.label = label
        self.is_known = False

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks that take part; none: all."""
        return self._lane.ranks

    @property
    def has_ended(self) -> bool:
        """Whether the thread has submitted it, and the host knows of an error."""
        return self.is_known or (self._future.done() and self._future.exception() is None)

    def submitted(self) -> DeviceTicket:
        """Wait until the thread has submitted the operation; returns the ticket of its stream.

        Raises:
            RuntimeError, ValueError: it failed.
        """
        if (error := self._future.exception()) is not None:
            raise error.with_traceback(None)
        return self._future.result()

    def finish(self) -> DeviceTicket:
        """The same for the host, which then knows whether it failed."""
        ACTIVITY.waits = self
        try:
            return self.submitted()
        finally:
            ACTIVITY.waits = None
            self.is_known = True


class ThreadLane(DeviceLane):
    """A lane on an accelerator whose operations wait on the host for something else: a thread
    submits them to its stream. See [Note: Lanes]."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.Stream | None,
        ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        super().__init__(device, stream, ranks, name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._unfinished: deque[ThreadTicket] = deque()
        self._at_work: int | None = None  # identity of the thread

    def submit(  # type: ignore[override]
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> ThreadTicket:
        """See :class:`Lane`; the host does not wait."""
        while self._unfinished and self._unfinished[0].has_ended:
            self._unfinished.popleft()
        future = self._thread.submit(self._run, label, operation, after)
        ticket = ThreadTicket(self, label, future)
        self._unfinished.append(ticket)
        return ticket

    def _run(self, label: str, operation: Operation, after: Sequence[Ticket]) -> DeviceTicket:
        self._at_work = threading.get_ident()
        return super().submit(label, operation, after=after)

    def wait(self, *tickets: Ticket) -> None:
        """See :class:`Lane`; the thread waits until those of other threads are submitted."""
        super().wait(
            *(each.submitted() if isinstance(each, ThreadTicket) else each for each in tickets)
        )

    def drain(self) -> list[Exception]:
        """See :class:`Lane`. Within an operation (garbage is collected in any thread) only those
        before it."""
        errors: list[Exception] = []
        if threading.get_ident() != self._at_work:
            while self._unfinished:
                ticket = self._unfinished.popleft()
                try:
                    if not ticket.is_known:
                        ticket.finish()
                except (RuntimeError, ValueError) as error:
                    errors.append(error)
        return [*errors, *super().drain()]
