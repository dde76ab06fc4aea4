"""A module of a unit may be called in the model's forward outside its unit's own forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from tests.pool import on_ranks

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MODULATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.SiLU(), nn.Linear(6, 6)),
    "layer norm": lambda: nn.LayerNorm(6),
    "convolution": lambda: nn.Conv1d(3, 3, 1),
    "recurrent": lambda: nn.GRU(6, 6, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 6, dropout=0.0, batch_first=True),
}


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.modulation = make()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) + shift


class Diffusion(nn.Module):
    """The model calls the modulation of each block before the block."""

    def __init__(self, make: Callable[[], nn.Module], *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList([Block(make) for _ in range(2)])
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recomputes:
                shift: Any = checkpoint(block.modulation, condition, use_reentrant=False)
            else:
                shift = block.modulation(condition)  # type: ignore[operator]
            x = block(x, shift[0] if isinstance(shift, tuple) else shift)
        return self.out(x)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, condition = (torch.randn(2, 3, 6, generator=generator) for _ in range(2))
    return model(x, condition).square().mean()


def check_trains(model: nn.Module, shard: Callable[[nn.Module], Any]) -> list[str]:
    """Losses and weights of three steps are those of one process; texts of warnings."""
    alone = copy.deepcopy(model)
    shard(model)
    steps = [torch.optim.SGD(each.parameters(), lr=0.2) for each in (model, alone)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for rank in range(dist.get_world_size()):
                (loss_of(alone, step, rank) / dist.get_world_size()).backward()
            loss_of(model, step, dist.get_rank()).backward()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, 9, 0), loss_of(alone, 9, 0))
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        value = param.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(value, other.detach(), rtol=1e-4, atol=1e-5)
    return [str(each.message) for each in caught if "parameters of unit" in str(each.message)]


@on_ranks(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODULATIONS)
def test_it_computes_with_full_parameters(name: str, level: str) -> None:
    torch.manual_seed(0)
    model = Diffusion(MODULATIONS[name])
    said = check_trains(model, lambda each: fe.shard(each, strategy=level, units=[Block]))
    # What it costs is said once for each unit, where parameters are cut.
    assert len(said) == (2 if level == "optim_grads_params" else 0), said
    if said:
        assert "unit blocks.0" in said[0]
        assert "stays full until the model's forward returns" in said[0]


@on_ranks(2)
@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
def test_it_may_be_recomputed(level: str) -> None:
    torch.manual_seed(0)
    model = Diffusion(MODULATIONS["layer norm"], recomputes=True)
    check_trains(model, lambda each: fe.shard(each, strategy=level, units=[Block]))


@on_ranks(2)
def test_a_unit_of_its_own_is_not_warned_about() -> None:
    torch.manual_seed(0)
    model = Diffusion(MODULATIONS["convolution"])
    assert not check_trains(model, lambda each: fe.shard(each, units=[Block, nn.Conv1d]))


@on_ranks(2)
def test_so_it_is_by_the_calls_of_fsdp2() -> None:
    def shard(model: nn.Module) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    torch.manual_seed(0)
    assert len(check_trains(Diffusion(MODULATIONS["layer norm"]), shard)) == 2


@on_ranks(2)
def test_outside_the_models_forward_it_raises() -> None:
    model = Diffusion(MODULATIONS["layer norm"])
    fe.shard(model, units=[Block])
    with pytest.raises(ValueError, match=r"full blocks\.0\.modulation\.weight only during the model's"):
        model.blocks[0].modulation(torch.ones(2, 3, 6))  # type: ignore[operator]
