"""One parameter before it is sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.layout.expert_place import ExpertPlace


@dataclass
class ParamRecord:
    """One parameter before it is sharded, with every place that refers to it.

    Attributes:
        name: its first fully qualified name.
        param: the user's parameter.
        owners: (module, attribute) pairs; several for a tied parameter.
        aliases: all its names, the first included.
        spread: of one that is a DTensor: how it lies over mesh dimensions that are not the
            engine's. Set when it is planned.
        is_written: a checkpoint takes what this rank holds of it from here, and not from another
            place of others' mesh dimensions that holds the same. Set when it is planned.
        expert: of one that not all data-parallel ranks share: which of them this rank has. Set when
            ranks have told each other.
    """

    name: str
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    spread: TensorParallelSpec | None = None
    is_written: bool = True
    expert: ExpertPlace | None = None

    @property
    def shard(self) -> nn.Parameter:
        """What this rank holds of ``param`` over others' mesh dimensions, a plain parameter with
        the user's marks: ``param`` itself, where it is one."""
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
