"""Which tensor each place of a sharded model holds, and what a user puts there instead.

    module.weight = nn.Parameter(values)    the values are taken, the sharded parameter stays;
                                            likewise load_state_dict(assign=True)
    head.weight = embedding.weight          raises: tied after shard()
    module.new = nn.Linear(...)             raises: a parameter that no unit knows

Assignments are seen by torch's hooks of registration, at once and at no cost in a step. What goes
past them (``module._parameters[...] = ...``) is seen at the root's next forward, which compares all
places in one pass, and at every save.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as _torch_module

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.elementwise import slice_of_distributed
from fsdp_engine.planning.recurrent import list_flat_weights
from fsdp_engine.runtime.callers import callers
from fsdp_engine.runtime.unit import Unit

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)

# Weak both ways: a roster knows its modules, and a value that holds its key would never go.
_ROSTERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Roster]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Owner:
    """One place of one parameter: its name, who else is tied to it, and what stands for it."""

    name: str
    others: tuple[str, ...]
    module: nn.Module
    attribute: str
    full: Tensor
    sharded: Tensor


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
        self._storages: set[int] | None = None
        self._orphans: list[tuple[str, weakref.ref[Tensor]]] = []
        owners = [
            _Owner(record.aliases[0], tuple(record.aliases[1:]), module, attribute, full, sharded)
            for unit in units
            for buffer in unit.buffers
            for record, full, sharded in zip(
                buffer.records, buffer.full_params, buffer.sharded_params, strict=True
            )
            for module, attribute in record.owners
        ]
        self._owners = {(id(owner.module), owner.attribute): owner for owner in owners}
        self._names = {id(owner.sharded): owner.name for owner in owners}
        # Parameters that no unit was to have: they stay the user's.
        self._left_alone = {
            (id(module), attribute)
            for module in model.modules()
            for attribute, param in module._parameters.items()
            if param is not None and (id(module), attribute) not in self._owners
        }
        self._listed = owners
        # Columns of a table that one pass of C compares, however many parameters there are.
        self._holders = [owner.module._parameters for owner in owners]
        self._keys = [owner.attribute for owner in owners]
        self._expected = [owner.sharded for owner in owners]
        for module in model.modules():
            _ROSTERS[module] = weakref.ref(self)
        _watch_modules()

    def check(self) -> None:
        """Take values that were put into the modules past torch's hooks.

        Raises:
            ValueError: something else was put there; names the parameter.
        """
        found = map(dict.get, self._holders, self._keys)
        if not self.paused and not all(map(operator.is_, found, self._expected)):
            self._take_all()

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
                if id(param) not in self._names and not self._is_full(param):
                    raise _unknown(f"{prefix}.{attribute}" if prefix else attribute)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Whether it steps a tensor that was assigned to a parameter, instead of the parameter.

        Raises:
            RuntimeError: it does; names the parameter.
        """
        if not self._orphans:
            return
        self._orphans = [each for each in self._orphans if each[1]() is not None]
        names = {id(reference()): name for name, reference in self._orphans}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in names:
                    raise RuntimeError(
                        f"{names[id(param)]}: expected an optimizer of the model's parameters; "
                        f"found one of the tensor that was assigned to it, whose values the "
                        "sharded parameter has taken. Build the optimizer from "
                        "model.parameters() after the assignment"
                    )

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
        return self._taken(owner, value, present if self.paused else owner.sharded)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """``value`` is about to become a child of ``module``.

        Raises:
            ValueError: it has parameters that are not the model's.
        """
        if value is None or module._modules.get(attribute) is value:
            return
        path = f"{self._name_of(module)}{attribute}"
        for name, inner in value.named_modules():
            if _roster_of(inner) is self:
                continue
            for own, param in inner._parameters.items():
                if param is not None:
                    raise _unknown(".".join(each for each in (path, name, own) if each))
            if isinstance(inner, _CONTAINERS):
                _ROSTERS[inner] = weakref.ref(self)  # what it is given later counts as well

    def _name_of(self, module: nn.Module) -> str:
        for name, each in self._model.named_modules():
            if each is module:
                return f"{name}." if name else ""
        return f"({type(module).__name__})."

    def _is_full(self, param: Tensor) -> bool:
        return any(param is owner.full for owner in self._listed)

    def _is_of_another(self, value: Tensor, sharded: Tensor) -> bool:
        if self._storages is None:
            self._storages = {_address(owner.sharded)[0] for owner in self._listed}
        storage, first = _address(value)
        return storage > 0 < first and storage in self._storages and first != _address(sharded)[1]

    def _take_all(self) -> None:
        if callers().functional_call:
            for unit in self._units:
                unit.check_not_swapped()
            return  # nobody cuts these parameters: it computes with those that it is given
        for owner in self._listed:
            present = owner.module._parameters.get(owner.attribute)
            if present is owner.sharded or present is owner.full:
                continue  # full: its weight gradient is yet to come (delay_wgrad_compute)
            if present is None:
                raise ValueError(
                    f"{owner.name}: expected the parameter that the model had when it was sharded; "
                    "found none. Remove parameters before shard()"
                )
            owner.module._parameters[owner.attribute] = self._taken(  # type: ignore[assignment]
                owner, present, owner.sharded
            )

    def _taken(self, owner: _Owner, value: Tensor, target: Tensor | None) -> Tensor:
        """``target``, with the values of ``value``."""
        assert target is not None
        self._check_value(owner, value)
        with torch.no_grad():
            target.copy_(value if isinstance(value, DTensor) else value.detach())
        if target.requires_grad is not value.requires_grad:
            target.requires_grad_(value.requires_grad)
        target.grad = None
        if isinstance(value, nn.Parameter):
            self._orphans.append((owner.name, weakref.ref(value)))
        return target

    def _check_value(self, owner: _Owner, value: Tensor) -> None:
        sharded = owner.sharded
        tied = self._names.get(id(value))
        problem = ""
        if tied is not None:
            problem = f"{tied}, which would tie them. Tie parameters before shard()"
        elif owner.others:
            others = ", ".join(owner.others)
            problem = (
                f"an assignment to one name of a parameter that is tied ({others})."
                " Copy values into it, under torch.no_grad(), or untie before shard()"
            )
        elif self._is_of_another(value, sharded):
            problem = "memory of another of its parameters. Tie parameters before shard()"
        elif isinstance(value, FlatDTensor):
            mine = sharded._flat if isinstance(sharded, FlatDTensor) else None
            # By name, too: on one rank the slices of two parameters can both be empty.
            if mine is None or value._flat != mine or value._flat.name != mine.name:
                problem = f"another slice, {value.flat_placement}. Assign value.full_tensor()"
        elif isinstance(value, DTensor):
            if not _is_distributed_like(value, sharded):
                problem = f"a DTensor over {value.device_mesh}. Assign value.full_tensor()"
        elif type(value) not in (Tensor, nn.Parameter):
            problem = f"a {type(value).__name__}. Assign a plain tensor"
        elif value.is_meta:
            problem = "a tensor on the meta device, which has none"
        if not problem and value.shape != sharded.shape:
            problem = f"shape {tuple(value.shape)}. Change shapes before shard()"
        if not problem and torch.promote_types(value.dtype, sharded.dtype) != sharded.dtype:
            problem = f"{value.dtype}. Cast it, to round on purpose"
        if problem:
            raise ValueError(
                f"{owner.name}: expected values of shape {tuple(sharded.shape)}, {sharded.dtype}, "
                f"for a parameter of a sharded model; found {problem}"
            )


def _is_distributed_like(value: Tensor, sharded: Tensor) -> bool:
    """Whether ``distribute_tensor`` made ``value`` by the placements of ``sharded``, or over the
    mesh of tensor parallelism."""
    if not isinstance(sharded, FlatDTensor):
        return False
    flat = sharded.flat_placement
    if flat.spread is not None and isinstance(value, DTensor):
        return value.device_mesh in (flat.spread.mesh, flat.device_mesh)
    return slice_of_distributed(value, flat) is not None


def _address(tensor: Tensor) -> tuple[int, int]:
    """Of its memory, and of its first element in it; zeros where nobody can tell."""
    local = tensor.local if isinstance(tensor, FlatDTensor) else tensor
    if isinstance(local, DTensor) or type(local) not in (Tensor, nn.Parameter) or local.is_meta:
        return 0, 0
    return local.untyped_storage().data_ptr(), local.data_ptr() if local.numel() else 0


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"{name}: expected the parameters that the model had when it was sharded; found a new one, "
        "which would be trained on each rank for itself and not be saved. Add parameters and "
        "modules (adapters, a new head) before shard()"
    )


def _roster_of(module: nn.Module) -> Roster | None:
    reference = _ROSTERS.get(module)
    return reference() if reference is not None else None


_is_watching = False


def _watch_modules() -> None:
    """Let each roster know what is put into its modules."""
    global _is_watching
    if _is_watching:
        return
    _is_watching = True

    def parameter_assigned(module: nn.Module, name: str, value: Any) -> Tensor | None:
        roster = _roster_of(module)
        return None if roster is None else roster.parameter_assigned(module, name, value)

    def module_assigned(module: nn.Module, name: str, value: Any) -> None:
        if (roster := _roster_of(module)) is not None:
            roster.module_assigned(module, name, value)

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
