"""A seam: what sees the full parameters that modules compute with.

Here nothing does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer


class UnitWatch:
    """Sees the full parameters of one unit.

    Args:
        buffers: The buffers of the unit.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer]) -> None:
        del buffers

    def begin(self) -> None:
        """Full parameters are about to be put into the modules."""

    def end(self) -> None:
        """Full parameters are about to be taken out of the modules, or to be freed."""

    def reset(self) -> None:
        """An exception ended the use: what modules did to full parameters is dropped."""


class ModelWatch:
    """Sees the forwards and backwards of one model.

    Args:
        engine: has its units and communicators already.
    """

    def __init__(self, engine: Any) -> None:
        del engine

    def begin_forward(self) -> None:
        """A forward begins."""

    def end_forward(self) -> None:
        """A forward is over."""

    def check(self, *, ranks_differ: bool) -> None:
        """The outermost forward or backward is over on all ranks: messages can be sent.

        Args:
            ranks_differ: ranks may use different units.
        """

    def reset(self) -> None:
        """An exception ended a forward or backward."""
