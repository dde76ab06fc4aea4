"""Weights that modules write in forward are taken into the main weights, or raise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests.matrices import thorough_but
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS, Place, assert_as_alone, everywhere, mean_square
from tests.reference import full_gradients, full_weights


class ForcedNorm(nn.Linear):
    """Normalizes its weight in training, as the layers of EDM2 do."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        return F.linear(x, self.weight, self.bias)


class Model(nn.Module):
    """Blocks with a layer that writes its weight and one that does not, and a tied weight. The
    first block is called twice."""

    recomputes = False

    def __init__(self, layer: Callable[..., nn.Module] = ForcedNorm) -> None:
        super().__init__()
        self.stem = layer(4, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(layer(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(2)]
        )
        self.head = nn.Linear(8, 8)
        self.tied = layer(8, 8)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.no_grad():
            extra = self.blocks[0](x)
        x = x + extra
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        out: Tensor = self.head(self.tied(x))
        return out


def clamp(module: nn.Module, args: Any) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.clamp_(-0.1, 0.1)


def clamp_data(module: nn.Module, args: Any) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.1, 0.1)


def recomputed() -> Model:
    model = Model()
    model.recomputes = True
    return model


def clamped(how: Any = clamp) -> Model:
    model = Model(nn.Linear)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.head:
            module.register_forward_pre_hook(how)
    return model


def clamped_at_root() -> Model:
    model = Model(nn.Linear)
    model.register_forward_pre_hook(clamp)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def evaluate(model: Any, x: Tensor) -> None:
    """Evaluations write weights, too."""
    with torch.no_grad():
        model(x)


@everywhere
def test_training_with_written_weights_is_that_of_one_process(place: Place) -> None:
    for make in (Model, recomputed, clamped, partial(clamped, clamp_data), clamped_at_root):
        assert_as_alone(place, make(), mean_square, evaluate, shape=(2, 4), clear=(True,) * 3)


@pytest.mark.parametrize(("begin", "dtype"), [(1, None), (2, torch.bfloat16), (5, None)])
@on_ranks(2)
def test_writes_through_data_that_begin_late_are_found(
    begin: int, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    model = Model(nn.Linear)
    policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
    fe.shard(model, strategy="optim_grads_params", mp_policy=policy, min_unit_size=0)
    found = []
    for step in range(9):
        if step == begin:
            model.blocks[1][0].register_forward_pre_hook(clamp_data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch(step, dist.get_rank())).square().mean().backward()
        found += [str(each.message) for each in caught if "through .data" in str(each.message)]
    weight = full_weights(model)["blocks.1.0.weight"]
    assert weight.abs().max() <= 0.1 + 1e-3, "the last write is kept"
    assert len(found) == int(begin > 1), found  # for begin=1 the write is found at once
    assert all("blocks.1.0" in text for text in found)


@everywhere
def test_written_compute_weights_are_taken_where_they_differ(place: Place) -> None:
    torch.manual_seed(0)
    model = clamped()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    alone = copy.deepcopy(model).bfloat16()
    place.shard(model, mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = batch(0, 0)
    for each in (model, alone):
        each(x.bfloat16()).float().square().mean().backward()
    written = full_weights(alone)
    for name, weight in full_weights(model).items():
        is_written = before[name].bfloat16() != written[name]
        assert torch.equal(weight, torch.where(is_written, written[name].float(), before[name]))
    grads = map(full_gradients, (model, alone))
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-3, check_dtype=False)


def write_rank(module: nn.Module, args: Any) -> None:
    with torch.no_grad():
        module.weight.add_(dist.get_rank())


def write_on_one_rank(module: nn.Module, args: Any) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            module.weight.zero_()


def replace_data(module: nn.Module, args: Any) -> None:
    module.weight.data = module.weight.data * 0.5


def hooked(hook: Any, **options: Any) -> tuple[Model, fe.Engine]:
    model = Model(nn.Linear)
    model.blocks[1][0].register_forward_pre_hook(hook)
    return model, fe.shard(model, **options)


@on_ranks(2)
def test_weights_that_ranks_write_differently_raise_and_so_does_other_memory() -> None:
    for level in LEVELS:
        for dtype in (None, torch.bfloat16):
            policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
            model, engine = hooked(write_rank, strategy=level, mp_policy=policy)
            message = r"(?s)blocks.1.0.weight.*expected the same on all ranks"
            with pytest.raises(ValueError, match=message):
                model(batch(0, 0))
            engine.reset()
        if level != "no_shard":
            model, engine = hooked(replace_data, strategy=level)
            with pytest.raises(RuntimeError, match=r"blocks.1.0.weight: .*in place"):
                model(batch(0, 0))
            engine.reset()


@pytest.mark.parametrize("level", thorough_but(LEVELS[::3], LEVELS))
@on_ranks(2)
def test_a_weight_that_one_rank_writes_raises_on_all(level: str) -> None:
    model, _ = hooked(write_on_one_rank, strategy=level)
    with pytest.raises((ValueError, RuntimeError), match=r"blocks.1.0.weight"):
        model(batch(0, 0)).sum().backward()


@on_ranks(2)
def test_embeddings_that_renormalize_their_rows_are_refused() -> None:
    for layer in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ValueError, match=r"0.weight: .*max_norm=1.0"):
            fe.shard(nn.Sequential(layer(4, 4, max_norm=1.0)))


@on_ranks(1)
def test_one_rank_renormalizes_rows_as_torch_does() -> None:
    for level in LEVELS:
        model = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0), nn.Linear(4, 4))
        alone = copy.deepcopy(model)
        fe.shard(model, strategy=level)
        for each in (model, alone):
            each(torch.tensor([1, 2])).sum().backward()
        torch.testing.assert_close(full_weights(model), full_weights(alone), rtol=0, atol=0)
