"""The description of a parameter before it is sharded, and the description of a buffer."""

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
    """One parameter before it is sharded, with all modules that refer to it.

    Attributes:
        name: The first fully qualified name of the parameter.
        param: The user's parameter.
        holders: Pairs (module, attribute) that refer to the parameter; several if it is tied.
        aliases: All names of the parameter, including the first one.
        spread: The placement of a DTensor on mesh dimensions other than the engine's; None: the
            parameter is a plain tensor. Set when the parameter is planned.
        is_written: Whether this rank writes its elements to checkpoints. False: another rank along
            the mesh dimensions of ``spread`` holds the same elements and writes them. Set when the
            parameter is planned.
        expert: The expert that this rank holds, if this is an expert parameter, which only some
            data-parallel ranks share. Set when ranks have exchanged their experts.
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
        """This rank's shard of a DTensor ``param`` on mesh dimensions other than the engine's, as a
        plain parameter with the user's attributes. ``param`` itself if ``spread`` is None."""
        param = self.param
        if self.spread is None:
            return param
        with torch.no_grad():
            # A full plain tensor replaces a DTensor that is moved off the meta device.
            made_whole = not isinstance(param, DTensor)
            local = self.spread.shard_of(param) if made_whole else param.to_local()  # type: ignore[attr-defined]
        shard = nn.Parameter(local, requires_grad=param.requires_grad)
        own = ("_local_tensor", "_spec")
        shard.__dict__.update({key: mark for key, mark in vars(param).items() if key not in own})
        return shard


@dataclass(frozen=True)
class BufferKind:
    """The properties that all parameters of a buffer share.

    Attributes:
        codec: The name of the codec.
        dtypes: The dtypes of weights and gradients.
        requires_grad: Whether the parameters are trainable.
        extra_divisor: The number by which gradients are divided in addition to the mean over ranks
            (attribute ``gradient_divisor`` of a parameter).
        is_expert: Whether the parameters are sharded over the expert mesh.
        apart: The name of a parameter that needs a buffer of its own; "": none does.
    """

    codec: str
    dtypes: ParamDtypes
    requires_grad: bool
    extra_divisor: float = 1.0
    is_expert: bool = False
    apart: str = ""


@dataclass(frozen=True)
class BufferSpec:
    """The description of one buffer, which is equal on all ranks.

    Attributes:
        label: The name of the buffer in messages.
        layout: The offsets of the parameters.
        kind: The properties that all parameters share.
        strategy: The levels of both axes.
        tag: The tag of the buffer's point-to-point messages, which distinguishes them from messages
            of other buffers in flight. The buffer also uses the tag ``tag + 1``.
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
