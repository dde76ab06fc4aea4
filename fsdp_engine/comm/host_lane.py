"""Lanes of a CPU: see [Note: Lanes] in ``lanes.py``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.comm.activity import ACTIVITY, failure
from fsdp_engine.comm.lanes import (
    Meter,
    Operation,
    Steps,
    Ticket,
    is_profiled,
    labelled,
    name_of_wait,
    unit_of,
)


class HostTicket:
    """An operation on a :class:`HostLane`.

    Attributes:
        done: Whether the host has driven the operation to its end.
    """

    __slots__ = ("_after", "_failure", "_label", "_lane", "_operation", "_steps", "_works", "done")

    def __init__(
        self, lane: HostLane, label: str, operation: Operation, after: Sequence[Ticket]
    ) -> None:
        self._lane = lane
        self._label = label
        self._operation: Operation | None = operation
        self._after = after
        self._steps: Steps | None = None
        self._works: Sequence[Any] = ()
        self._failure: str | None = None
        self.done = False

    @property
    def label(self) -> str:
        """The label of the operation, which names its unit."""
        return self._label

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that take part. Empty: all."""
        return self._lane.ranks

    @property
    def is_started(self) -> bool:
        """Whether the operation has issued its communication."""
        return self._operation is None

    def start(self) -> None:
        """Wait for the predecessors, and issue the communication."""
        if self._operation is None:
            return
        for ticket in self._after:
            assert isinstance(ticket, HostTicket)
            ticket.finish()
        operation, self._operation = self._operation, None
        self._after = ()
        self._steps = operation()
        self._advance()

    def finish(self) -> None:
        """Drive the operation to its end.

        Raises:
            RuntimeError: The communication has failed, now or before. The message names the
                operation.
            ValueError: This rank and other ranks run different operations.
        """
        if self._operation is not None:
            self._lane.start_through(self)
        while not self.done:
            self._advance()

    def _advance(self) -> None:
        """Wait for the pending works, then take the next step."""
        if self._failure is not None:
            # A generator that has raised looks exhausted, which must not count as success.
            raise RuntimeError(self._failure)
        assert self._steps is not None
        profiled = is_profiled()
        try:
            if self._works:
                ACTIVITY.waits = self
                if profiled or self._lane.meters:
                    self._wait_seen()
                else:
                    for work in self._works:
                        work.wait()
                ACTIVITY.waits = None
            if profiled:
                with torch.profiler.record_function(f"fsdp_engine: {self._label}"):
                    works = next(self._steps, None)
            else:  # a profiler range costs time even without a profiler
                works = next(self._steps, None)
        except ValueError as error:
            self._failure = str(error)
            ACTIVITY.waits = None
            raise
        except RuntimeError as error:
            named = failure(self._label, self.ranks, error)
            self._failure = str(named)
            ACTIVITY.waits = None
            raise named from error
        self._works = works or ()
        if works is None:
            self.done = True
            self._steps = None
            ACTIVITY.done = self._label

    def _wait_seen(self) -> None:
        """Wait for the pending works, and report the wait to the profiler and to meters."""
        lane = self._lane
        begin = time.perf_counter()
        with labelled(f"compute waits for {name_of_wait(lane.name, unit_of(self._label))}"):
            for work in self._works:
                work.wait()
        seconds = time.perf_counter() - begin
        for meter in lane.meters:
            meter.waited(lane.name, self._label, seconds)


_DONE = SimpleNamespace(done=True)  # the ticket of work that is already done


class HostLane:
    """A lane of a CPU: a FIFO of operations. See [Note: Lanes] in ``lanes.py``.

    Args:
        ranks: Global ranks that take part, for messages. Empty: all.
        name: The name of the lane, such as one of ``LANES``.
    """

    runs_ahead = False

    def __init__(self, ranks: Sequence[int] = (), name: str = "") -> None:
        self.ranks = ranks
        self.name = name
        self.meters: tuple[Meter, ...] = ()
        self._waiting: deque[HostTicket] = deque()
        self._unfinished: deque[HostTicket] = deque()

    def submit(
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> HostTicket:
        """See :class:`Lane`."""
        del reads, writes
        # Operations that have not started wait for work on another lane. The host blocks for this
        # work now, one submission later, so that the lane advances without a polling thread.
        while self._waiting:
            self._waiting.popleft().start()
        unfinished = self._unfinished
        while unfinished and unfinished[0].done:
            unfinished.popleft()
        ACTIVITY.last = label
        held_up_by = [each for each in after if not each.done]
        ticket = HostTicket(self, label, operation, held_up_by)
        unfinished.append(ticket)
        if held_up_by:
            self._waiting.append(ticket)
        else:
            ticket.start()
        return ticket

    def start_through(self, ticket: HostTicket) -> None:
        """Start all operations up to ``ticket``, and ``ticket`` itself."""
        while self._waiting and not ticket.is_started:
            self._waiting.popleft().start()
        ticket.start()

    def record(self) -> Ticket:
        """See :class:`Lane`. Called on the compute lane only. Its work is done when the host calls
        this."""
        return _DONE

    def wait(self, *tickets: Ticket) -> None:
        """See :class:`Lane`. The host blocks."""
        for ticket in tickets:
            if not ticket.done:
                assert isinstance(ticket, HostTicket)
                ticket.finish()

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """See :class:`Lane`."""

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """See :class:`Lane`."""
        action()

    def drain(self) -> list[Exception]:
        """See :class:`Lane`."""
        errors: list[Exception] = []
        while self._unfinished:
            try:
                self._unfinished.popleft().finish()
            except (RuntimeError, ValueError) as error:
                errors.append(error)
        self._waiting.clear()
        return errors
