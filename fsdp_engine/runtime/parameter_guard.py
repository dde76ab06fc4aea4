"""Guards the parameters of a sharded model against assignments.

    module.weight = nn.Parameter(values)    the sharded parameter stays; an extension copies the
                                            values into it: :class:`AssignedValues`
    head.weight = embedding.weight          raises: tied after shard()
    module.new = nn.Linear(...)             raises: a parameter of no unit

Assignments are seen by torch's registration hooks, at once and at no cost in a step. Those that
bypass the hooks (``module._parameters[...] = ...``) are found by the root's next forward, which
compares all places in one pass, and by every save. So are FSDP2's all-gather hooks that were set on
a parameter or on its slice.

torch's conversions of modules (``.to()``, ``.half()``) are seen by ``nn.Module._apply``. An
extension converts parameters; without it, their dtypes and their device stay.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.codecs.base import PARAM_CLASSES
from fsdp_engine.extension_list import implementation
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.memory import allocator
from fsdp_engine.runtime.call_context import call_context
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.units.installing import list_flat_weights

_slice_of: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


# The guard of each module, of which ``parameter_assigned`` and ``module_assigned`` are called. Weak
# both ways: a guard knows its modules, and a value that holds its key would never be freed.
_GUARDS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Owner:
    """One place of one parameter: its name, names tied to it, and its two tensors."""

    name: str
    others: tuple[str, ...]
    module: nn.Module
    attribute: str
    full: Tensor
    sharded: Tensor


def owners_of(units: Sequence[Unit]) -> list[Owner]:
    """Returns every place of every parameter of ``units``."""
    return [
        Owner(record.aliases[0], tuple(record.aliases[1:]), module, attribute, full, sharded)
        for unit in units
        for buffer in unit.buffers
        for record, full, sharded in zip(
            buffer.records, buffer.full_params, buffer.sharded_params, strict=True
        )
        for module, attribute in record.owners
    ]


class AssignedValues:
    """A seam: values that are assigned to sharded parameters. Here they are refused.

    Args:
        owners: every place of every parameter.

    Attributes:
        assigned: parameters of users' own whose values were taken, with their names.
    """

    def __init__(self, owners: Sequence[Owner]) -> None:
        del owners
        self.assigned: list[tuple[str, weakref.ref[Tensor]]] = []

    def check_value(self, owner: Owner, value: Tensor, *, as_tied: bool = False) -> None:
        """Check that a parameter can take ``value``.

        Args:
            owner: the place that it is assigned to.
            value: the tensor.
            as_tied: the caller sees to it that all names of a tied parameter get one value.

        Raises:
            ValueError: it cannot; names the parameter.
        """
        raise ValueError(
            f"{owner.name}: expected values to be copied into the parameter (copy_ under "
            "torch.no_grad()), without the extension for assigned values; found an assignment"
        )

    def take(self, owner: Owner, value: Tensor) -> Tensor:
        """Returns the sharded parameter, with the values of ``value``.

        Raises:
            ValueError: see :meth:`check_value`.
        """
        self.check_value(owner, value)
        return owner.sharded

    def remember(self, owner: Owner, value: Tensor) -> None:
        """``value`` was taken: an optimizer that holds it would step nothing."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer steps no tensor that was assigned to a parameter, instead of the
        parameter.

        Raises:
            RuntimeError: it does; names the parameter.
        """


class ParameterGuard:
    """See the module docstring.

    Args:
        model: the root module.
        units: all of its units.

    Attributes:
        paused: modules hold full main weights, which users may edit.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.paused = False
        self._model = model
        self._units = tuple(units)
        self._places = owners = owners_of(units)
        self._names = {id(owner.sharded) for owner in owners}
        # None: no value was assigned yet.
        self._values: AssignedValues | None = None
        self._owners = {(id(owner.module), owner.attribute): owner for owner in owners}
        # Parameters of no unit stay the user's.
        self._left_alone = {
            (id(module), attribute)
            for module in model.modules()
            for attribute, param in module._parameters.items()
            if param is not None and (id(module), attribute) not in self._owners
        }
        # Columns of a table that is compared in one pass in C.
        self._holders = [owner.module._parameters for owner in owners]
        self._keys = [owner.attribute for owner in owners]
        self._expected = [owner.sharded for owner in owners]
        self._slices = [each for each in self._expected if isinstance(each, FlatDTensor)]
        self._plain = [each for each in self._expected if type(each) in (nn.Parameter, FlatDTensor)]
        for module in model.modules():
            watch(module, self)

    def check(self) -> None:
        """Take values that were put into the modules without torch's hooks.

        Raises:
            ValueError: another object was put there, or a parameter was marked as one of another
                class (:meth:`.ParamClass.refuse_marked`); names the parameter.
        """
        found = map(dict.get, self._holders, self._keys)
        if not self.paused and not all(map(operator.is_, found, self._expected)):
            self._take_all()
        for each in PARAM_CLASSES:
            if each.any_marked(self._plain) or each.any_marked(map(_slice_of, self._slices)):
                plain = set(map(id, self._plain))
                for owner in self._places:
                    if id(owner.sharded) in plain:
                        each.refuse_marked(owner.name, owner.sharded)

    def check_all(self) -> None:
        """Before a save: as :meth:`check`, and check that every parameter is of a unit.

        Raises:
            ValueError: there are; names the first.
        """
        if self.paused:
            return
        self.check()
        full = {id(owner.full) for owner in self._places}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for attribute, param in module._parameters.items():
                if param is None or (id(module), attribute) in self._left_alone:
                    continue
                if id(param) not in self._names and id(param) not in full:
                    raise _unknown(f"{prefix}.{attribute}" if prefix else attribute)

    def check_places(self) -> None:
        """Check that modules hold no parameters in places that were without one at ``shard``.

        Raises:
            ValueError: one does; names the parameter.
        """
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for attribute, param in module._parameters.items():
                place = (id(module), attribute)
                if param is None or place in self._owners or place in self._left_alone:
                    continue
                raise _unknown(f"{prefix}.{attribute}" if prefix else attribute)

    def full_main(self, buffer: ParamAndGradBuffer, index: int) -> Tensor | None:
        """Returns the full main weight that modules hold in place of a sharded parameter, while
        the guard is paused; None: they hold none."""
        module, attribute = buffer.records[index].owners[0]
        held = dict.get(module._parameters, attribute) if self.paused else None
        if held is None or held is buffer.sharded_params[index]:
            return None
        return None if held is buffer.full_params[index] else held.detach()

    def check_value(self, sharded: Tensor, value: Tensor) -> None:
        """Check that a sharded parameter can take ``value`` at all of its names.

        Raises:
            ValueError: it cannot; names the parameter.
        """
        self._taken_values().check_value(self._owner_of(sharded), value, as_tied=True)

    def remember(self, sharded: Tensor, value: Tensor) -> None:
        """See :meth:`AssignedValues.remember`."""
        self._taken_values().remember(self._owner_of(sharded), value)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`AssignedValues.check_optimizer`."""
        if self._values is not None:
            self._values.check_optimizer(optimizer)

    def _owner_of(self, sharded: Tensor) -> Owner:
        """Returns the first place of a sharded parameter."""
        return next(owner for owner in self._places if owner.sharded is sharded)

    def _taken_values(self) -> AssignedValues:
        if self._values is None:
            self._values = implementation(AssignedValues)(self._places)
        return self._values

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """Returns the tensor to put into ``module`` when ``value`` is assigned to ``attribute``.

        Raises:
            ValueError: no value for a parameter that the model had when it was sharded.
            RuntimeError: a forward of the module runs.
        """
        owner = self._owners.get((id(module), attribute))
        if owner is None:
            if (id(module), attribute) in self._left_alone:
                return value
            raise _unknown(f"{self._name_of(module)}{attribute}")
        present = module._parameters.get(attribute)
        if isinstance(module, nn.RNNBase) and present is not None:
            list_flat_weights(module)  # its own list has the value already
        if value is present:
            return value
        if present is owner.full and owner.full is not owner.sharded:
            raise RuntimeError(
                f"{owner.name}: expected an assignment outside of forward and backward; found one "
                "within"
            )
        if self.paused and present is not owner.sharded:
            return value  # its values are written back when the context ends
        return self._taken_values().take(owner, value)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """``value`` is about to become a child of ``module``.

        Raises:
            ValueError: it has parameters that are not the model's.
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
                watch(inner, self)  # assignments to it count as well

    def _name_of(self, module: nn.Module) -> str:
        for name, each in self._model.named_modules():
            if each is module:
                return f"{name}." if name else ""
        return f"({type(module).__name__})."

    def _take_all(self) -> None:
        if call_context().functional_call:
            for unit in self._units:
                unit.check_not_swapped()
            return  # never sharded parameters: the call computes with those it is given
        for owner in self._places:
            present = owner.module._parameters.get(owner.attribute)
            if present is owner.sharded or present is owner.full:
                continue  # full: its weight gradient is pending (delay_wgrad_compute)
            if present is None:
                raise ValueError(
                    f"{owner.name}: expected the parameter that the model had when it was sharded; "
                    "found none. Remove parameters before shard()"
                )
            owner.module._parameters[owner.attribute] = self._taken_values().take(owner, present)  # type: ignore[assignment]


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"{name}: expected the parameters that the model had when it was sharded; found a new one, "
        "which would be trained on each rank for itself and not be saved. Add parameters and "
        "modules (adapters, a new head) before shard()"
    )


def watch(module: nn.Module, guard: object) -> None:
    """Let ``guard``, while it lives, see assignments to ``module``: as ``parameter_assigned(module,
    attribute, value)``, which returns the tensor to put there, and ``module_assigned(module,
    attribute, value)``."""
    _GUARDS[module] = weakref.ref(guard)
    _register_hooks()


def _guard_of(module: nn.Module) -> Any:
    reference = _GUARDS.get(module)
    return reference() if reference is not None else None


@functools.cache
def _register_hooks() -> None:
    """Register torch's hooks of assignments to modules, once."""

    def parameter_assigned(module: nn.Module, name: str, value: Any) -> Any:
        guard = _guard_of(module)
        return None if guard is None else guard.parameter_assigned(module, name, value)

    def module_assigned(module: nn.Module, name: str, value: Any) -> None:
        if (guard := _guard_of(module)) is not None:
            guard.module_assigned(module, name, value)

    _torch_module.register_module_parameter_registration_hook(parameter_assigned)
    _torch_module.register_module_module_registration_hook(module_assigned)


class Conversions:
    """A seam: torch's conversions of the modules of one model. Here sharded parameters keep their
    dtypes and device.

    Args:
        engine: the engine of the model.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def convert(
        self, module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Takes the place of ``nn.Module._apply``; a subclass may have other arguments than torch's
        (metrics do).

        Raises:
            ValueError: see :func:`check_same`.
        """
        check_same(self._engine.buffers, list(module.modules()), fn)
        type(module)._apply(module, fn, *args, **kwargs)


def check_same(
    buffers: Sequence[ParamAndGradBuffer],
    modules: Sequence[nn.Module],
    fn: Callable[[Tensor], Tensor],
) -> None:
    """Check that ``fn`` keeps dtypes and device of the parameters of ``modules``.

    Raises:
        ValueError: it does not; names a parameter.
    """
    for buffer in buffers:
        for record in buffer.records:
            if any(module in modules for module, _ in record.owners):
                main = buffer.weights.main.tensor
                found = fn(allocator.empty(0, main.dtype, main.device))
                if (found.dtype, found.device.type) != (main.dtype, main.device.type):
                    raise ValueError(
                        f"conversion of {record.name}: expected {main.dtype} on {main.device} to "
                        f"stay, without the extension for conversions; found {found.dtype} on "
                        f"{found.device}. Convert the model before shard()"
                    )


class Apply:
    """``_apply`` of one module of a sharded model. A copied or unpickled module has torch's.

    Args:
        module: the module.
        engine: of the model.
    """

    def __init__(self, module: nn.Module, engine: Any) -> None:
        self._module = weakref.ref(module)
        self._engine = engine

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        module = self._module()
        assert module is not None
        conversions = self._engine.extension(implementation(Conversions))
        conversions.convert(module, fn, *args, **kwargs)
        return module

    def __reduce__(self) -> Any:
        module = self._module()
        assert module is not None
        return functools.partial, (type(module)._apply, module)


def refuse_copies(module: nn.Module) -> None:
    """Let ``copy``, ``deepcopy`` and ``pickle`` of a sharded module raise RuntimeError.

    A copy would have the hooks of the original, and so gather the original's weights.
    """
    # They ask the object for these methods before its class.
    vars(module).update(__deepcopy__=_refuse_deepcopy, __reduce_ex__=_refuse_pickle)


class _Unreplicated:
    """Names of parameters to ignore, which ``DistributedDataParallel`` reads of a module first."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "DistributedDataParallel: expected a model that is not sharded; found one in the hands "
            "of an engine, which reduces its gradients. Call the model itself; replicas are the "
            'engine\'s, too: strategy="no_shard", or an outer axis (mesh=(2, 4))'
        )


def refuse_replicas(model: nn.Module) -> None:
    """Let ``torch.nn.parallel.DistributedDataParallel(model)`` raise RuntimeError: it would
    broadcast slices of one rank over those of others."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _Unreplicated()


def _refuse_deepcopy(memo: Any) -> Any:
    raise RuntimeError(
        "deepcopy: expected a model that is not sharded; found one in the hands of an engine. "
        "Copy it before shard(), and shard the copy alike (AveragedModel too); or keep the "
        "average as clones of model.parameters()"
    )


def _refuse_pickle(protocol: Any) -> Any:
    raise RuntimeError(
        "copy, pickle: expected a model that is not sharded; found one in the hands of an engine. "
        "Save engine.full_state_dict(), or a checkpoint (fe.save_checkpoint), and load it into "
        "a model that is built anew"
    )
