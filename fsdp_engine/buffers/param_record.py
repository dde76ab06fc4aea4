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
        spread: of a DTensor: its placement on mesh dimensions other than the engine's. Set when it
            is planned.
        is_written: a checkpoint takes this rank's elements from here, and not from another rank of
            those mesh dimensions that holds the same ones. Set when it is planned.
        expert: of an expert parameter, which not all data-parallel ranks share: the one that this
            rank holds. Set when ranks have exchanged their experts.
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
