"""Saves and loads the state of an optimizer by names of parameters, for any order and sharding.

The format is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, with an
additional entry for the optimizer's class:

    optimizer.state.<parameter>.<state>             a tensor, or an object
    optimizer.param_groups.<number>.params          names of its parameters
    optimizer.param_groups.<number>.<hyperparameter>
    optimizer.kind                                  name of the optimizer's class

[Note: State without a step]
An optimizer that has not stepped has no state to load into. Its state is created from the metadata:
a tensor of the saved weight's shape is loaded as a slice with the parameter's placement (or as a
plain tensor if the parameter is one), and every other tensor is replicated. For a 0-d parameter the
shape of a state does not determine whether the state is sharded like the parameter. In this case a
parameter with dims that has a state of the same name determines it: if that state has the shape of
its parameter, the 0-d state is sharded, too. Without such a parameter, all states but ``step`` are
sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp_engine.checkpoint.joint_optimizer import Optimizers, single_optimizers
from fsdp_engine.checkpoint.model_state import (
    MODEL,
    OPTIMIZER,
    Path,
    Saved,
    Targets,
    describe_tensor,
    nested,
)
from fsdp_engine.checkpoint.sharded_model import SavedParam, ShardedModel, saved_params
from fsdp_engine.extension_list import implementation
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.memory import allocator
from fsdp_engine.optim.shadow import StepHook, method_of, step_hook_of
from fsdp_engine.optim.state_format import StateFormat
from fsdp_engine.optim.state_leaves import map_leaves

STATE, GROUPS, KIND = "state", "param_groups", "kind"

_NOT_HYPERPARAMETERS = ("params", "param_names")


def name_params(
    named: Mapping[int, SavedParam], optimizer: torch.optim.Optimizer
) -> list[list[SavedParam]]:
    """Returns the named parameters of each of the optimizer's groups.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
        ValueError: The optimizer holds a tensor that is not a parameter of the sharded model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer or None; found {optimizer!r}")
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in named]
        if unknown:
            raise ValueError(
                "optimizer: expected parameters of the sharded model (built after shard()); found "
                f"others in group {number}, of shapes {unknown[:4]}"
            )
        groups.append([named[id(param)] for param in group["params"]])
    return groups


def optimizer_entries(engine: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the entries below ``optimizer`` that this rank saves: state tensors, and on rank 0
    all other entries.

    Raises:
        ValueError: A state contains a container or a tensor of a subclass, has another shape than
            the expert's parameter, or belongs to no parameter.
        TypeError, ValueError: Errors of :func:`name_params`.
    """
    groups = name_params(saved_params(engine), optimizer)
    packed = optimizer.state_dict()
    hooks = _step_hooks(optimizer)
    flattened = implementation(StateFormat).flattened
    member_of = {
        index: member
        for group, members in zip(packed[GROUPS], groups, strict=True)
        for index, member in zip(group["params"], members, strict=True)
    }
    is_first = engine.ranks.rank == 0
    states: dict[str, dict[str, Any]] = {}
    for index, state in packed[STATE].items():
        member = member_of.get(index)
        if member is None:
            raise ValueError(f"optimizer: expected state of parameters; found state of {index!r}")
        if any(hook.keeps_full_state(member.held) for hook in hooks):
            states[member.name] = {
                key: map_leaves(partial(_full_as_saved, member, key), value)
                for key, value in state.items()
            }
            continue
        for key, value in flattened(member.name, member.held, state).items():
            if isinstance(value, Mapping | list):
                raise ValueError(
                    f"optimizer: expected tensors and numbers in the state of {member.name}; "
                    f"found a {type(value).__name__} in {key!r}"
                )
            if (kind := _class_within(value)) is not None:
                raise ValueError(
                    f"optimizer: expected plain tensors in the state of {member.name}; found a "
                    f"{kind.__name__} in {key!r}. Call fe.shard_optimizer(optimizer): its state "
                    "dicts contain plain tensors"
                )
            if isinstance(value, Tensor) and value.shape == member.held.shape:
                value = member.as_saved(value)
            elif isinstance(value, FlatDTensor) and member.is_of_experts:
                raise ValueError(
                    f"optimizer: expected state of {member.name}, an expert's parameter, in the "
                    f"parameter's shape; found {key!r} of shape {tuple(value.shape)}"
                )
            if is_first or isinstance(value, Tensor):
                states.setdefault(member.name, {})[key] = value
    if not is_first:
        return {STATE: states}
    hyperparameters = [
        {
            **_hyperparameters(group),
            "params": list(dict.fromkeys(name for each in members for name in _names(each))),
        }
        for group, members in zip(packed[GROUPS], groups, strict=True)
    ]
    return {STATE: states, GROUPS: hyperparameters, KIND: type(optimizer).__name__}


def group_targets(saved: Saved) -> Targets:
    """Returns the targets of the optimizer's groups and class, which are read first.

    Raises:
        ValueError: The checkpoint contains no optimizer state by names.
    """
    keys = [*saved.below(OPTIMIZER, GROUPS), *saved.below(OPTIMIZER, KIND)]
    if not keys:
        raise ValueError(
            f"optimizer: expected entries {OPTIMIZER}.{GROUPS} and {OPTIMIZER}.{STATE} by "
            "parameter names; found none"
        )
    return {key: saved.empty(key) for key in keys}


class OptimizerMatch:
    """The match of a checkpoint's entries with an optimizer.

    Args:
        engine: The engine of the optimizer's parameters.
        optimizer: The optimizer, which only :meth:`apply` changes.
        saved: The keys of the checkpoint.
        groups: The values that were read for :func:`group_targets`.

    Attributes:
        targets: The entries to read.
        problems: A line for each entry that does not fit. Such entries are not in ``targets``.
        is_same_kind: Whether a compatible class of optimizer saved the state.
    """

    def __init__(
        self,
        engine: ShardedModel,
        optimizer: torch.optim.Optimizer,
        saved: Saved,
        groups: Targets,
    ) -> None:
        self._optimizer = optimizer
        self._saved = saved
        named = saved_params(engine)
        self._members = name_params(named, optimizer)
        self._hooks = _step_hooks(optimizer)
        self._full: dict[str, Tensor] = {}  # memory of full state tensors, by key
        self._format = implementation(StateFormat).of(optimizer)
        self._canonical = {alias: param.name for param in named.values() for alias in param.aliases}
        self.targets: Targets = {}
        self.problems: list[str] = []
        self.is_same_kind = True
        read = nested({saved.paths[key][1:]: value for key, value in groups.items()})
        saved_groups = _checked_groups(read)
        self._group_of = {
            self._canonical.get(name, name): group
            for group in saved_groups
            for name in group["params"]
        }
        self._check_kind(read.get(KIND), saved_groups)
        self._check_names()
        self._check_group_state(saved_groups)
        empty = [group for group in saved_groups if not group["params"]]
        self._hyperparameters = [
            self._merge(number, members) if members else self._of_empty_group(number, empty)
            for number, members in enumerate(self._members)
        ]
        self._keys = self._state_keys()
        kinds = [type(each) for each in single_optimizers(optimizer) for _ in each.param_groups]
        for number, members in enumerate(self._members):
            values = {**optimizer.param_groups[number], **self._hyperparameters[number]}
            expected: dict[int, set[str]] = {}
            for member in members:
                num_dims = member.held.ndim
                if num_dims not in expected:
                    expected[num_dims] = state_names(kinds[number], values, num_dims)
                if self._is_complete(member, kinds[number], expected[num_dims]):
                    self._match_state(member, _is_torchs(kinds[number]))

    def apply(self, read: Targets) -> None:
        """Load the values that were read for ``targets`` into the optimizer."""
        packed = self._optimizer.state_dict()
        states: dict[int, dict[str, Any]] = {}
        for group, members in zip(packed[GROUPS], self._members, strict=True):
            for index, member in zip(group["params"], members, strict=True):
                keys = self._keys.get(member.name, {})
                state = {
                    path: self._as_held(member, key, read[key])
                    for path, key in keys.items()
                    if key in self.targets
                }
                if state:
                    states[index] = nested(state)
        groups = [
            {**group, **hyperparameters}
            for group, hyperparameters in zip(packed[GROUPS], self._hyperparameters, strict=True)
        ]
        self._optimizer.load_state_dict({STATE: states, GROUPS: groups})
        for group, members in zip(packed[GROUPS], self._members, strict=True):
            for index, member in zip(group["params"], members, strict=True):
                if self._put_full_state(member, states.get(index)):
                    continue
                loaded = self._optimizer.state[member.held] if index in states else {}
                for name, value in states.get(index, {}).items():
                    # load_state_dict casts to the parameter's dtype. Restore the dtype of the
                    # target; see _dtype_of_state.
                    casts = isinstance(value, Tensor) and loaded[name].dtype != value.dtype
                    if casts and _class_within(loaded[name]) is None:
                        loaded[name] = value.to(loaded[name].device)

    def _put_full_state(self, member: SavedParam, state: Any) -> bool:
        """Set the full state of a parameter to the state that was read. Returns False if the state
        is sharded."""
        for hook in self._hooks:
            if hook.keeps_full_state(member.held):
                if state:
                    hook.put_state(member.held, state)
                return True
        return False

    def _as_held(self, member: SavedParam, key: str, value: Any) -> Any:
        if key in self._full:
            return self._full[key]  # the target that was read is a view of this tensor
        return member.as_held(value) if isinstance(value, Tensor) else value

    def _check_kind(self, kind: str | None, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that the optimizer's class, one of its base classes, or a class with the same
        hyperparameters saved the state."""
        classes = [each.__name__ for each in type(self._optimizer).__mro__]
        mine = set().union(*(_hyperparameters(g) for g in self._optimizer.param_groups))
        mine &= set().union(*(each.defaults for each in single_optimizers(self._optimizer)))
        missing = mine - set().union(*(_hyperparameters(group) for group in saved_groups))
        if kind not in classes and missing:
            self.is_same_kind = False
            self.problems.append(
                f"{OPTIMIZER}: expected the state of {classes[0]}; found that of "
                f"{kind or 'another kind'}, without {', '.join(sorted(missing))}"
            )

    def _check_names(self) -> None:
        names = {member.name for members in self._members for member in members}
        of_others = {each for members in self._members for one in members for each in one.of_others}
        for name in sorted(names - self._group_of.keys()):
            self.problems.append(
                f"missing {OPTIMIZER}.{STATE}.{name}: expected it in a param group; found nothing"
            )
        for name in sorted(self._group_of.keys() - names - of_others):
            self.problems.append(
                f"unexpected {OPTIMIZER}.{STATE}.{name}: expected parameters of the optimizer; "
                "found another in a param group"
            )

    def _check_group_state(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that the checkpoint has the entries that only the state dict adds to param groups,
        such as the state of a loss scaler."""
        own = set().union(*(_hyperparameters(g) for g in self._optimizer.param_groups))
        packed = set().union(*map(_hyperparameters, self._optimizer.state_dict()[GROUPS]))
        saved = set().union(*map(_hyperparameters, saved_groups))
        for name in sorted(packed - own - saved):
            self.problems.append(
                f"missing {OPTIMIZER}.{GROUPS}: expected {name} in its groups; found nothing"
            )

    def _of_empty_group(self, number: int, empty: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the saved hyperparameters of a group without parameters. The n-th group without
        parameters gets those of the n-th saved group without parameters."""
        place = sum(not members for members in self._members[:number])
        return _hyperparameters(empty[place]) if place < len(empty) else {}

    def _is_complete(
        self, member: SavedParam, kind: type[torch.optim.Optimizer], expected: set[str]
    ) -> bool:
        """Returns whether a parameter's saved state is empty or complete. Reports a problem if
        not."""
        found = {str(path[0]) for path in self._keys.get(member.name, {})}
        missing = expected - found if found else set()
        if missing:
            self.problems.append(
                f"missing {OPTIMIZER}.{STATE}.{member.name}: expected the state of "
                f"{kind.__name__}, {', '.join(sorted(expected))}; found {', '.join(sorted(found))}"
            )
        return not missing

    def _dtype_of_state(self, member: SavedParam, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a state of this saved dtype is loaded: the parameter's dtype
        if state and parameter were saved in the same dtype, else the saved dtype."""
        return member.held.dtype if dtype == self._saved_dtype(member.aliases) else dtype

    def _merge(self, number: int, members: Sequence[SavedParam]) -> dict[str, Any]:
        """Returns the hyperparameters that the parameters of a group had at the save. Reports a
        problem if they differ."""
        names = [m.name for m in members if m.name in self._group_of]
        merged: dict[str, Any] = {}
        origin: dict[str, str] = {}
        conflicting: set[str] = set()
        for name in names:
            for key, value in _hyperparameters(self._group_of[name]).items():
                if key not in merged:
                    merged[key], origin[key] = value, name
                elif key not in conflicting and not _equal(merged[key], value):
                    conflicting.add(key)
                    self.problems.append(
                        f"{OPTIMIZER}.{GROUPS}: expected one {key} for all of group {number}; "
                        f"found {merged[key]} of {origin[key]} and {value} of {name}"
                    )
        return merged

    def _state_keys(self) -> dict[str, dict[Path, str]]:
        """Returns the flat key of each state, by the name of the parameter and the path of the
        state: its name, and keys or indices in containers."""
        found: dict[str, dict[Path, str]] = {}
        for key in self._saved.below(OPTIMIZER, STATE):
            _, _, *rest = self._saved.paths[key]
            if len(rest) >= 2:
                name, *path = rest
                found.setdefault(self._canonical.get(str(name), str(name)), {})[tuple(path)] = key
            else:
                self.problems.append(
                    f"unexpected {key}: expected {OPTIMIZER}.{STATE}.<parameter>.<state>; "
                    f"found {self._saved.describe(key)}"
                )
        return found

    def _match_state(self, member: SavedParam, is_torchs: bool) -> None:
        for path, key in self._keys.get(member.name, {}).items():
            state = str(path[0])
            target = self._saved.empty(key, "meta")
            # torch's own optimizers also store tensors of other shapes in the parameter's dtype
            # (Adafactor).
            follows = is_torchs and target is not None and target.ndim > 0
            if target is not None and (follows or self._is_like_parameter(member, state, key)):
                target = target.to(self._dtype_of_state(member, target.dtype))
            if target is not None:
                for hook in self._hooks:
                    held = hook.target_of(member.held, target.shape, target.dtype)
                    if held is not None:
                        self._full[key] = held
            if key in self._full:
                self.targets[key] = _full_as_saved(member, state, self._full[key])
                continue
            if (scales := self._scales_of_blocks(member, state, target)) is not None:
                target = scales
            elif target is not None and self._is_like_parameter(member, state, key):
                if target.shape == member.saved.shape:
                    try:
                        for hook in self._hooks:
                            hook.check_kept_state(member.held, state)
                    except ValueError as error:
                        self.problems.append(f"{key}: {error}")
                        continue
                    target = self._target_like(member, state, target.dtype)
                else:
                    expected = describe_tensor(tuple(member.saved.shape), target.dtype)
                    self.problems.append(
                        f"{key}: expected {expected}; found {self._saved.describe(key)}"
                    )
                    continue
            elif target is not None:
                target = allocator.zeros(tuple(target.shape), target.dtype, "cpu")
            self.targets[key] = target

    def _scales_of_blocks(
        self, member: SavedParam, state: str, target: Tensor | None
    ) -> Tensor | None:
        """Returns a tensor for this rank's elements of a state that has an element for each block
        of the parameter; None for any other state."""
        if target is None or not isinstance(member.held, FlatDTensor):
            return None
        of_param = member.held.flat_placement
        placement = self._format.placement_of(state, of_param)
        if placement in (None, of_param) or placement.shape != target.shape:
            return None
        local = allocator.zeros(placement.numel, target.dtype, member.held.device)
        return FlatDTensor.from_flat_local(local, placement)

    def _target_like(self, member: SavedParam, state: str, dtype: torch.dtype) -> Tensor:
        """Returns the existing state if it has the parameter's placement, otherwise a new
        tensor."""
        found = self._optimizer.state.get(member.held, {}).get(state)
        if isinstance(found, Tensor) and found.dtype == dtype and _class_within(found) is None:
            placement = _placement_of(member.held)
            fits = found.shape == member.held.shape and _placement_of(found) == placement
            if fits:
                return member.as_saved(found.detach())
        for hook in self._hooks:
            if (kept := hook.kept_state(member.held, state, dtype)) is not None:
                return member.as_saved(kept)
        return member.zeros(dtype)

    def _is_like_parameter(self, member: SavedParam, state: str, key: str) -> bool:
        """Returns whether a state has its parameter's shape. See [Note: State without a step]."""
        shape = self._saved_shape(member.aliases)
        if self._saved.shape(key) != shape:
            return False
        if shape:
            return True
        for members in self._members:
            for other in members:
                other_shape = self._saved_shape(other.aliases)
                other_key = self._keys.get(other.name, {}).get((state,))
                if other_shape and other_key is not None:
                    return self._saved.shape(other_key) == other_shape
        return state != "step"

    def _saved_dtype(self, aliases: Iterable[str]) -> torch.dtype | None:
        entries = (self._saved.entries.get(f"{MODEL}.{alias}") for alias in aliases)
        found = (each for each in entries if isinstance(each, TensorStorageMetadata))
        return next((entry.properties.dtype for entry in found), None)

    def _saved_shape(self, aliases: Iterable[str]) -> tuple[int, ...] | None:
        shapes = (self._saved.shape(f"{MODEL}.{alias}") for alias in aliases)
        return next((shape for shape in shapes if shape is not None), None)


def state_names(
    kind: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], num_dims: int
) -> set[str]:
    """Returns the names of the states that a parameter has after a step. They are found by a trial
    step on a parameter of one element.

    The result is empty if the optimizer's step is not torch's own, or if the step fails, for
    example because it needs a closure.
    """
    if not _is_torchs(kind):
        return set()
    step = method_of(kind, "step")
    values = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in hyperparameters.items()
    }
    values |= {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
    param = nn.Parameter(allocator.zeros((1,) * num_dims, torch.float32, "cpu"))
    param.grad = allocator.zeros((1,) * num_dims, torch.float32, "cpu")
    trial: Any = object.__new__(kind)
    groups = [{**values, "params": [param]}]
    trial.__dict__.update(defaults=values, param_groups=groups, state=defaultdict(dict))
    try:
        step(trial)
    except Exception:  # the step needs a closure or other gradients
        return set()
    return {str(name) for name, value in trial.state[param].items() if value is not None}


def _is_torchs(kind: type[torch.optim.Optimizer]) -> bool:
    """Returns whether the step of an optimizer is torch's own."""
    return str(getattr(method_of(kind, "step"), "__module__", "")).startswith("torch.optim.")


def _checked_groups(read: Any) -> list[dict[str, Any]]:
    """Returns the param groups of a saved optimizer, with names of parameters.

    Raises:
        ValueError: The groups are not a list of dicts with a list of names in ``params``.
    """
    groups = read.get(GROUPS) if isinstance(read, dict) else None
    are_right = isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    )
    if not are_right or not isinstance(read.get(KIND), str | None):
        raise ValueError(
            f"{OPTIMIZER}.{GROUPS}: expected a list of groups, each with a list of parameter names "
            "in params, and the name of the optimizer's class; found other values. The checkpoint "
            "is damaged"
        )
    return list(groups)  # type: ignore[arg-type]


def _step_hooks(optimizer: torch.optim.Optimizer) -> list[StepHook]:
    hooks = (step_hook_of(each, StepHook) for each in single_optimizers(optimizer))
    return [hook for hook in hooks if hook is not None]


def _full_as_saved(member: SavedParam, key: Any, value: Any) -> Any:
    """Convert a value of a parameter's full state to the placement in a checkpoint.

    Raises:
        ValueError: The value is neither tensor nor number, or it belongs to an expert and has
            another shape.
    """
    if isinstance(value, Tensor):
        if member.saved is member.held:
            return value
        if value.shape == member.held.shape or not member.is_of_experts:
            return member.as_saved(value)
        if value.ndim == 0:
            return value
        raise ValueError(
            f"optimizer: expected state in the shape of {member.name}, a tensor of experts that "
            f"is sharded over ranks; found {key!r} of shape {tuple(value.shape)}"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"optimizer: expected tensors and numbers in the state of {member.name}; found a "
        f"{type(value).__name__} in {key!r}"
    )


def _placement_of(tensor: Tensor) -> FlatPlacement | None:
    return tensor.flat_placement if isinstance(tensor, FlatDTensor) else None


def _class_within(value: object) -> type | None:
    """Returns the class of a tensor, or of a FlatDTensor's slice, if it is a subclass of Tensor;
    else None."""
    local = value._local_tensor if isinstance(value, FlatDTensor) else value
    if not isinstance(local, Tensor) or type(local) in (Tensor, nn.Parameter, FakeTensor):
        return None
    return None if isinstance(local, DTensor) else type(local)


def _names(member: SavedParam) -> tuple[str, ...]:
    """Returns the name of a parameter. For an expert: the names of all ranks' experts at its
    position."""
    return member.of_others if member.is_of_experts else (member.name,)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and bool(torch.equal(one, other))
    return bool(one == other)


def optimizer_kind(optimizer: Optimizers | None) -> str | None:
    """Returns the names of the optimizers' classes, which ranks compare; None without an
    optimizer."""
    if optimizer is None:
        return None
    if isinstance(optimizer, Sequence):
        return " and ".join(str(optimizer_kind(each)) for each in optimizer)
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
