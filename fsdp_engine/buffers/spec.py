"""The description of a buffer, which its weights and gradients share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdp_engine.layout import Layout
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import Role, Strategy


@dataclass(frozen=True)
class BufferKind:
    """The properties that all parameters of a buffer share.

    Attributes:
        codec: name of the encoding.
        dtypes: of weights and gradients.
        requires_grad: they are trainable.
        extra_divisor: gradients are divided by it, beside the mean over ranks (a parameter's
            attribute ``gradient_divisor``).
        is_expert: they are sharded over the expert mesh.
        apart: name of a parameter that needs a buffer of its own.
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
        label: its name in messages.
        layout: offsets of its tensors.
        kind: properties that its parameters share.
        strategy: the levels of both axes.
        tag: of its point-to-point messages, which can be in flight beside those of others; the
            next number is reserved for it, too.
    """

    label: str
    layout: Layout
    kind: BufferKind
    strategy: Strategy
    tag: int

    @cached_property
    def optim_depth(self) -> int:
        """The depth of main weights and of the gradients that the optimizer reads."""
        return self.strategy.depth(Role.OPTIM)

    @cached_property
    def grad_depth(self) -> int:
        """The depth of accumulated gradients."""
        return self.strategy.depth(Role.GRAD)

    @cached_property
    def param_depth(self) -> int:
        """The depth of compute weights between uses."""
        return self.strategy.depth(Role.PARAM)
