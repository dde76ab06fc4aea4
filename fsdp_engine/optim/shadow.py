"""Replacements of an optimizer and of its parameters for a step on plain slices.

See [Note: Shadow optimizer] in ``sharded_step.py``.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import count, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_engine.flat_dtensor import (
    FlatDTensor,
    clear_gradients,
    gradients_of,
    set_gradients,
)
from fsdp_engine.flat_dtensor.parameter_access import GradientAccess
from fsdp_engine.optim.state_format import StateFormat

slice_of: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
_dtype_of: Callable[[Any], torch.dtype] = operator.attrgetter("dtype")
_param_local: Callable[[Any], Tensor] = operator.attrgetter("param_local")
_TORCHS_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__


def method_of(kind: type[Optimizer] | None, name: str) -> Any:
    """Returns a method of a class, without the wrapper that torch sets around ``step``.

    torch wraps ``step`` of each class when the first instance is made.
    """
    found: Any = getattr(kind, name, None)
    while getattr(found, "__code__", None) is _TORCHS_WRAPPER:
        found = found.__wrapped__
    return found


class StepHook:
    """A step pre-hook that makes an optimizer step on a shadow with plain tensors.

    Attributes:
        takes_moved_state: Whether the hook can step parameters whose state is not on the device
            between steps.
    """

    takes_moved_state = False

    def __call__(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run :meth:`begin`. Do nothing for a shadow, whose ``step`` may call its parent's."""
        return None if isinstance(optimizer, Shadow) else self.begin(optimizer, args, kwargs)

    def begin(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare the step, and return the arguments of ``step``, with a shadow as ``self``."""
        raise NotImplementedError

    def finish(self, optimizer: Any) -> None:
        """Complete the step. Called after torch has stepped the optimizer."""
        raise NotImplementedError

    def _finish(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Run :meth:`finish` as a step post-hook."""
        if not isinstance(optimizer, Shadow):
            self.finish(optimizer)

    def kept_state(self, param: Tensor, key: Any, dtype: torch.dtype) -> Tensor | None:
        """Returns the tensor of ``optimizer.state`` into which a checkpoint's values are read.

        None: the checkpoint reader allocates it.
        """
        return None

    def check_kept_state(self, param: Tensor, key: Any) -> None:
        """Check that a state tensor of the parameter's shape can be loaded.

        Raises:
            ValueError: ``param`` belongs to this optimizer, whose state has no memory for ``key``.
        """

    def keeps_full_state(self, param: Tensor) -> bool:
        """Returns whether the state of ``param`` is in full tensors, each on a single rank.

        Full state may have tensors of any shapes, in any containers.
        """
        return False

    def target_of(self, param: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Returns new memory for a full state tensor of a checkpoint.

        None: ``param`` has no full state.
        """
        return None

    def put_state(self, param: Tensor, state: Any) -> None:
        """Set the full state of ``param``, whose tensors were read into :meth:`target_of`."""

    def describe(self, params: Collection[int]) -> str:
        """Returns a line that describes how parameters with these ``id``s are stepped.

        It is empty if the hook steps none of them, or steps slices only.
        """
        return ""

    def register(self, optimizer: Optimizer) -> None:
        """Register the hooks of the step with the optimizer.

        The post-hook precedes all others, so that these can read the values that the step stores.
        """
        _REGISTERED[next(_NUMBERS)] = self
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_hook_last))
        self._number = optimizer.register_step_pre_hook(self).id
        hooks = optimizer._optimizer_step_post_hooks
        others = list(hooks)
        optimizer.register_step_post_hook(self._finish)
        for number in others:
            hooks[number] = hooks.pop(number)

    def hook_last(self, optimizer: Optimizer) -> None:
        """Make this pre-hook run last: others may change gradients or hyperparameters."""
        hooks = optimizer._optimizer_step_pre_hooks
        hooks[self._number] = hooks.pop(self._number)


_HOOKS: list[object] = []  # the pre-hook of all optimizers, registered once for this process
# All step hooks of this process, in the order of their registration.
_REGISTERED: weakref.WeakValueDictionary[int, StepHook] = weakref.WeakValueDictionary()
_NUMBERS = count()
AnyHook = TypeVar("AnyHook", bound=StepHook)


def step_hook_of(optimizer: Optimizer, kind: type[AnyHook]) -> AnyHook | None:
    """Returns the hook of class ``kind`` that steps an optimizer, or None if there is none."""
    hooks: Iterable[Any] = optimizer._optimizer_step_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


def describe_steps(params: Collection[int]) -> list[str]:
    """Returns a line for each optimizer of this process that steps parameters with these ``id``s.

    Optimizers that step slices only are left out.
    """
    lines = (hook.describe(params) for hook in list(_REGISTERED.values()))
    return [line for line in lines if line]


def _hook_last(optimizer: Optimizer, *args: object) -> None:
    """Make the step hook of an optimizer its last pre-hook.

    This is a pre-hook of all optimizers, which runs before their own pre-hooks.
    """
    hook = step_hook_of(optimizer, StepHook)
    if hook is not None and not isinstance(optimizer, Shadow):
        hook.hook_last(optimizer)


class Shadow:
    """Mixin for an optimizer class, with param groups and state that differ from the optimizer's.

    An object is made for each step. It shares the optimizer's ``__dict__``, over which properties
    take precedence.
    """

    __slots__ = ()


AnyShadow = TypeVar("AnyShadow", bound=Shadow)


def shadow_class(
    mixin: type[AnyShadow],
    optimizer: Optimizer,
    slots: tuple[str, ...],
    others: tuple[type, ...] = (),
) -> Any:
    """Returns the class of shadows of ``optimizer``.

    Args:
        mixin: The base class that defines ``param_groups`` and ``state``.
        optimizer: The optimizer, whose class is a base class, too.
        slots: Names of the attributes that shadows do not share with the optimizer.
        others: Further mixins.
    """
    kind = type(optimizer)
    return type(kind.__name__, (mixin, *others, kind), {"__slots__": slots})


class Slot:
    """One FlatDTensor of the optimizer, and the slice that replaces it in the shadow.

    Args:
        param: The FlatDTensor.
        state_format: The format of its optimizer state.
    """

    state_format = StateFormat()

    def __init__(self, param: FlatDTensor, state_format: StateFormat = state_format) -> None:
        self.param = param
        self.state_format = state_format
        # This is a separate tensor, so that it has its own .grad. It shares the parameter's memory
        # and version counter.
        self.local = param.local.detach()
        self.param_local = param.local

    @property
    def is_current(self) -> bool:
        """Whether the parameter has the same slice as when this object was made."""
        return slice_of(self.param) is self.param_local

    def to_flat(self, key: Any, value: Any) -> Any:
        """Convert state of the slice to state of the parameter."""
        placement = self.state_format.placement_of(key, self.param.flat_placement)
        if placement is None or not isinstance(value, Tensor) or isinstance(value, FlatDTensor):
            return value
        if value.shape == (placement.numel,):
            return FlatDTensor.from_flat_local(value, placement)
        return value

    def to_local(self, key: Any, value: Any) -> tuple[Any, Any]:
        """Convert state of the parameter to state of the slice.

        Returns:
            The state of the parameter, as a FlatDTensor if it is sharded, and the state of the
            slice.

        Raises:
            ValueError: ``value`` is a FlatDTensor with another placement.
        """
        placement = self.state_format.placement_of(key, self.param.flat_placement)
        if placement is None:
            return value, value
        if isinstance(value, FlatDTensor):
            if not value.flat_placement.is_same_on_all_ranks(placement):
                raise ValueError(
                    f"state {key!r} of {placement.name or 'a parameter'}: expected {placement}; "
                    f"found {value.flat_placement}. State of torch.save can only be loaded with "
                    "the same ranks and levels; fe.save_checkpoint saves state for any"
                )
            return value, value.local
        if isinstance(value, Tensor) and value.ndim and value.shape == placement.shape:
            # The value is a full tensor, which was loaded from an unsharded checkpoint.
            full = value.full_tensor() if isinstance(value, DTensor) else value
            local = placement.slice_of_full(full).clone()
            return FlatDTensor.from_flat_local(local, placement), local
        return value, value

    def load(self, state: MutableMapping[Any, Any]) -> dict[Any, Any]:
        """Shard the parameter's ``state`` in place, and return the state of the slice."""
        values = {}
        for key, value in state.items():
            state[key], values[key] = self.to_local(key, value)
        return values

    def keep(self, state: MutableMapping[Any, Any], found: Mapping[Any, Any]) -> None:
        """Store the state of the slice after a step in the state of the parameter.

        Args:
            state: The state of the parameter. Objects that the step did not replace are kept.
            found: The state of the slice.
        """
        for key in [key for key in state if key not in found]:
            del state[key]
        for key, value in found.items():
            before = state.get(key, found)
            if before is not value and slice_within(before) is not value:
                state[key] = self.to_flat(key, value)


def slice_within(value: Any) -> Any:
    """Returns the slice of a FlatDTensor, and any other object unchanged."""
    return slice_of(value) if isinstance(value, FlatDTensor) else value


class PlainSlot(Slot):
    """A parameter that is not sharded. The shadow uses the parameter itself."""

    def __init__(self, param: Any) -> None:
        self.param: Any = param
        self.local = self.param_local = param

    def to_flat(self, key: Any, value: Any) -> Any:
        return value

    def to_local(self, key: Any, value: Any) -> tuple[Any, Any]:
        return value, value


class Slices:
    """The slices of several parameters, and their gradients within a step.

    Slices have gradients within a step only, because a reference to a gradient keeps its memory
    allocated ([Note: When gradients are held] in ``buffers/gradient_memory.py``). Loops run in C,
    because there may be many parameters.

    Args:
        slots: The parameters with their slices.
        bring: Function of the index of a slice and its gradient, which returns the gradient on the
            device of the slice. None: gradients are on this device.

    Attributes:
        slots: The argument of this name.
        params: The FlatDTensors.
        locals: The slices.
    """

    def __init__(
        self, slots: Sequence[Slot], bring: Callable[[int, Tensor], Tensor] | None = None
    ) -> None:
        self.slots = slots
        self._bring = bring
        self.params: list[FlatDTensor] = [slot.param for slot in slots]
        self.locals = [slot.local for slot in slots]
        self._dtypes = [local.dtype for local in self.locals]
        backrefs = [param.backref for param in self.params if param.backref is not None]
        reads = {id(each.gradients): each.gradients for each in backrefs}
        self._reads: list[GradientAccess] = list(reads.values())

    @property
    def are_current(self) -> bool:
        """Whether all parameters have the same slices as when this object was made."""
        return all(map(operator.is_, map(slice_of, self.params), map(_param_local, self.slots)))

    def wait_for_gradients(self) -> None:
        """Make compute wait for reductions of gradients."""
        for reads in self._reads:
            reads.wait()

    @torch.no_grad()
    def set_gradients(self) -> None:
        """Set ``.grad`` of each slice to the parameter's gradient in the dtype of the slice."""
        self.wait_for_gradients()
        grads = gradients_of(self.params)
        slices: list[Tensor | None]
        if (bring := self._bring) is not None:
            slices = [
                None if grad is None else bring(index, slice_of(grad))
                for index, grad in enumerate(grads)
            ]
        elif any(map(operator.is_, grads, repeat(None))):
            slices = [None if grad is None else slice_of(grad) for grad in grads]
        else:
            slices = list(map(slice_of, grads))
            if all(map(operator.is_, map(_dtype_of, slices), self._dtypes)):
                set_gradients(self.locals, slices)
                return
        casts = zip(slices, self._dtypes, strict=True)
        set_gradients(self.locals, [None if s is None else s.to(dtype) for s, dtype in casts])

    def clear_gradients(self) -> None:
        """Set ``.grad`` of each slice to None."""
        clear_gradients(self.locals)
