"""What stands for an optimizer, and for a parameter, while an optimizer steps on plain slices: see
[Note: Shadow optimizer] in ``sharded_step.py``."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.flat_dtensor import FlatDTensor

_TORCHS_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__


def method_of(kind: type[Optimizer] | None, name: str) -> Any:
    """A method of a class, without what torch wraps around the step of each class that has an
    instance."""
    found: Any = getattr(kind, name, None)
    while getattr(found, "__code__", None) is _TORCHS_WRAPPER:
        found = found.__wrapped__
    return found


class Shadow:
    """Mixin for an optimizer class: own param groups and state; all else is the optimizer's.

    One object per step. It shares the optimizer's ``__dict__``; properties take precedence over it.
    """

    __slots__ = ()


AnyShadow = TypeVar("AnyShadow", bound=Shadow)


def shadow_class(mixin: type[AnyShadow], optimizer: Optimizer, slots: tuple[str, ...]) -> Any:
    """The class of shadows of ``optimizer``, with ``slots`` of their own."""
    kind = type(optimizer)
    return type(kind.__name__, (mixin, kind), {"__slots__": slots})


class Slot:
    """One FlatDTensor of the optimizer, and the slice that replaces it in the shadow."""

    def __init__(self, param: FlatDTensor) -> None:
        self.param = param
        # A separate tensor, so that it has a separate .grad. It shares the parameter's memory and
        # version counter.
        self.local = param.local.detach()
        self.param_local = param.local

    def to_flat(self, value: Any) -> Any:
        """Convert state of the slice to state of the parameter."""
        if isinstance(value, Tensor) and value.shape == self.local.shape:
            return FlatDTensor.from_flat_local(value, self.param.flat_placement)
        return value

    def to_local(self, key: Any, value: Any) -> tuple[Any, Any]:
        """Convert state of the parameter to state of the slice.

        Returns:
            The parameter's state, as a FlatDTensor if it is sharded; the slice's state.

        Raises:
            ValueError: ``value`` is a FlatDTensor of another slice.
        """
        placement = self.param.flat_placement
        if isinstance(value, FlatDTensor):
            if value.flat_placement != placement:
                raise ValueError(
                    f"state {key!r} of {placement.name or 'a parameter'}: expected {placement}; "
                    f"found {value.flat_placement}. State of torch.save fits the ranks and the "
                    "levels that it was saved with; fe.save_checkpoint saves for any"
                )
            return value, value.local
        if isinstance(value, Tensor) and value.ndim and value.shape == placement.shape:
            # Unsharded, as loaded from an unsharded checkpoint.
            full = value.full_tensor() if isinstance(value, DTensor) else value
            local = placement.slice_of_full(full).clone()
            return FlatDTensor.from_flat_local(local, placement), local
        return value, value
