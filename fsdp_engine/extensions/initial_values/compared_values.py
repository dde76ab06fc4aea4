"""Choice of the initial values of sharded parameters; checks that all ranks have the same ones.

Each rank keeps its shard of every parameter, so shards are consistent only if all ranks have built
the same values. Three cases are distinguished before anything is changed:

    values of the ranks                          initial values of the sharded parameters
    ==========================================   ==========================================
    equal on all ranks                           these values; nothing is sent
    values on the first rank, meta on others     the first rank's, broadcast unit by unit
    different on some rank                       an error names the first different tensor;
                                                 with ``initial_values="rank0"`` the first rank's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_engine.comm.groups import Ranks
from fsdp_engine.extensions.initial_values.comparison import Comparison, Holdings
from fsdp_engine.units.build import SAME, EngineSetup, InitialValues

FIRST, EMPTY = "rank0", "empty"


class ComparedValues(InitialValues):
    """Initial values that are compared between ranks. See the module docstring and
    :class:`InitialValues`."""

    choices = (SAME, FIRST, EMPTY)

    def __init__(self, setup: EngineSetup, choice: str, *, from_first: bool = False) -> None:
        super().__init__(setup, choice, from_first=from_first)
        self._setup, self._choice = setup, choice
        compares = setup.data.size > 1 and choice != FIRST and not from_first
        self._holdings = Holdings(setup.plan, setup.experts, compare=compares)
        self.note = setup.plan.on_meta, self._holdings.digests

    def decide(
        self, notes: Sequence[Any], all_notes: Sequence[Any], ranks: Ranks, what: str
    ) -> InitialValues:
        """See :meth:`InitialValues.decide`."""
        comparison = Comparison(self._holdings, [digests for _, digests in notes], self._setup.data)
        has_meta = any(on_meta for on_meta, _ in all_notes)
        if self._choice == SAME and not has_meta:
            comparison.check_values()
            return self
        from fsdp_engine.extensions.initial_values.given_values import GivenValues

        return GivenValues(
            self._setup,
            comparison,
            from_first=self.from_first,
            takes_first=self._choice == FIRST,
            is_empty=self._choice == EMPTY,
            has_meta=has_meta,
            ranks=ranks,
            what=what,
        )
