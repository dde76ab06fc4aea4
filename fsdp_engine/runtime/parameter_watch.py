"""A seam for extensions that inspect full parameters before and after modules compute with them.

The methods of these classes do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer


class UnitWatch:
    """Inspects the full parameters of one unit.

    Args:
        buffers: The buffers of the unit.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer]) -> None:
        del buffers

    def begin(self) -> None:
        """Called before full parameters are installed in the modules."""

    def end(self) -> None:
        """Called before full parameters are removed from the modules or freed."""

    def reset(self) -> None:
        """Drop the record of the running use. Called after an exception has ended the use (changes
        of full parameters are then dropped), and after the unit has increased the version counters
        of its full parameters."""


class ModelWatch:
    """Called at the start and end of a model's forwards and backwards.

    Args:
        engine: The engine of the model, whose units and communicators are set already.
    """

    def __init__(self, engine: Any) -> None:
        del engine

    def begin_forward(self) -> None:
        """Called when a forward begins."""

    def end_forward(self) -> None:
        """Called when a forward has ended."""

    def check(self, *, ranks_differ: bool) -> None:
        """Called when the outermost forward or backward has ended, so that collectives may be
        called.

        Args:
            ranks_differ: Ranks may use different units.
        """

    def reset(self) -> None:
        """Called after an exception has ended a forward or backward."""
