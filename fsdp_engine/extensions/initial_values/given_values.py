"""Initial values that a rank has not built itself.

Tensors on the meta device are initialized unit by unit, broadcast from the first rank, or allocated
for values that are loaded later. ``compared_values.py`` selects between these cases before anything
is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine import backend
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.extensions.initial_values.comparison import Comparison
from fsdp_engine.extensions.initial_values.first_rank import broadcast_buffers, check_first_has_all
from fsdp_engine.extensions.initial_values.materialize import (
    ModuleTree,
    check_attributes,
    find_lacking,
    materialize,
    materialize_buffers,
)
from fsdp_engine.units.build import SAME, EngineCommunicators, EngineSetup, InitialValues
from fsdp_engine.units.plan import PlannedUnit


class GivenValues(InitialValues):
    """Assigns initial values; see the module docstring. The constructor is collective.

    Args:
        setup: The setup of the engine.
        comparison: The comparison of all data-parallel ranks.
        from_first: See :class:`InitialValues`.
        takes_first: Use the parameters and buffers of the first rank, also if no tensor is on the
            meta device.
        is_empty: Allocate tensors that are on the meta device on all ranks, without values.
        has_meta: Whether any rank of the model has tensors on the meta device.
        ranks: All ranks of the model.
        what: Name of the calling function, for messages.

    Raises:
        ValueError: Values differ, the first rank lacks a value that another rank has, or a module
            on the meta device cannot initialize itself. Raised on all ranks.
    """

    def __init__(
        self,
        setup: EngineSetup,
        comparison: Comparison,
        *,
        from_first: bool,
        takes_first: bool,
        is_empty: bool,
        has_meta: bool,
        ranks: Ranks,
        what: str,
    ) -> None:
        super().__init__(setup, SAME)
        self._plan = plan = setup.plan
        self._is_empty = is_empty
        self._tree: ModuleTree | None = None
        self._error: Exception | None = None
        lacks = find_lacking(plan.root) if plan.on_meta else ""
        # Whether parameters and buffers are copied from the first rank, which alone needs values.
        self._are_firsts = takes_first
        if comparison.metas_differ:
            check_first_has_all(comparison, lacks)
            self._are_firsts = True
        elif lacks and not is_empty:
            raise ValueError(lacks)
        elif not takes_first:
            comparison.check_values()
        self.from_first = from_first or self._are_firsts
        # Names of tensors that are allocated here and get their values later.
        self._missing: list[str] = []
        if is_empty:
            self._missing = [name for name, value in _saved(plan.root) if value.is_meta]
        self._seed = 0
        if has_meta:
            seed = int(torch.randint(2**31, (), device="cpu")) if plan.on_meta else 0
            self._seed = agree(what, None, ranks.control_group, seed)[0]

    def give(self, index: int, planned: PlannedUnit, communicators: EngineCommunicators) -> None:
        """See :class:`InitialValues`. If a module raises, the rank continues with uninitialized
        values, so that all ranks issue the same collectives; :meth:`finish` raises on all ranks."""
        if not self._plan.on_meta:
            return
        if self._tree is None:
            self._tree = ModuleTree(self._plan.root)
        records = [
            record
            for part in planned.buffers
            # Other ranks receive the values of the first rank, so they initialize nothing.
            if not self._are_firsts or communicators.of(part.kind)[1].mesh.is_first
            for record in part.records
        ]
        try:
            seeds = (self._seed + index, self._seed)
            device = communicators.data.mesh.device
            materialize(self._tree, records, device, *seeds, is_empty=self._is_empty)
        except Exception as caught:
            self._error = self._error or caught

    def finish(self, model: nn.Module, communicators: EngineCommunicators, num_units: int) -> None:
        """See :class:`InitialValues`.

        Raises:
            Exception: A module on the meta device could not initialize itself on some rank. The
                model cannot be used afterwards.
        """
        mesh = communicators.data.mesh
        checks = self._plan.on_meta or self._are_firsts
        try:
            if self._tree is not None:
                seed, has_values = self._seed + num_units, not self._are_firsts or mesh.is_first
                materialize_buffers(
                    self._tree, mesh.device, seed, values=has_values, is_empty=self._is_empty
                )
            super().finish(model, communicators, num_units)
            if checks and mesh.device.type != "meta" and backend.current().has_values:
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
            experts = communicators.expert.mesh if communicators.expert is not None else None
            broadcast_buffers(model, mesh, experts)

    def started(self, engine: Any) -> None:
        """See :class:`InitialValues`."""
        if self._missing:
            engine.missing_values.mark_empty(self._missing)


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of the model's state dict, without the effects of its hooks."""
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        for name, value in tensors.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value
