"""What a buffer is, and what it works with: values that its weights and gradients share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdp_engine.layout import Layout
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import Role, Strategy


@dataclass(frozen=True)
class BufferKind:
    """What the parameters of one buffer have in common.

    ``codec`` names the encoding; ``extra_divisor`` divides gradients once more than the mean over
    all ranks does (a parameter's attribute ``gradient_divisor``). Experts are shared by ranks of
    their own. ``apart`` names a parameter that has to have a buffer for itself.
    """

    codec: str
    dtypes: ParamDtypes
    requires_grad: bool
    extra_divisor: float = 1.0
    is_expert: bool = False
    apart: str = ""


@dataclass(frozen=True)
class BufferSpec:
    """One buffer, as all ranks know it.

    Attributes:
        label: for people.
        layout: where its tensors sit.
        kind: what they have in common.
        strategy: the levels of both axes.
        tag: tells its messages from others in flight; the next one is its, too.
    """

    label: str
    layout: Layout
    kind: BufferKind
    strategy: Strategy
    tag: int

    @cached_property
    def optim_depth(self) -> int:
        """The depth of main weights and of what the optimizer gets."""
        return self.strategy.depth(Role.OPTIM)

    @cached_property
    def grad_depth(self) -> int:
        """The depth of accumulated gradients."""
        return self.strategy.depth(Role.GRAD)

    @cached_property
    def param_depth(self) -> int:
        """The depth of what persists of compute weights."""
        return self.strategy.depth(Role.PARAM)
