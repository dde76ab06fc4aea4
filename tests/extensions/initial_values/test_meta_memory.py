"""Full values of units are gone when the next unit is built."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.units import build
from tests import reference
from tests.models import Transformer, token_batch


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """``shard`` makes a group for a process that has none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def full_values_alive(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Elements of full parameters that exist at most while a unit after theirs is built."""
    alive: list[tuple[weakref.ref[Tensor], int]] = []
    most = 0
    build_unit = build.build_unit

    def watched(planned: Any, *args: Any) -> Any:
        nonlocal most
        most = max(most, sum(numel for param, numel in alive if param() is not None))
        for part in planned.buffers:
            for record in part.records:
                alive.append((weakref.ref(record.param), record.param.numel()))
        return build_unit(planned, *args)

    monkeypatch.setattr(build, "build_unit", watched)
    fe.shard(model, min_unit_size=0, **options)
    assert len(alive) > 8
    return most


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_one_unit_at_a_time_is_full(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device(device):
        model = Transformer(4)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert full_values_alive(model, monkeypatch) == 0
    for name, param in model.named_parameters():
        assert device == "meta" or torch.equal(reference.full(param), expected[name])
    model(*token_batch(4, 0)).backward()


class Tied(nn.Module):
    """A bias beside a weight that another unit has: it is drawn with both units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_a_module_with_parameters_of_two_units_has_the_values_of_one_process() -> None:
    weights = []
    for level in ("no_shard", "optim_grads_params"):
        torch.manual_seed(3)
        with torch.device("meta"):
            model = Tied()
        engine = fe.shard(model, strategy=level, units=["blocks.*"], min_unit_size=0)
        model(torch.ones(2, 4)).backward()
        weights.append(engine.full_state_dict())
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value)
        assert value.abs().sum() > 0
