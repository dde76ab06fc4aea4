"""Values of tensors on the meta device, those of the first rank, and values that are loaded later.

    values of the ranks                          initial values of the sharded parameters
    ==========================================   ==========================================
    values on the first rank, meta on others     the first rank's, broadcast unit by unit
    meta on all ranks                            the modules' own, from one seed; with
                                                 ``initial_values="empty"`` none
    equal or different, and                      the first rank's
    ``initial_values="rank0"``

Which of these applies is decided before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine import backend
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import broadcast_together_, gather_objects
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.extensions.initial_values.materialize import (
    ModuleTree,
    check_attributes,
    find_lacking,
    materialize,
    materialize_buffers,
)
from fsdp_engine.units.build import SAME, EngineCommunicators, InitialValues
from fsdp_engine.units.initial_values import Built, digest_of, has_experts
from fsdp_engine.units.plan import PlannedUnit

FIRST, EMPTY = "rank0", "empty"


class GivenValues(InitialValues):
    """See the module docstring.

    Args:
        built: what ranks have built.
        choice: what the user says.

    Raises:
        ValueError: on all ranks: values differ, the first rank has not got one that others have,
            or a module on the meta device cannot make its own.
    """

    choices = (SAME, FIRST, EMPTY)

    def __init__(self, built: Built, choice: str) -> None:
        plan = built.plan
        self._lacks = find_lacking(plan.root) if plan.on_meta else ""
        # Parameters and buffers are those of the first rank, which alone needs to have any.
        self._are_firsts = self._decide(built, choice)
        self.from_first = self._are_firsts
        self._is_empty = choice == EMPTY
        self._on_meta = plan.on_meta
        self._root = plan.root
        self._tree: ModuleTree | None = None
        # Names of tensors that get memory here, and their values later.
        self._missing: list[str] = []
        if self._is_empty:
            self._missing = [name for name, value in _saved(plan.root) if value.is_meta]
        self._seed = 0
        if built.has_meta:
            seed = int(torch.randint(2**31, (), device="cpu")) if plan.on_meta else 0
            self._seed = agree(built.what, None, built.ranks.control_group, seed)[0]
        self._error: Exception | None = None

    @classmethod
    def compares(cls, choice: str) -> bool:
        """See the class: the first rank's values take the place of others."""
        return choice != FIRST

    def _decide(self, built: Built, choice: str) -> bool:
        if built.metas_differ:
            _check_first_has_all(built, self._lacks)
            return True
        if self._lacks and choice != EMPTY:
            raise ValueError(self._lacks)
        if choice != FIRST:
            built.check_values()
        return choice == FIRST

    def give(self, index: int, planned: PlannedUnit, communicators: EngineCommunicators) -> None:
        """See the class. A rank whose modules raise continues with the values in its memory, so
        that all ranks issue the same collectives; :meth:`finish` raises on all ranks."""
        if not self._on_meta:
            return
        if self._tree is None:
            self._tree = ModuleTree(self._root)
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
            materialize(self._tree, records, device, *seeds, is_empty=self._is_empty)
        except Exception as caught:
            self._error = self._error or caught

    def finish(self, model: nn.Module, communicators: EngineCommunicators, num_units: int) -> None:
        """See the class.

        Raises:
            Exception: a module on the meta device could not give itself values, on some rank; the
                model is of no use any more.
        """
        mesh = communicators.data.mesh
        checks = self._on_meta or self._are_firsts
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


def _check_first_has_all(built: Built, lacks: str) -> None:
    """Some ranks have values where others are on the meta device: the first must have them."""
    found: list[Any] = gather_objects((built.holdings.details, lacks), built.mesh.control_group)
    firsts: dict[str, tuple[int, set[str]]] = {}
    for rank, (details, missing) in enumerate(found):
        for scope, (metas, _) in details.items():
            if scope not in firsts:
                if missing and metas:
                    raise ValueError(missing)
                firsts[scope] = rank, set(metas)
            first, first_metas = firsts[scope]
            held = first_metas.difference(metas)
            if held:
                name = next(each for each in found[first][0][scope][0] if each in held)
                raise ValueError(
                    f"{name}: expected values on data-parallel rank {first}, the first, from which "
                    f"others on the meta device get them; found it on the meta device there, and "
                    f"values on rank {rank}. Build the model with values on rank {first} (and on "
                    "the meta device on the others, if you like), or on the meta device on all"
                )


def broadcast_buffers(model: nn.Module, mesh: DataMesh, experts: DataMesh | None) -> None:
    """Give all ranks the first one's buffers; experts, the first of theirs. Collective.

    A buffer that several modules have on the first rank becomes one buffer on all ranks. On ranks
    that were moved to the meta device, torch has made a tensor for each module.

    Raises:
        ValueError: ranks have buffers of other names, shapes or dtypes; on all ranks.
    """
    places: dict[bool, dict[str, tuple[nn.Module, str]]] = {False: {}, True: {}}
    for prefix, module in model.named_modules():
        is_expert_module = experts is not None and has_experts(module)
        for attribute, buffer in module._buffers.items():
            if type(buffer) is Tensor and buffer.layout == torch.strided:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places[is_expert_module][name] = module, attribute
    for of_experts, own in places.items():
        ranks = experts if of_experts and experts is not None else mesh
        if ranks is mesh or experts is not None:
            _broadcast(own, ranks)


def _broadcast(places: dict[str, tuple[nn.Module, str]], ranks: DataMesh) -> None:
    """Give ``ranks`` the buffers of the first of them.

    Args:
        places: module and attribute of each buffer, by name.
        ranks: of the same buffers.
    """
    buffers = {name: module._buffers[attribute] for name, (module, attribute) in places.items()}
    first_names: dict[int, str] = {}
    owners = {name: first_names.setdefault(id(buffer), name) for name, buffer in buffers.items()}
    mine = [f"{n}: shape {tuple(b.shape)}, {b.dtype}" for n, b in buffers.items() if b is not None]
    told: list[Any] = gather_objects(
        (digest_of(mine), owners if ranks.is_first else None), ranks.control_group
    )
    if any(digest != told[0][0] for digest, _ in told):
        _raise_first_other_buffer(mine, ranks)
    sent: list[Tensor] = []
    for name, owner in told[0][1].items():
        module, attribute = places[name]
        if owner != name:
            other, of_other = places[owner]
            module._buffers[attribute] = other._buffers[of_other]
            continue
        buffer = module._buffers[attribute]
        assert buffer is not None
        if not buffer.numel():
            continue
        # Two modules may have one buffer here and two on the first rank. An expanded tensor
        # cannot be written to.
        if owners[name] != name or 0 in buffer.stride():
            buffer = module._buffers[attribute] = buffer.clone(
                memory_format=torch.contiguous_format
            )
        sent.append(buffer.detach())
    values = [buffer.reshape(-1).view(torch.uint8) for buffer in sent]
    broadcast_together_(values, ranks.control_group)
    for value, buffer in zip(values, sent, strict=True):
        buffer.copy_(value.view(buffer.dtype).view(buffer.shape))


def _raise_first_other_buffer(mine: list[str], ranks: DataMesh) -> None:
    found: list[Any] = gather_objects(mine, ranks.control_group)
    for rank, other in enumerate(found):
        for one, two, has, lacks in ((found[0], other, 0, rank), (other, found[0], rank, 0)):
            for line in one:
                if line not in two:
                    raise ValueError(
                        f"{line.partition(': ')[0]}: expected the same buffers on all ranks, which "
                        f"get the first rank's values; found [{line}] on data-parallel rank {has} "
                        f"and not on rank {lacks}. Build the same model on all ranks"
                    )
    raise ValueError("buffers: expected the same order on all ranks; found others")
