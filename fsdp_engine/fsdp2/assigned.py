"""Values that are assigned to a unit's parameters before there is an engine.

As in FSDP2's tutorial: ``fully_shard`` on the meta device, ``distribute_tensor`` of each value,
``load_state_dict(assign=True)``, then the optimizer. Parameters take the values and stay the
objects that they are. On the meta device a unit gets memory when values for all of its parameters
have been assigned; until then they wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.runtime.assigned_values import AssignedValues, Owner
from fsdp_engine.runtime.parameter_guard import watch
from fsdp_engine.runtime.unit import Unit


class ValuesBeforeEngine:
    """See the module docstring. An engine's ``ParameterGuard`` takes its place.

    Args:
        unit: whose parameters.
        give_memory: brings them off the meta device.
    """

    def __init__(self, unit: Unit, give_memory: Callable[[], None]) -> None:
        self._give_memory = give_memory
        self._values = AssignedValues([unit])
        self._owners = {(id(each.module), each.attribute): each for each in self._values.owners}
        self._waiting: dict[int, Tensor] = {}
        for owner in self._values.owners:
            watch(owner.module, self)

    @property
    def assigned(self) -> list[tuple[str, Tensor]]:
        """Users' parameters whose values were taken, as far as they live, with their names."""
        names = {each.name: _name_now(each) for each in self._values.owners}
        found = ((names[name], reference()) for name, reference in self._values.assigned)
        return [(name, param) for name, param in found if param is not None]

    def awaits_others(self, param: Tensor) -> bool:
        """Whether a value for ``param`` is there, and others of the unit are missing."""
        return id(param) in self._waiting

    def forget(self) -> None:
        """Drop values that wait: the unit has got memory without them."""
        self._waiting.clear()

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """What to put into ``module`` when ``value`` is assigned to ``attribute``.

        Raises:
            ValueError: no value for the parameter; names it.
        """
        owner = self._owners.get((id(module), attribute))
        if owner is None or value is None or value is owner.sharded:
            return value
        if owner.sharded.is_meta:
            if not value.is_meta:
                self._wait(owner, value)
            return owner.sharded
        if owner.others and _has_value(owner.sharded, value):
            return owner.sharded
        return self._values.take(owner, value, owner.sharded)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """Modules may come and go until the first forward."""

    def take_all(self) -> None:
        """Take values that went past torch's hooks (``module._parameters[...] = ...``).

        Raises:
            ValueError: no value for the parameter; names it.
        """
        for owner in self._values.owners:
            present = dict.get(owner.module._parameters, owner.attribute)
            if present is not None and present is not owner.full:
                taken = self.parameter_assigned(owner.module, owner.attribute, present)
                owner.module._parameters[owner.attribute] = taken  # type: ignore[assignment]

    def _wait(self, owner: Owner, value: Tensor) -> None:
        self._values.check_value(owner, value, as_tied=True)
        self._waiting[id(owner.sharded)] = value.detach()
        self._values.remember(owner, value)
        if len(self._waiting) == len(self._values.names):
            waiting = dict(self._waiting)
            self._waiting.clear()
            self._give_memory()
            with torch.no_grad():
                for each in self._values.owners:
                    each.sharded.copy_(waiting[id(each.sharded)])


def _has_value(param: Tensor, value: Tensor) -> bool:
    """Whether this rank's elements of ``param`` are those of ``value``."""
    if value.shape != param.shape:
        return False
    with torch.no_grad():
        taken = param.detach().clone().copy_(value)
    return torch.equal(_local(taken), _local(param))


def _local(param: Tensor) -> Tensor:
    return param.local if isinstance(param, FlatDTensor) else param.detach()


def _name_now(owner: Owner) -> str:
    """Its name in the outermost module, once that is known."""
    sharded = owner.sharded
    return sharded.flat_placement.name if isinstance(sharded, FlatDTensor) else owner.name
