"""Determines the initial values of sharded parameters.

    values of the ranks                          initial values of the sharded parameters
    ==========================================   ==========================================
    equal on all ranks                           these; nothing is sent
    values on the first rank, meta on others     the first rank's, broadcast unit by unit
    meta on all ranks                            the modules' own, from one seed; with
                                                 ``initial_values="empty"`` none
    different on some rank                       an error names the first different tensor;
                                                 with ``initial_values="rank0"`` the first rank's

Which of these applies is decided before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp_engine import backend
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.extensions.initial_values.comparison import Comparison, Holdings
from fsdp_engine.units.build import SAME, EngineCommunicators, InitialValues
from fsdp_engine.units.plan import Plan, PlannedUnit

if TYPE_CHECKING:
    from fsdp_engine.extensions.initial_values.materialize import ModuleTree

FIRST, EMPTY = "rank0", "empty"


class GivenValues(InitialValues):
    """See the module docstring, and the class."""

    choices = (SAME, FIRST, EMPTY)

    def __init__(
        self,
        plan: Plan,
        choice: str,
        data: DataMesh,
        experts: DataMesh | None = None,
        *,
        from_first: bool = False,
    ) -> None:
        super().__init__(plan, choice, data, experts, from_first=from_first)
        self._choice = choice
        self._data = data
        self._plan = plan
        compares = data.size > 1 and choice != FIRST and not from_first
        self._holdings = Holdings(plan, experts, compare=compares)
        self.note = plan.on_meta, self._holdings.digests
        self._lacks = ""
        self._tree: ModuleTree | None = None
        # Names of tensors that get memory here, and their values later.
        self._missing: list[str] = []
        if plan.on_meta:
            from fsdp_engine.extensions.initial_values.materialize import find_lacking

            self._lacks = find_lacking(plan.root)
            if choice == EMPTY:
                self._missing = [name for name, value in _saved(plan.root) if value.is_meta]
        # Parameters and buffers are those of the first rank, which alone needs to have any.
        self._are_firsts = False
        self._seed = 0
        self._error: Exception | None = None

    def decide(
        self, notes: Sequence[Any], all_notes: Sequence[Any], ranks: Ranks, what: str
    ) -> None:
        """See the class.

        Raises:
            ValueError: on all ranks: values differ, the first rank has not got one that others
                have, or a module on the meta device cannot make its own.
        """
        comparison = Comparison(self._holdings, [digests for _, digests in notes], self._data)
        self._are_firsts = self._choice == FIRST
        if comparison.metas_differ:
            from fsdp_engine.extensions.initial_values.first_rank import check_first_has_all

            check_first_has_all(comparison, self._lacks)
            self._are_firsts = True
        elif self._lacks and self._choice != EMPTY:
            raise ValueError(self._lacks)
        elif self._choice != FIRST:
            comparison.check_values()
        self.from_first |= self._are_firsts
        if any(on_meta for on_meta, _ in all_notes):
            seed = int(torch.randint(2**31, (), device="cpu")) if self._plan.on_meta else 0
            self._seed = agree(what, None, ranks.control_group, seed)[0]

    def give(self, index: int, planned: PlannedUnit, communicators: EngineCommunicators) -> None:
        """See the class. A rank whose modules raise continues with the values in its memory, so
        that all ranks issue the same collectives; :meth:`finish` raises on all ranks."""
        if not self._plan.on_meta:
            return
        from fsdp_engine.extensions.initial_values.materialize import ModuleTree, materialize

        if self._tree is None:
            self._tree = ModuleTree(self._plan.root)
        records = [
            record
            for part in planned.buffers
            # The others' values come from there, so they need none.
            if not self._are_firsts or communicators.of(part.kind)[1].mesh.is_first
            for record in part.records
        ]
        try:
            seeds = (self._seed + index, self._seed)
            device = communicators.data.mesh.device
            materialize(self._tree, records, device, *seeds, is_empty=self._choice == EMPTY)
        except Exception as caught:
            self._error = self._error or caught

    def finish(self, model: nn.Module, communicators: EngineCommunicators, num_units: int) -> None:
        """See the class.

        Raises:
            Exception: a module on the meta device could not give itself values, on some rank; the
                model is of no use any more.
        """
        mesh = communicators.data.mesh
        checks = self._plan.on_meta or self._are_firsts
        try:
            if self._tree is not None:
                from fsdp_engine.extensions.initial_values.materialize import materialize_buffers

                seed, has_values = self._seed + num_units, not self._are_firsts or mesh.is_first
                materialize_buffers(
                    self._tree, mesh.device, seed, values=has_values, is_empty=self._choice == EMPTY
                )
            super().finish(model, communicators, num_units)
            if checks and mesh.device.type != "meta" and backend.current().has_values:
                from fsdp_engine.extensions.initial_values.materialize import check_attributes

                check_attributes(model)
        except Exception as caught:
            self._error = self._error or caught
        if checks:
            what = "giving values to modules on the meta device"
            try:
                agree(what, self._error, communicators.ranks.control_group)
            except Exception as raised:
                raised.add_note("The model is half built: make a new one before the next shard()")
                raise
        elif self._error is not None:
            raise self._error
        if self._are_firsts:
            from fsdp_engine.extensions.initial_values.first_rank import broadcast_buffers

            experts = communicators.expert.mesh if communicators.expert is not None else None
            broadcast_buffers(model, mesh, experts)

    def started(self, engine: Any) -> None:
        """See the class."""
        if self._missing:
            engine.missing_values.mark_empty(self._missing)


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the model's state dict, whatever its hooks make of it."""
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        for name, value in tensors.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value
