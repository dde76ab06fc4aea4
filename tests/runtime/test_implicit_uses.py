"""Parameters beside blocks that the model's forward reads without calling their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from tests.megatron.configs import LEVEL_NAMES
from tests.models import DIM, VOCABULARY, Block, token_batch
from tests.pool import on_ranks
from tests.scenario import assert_trains_alike


class Language(nn.Module):
    """Embedding, blocks, a head; how the head is applied is the subclasses' affair."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.logits(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class ReadsEmbedding(Language):
    """Its head is the embedding, which is called, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.t()


class _Product(torch.autograd.Function):
    """As fused losses do: weights go into a function of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class FusedHead(Language):
    """Its head is never called."""

    def weight_of_head(self) -> Tensor:
        return self.head.weight

    def logits(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight_of_head())


class FusedTiedHead(FusedHead):
    """Tied, besides."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class ReadsLater(Language):
    """Calls its head in the first forward, and reads it from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def logits(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.head(x) if self.num_calls == 1 else F.linear(x, self.head.weight)


class FusedLater(FusedHead):
    """Calls its head in the first forward, and gives it to a function of its own from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def logits(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.head(x) if self.num_calls == 1 else super().logits(x)


class GivenHead(nn.Linear):
    """Multiplies with the weight that it is given, as Megatron-Core's output layer does."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return _Product.apply(x, self.weight if weight is None else weight)


class HandsOver(Language):
    """Reads its head's weight and hands it to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = GivenHead(self.head.in_features, self.head.out_features, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x, weight=self.head.weight)


class HandsOverEmbedding(HandsOver):
    """The embedding's weight: the output layer is tied by that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = None

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x, weight=self.embedding.weight)


MODELS: list[Callable[[], Language]] = [
    Language,
    ReadsEmbedding,
    FusedHead,
    FusedTiedHead,
    ReadsLater,
    FusedLater,
    HandsOver,
    HandsOverEmbedding,
]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("strategy", LEVEL_NAMES)
@on_ranks(2)
def test_weights_that_are_read_without_a_call_train_as_in_one_process(
    strategy: str, make: Callable[[], Language]
) -> None:
    assert_trains_alike(make(), token_batch, strategy, num_steps=3)


@pytest.mark.parametrize("strategy", LEVEL_NAMES[1:])
@on_ranks(2)
def test_a_function_of_ones_own_that_gets_a_slice_is_told_so(strategy: str) -> None:
    model = FusedLater()
    fe.shard(model, strategy=strategy)
    model(*token_batch(2, 0)).backward()
    kept = model.head.weight  # outside the forward: a slice
    model.weight_of_head = lambda: kept  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"slice of head\.weight.*autograd\.Function"):
        model(*token_batch(2, 1)).backward()


def units_in_use(model: nn.Module, engine: fe.Engine, num_steps: int) -> list[list[str]]:
    """Trains; returns the names of the units in use as the first block is entered, by step."""
    units = {unit.name: unit for unit in engine.units}
    seen: list[list[str]] = []

    def look(*_: Any) -> None:
        seen[-1] += [unit.name for unit in units.values() if unit.name and unit.uses]

    model.blocks[0].register_forward_pre_hook(look)
    for step in range(num_steps):
        seen.append([])
        model(*token_batch(2, step)).backward()
    return seen


@on_ranks(2)
def test_units_whose_modules_are_called_are_full_only_then() -> None:
    model = Language()
    engine = fe.shard(model)
    seen = units_in_use(model, engine, num_steps=2)
    # In the first forward it is unknown which units are read.
    assert seen == [["embedding", "blocks.0", "norm + head"], ["blocks.0"]]


@on_ranks(2)
def test_a_unit_with_a_module_that_is_never_called_stays_full_for_the_whole_forward() -> None:
    model = FusedHead()
    engine = fe.shard(model)
    seen = units_in_use(model, engine, num_steps=3)
    assert seen[1:] == [["blocks.0", "norm + head"]] * 2


@on_ranks(2)
def test_outside_of_forward_they_are_slices_all_the_same() -> None:
    model = Language()
    fe.shard(model)
    model(*token_batch(2, 0)).backward()
    with pytest.raises(ValueError, match=r"embedding\.weight"):
        model.embedding.weight.numpy()


@on_ranks(2)
def test_an_embedding_is_not_gathered_for_backward() -> None:
    model = Language()
    engine = fe.shard(model)
    row = {row.name: row for row in engine.describe().rows}["embedding"]
    assert row.num_gathers == 1
    (unit,) = (unit for unit in engine.units if unit.name == "embedding")
    gathered = []
    for step in range(3):
        loss = model(*token_batch(2, step))
        gathered.append(0)

        def count(*args: Any, real: Any = unit.gather) -> None:
            gathered[-1] += 1
            real(*args)

        unit.gather = count  # type: ignore[method-assign]
        loss.backward()
        del unit.gather
    assert gathered == [1, 0, 0]  # in the first forward it may have been read, too
