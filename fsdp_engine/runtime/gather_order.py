"""Who decides which unit is gathered next, and what ranks tell each other in order to stay in step.

A seam. Here all ranks use the same units in one order, so each rank issues the gathers of its own
uses and no messages are needed. An extension for ranks that differ has a subclass, which
:meth:`.Scheduler.use_gather_order` swaps in and out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.host_message import HostMessage
from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.runtime.record import Record, Use
from fsdp_engine.runtime.unit import Call, Unit


class Place(enum.IntEnum):
    """Where a rank waits until all others are there, too."""

    BACKWARD = 0
    LAST_BACKWARD = 1
    OUTERMOST = 2
    CALL = 3
    EXIT = 4


class GatherOrder:
    """See the module docstring.

    Args:
        ranks: all ranks of the model.
        record: the recorded order of uses.
        sends_passes: backwards reduce gradients, so that ranks have to agree on how many passes
            nested backwards take ([Note: Passes] in ``reductions.py``).

    Attributes:
        ranks_differ: ranks may use different units.
        record: see the argument.
    """

    ranks_differ = False

    def __init__(self, ranks: Ranks, record: Record, *, sends_passes: bool) -> None:
        self.record = record
        self._ranks = ranks
        self._sends_passes = sends_passes
        self._passes: HostMessage | None = None

    def begin_forward(self) -> None:
        """The outermost module of a forward is called."""

    def end_forward(self) -> None:
        """A forward is over."""

    def begin_backward(self) -> None:
        """A backward begins."""

    def end_backward(self) -> None:
        """A backward is over."""

    def check_backward(self, call: Call, order: GatherOrder) -> None:
        """The backward of a call begins whose forward ran in this order. Now there is ``order``."""

    def gather(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """On return the gather of ``unit`` for a use of ``phase`` is issued. See
        :meth:`.Unit.gather`."""
        if unit.needs_gather(phase):
            unit.gather(phase, compute_now)

    def window(self, window: Sequence[Use]) -> Sequence[Use]:
        """Returns the units to prefetch at the present use, of the ``window`` that follows from the
        recorded order."""
        return window

    def await_ranks(self, place: Place = Place.CALL) -> None:
        """This rank needs no gather until all ranks are at ``place``. Called before each collective
        outside of the recorded order, and before weights change."""

    def await_reductions(self, place: Place) -> None:
        """This rank is about to wait for the reductions that it has submitted."""

    def before_reduction(self, num_submitted: int, place: Place) -> None:
        """This rank is about to submit a reduction, the ``num_submitted``-th of its backward."""

    def after_reduction(self, num_submitted: int) -> None:
        """This rank has submitted that many reductions in its backward."""

    def begin_pass(self) -> None:
        """This rank begins another pass of reductions."""
        self._send_pass(b"\1")

    def has_another_pass(self) -> bool:
        """Whether another rank has begun another pass, where this one has not. Collective."""
        self._send_pass(b"\0")
        message, self._passes = self._passes, None
        return message is not None and message.finish() != [0]

    def reset(self) -> None:
        """Drop what an exception has interrupted."""
        self._passes = None

    def _send_pass(self, content: bytes) -> None:
        if not self._sends_passes:
            return
        if self._passes is not None:
            self._passes.finish()
        self._passes = HostMessage("the message of nested backwards", self._ranks)
        self._passes.start(bytearray(content))
