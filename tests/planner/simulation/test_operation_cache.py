"""Results from recipes equal those of torch, and simulations with the cache are identical.

Complete simulations are compared exactly, with all fields: seconds, every span, exposed times,
memory by kind, budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.planner.simulation.operations import OperationCache, Recipe
from fsdp_engine.strategies import LEVELS
from tests.models import (
    DIM,
    Chain,
    EncoderDecoder,
    Recurrent,
    Transformer,
    lora_model,
    token_batch,
    vector_batch,
)
from tests.planner.simulation.memory_models import (
    ConvolutionNet,
    CustomBlock,
    TokenModel,
    WeightedExperts,
    images,
    tokens,
)
from tests.planner.simulation.scene import on_meta
from tests.planner.simulation.small_llama import llama

TOKENS = torch.zeros(1, 16, dtype=torch.long)


class WorkedOut(OperationCache):
    """A cache that stores no recipes."""

    def run(
        self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Recipe | None]:
        return func(*args, **kwargs), None


class Custom(nn.Module):
    """A view of another dtype, complex numbers, in-place changes, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.linear(x), 0.1, self.training)
        turned = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        y = torch.view_as_real(turned * torch.ones_like(turned)).flatten(-2)
        mask = x.detach().view(torch.int32) > torch.tensor(0)
        y = y.masked_fill(mask, 0.0).clone()
        y.mul_(self.scale).transpose_(0, 1).transpose_(0, 1)
        y[:, 0] += 1.0
        return x + y


def regression() -> Any:
    return vector_batch(8, 0)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT": (lambda: Transformer(3), lambda: token_batch(4, 0)),
    "encoder-decoder": (EncoderDecoder, regression),
    "experts": (lambda: Chain(WeightedExperts(DIM), WeightedExperts(DIM)), regression),
    "LSTM": (lambda: Chain(Recurrent(), Recurrent()), regression),
    "convolution": (lambda: ConvolutionNet(batch=True, width=8), lambda: images(2, 16)),
    "LoRA": (lora_model, regression),
    "own function": (
        lambda: TokenModel(8, (CustomBlock(8) for _ in range(2))),
        lambda: tokens(2, 8),
    ),
    "in place": (lambda: Chain(Custom(), Custom(), Custom()), regression),
}


def compare(
    build: Callable[[], nn.Module], batch: Any, known: OperationCache, **options: Any
) -> None:
    """Simulate with the cache, once it is filled, and without."""
    run: dict[str, Any] = {"batch": batch, "mesh": (2, 4), **options}
    # In the first simulation of a process autograd may copy gradients that it takes over later.
    fe.simulate(build, 8, known=known, **run)
    found = fe.simulate(build, 8, known=known, **run)
    must = fe.simulate(build, 8, known=WorkedOut(), **run)
    assert must.seconds > 0
    assert len(must.spans) > 20
    assert found.memory == must.memory
    assert found.exposed == must.exposed
    assert found.spans == must.spans
    assert found == must


FEW = ("GPT", "experts", "own function", "in place")
CASES = [
    *(
        pytest.param(
            *(name, "optim_grads_params", True), marks=() if name in FEW else pytest.mark.thorough
        )
        for name in MODELS
    ),
    *(pytest.param("GPT", each, False, marks=pytest.mark.thorough) for each in LEVELS),
]


@pytest.mark.parametrize(("name", "level", "again"), CASES)
def test_simulations_are_identical_with_and_without_the_cache(
    name: str, level: str, again: bool
) -> None:
    build, batch = MODELS[name]
    known = OperationCache()
    compare(build, batch, known, strategy=level, checkpointing=again)
    assert known.num_hits > known.num_misses


BF16 = fe.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
DOUBLE_BUFFER = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mp_policy": BF16, "config": DOUBLE_BUFFER}, id="bf16, double buffer"),
        pytest.param(
            {"codec_rules": [fe.Float8()], "microbatches": 3, "outer_strategy": "optim"},
            id="fp8, microbatches",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"optimizer": lambda params: torch.optim.AdamW(params, foreach=False)},
            id="one by one",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_options_do_not_affect_the_cache(options: dict[str, Any]) -> None:
    build, batch = MODELS["GPT"]
    compare(build, batch, OperationCache(), strategy="optim_grads_params", **options)


def test_simulations_share_a_cache() -> None:
    build, batch = MODELS["GPT"]
    known = OperationCache()
    for level in ("optim", "optim_grads_params"):
        alone, before = OperationCache(), known.num_misses
        options: dict[str, Any] = {"batch": batch, "mesh": (2, 4), "strategy": level}
        joined = fe.simulate(build, 8, known=known, **options)
        assert joined == fe.simulate(build, 8, known=alone, **options)
        afresh = alone.num_misses
        if level == "optim":
            assert known.num_misses == afresh
    # The others have no recipe: collectives, tensors over storages of the engine.
    assert known.num_misses - before < afresh / 2


# Without checkpointing a cache of keys and values is filled: blocks with side effects.
@pytest.mark.parametrize("ways", [[False], pytest.param([False, True], marks=pytest.mark.thorough)])
def test_a_llama_of_transformers_that_checkpoints_itself(ways: list[bool]) -> None:
    def build(again: bool) -> nn.Module:
        model: Any = on_meta(partial(llama, use_cache=True))()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    batch = {"input_ids": TOKENS, "labels": TOKENS}
    known = OperationCache()
    for again in ways:
        compare(partial(build, again), batch, known, strategy="optim_grads_params")


# --- single operations ---


class Cached(TorchDispatchMode):
    """Every operation runs by the cache."""

    def __init__(self, mode: FakeTensorMode, known: OperationCache) -> None:
        super().__init__()
        self._mode, self._known = mode, known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._known.run(self._mode, func, args, kwargs or {})[0]


def test_which_argument_a_result_is_does_not_follow_from_one_call() -> None:
    mode, known = FakeTensorMode(), OperationCache()
    add, add_ = torch.ops.aten.add, torch.ops.aten.add_
    with mode:
        x, y, z = (torch.zeros(3) for _ in range(3))
        for out in (x, y, z, x):
            assert known.run(mode, add.out, (x, y), {"out": out})[0] is out
        for other in (x, y, x):
            assert known.run(mode, add_.Tensor, (x, other), {})[0] is x
    assert known.num_hits > 0


def test_types_of_numbers_constants_and_the_default_dtype_count() -> None:
    mode = FakeTensorMode()
    with mode, Cached(mode, OperationCache()):
        check_types_of_numbers()


def check_types_of_numbers() -> None:
    torch.zeros(()) * 2  # of the shape of the products below, without a constant value
    before = torch.get_default_dtype()
    try:
        for number, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
            x = torch.zeros(3, dtype=torch.bool)
            kinds = [(x + value).dtype for value in (True, 1)]
            assert kinds == [torch.bool, torch.int64]
            torch.set_default_dtype(dtype)
            assert (x + 1.0).dtype == dtype
            assert torch.zeros(3).dtype == dtype
            assert (torch.arange(3) / 2).dtype == dtype
            assert (torch.tensor(float(number)) * 2).item() == 2 * number
    finally:
        torch.set_default_dtype(before)


def test_fakes_of_two_modes_are_not_mixed() -> None:
    known = OperationCache()
    for mode in (FakeTensorMode(), FakeTensorMode()):
        with mode, Cached(mode, known):
            found = torch.zeros(3) + 1
            assert isinstance(found, FakeTensor)
            assert found.fake_mode is mode
    assert known.num_hits == 2
