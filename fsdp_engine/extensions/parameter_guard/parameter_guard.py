"""Checks of assignments to the parameters of a sharded model.

    module.weight = nn.Parameter(values)    copies the values, keeps the sharded parameter; also
                                            load_state_dict(assign=True)
    head.weight = embedding.weight          raises: tied after shard()
    module.new = nn.Linear(...)             raises: a parameter of no unit

Torch's registration hooks report assignments immediately, at no cost in a step. Assignments that
bypass the hooks (``module._parameters[...] = ...``) are found by the next forward of the root,
which compares all places in one pass, and by every save. The same check refuses all-gather hooks of
FSDP2 on a parameter or on its slice.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.codecs.base import PARAM_CLASSES
from fsdp_engine.engine import Engine
from fsdp_engine.extensions.parameter_guard.places import ParamPlace, places_of
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.runtime.call_context import call_context
from fsdp_engine.runtime.parameter_guard import ParameterGuard
from fsdp_engine.units.installing import list_flat_weights

if TYPE_CHECKING:
    from fsdp_engine.extensions.parameter_guard.assigned_values import AssignedValues

_slice_of: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


# The guard of each module, whose `parameter_assigned` and `module_assigned` are called. Keys and
# values are weak: a guard refers to its modules, so a strong value would keep its key alive.
_GUARDS: MutableMapping[nn.Module, weakref.ref[Any]]
_GUARDS = WeakIdKeyDictionary()  # Compares by identity: modules may define ``==``.


class AssignmentGuard(ParameterGuard):
    """Guard of one model's parameters. See the module docstring.

    Args:
        engine: The engine of the model.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._model = model = engine.model
        self._units = units = tuple(engine.units)
        self._places = places = places_of(units)
        self._names = {id(place.sharded) for place in places}
        # None until a value is assigned.
        self._values: AssignedValues | None = None
        self._by_place = {(id(place.module), place.attribute): place for place in places}
        # Parameters of no unit belong to the user.
        self._left_alone = {
            (id(module), attribute)
            for module in model.modules()
            for attribute, param in module._parameters.items()
            if param is not None and (id(module), attribute) not in self._by_place
        }
        # Columns of a table that is compared in one pass in C.
        self._holders = [place.module._parameters for place in places]
        self._keys = [place.attribute for place in places]
        self._expected = [place.sharded for place in places]
        # Only parameters of these classes are checked for marks. Other classes may have all-gather
        # hooks of their own.
        self._slices = [each for each in self._expected if isinstance(each, FlatDTensor)]
        self._plain = [each for each in self._expected if type(each) in (nn.Parameter, FlatDTensor)]
        for module in model.modules():
            watch(module, self)

    def start(self, hooked: Iterable[nn.Module]) -> None:
        """See the class. Makes copies of ``hooked`` modules raise errors, and, if the model is
        sharded, ``DistributedDataParallel``."""
        for module in hooked:
            refuse_copies(module)
        if not all(buffer.is_plain for unit in self._units for buffer in unit.buffers):
            refuse_replicas(self._model)

    def check(self) -> None:
        """Take values that were assigned without torch's hooks.

        Raises:
            ValueError: A value is not valid, or a parameter has marks of another parameter class
                (:meth:`.ParamClass.refuse_marked`); names the parameter.
        """
        found = map(dict.get, self._holders, self._keys)
        if not self.paused and not all(map(operator.is_, found, self._expected)):
            self._take_all()
        for each in PARAM_CLASSES:
            if each.any_marked(self._plain) or each.any_marked(map(_slice_of, self._slices)):
                plain = set(map(id, self._plain))
                for place in self._places:
                    if id(place.sharded) in plain:
                        each.refuse_marked(place.name, place.sharded)

    def check_all(self) -> None:
        """Check like :meth:`check` before a save, and refuse parameters that belong to no unit and
        were added after ``shard()``.

        Raises:
            ValueError: See :meth:`check`. Or such a parameter was found; names the first one.
        """
        if self.paused:
            return
        self.check()
        full = {id(place.full) for place in self._places}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for attribute, param in module._parameters.items():
                if param is None or (id(module), attribute) in self._left_alone:
                    continue
                if id(param) not in self._names and id(param) not in full:
                    raise _unknown(f"{prefix}.{attribute}" if prefix else attribute)

    def check_places(self) -> None:
        """Check that modules hold no parameters in places that had none at ``shard``.

        Raises:
            ValueError: A module holds such a parameter; names the parameter.
        """
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for attribute, param in module._parameters.items():
                place = (id(module), attribute)
                if param is None or place in self._by_place or place in self._left_alone:
                    continue
                raise _unknown(f"{prefix}.{attribute}" if prefix else attribute)

    def check_value(self, sharded: Tensor, value: Tensor) -> None:
        """Check that a sharded parameter can take ``value`` at all of its names.

        Raises:
            ValueError: The parameter cannot take ``value``; names the parameter.
        """
        self._taken_values().check_value(self._first_place_of(sharded), value, as_tied=True)

    def remember(self, sharded: Tensor, value: Tensor) -> None:
        """See :meth:`AssignedValues.remember`."""
        self._taken_values().remember(self._first_place_of(sharded), value)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`AssignedValues.check_optimizer`."""
        if self._values is not None:
            self._values.check_optimizer(optimizer)

    def _first_place_of(self, sharded: Tensor) -> ParamPlace:
        """Returns the first place of a sharded parameter."""
        return next(place for place in self._places if place.sharded is sharded)

    def _taken_values(self) -> AssignedValues:
        if self._values is None:
            from fsdp_engine.extensions.parameter_guard.assigned_values import AssignedValues

            self._values = AssignedValues(self._places)
        return self._values

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """Returns the tensor to store in ``module`` when ``value`` is assigned to ``attribute``.

        Raises:
            ValueError: The model had no such parameter when it was sharded, or it cannot take the
                value.
            RuntimeError: A forward or backward of the module is running.
        """
        place = self._by_place.get((id(module), attribute))
        if place is None:
            if (id(module), attribute) in self._left_alone:
                return value
            raise _unknown(f"{self._name_of(module)}{attribute}")
        present = module._parameters.get(attribute)
        if isinstance(module, nn.RNNBase) and present is not None:
            # The module has already put the value into its list of weights. Restore the list.
            list_flat_weights(module)
        if value is present:
            return value
        if present is place.full and place.full is not place.sharded:
            raise RuntimeError(
                f"{place.name}: expected an assignment outside of forward and backward; found one "
                "within"
            )
        if self.paused and present is not place.sharded:
            return value  # The value is written back when the `unsharded` context ends.
        return self._taken_values().take(place, value)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """Check a module that is about to become a child of ``module``.

        Raises:
            ValueError: The child has parameters that are not the model's.
        """
        if value is None or module._modules.get(attribute) is value:
            return
        path = f"{self._name_of(module)}{attribute}"
        for name, inner in value.named_modules():
            if _guard_of(inner) is self:
                continue
            for own, param in inner._parameters.items():
                if param is not None:
                    raise _unknown(".".join(each for each in (path, name, own) if each))
            if isinstance(inner, _CONTAINERS):
                watch(inner, self)  # Check later assignments to this container as well.

    def _name_of(self, module: nn.Module) -> str:
        for name, each in self._model.named_modules():
            if each is module:
                return f"{name}." if name else ""
        return f"({type(module).__name__})."

    def _take_all(self) -> None:
        if call_context().functional_call:
            for unit in self._units:
                unit.check_not_swapped()
            return  # The call uses the tensors that it is given, not the sharded parameters.
        for place in self._places:
            present = place.module._parameters.get(place.attribute)
            if present is place.sharded or present is place.full:
                continue  # A full parameter's weight gradient is pending (delay_wgrad_compute).
            if present is None:
                raise ValueError(
                    f"{place.name}: expected the parameter that the model had when it was sharded; "
                    "found none. Remove parameters before shard()"
                )
            place.module._parameters[place.attribute] = self._taken_values().take(place, present)  # type: ignore[assignment]


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"{name}: expected the parameters that the model had when it was sharded; found a new one, "
        "which would be trained on each rank for itself and would not be saved. Add parameters and "
        "modules (adapters, a new head, SyncBatchNorm) before shard()"
    )


def watch(module: nn.Module, guard: object) -> None:
    """Report assignments to ``module`` to ``guard`` while ``guard`` exists. A parameter is reported
    by ``guard.parameter_assigned(module, attribute, value)``, which returns the tensor to store, a
    module by ``guard.module_assigned(module, attribute, value)``."""
    _GUARDS[module] = weakref.ref(guard)
    _register_hooks()


def _guard_of(module: nn.Module) -> Any:
    reference = _GUARDS.get(module)
    return reference() if reference is not None else None


@functools.cache
def _register_hooks() -> None:
    """Register torch's hooks for assignments to modules once."""

    def parameter_assigned(module: nn.Module, name: str, value: Any) -> Any:
        guard = _guard_of(module)
        return None if guard is None else guard.parameter_assigned(module, name, value)

    def module_assigned(module: nn.Module, name: str, value: Any) -> None:
        if (guard := _guard_of(module)) is not None:
            guard.module_assigned(module, name, value)

    _torch_module.register_module_parameter_registration_hook(parameter_assigned)
    _torch_module.register_module_module_registration_hook(module_assigned)


def refuse_copies(module: nn.Module) -> None:
    """Make ``copy``, ``deepcopy`` and ``pickle`` of a sharded module raise RuntimeError.

    A copy would have the hooks of the original, which gather the original's weights.
    """
    # These methods are looked up on the instance before its class.
    vars(module).update(__deepcopy__=_refuse_deepcopy, __reduce_ex__=_refuse_pickle)


class _Unreplicated:
    """Parameter names that ``DistributedDataParallel`` is to ignore. It reads them before anything
    else, and reading them raises an error."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "DistributedDataParallel: expected a model that is not sharded; found a sharded "
            "one, which reduces its gradients. Call the model itself; for replicas use "
            'strategy="no_shard", or an outer axis (mesh=(2, 4))'
        )


def refuse_replicas(model: nn.Module) -> None:
    """Make ``torch.nn.parallel.DistributedDataParallel(model)`` raise RuntimeError: it would
    overwrite the shards of all ranks with those of one rank."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _Unreplicated()


def _refuse_deepcopy(memo: Any) -> Any:
    raise RuntimeError(
        "deepcopy: expected a model that is not sharded; found a sharded one. "
        "Copy it before shard(), and shard the copy in the same way (also for AveragedModel); for "
        "an average of the weights use fe.EMA(engine)"
    )


def _refuse_pickle(protocol: Any) -> Any:
    raise RuntimeError(
        "copy, pickle: expected a model that is not sharded; found a sharded one. "
        "Save engine.full_state_dict(), or a checkpoint (fe.save_checkpoint), and load it into "
        "a new model"
    )
