"""Descriptions of a parameter before it is sharded, and of a buffer of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.layout import Layout
from fsdp_engine.layout.expert_place import ExpertPlace
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import Role, Strategy


@dataclass
class ParamRecord:
    """One parameter before it is sharded, with every place that refers to it.

    Attributes:
        name: its first fully qualified name.
        param: the user's parameter.
        holders: (module, attribute) pairs that have the parameter; several for a tied one.
        aliases: all its names, the first included.
        spread: The placement of a DTensor on mesh dimensions other than the engine's. Set when it
            is planned.
        is_written: a checkpoint takes this rank's elements from here, and not from another rank of
            those mesh dimensions that holds the same ones. Set when it is planned.
        expert: The expert that this rank holds, of an expert parameter, which not all data-parallel
            ranks share. Set when ranks have exchanged their experts.
    """

    name: str
    param: nn.Parameter
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    spread: TensorParallelSpec | None = None
    is_written: bool = True
    expert: ExpertPlace | None = None

    @property
    def shard(self) -> nn.Parameter:
        """This rank's shard of ``param`` on mesh dimensions other than the engine's: a plain
        parameter with the user's attributes; ``param`` itself, if it is no DTensor."""
        param = self.param
        if self.spread is None:
            return param
        with torch.no_grad():
            made_whole = not isinstance(param, DTensor)  # to be given values
            local = self.spread.shard_of(param) if made_whole else param.to_local()  # type: ignore[attr-defined]
        shard = nn.Parameter(local, requires_grad=param.requires_grad)
        own = ("_local_tensor", "_spec")
        shard.__dict__.update({key: mark for key, mark in vars(param).items() if key not in own})
        return shard


@dataclass(frozen=True)
class BufferKind:
    """The properties that all parameters of a buffer share.

    Attributes:
        codec: name of the codec.
        dtypes: The dtypes of weights and gradients.
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
        tag: The tag of its point-to-point messages, which can be in flight beside those of others;
            the next number is reserved for it, too.
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
