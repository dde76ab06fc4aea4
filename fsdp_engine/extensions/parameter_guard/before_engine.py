"""Values that are assigned to a unit of ``fully_shard`` before its engine is constructed.

This supports the sequence of FSDP2's tutorial: ``fully_shard`` on the meta device,
``distribute_tensor`` of each value, ``load_state_dict(assign=True)``, then the optimizer. Assigned
values are copied into the existing parameter objects. For a unit on the meta device they are kept
until values for all of its parameters have been assigned; then the unit's memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine.comm.groups import timeout_of_group
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.extensions.parameter_guard.assigned_values import AssignedValues
from fsdp_engine.extensions.parameter_guard.parameter_guard import watch
from fsdp_engine.extensions.parameter_guard.places import ParamPlace, places_of
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.units.build import (
    EngineCommunicators,
)


@dataclass(frozen=True)
class _Pending:
    """A value for a parameter on the meta device.

    Attributes:
        value: The assigned tensor.
        places: ``id`` of the module, and attribute, for each place that it was assigned to.
    """

    value: Tensor
    places: frozenset[tuple[int, str]]


class AssignedBeforeEngine:
    """Handles assignments until the engine is constructed; see the module docstring. The guard of
    the engine replaces it.

    Args:
        unit: The unit whose parameters are assigned to.
        communicators: The communicators of the model, with which ranks compare tied values.
        give_memory: Allocates the memory of a unit on the meta device.
    """

    def __init__(
        self, unit: Unit, communicators: EngineCommunicators, give_memory: Callable[[], None]
    ) -> None:
        self._communicators = communicators
        self._give_memory = give_memory
        self._places = places_of([unit])
        self._values = AssignedValues(self._places)
        self._owners = {(id(each.module), each.attribute): each for each in self._places}
        self._pending: dict[int, _Pending] = {}  # by id of the sharded parameter
        for owner in self._places:
            watch(owner.module, self)

    @property
    def assigned(self) -> list[tuple[str, Tensor]]:
        """For each ``nn.Parameter`` of the user that was copied and still exists: the name of the
        parameter that has taken its values, and the user's ``nn.Parameter``."""
        names = {each.name: _current_name(each) for each in self._places}
        found = ((names[name], reference()) for name, reference in self._values.assigned)
        return [(name, param) for name, param in found if param is not None]

    def is_pending(self, param: Tensor) -> bool:
        """Returns whether ``param`` has a value that is kept until the whole unit has values."""
        return id(param) in self._pending

    def drop_pending(self) -> None:
        """Drop pending values: the unit's memory is allocated, so they need not be kept."""
        self._pending.clear()

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """Returns the tensor to store in ``module`` when ``value`` is assigned to ``attribute``.

        Collective for each further name of a tied parameter.

        Raises:
            ValueError: The value is not valid for the parameter; names the parameter.
        """
        owner = self._owners.get((id(module), attribute))
        if owner is None or value is None or value is owner.sharded:
            return value
        if owner.sharded.is_meta:
            if not value.is_meta:
                self._keep(owner, value)
            return owner.sharded
        if owner.others:
            self._check_tied(owner, value, owner.sharded)
            return owner.sharded
        return self._values.take(owner, value)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """Do nothing: modules may be added and removed until the first forward."""

    def take_unhooked(self) -> None:
        """Take values that were assigned without torch's hooks (``module._parameters[...] = ...``).

        Raises:
            ValueError: A value is not valid for its parameter; names the parameter.
        """
        for owner in self._places:
            present = dict.get(owner.module._parameters, owner.attribute)
            if present is not None and present is not owner.full:
                taken = self.parameter_assigned(owner.module, owner.attribute, present)
                owner.module._parameters[owner.attribute] = taken  # type: ignore[assignment]

    def _keep(self, owner: ParamPlace, value: Tensor) -> None:
        self._values.check_value(owner, value, as_tied=True)
        key, place = id(owner.sharded), (id(owner.module), owner.attribute)
        places = frozenset([place])
        known = self._pending.get(key)
        if known is not None and place not in known.places:  # Otherwise replace the known value.
            self._check_tied(owner, value, known.value)
            places |= known.places
        self._pending[key] = _Pending(value.detach(), places)
        self._values.remember(owner, value)
        if len(self._pending) == len({id(each.sharded) for each in self._places}):
            pending = dict(self._pending)
            self.drop_pending()
            self._give_memory()
            with torch.no_grad():
                for each in self._places:
                    each.sharded.copy_(pending[id(each.sharded)].value)

    def _check_tied(self, owner: ParamPlace, value: Tensor, present: Tensor) -> None:
        """Check that all names of a tied parameter get the same value. Collective, since shards may
        be equal on some ranks only.

        Raises:
            ValueError: ``value`` differs from ``present`` on this rank; names the parameter.
            RuntimeError: They differ on another rank.
        """
        what, ranks = f"assignment to {owner.name}", self._communicators.ranks
        with reporting(what, ranks.ranks):
            if not _has_value(present, value):
                self._values.check_value(owner, value)
        if ranks.control_group is not None:
            timeout = timeout_of_group(ranks.control_group, ranks.device)
            meet(what, ranks.ranks, timeout, groups=self._communicators.groups)


def _has_value(present: Tensor, value: Tensor) -> bool:
    """Returns whether this rank's elements of ``present`` equal those of ``value``."""
    if value.shape != present.shape or value.is_meta:
        return False
    with torch.no_grad():
        if isinstance(present, FlatDTensor):
            value = present.detach().clone().copy_(value)
        elif getattr(present, "placements", None) != getattr(value, "placements", None):
            present, value = _full(present), _full(value)
    mine, given = _local(present), _local(value)
    dtype = torch.promote_types(mine.dtype, given.dtype)
    return torch.equal(mine.to(dtype), given.to(dtype))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FlatDTensor):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _current_name(owner: ParamPlace) -> str:
    """Returns the parameter's name in the root module, or in its group if that is not known yet."""
    sharded = owner.sharded
    return sharded.flat_placement.name if isinstance(sharded, FlatDTensor) else owner.name
