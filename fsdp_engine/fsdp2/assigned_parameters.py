"""Assignments to a unit's parameters before the engine is constructed.

Supports the sequence of FSDP2's tutorial: ``fully_shard`` on the meta device,
``distribute_tensor`` of each value, ``load_state_dict(assign=True)``, then the optimizer. Assigned
values are copied into the existing parameter objects. For a unit on the meta device they are kept
until values for all of its parameters have been assigned; then the unit's memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.runtime.assigned_values import AssignedValues, Owner
from fsdp_engine.runtime.parameter_guard import watch
from fsdp_engine.runtime.unit import Unit


class AssignedBeforeEngine:
    """Handles assignments until the engine is constructed; see the module docstring. The engine
    replaces it by its ``ParameterGuard``.

    Args:
        unit: the unit whose parameters are assigned to.
        give_memory: allocates the memory of a unit on the meta device.
    """

    def __init__(self, unit: Unit, give_memory: Callable[[], None]) -> None:
        self._give_memory = give_memory
        self._values = AssignedValues([unit])
        self._owners = {(id(each.module), each.attribute): each for each in self._values.owners}
        self._pending: dict[int, Tensor] = {}
        for owner in self._values.owners:
            watch(owner.module, self)

    @property
    def assigned(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of users' parameters whose values were copied and that still exist."""
        names = {each.name: _current_name(each) for each in self._values.owners}
        found = ((names[name], reference()) for name, reference in self._values.assigned)
        return [(name, param) for name, param in found if param is not None]

    def is_pending(self, param: Tensor) -> bool:
        """Whether a value was assigned to ``param`` while other values of the unit are missing."""
        return id(param) in self._pending

    def drop_pending(self) -> None:
        """Drop pending values, after the unit's memory was allocated in another way."""
        self._pending.clear()

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """Returns the tensor to store in ``module`` when ``value`` is assigned to ``attribute``.

        Raises:
            ValueError: the value is not valid for the parameter; names it.
        """
        owner = self._owners.get((id(module), attribute))
        if owner is None or value is None or value is owner.sharded:
            return value
        if owner.sharded.is_meta:
            if not value.is_meta:
                self._keep(owner, value)
            return owner.sharded
        if owner.others and _has_value(owner.sharded, value):
            return owner.sharded
        return self._values.take(owner, value, owner.sharded)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """Does nothing: modules may be added and removed until the first forward."""

    def take_unhooked(self) -> None:
        """Take values that were assigned without torch's hooks (``module._parameters[...] = ...``).

        Raises:
            ValueError: a value is not valid for its parameter; names it.
        """
        for owner in self._values.owners:
            present = dict.get(owner.module._parameters, owner.attribute)
            if present is not None and present is not owner.full:
                taken = self.parameter_assigned(owner.module, owner.attribute, present)
                owner.module._parameters[owner.attribute] = taken  # type: ignore[assignment]

    def _keep(self, owner: Owner, value: Tensor) -> None:
        self._values.check_value(owner, value, as_tied=True)
        self._pending[id(owner.sharded)] = value.detach()
        self._values.remember(owner, value)
        if len(self._pending) == len(self._values.names):
            pending = dict(self._pending)
            self._pending.clear()
            self._give_memory()
            with torch.no_grad():
                for each in self._values.owners:
                    each.sharded.copy_(pending[id(each.sharded)])


def _has_value(param: Tensor, value: Tensor) -> bool:
    """Whether this rank's elements of ``param`` equal those of ``value``."""
    if value.shape != param.shape:
        return False
    with torch.no_grad():
        copied = param.detach().clone().copy_(value)
    return torch.equal(_local(copied), _local(param))


def _local(param: Tensor) -> Tensor:
    return param.local if isinstance(param, FlatDTensor) else param.detach()


def _current_name(owner: Owner) -> str:
    """The parameter's name in the root module once that is known, else in its group."""
    sharded = owner.sharded
    return sharded.flat_placement.name if isinstance(sharded, FlatDTensor) else owner.name
