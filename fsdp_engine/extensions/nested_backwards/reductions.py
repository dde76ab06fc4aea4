"""Reductions of backwards within a backward.

[Note: Passes]
A nested backward ([Note: Nested backwards] in ``scheduler.py``) can compute gradients of a unit
whose reduction is already submitted. Then the queue is completed like that of a microbatch, and
another *pass* begins. Ranks may need different numbers of passes. If passes reduce (over axes that
shard gradients), a rank sends a message when it begins another pass, without waiting. When the
outermost backward ends, ranks exchange whether any has begun another pass, and take part in it with
zeros. Then the last axes are reduced. If ranks use different units, the votes of the schedule
replace these messages ([Note: Gather rounds] in ``different_modules/gather_rounds.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fsdp_engine.comm.host_message import HostMessage
from fsdp_engine.runtime.reductions import ReductionQueue, Reductions
from fsdp_engine.runtime.unit import Unit


class NestedReductions(Reductions):
    """Reductions in passes. See the module docstring."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_nested = False  # whether backwards run within the current one
        self._sends_passes = any(unit.num_staged for unit in self._units)
        self._message_of_passes: HostMessage | None = None

    def begin_backward(self, *, inputs_only: bool = False) -> None:
        """See the base class. A backward within another one continues its pass."""
        if not self._is_nested or self._queue is None:
            super().begin_backward(inputs_only=inputs_only)

    def end_backward(self) -> None:
        """See the base class. A pass ends with the outermost backward, or when another pass
        begins."""
        if not self._is_nested:
            super().end_backward()

    def reset(self) -> None:
        """See the base class."""
        self._is_nested = False
        self._message_of_passes = None
        super().reset()

    def begin_nested(self) -> None:
        """Prepare for a backward within the current one, or within a backward in which this engine
        has no uses so far."""
        queue = self._queue
        if queue is not None and queue.is_last:
            # All ranks begin nested backwards, but may have submitted different reductions of the
            # queue before. So all of its reductions are submitted first.
            with self._on_stream():
                self._end_pass(queue)
                self._close(queue)
        self._is_nested = True
        if queue is not None and queue.is_last:
            self.begin_backward()

    def end_nested(self) -> None:
        """Reduce the remaining gradients when the outermost backward ends, and publish them."""
        if self._queue is None:
            self.begin_backward()
        queue = self._queue
        assert queue is not None
        with self._on_stream():
            self._end_pass(queue)
            while self._has_another_pass():
                queue = self._begin_pass(queue)
                self._end_pass(queue)
            self._is_nested = False
            queue.is_last = self._is_last(queue.partial)
            if queue.is_last:
                self._check_last(queue.partial)
                self.wait()  # The last axes reduce the sums of all passes.
                self._start_last(queue.partial)
            self._close(queue)

    def _is_last(self, partial: Collection[int]) -> bool:
        return not self._is_nested and super()._is_last(partial)

    def _reduce_again(self, queue: ReductionQueue, unit: Unit) -> ReductionQueue:
        if not self._is_nested:
            return super()._reduce_again(queue, unit)
        self._end_pass(queue)
        self._send(b"\1")
        return self._begin_pass(queue)

    def _begin_pass(self, queue: ReductionQueue) -> ReductionQueue:
        """Returns the queue of the pass after that of ``queue``."""
        assert self._step is not None
        self._step.reduced_units.update(queue.reduced)
        self._queue = ReductionQueue(
            self.order, is_last=False, inputs_only=queue.inputs_only, partial=queue.partial
        )
        return self._queue

    def _end_pass(self, queue: ReductionQueue) -> None:
        """Reduce the units that remain in ``queue``, with the gradients computed so far."""
        queue.autograd_is_done = True
        self._advance(queue)
        self.schedule.await_ranks(queue.place)

    def _has_another_pass(self) -> bool:
        """Returns whether another rank has begun another pass and this one has not. Collective."""
        if self.schedule.ranks_differ:
            return self.schedule.has_another_pass()
        self._send(b"\0")
        message, self._message_of_passes = self._message_of_passes, None
        return message is not None and message.finish() != [0]

    def _send(self, content: bytes) -> None:
        """Send to other ranks whether this one has begun another pass."""
        if not self._sends_passes or self.schedule.ranks_differ:
            return
        if self._message_of_passes is not None:
            self._message_of_passes.finish()
        self._message_of_passes = HostMessage("the message of nested backwards", self.ranks)
        self._message_of_passes.start(bytearray(content))
