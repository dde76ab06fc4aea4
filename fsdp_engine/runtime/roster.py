"""Which tensor each place of a sharded model holds, and what a user puts there instead.

    module.weight = nn.Parameter(values)    the values are taken, the sharded parameter stays;
                                            likewise load_state_dict(assign=True)
    head.weight = embedding.weight          raises: tied after shard()
    module.new = nn.Linear(...)             raises: a parameter that no unit knows

Assignments are seen by torch's hooks of registration, at once and at no cost in a step. What goes
past them (``module._parameters[...] = ...``) is seen at the root's next forward, which compares all
places in one pass, and at every save. So are FSDP2's all-gather hooks that were set on a parameter
or on its slice.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

from fsdp_engine.codecs.tensor_hooks import any_patched, refuse_patched
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.planning.recurrent import list_flat_weights
from fsdp_engine.runtime.assigned_values import AssignedValues
from fsdp_engine.runtime.callers import callers
from fsdp_engine.runtime.unit import Unit

_slice_of: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


class Watcher(Protocol):
    """Who is asked when something is assigned to a module."""

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """What to put into ``module`` when ``value`` is assigned to ``attribute``."""
        ...

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """``value`` is about to become a child of ``module``."""
        ...


# Weak both ways: a roster knows its modules, and a value that holds its key would never go.
_WATCHERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watcher]] = weakref.WeakKeyDictionary()


class Roster:
    """See the module docstring.

    Args:
        model: the root module.
        units: all of its units.

    Attributes:
        paused: modules hold full main weights (``engine.unsharded()``).
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.paused = False
        self._model = model
        self._units = tuple(units)
        self._values = AssignedValues(units)
        owners = self._values.owners
        self._owners = {(id(owner.module), owner.attribute): owner for owner in owners}
        # Parameters that no unit was to have: they stay the user's.
        self._left_alone = {
            (id(module), attribute)
            for module in model.modules()
            for attribute, param in module._parameters.items()
            if param is not None and (id(module), attribute) not in self._owners
        }
        # Columns of a table that one pass of C compares, however many parameters there are.
        self._holders = [owner.module._parameters for owner in owners]
        self._keys = [owner.attribute for owner in owners]
        self._expected = [owner.sharded for owner in owners]
        # Other classes may have all-gather hooks of their own.
        self._slices = [each for each in self._expected if isinstance(each, FlatDTensor)]
        self._hookless = [
            each for each in self._expected if type(each) in (nn.Parameter, FlatDTensor)
        ]
        for module in model.modules():
            watch(module, self)

    def check(self) -> None:
        """Take values that were put into the modules past torch's hooks.

        Raises:
            ValueError: something else was put there, or all-gather hooks were set on a parameter;
                names the parameter.
        """
        found = map(dict.get, self._holders, self._keys)
        if not self.paused and not all(map(operator.is_, found, self._expected)):
            self._take_all()
        if any_patched(self._hookless) or any_patched(map(_slice_of, self._slices)):
            hookless = set(map(id, self._hookless))
            for owner in self._values.owners:
                if id(owner.sharded) in hookless:
                    refuse_patched(owner.name, owner.sharded)

    def check_all(self) -> None:
        """Before a save: as :meth:`check`, and whether there are parameters that no unit knows.

        Raises:
            ValueError: there are; names the first.
        """
        if self.paused:
            return
        self.check()
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for attribute, param in module._parameters.items():
                if param is None or (id(module), attribute) in self._left_alone:
                    continue
                if id(param) not in self._values.names and not self._is_full(param):
                    raise _unknown(f"{prefix}.{attribute}" if prefix else attribute)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`AssignedValues.check_optimizer`."""
        self._values.check_optimizer(optimizer)

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """What to put into ``module`` when ``value`` is assigned to ``attribute``.

        Raises:
            ValueError: no value for a parameter that the model had when it was sharded.
            RuntimeError: a forward of the module is under way.
        """
        owner = self._owners.get((id(module), attribute))
        if owner is None:
            if (id(module), attribute) in self._left_alone:
                return value
            raise _unknown(f"{self._name_of(module)}{attribute}")
        present = module._parameters.get(attribute)
        if isinstance(module, nn.RNNBase) and present is not None:
            list_flat_weights(module)  # it has put the value into a list of its own already
        if value is present:
            return value
        if present is owner.full and owner.full is not owner.sharded:
            raise RuntimeError(
                f"{owner.name}: expected an assignment outside of forward and backward; found one "
                "within"
            )
        return self._values.take(owner, value, present if self.paused else owner.sharded)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """``value`` is about to become a child of ``module``.

        Raises:
            ValueError: it has parameters that are not the model's.
        """
        if value is None or module._modules.get(attribute) is value:
            return
        path = f"{self._name_of(module)}{attribute}"
        for name, inner in value.named_modules():
            if _watcher_of(inner) is self:
                continue
            for own, param in inner._parameters.items():
                if param is not None:
                    raise _unknown(".".join(each for each in (path, name, own) if each))
            if isinstance(inner, _CONTAINERS):
                watch(inner, self)  # what it is given later counts as well

    def _name_of(self, module: nn.Module) -> str:
        for name, each in self._model.named_modules():
            if each is module:
                return f"{name}." if name else ""
        return f"({type(module).__name__})."

    def _is_full(self, param: Tensor) -> bool:
        return any(param is owner.full for owner in self._values.owners)

    def _take_all(self) -> None:
        if callers().functional_call:
            for unit in self._units:
                unit.check_not_swapped()
            return  # nobody cuts these parameters: it computes with those that it is given
        for owner in self._values.owners:
            present = owner.module._parameters.get(owner.attribute)
            if present is owner.sharded or present is owner.full:
                continue  # full: its weight gradient is yet to come (delay_wgrad_compute)
            if present is None:
                raise ValueError(
                    f"{owner.name}: expected the parameter that the model had when it was sharded; "
                    "found none. Remove parameters before shard()"
                )
            owner.module._parameters[owner.attribute] = self._values.take(  # type: ignore[assignment]
                owner, present, owner.sharded
            )


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"{name}: expected the parameters that the model had when it was sharded; found a new one, "
        "which would be trained on each rank for itself and not be saved. Add parameters and "
        "modules (adapters, a new head) before shard()"
    )


def watch(module: nn.Module, watcher: Watcher) -> None:
    """Let ``watcher``, while it lives, be asked when something is assigned to ``module``."""
    _WATCHERS[module] = weakref.ref(watcher)
    _watch_modules()


def _watcher_of(module: nn.Module) -> Watcher | None:
    reference = _WATCHERS.get(module)
    return reference() if reference is not None else None


_is_watching = False


def _watch_modules() -> None:
    """Let torch tell watchers what is put into their modules."""
    global _is_watching
    if _is_watching:
        return
    _is_watching = True

    def parameter_assigned(module: nn.Module, name: str, value: Any) -> Tensor | None:
        watcher = _watcher_of(module)
        return None if watcher is None else watcher.parameter_assigned(module, name, value)

    def module_assigned(module: nn.Module, name: str, value: Any) -> None:
        if (watcher := _watcher_of(module)) is not None:
            watcher.module_assigned(module, name, value)

    returns_a_tensor: Any = parameter_assigned  # torch's annotation says None
    _torch_module.register_module_parameter_registration_hook(returns_a_tensor)
    _torch_module.register_module_module_registration_hook(module_assigned)


def refuse_copies(module: nn.Module) -> None:
    """Let ``copy``, ``deepcopy`` and ``pickle`` of a sharded module raise RuntimeError.

    A copy would have the hooks of the original, and so gather the original's weights.
    """
    # They ask the object for these methods before its class.
    vars(module).update(__deepcopy__=_refuse_deepcopy, __reduce_ex__=_refuse_pickle)


class _Unreplicated:
    """What ``DistributedDataParallel`` reads of a module first: names of parameters to ignore."""

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
