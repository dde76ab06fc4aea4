"""Gathers on demand, where ranks use different units: evaluation and generation.

[Note: Gather rounds]
Sharded weights are gathered from all ranks, so ranks that compute different things have to take
part in each other's gathers. Within ``engine.together()`` a rank that is about to use a unit first
exchanges which one, and then takes part in the gathers of all units that ranks want in this round,
in module order. A rank that has finished wants none, and continues until no rank wants any. Ranks
can so run any number of forwards, over any units. This costs a small message for each gather, and
prefetching: which unit is next is known only when a rank comes to it.
"""

from __future__ import annotations

from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.host_message import HostMessage


class GatherRounds:
    """See the module docstring. Collective: all ranks make one, and exchange until none wants any.

    Args:
        ranks: all ranks of the model.
        num_units: of the engine.
    """

    def __init__(self, ranks: Ranks, num_units: int) -> None:
        self._message = HostMessage("together()", ranks)
        self._num_units = num_units

    def exchange(self, unit: int | None) -> list[int]:
        """Returns the units to gather in this round, on all ranks in this order.

        Args:
            unit: that this rank wants; None: it has finished.
        """
        wanted = bytearray(self._num_units)
        if unit is not None:
            wanted[unit] = 1
        self._message.start(wanted)
        return [number for number, flag in enumerate(self._message.finish()) if flag]
