"""``extensions=`` of ``fe.shard``: the order of calls, and the refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.codecs import CastCodec
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.flat_dtensor import FlatDTensor
from tests.pool import on_ranks


@dataclass(frozen=True)
class Recorded(EngineExtension):
    """Appends the name of each method that is called, and whether the model was sharded then."""

    calls: list[Any] = field(default_factory=list, compare=False)
    text: str = "recorded"
    failing_rank: int | None = None

    @property
    def codec_rules(self) -> list[Any]:
        return [self._rule]

    def _rule(self, name: str, param: Tensor, dtypes: Any) -> Any:
        self.calls.append(("rule", name, isinstance(param, FlatDTensor)))
        return "recorded", lambda: CastCodec(dtypes.main, dtypes.compute)

    def signature(self) -> str:
        self.calls.append("signature")
        return self.text

    def check(self, setup: Any) -> None:
        sharded = any(isinstance(param, FlatDTensor) for param in setup.model.parameters())
        self.calls.append(("check", len(setup.plan.units), sharded))
        if dist.get_rank() == self.failing_rank:
            raise ValueError("recorded: expected another rank; found this one")

    def prepare(self, setup: Any, resources: Any) -> None:
        sharded = any(isinstance(param, FlatDTensor) for param in setup.model.parameters())
        self.calls.append(("prepare", resources.memory.device.type, sharded))

    def start(self, engine: Any) -> None:
        self.calls.append(("start", type(engine).__name__))


class Other(EngineExtension):
    """Does nothing."""

    def __repr__(self) -> str:
        return "Other()"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@on_ranks(world_size=2)
def test_methods_are_called_in_order_before_and_after_sharding() -> None:
    recorded = Recorded()
    engine = fe.shard(model(), extensions=[recorded, Other()])
    assert [each for each in recorded.calls if each[0] != "rule"] == [
        ("check", 1, False),
        "signature",
        ("prepare", "cpu", False),
        ("start", "Engine"),
    ]
    assert recorded.calls[0] == ("rule", "weight", False)
    assert {buffer.kind.codec for buffer in engine.buffers} == {"recorded"}


@on_ranks(world_size=2)
def test_an_error_of_check_is_raised_on_all_ranks_and_nothing_is_changed() -> None:
    found = model()
    with pytest.raises(ValueError, match="recorded: expected another rank"):
        fe.shard(found, extensions=[Recorded(failing_rank=1)])
    assert not any(isinstance(param, FlatDTensor) for param in found.parameters())
    fe.shard(found, extensions=[Recorded()])


@on_ranks(world_size=2)
def test_ranks_compare_signatures() -> None:
    with pytest.raises(ValueError, match="rank 1"):
        fe.shard(model(), extensions=[Recorded(text=f"of rank {dist.get_rank()}")])
    with pytest.raises(ValueError, match="Other"):
        fe.shard(model(), extensions=[Other()] if dist.get_rank() else [])


@on_ranks(world_size=2)
def test_two_of_one_class_and_other_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="extensions: expected at most one Other; found Other"):
        fe.shard(model(), extensions=[Other(), Other()])
    with pytest.raises(TypeError, match=r"extensions: expected objects such as .*; found 'fp8'"):
        fe.shard(model(), extensions=["fp8"])  # type: ignore[list-item]
