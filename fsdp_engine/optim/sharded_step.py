"""Steps elementwise optimizers on plain slices, while their state dicts hold FlatDTensors.

[Note: Shadow optimizer]
The DTensor dispatch costs host time in every operation of a step. An elementwise optimizer does not
need it, because the update of a slice depends on this slice alone. Therefore ``step`` runs on a
*shadow*: an object of the same class that shares the optimizer's attributes, but whose
``param_groups`` and ``state`` hold plain slices. A step pre-hook passes it to ``step`` as ``self``.

The optimizer itself is not modified, so no state has to be restored after an exception. Closures,
hooks and LR schedulers read FlatDTensors before, during and after the step. The optimizer and the
shadow share memory:

    optimizer   param_groups: [FlatDTensor]           state[FlatDTensor]["exp_avg"]: FlatDTensor
                                  | .local                                            | .local
    shadow      param_groups: [slice]                 state[slice]["exp_avg"]: slice

A hyperparameter or a new state that the step stores is written through to the optimizer's groups
and state immediately. If other code replaces state (by loading), this is detected before the next
step by comparing objects. Slices have gradients within the step only, because a reference to a
gradient keeps its memory allocated ([Note: When gradients are held] in
``buffers/gradient_memory.py``).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.extension_list import implementation
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.optim.chunked_step import with_closures
from fsdp_engine.optim.shadow import (
    Shadow,
    Slices,
    Slot,
    StepHook,
    method_of,
    shadow_class,
    step_hook_of,
)
from fsdp_engine.optim.state_format import StateFormat
from fsdp_engine.optim.step_placement import StepPlacement
from fsdp_engine.optim.whole_tensor_steps import WholeTensorSteps

_KNOWN = "Adam, AdamW, SGD, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop"
_ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _KNOWN.split(", "))
# Methods that determine a step. In torch's optimizers ``_init_group`` makes the state.
_STEP = ("step", "_init_group")

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def is_elementwise(optimizer: Optimizer, state_format: StateFormat) -> bool:
    """Returns whether the step of ``optimizer`` is known to update each element independently.

    The known classes are those of :func:`shard_optimizer`, and subclasses that inherit their step.
    """
    kinds = type(optimizer).__mro__
    known = (k for k in kinds if k in _ELEMENTWISE or state_format.is_elementwise(optimizer, k))
    if (ancestor := next(known, None)) is None:
        return False
    return all(method_of(kinds[0], name) is method_of(ancestor, name) for name in _STEP)


def shard_optimizer(
    optimizer: AnyOptimizer,
    *,
    elementwise: bool = False,
    whole: Sequence[str] | bool = (),
) -> AnyOptimizer:
    """Make an optimizer step on plain tensors instead of FlatDTensors. Collective.

    An elementwise optimizer steps on each rank's slices. An optimizer that needs full tensors steps
    each of them on one rank. All else is unchanged: ``param_groups``, ``state``, ``state_dict`` and
    ``load_state_dict`` hold FlatDTensors, schedulers and hooks work, and plain tensors in the param
    groups are updated as before. For parameters that are stepped as full tensors, ``state`` has
    only those that this rank steps (``docs/internals/optimizers.md``).

    Args:
        optimizer: An optimizer whose step updates elements, tensors or param groups independently
            of each other, or all param groups together. Trial steps on small tensors determine
            which of these applies. No trial is needed for Adam, AdamW, SGD, RMSprop, Adagrad,
            Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop of ``torch.optim``, subclasses that inherit
            their step, torchao's AdamW8bit, AdamW4bit, AdamWFp8 (whose ``state_dict()`` holds fp32
            values), and optimizers of bitsandbytes other than LARS and LAMB. State in 8 or 4 bits
            is bitwise equal to the state of the same optimizer over full parameters.
        elementwise: Asserts that the optimizer updates each element from the gradient and state of
            this element alone, and that its state tensors have the parameter's shape or shape ().
            No trial steps are run then.
        whole: Patterns (``fnmatch``) of names of parameters that are stepped as full tensors, each
            independently. No trial steps are run for them. True: all parameters.

    Returns:
        ``optimizer`` itself.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``, or ``whole`` is a string.
        ValueError: ``optimizer`` has ``differentiable=True``; a trial step failed; a parameter that
            needs a step of the full tensor is a DTensor over other mesh dimensions; a shard
            boundary is inside a block of quantised state; or the state cannot be kept in the memory
            that was chosen for it.
        OSError: The disk has too little space for the state.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer; found {optimizer!r}")
    name = type(optimizer).__name__
    if isinstance(whole, str):
        raise TypeError(f"whole: expected a list of patterns or a bool; found {whole!r}")
    if elementwise and whole:
        raise ValueError(
            f"whole: expected no patterns with elementwise=True, for {name}; found {whole!r}"
        )
    if optimizer.defaults.get("differentiable"):
        raise ValueError(
            f"optimizer: expected differentiable=False; found True for {name}. Its step would "
            f"need the autograd history of sharded parameters"
        )
    if step_hook_of(optimizer, StepHook) is not None:
        return optimizer
    state_format = implementation(StateFormat).of(optimizer)
    placement = implementation(StepPlacement)(optimizer)
    hook: StepHook | None = None
    if whole or not (elementwise or is_elementwise(optimizer, state_format)):
        patterns = ("*",) if whole is True else tuple(whole or ())
        hook = implementation(WholeTensorSteps).make_hook(optimizer, patterns, placement)
    hook = hook or placement.make_hook(optimizer) or _LocalStep(optimizer, state_format)
    hook.register(optimizer)
    return optimizer


class _WriteThrough(dict[Any, Any]):
    """A dict that applies every change to another mapping, too. Reads are as fast as a dict's."""

    def target(self) -> MutableMapping[Any, Any]:
        """Returns the mapping to which changes are also applied."""
        raise NotImplementedError

    def converted(self, key: Any, value: Any) -> Any:
        """Returns the value to store in the target for ``value`` under ``key``."""
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self or self[key] is not value:
            super().__setitem__(key, value)
            self.target()[key] = self.converted(key, value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        del self.target()[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        for key in reversed(self):
            return key, self.pop(key)
        raise KeyError("popitem(): expected a dict with items; found an empty one")

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        for key in list(self):
            del self[key]


class _LocalGroup(_WriteThrough):
    """A param group of the shadow: slices as parameters, and the optimizer's hyperparameters."""

    def __init__(self, group: dict[str, Any], params: list[Tensor]) -> None:
        super().__init__(group)
        dict.__setitem__(self, "params", params)
        self._group = group

    def target(self) -> MutableMapping[Any, Any]:
        return self._group


class _LocalShadow(Shadow):
    """A shadow with the slices of all parameters."""

    __slots__ = ()

    local_of: dict[int, Tensor]
    local_states: _LocalStates

    @property
    def param_groups(self) -> list[_LocalGroup]:
        """The optimizer's param groups, with slices as parameters."""
        # The groups are made at each access, because other pre-hooks may set hyperparameters.
        local_of = self.local_of
        return [
            _LocalGroup(group, [local_of.get(id(p), p) for p in group["params"]])
            for group in self.__dict__["param_groups"]
        ]

    @property
    def state(self) -> _LocalStates:
        """The optimizer's state, with slices as keys."""
        return self.local_states

    def param_of(self, local: Tensor) -> Tensor:
        """Returns the parameter of a slice, or ``local`` itself if it is not a slice."""
        return self.local_states.param_of(local)


class _OriginalState:
    """Access of the shadow's state to the optimizer's state.

    It has a weak reference to the optimizer, and none to its hooks, so that a deleted optimizer
    frees its state without the garbage collector.

    Attributes:
        slot_of: The slots by ``id`` of the slice.
        changed: Whether a step has changed the state since it was last compared.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.slot_of: dict[int, Slot] = {}
        self.changed = True

    def state_to_change(self) -> Any:
        """Returns the optimizer's state, and records that its step changes it."""
        self.changed = True
        return self._state()

    def entry(self, key: Any) -> Any:
        """Returns the state of a key that is not a slice. If it is missing, it is created, as torch
        does."""
        state = self._state()
        return state[key] if key in state else self.state_to_change()[key]

    def _state(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.state


class _LocalState(_WriteThrough):
    """State of a slice. Values that the step stores are also stored in the parameter's state."""

    def __init__(self, original: _OriginalState, slot: Slot, values: dict[Any, Any]) -> None:
        super().__init__(values)
        self._original = original
        self._slot = slot

    def target(self) -> MutableMapping[Any, Any]:
        # ``state`` may be a plain dict without an entry for the parameter.
        state: MutableMapping[Any, Any] = self._original.state_to_change().setdefault(
            self._slot.param, {}
        )
        return state

    def converted(self, key: Any, value: Any) -> Any:
        return self._slot.to_flat(key, value)


class _LocalStates(_WriteThrough):
    """``state`` of the shadow, with slices as keys. Entries of other keys are the optimizer's."""

    def __init__(self, original: _OriginalState) -> None:
        super().__init__()
        self._original = original

    def __missing__(self, key: Any) -> Any:
        slot = self._original.slot_of.get(id(key))
        if slot is None:
            entry = self._original.entry(key)
            dict.__setitem__(self, key, entry)
            return entry
        state = _LocalState(self._original, slot, {})
        dict.__setitem__(self, key, state)
        return state

    def __setitem__(self, key: Any, value: Any) -> None:
        if id(key) not in self._original.slot_of:
            self._original.state_to_change()[key] = value
            dict.__setitem__(self, key, value)
            return
        state = self[key]
        state.clear()
        state.update(value)

    def __delitem__(self, key: Any) -> None:
        dict.__delitem__(self, key)
        slot = self._original.slot_of.get(id(key))
        self._original.state_to_change().pop(key if slot is None else slot.param, None)

    def param_of(self, local: Tensor) -> Tensor:
        """Returns the parameter of a slice, or ``local`` itself if it is not a slice."""
        slot = self._original.slot_of.get(id(local))
        return local if slot is None else slot.param

    def load_other(self, key: Any, value: Any) -> None:
        """Add the optimizer's entry for a key that is not a slice."""
        dict.__setitem__(self, key, value)

    def load(self, slot: Slot, param_state: dict[Any, Any]) -> None:
        """Set the state of a slice from the state of its parameter, which is sharded in place."""
        local_state = _LocalState(self._original, slot, slot.load(param_state))
        dict.__setitem__(self, slot.local, local_state)


class _LocalStep(StepHook):
    """The step hook of elementwise optimizers, with a shadow of the slices of all parameters."""

    def __init__(self, optimizer: Optimizer, state_format: StateFormat) -> None:
        state_format.check(optimizer)
        slots = ("local_of", "local_states")
        self._shadow_class = shadow_class(_LocalShadow, optimizer, slots, state_format.mixins)
        self._format = state_format
        self._original = _OriginalState(optimizer)
        self._params: list[Tensor] = []
        self._slices = Slices([])
        self._local_of: dict[int, Tensor] = {}  # by id of the FlatDTensor
        self._local_states = _LocalStates(self._original)
        # Objects of the optimizer's state when the shadow's state last matched it.
        self._known_state: Any = None
        self._known_entries: list[Any] = []
        self._known_dicts: list[dict[Any, Any]] = []
        self._known_values: list[Any] = []

    def register(self, optimizer: Optimizer) -> None:
        """See :class:`StepHook`."""
        super().register(optimizer)
        self._format.register(optimizer)

    def begin(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See :class:`StepHook`. Updates the shadow."""
        self._refresh_params(optimizer)
        if self._original.changed or not self._state_is_known(optimizer.state):
            self._load_state(optimizer.state)
        self._slices.set_gradients()
        shadow: Any = object.__new__(self._shadow_class)
        shadow.__dict__ = optimizer.__dict__
        shadow.local_of, shadow.local_states = self._local_of, self._local_states
        arguments, kwargs = with_closures(args, kwargs, self._closure)
        return (shadow, *arguments), kwargs

    def finish(self, optimizer: Any) -> None:
        """See :class:`StepHook`. The step has already written state through to the optimizer."""
        self._slices.clear_gradients()
        if self._original.changed:
            self._remember(optimizer.state)
        # Fused steps do not increment version counters (torch 2.11 to 2.13).
        torch.autograd.graph.increment_version(self._slices.locals)

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def with_new_gradients() -> Any:
            self._slices.clear_gradients()
            result = closure()
            self._slices.set_gradients()
            return result

        return with_new_gradients

    def _refresh_params(self, optimizer: Any) -> None:
        """Update the slots if parameters were added, removed or converted."""
        groups = optimizer.param_groups
        params = list(chain.from_iterable(group["params"] for group in groups))
        if (
            len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and self._slices.are_current
        ):
            return
        self._format.check(optimizer)
        known = {id(slot.param): slot for slot in self._slices.slots if slot.is_current}
        self._params = params
        flat = [param for param in params if isinstance(param, FlatDTensor)]
        slots = [known.get(id(p)) or Slot(p, self._format) for p in flat]
        self._slices = Slices(slots)
        self._local_of = {id(slot.param): slot.local for slot in slots}
        self._original.slot_of = {id(slot.local): slot for slot in slots}
        self._original.changed = True

    def _state_is_known(self, state: Any) -> bool:
        values = chain.from_iterable(map(dict.values, self._known_dicts))
        return (
            state is self._known_state
            and len(state) == len(self._known_entries)
            and all(map(operator.is_, state.values(), self._known_entries))
            and sum(map(len, self._known_dicts)) == len(self._known_values)
            and all(map(operator.is_, values, self._known_values))
        )

    @torch.no_grad()
    def _load_state(self, state: Any) -> None:
        """Set the shadow's state from the optimizer's."""
        self._local_states = _LocalStates(self._original)
        slots = {id(slot.param): slot for slot in self._slices.slots}
        for key, value in state.items():
            if (slot := slots.get(id(key))) is not None:
                self._local_states.load(slot, value)
            elif not isinstance(key, FlatDTensor):
                self._local_states.load_other(key, value)
        self._remember(state)

    def _remember(self, state: Any) -> None:
        """Keep the objects of the optimizer's state, to detect when they are replaced."""
        self._original.changed = False
        self._known_state = state
        self._known_entries = list(state.values())
        flat = {id(param) for param in self._slices.params}
        self._known_dicts = [each for key, each in state.items() if id(key) in flat]
        self._known_values = list(chain.from_iterable(map(dict.values, self._known_dicts)))
