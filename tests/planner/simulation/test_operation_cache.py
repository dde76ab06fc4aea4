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


regression = partial(vector_batch, 8, 0)


def llama_batch() -> dict[str, Tensor]:
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def checkpointed_llama() -> nn.Module:
    model: Any = on_meta(partial(llama, use_cache=True))()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


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
    # Blocks with a side effect: they fill a cache of keys and values.
    "llama": (on_meta(partial(llama, use_cache=True)), llama_batch),
    "llama that checkpoints itself": (checkpointed_llama, llama_batch),
}


thorough = partial(pytest.param, marks=pytest.mark.thorough)
BF16 = fe.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
DOUBLE_BUFFER = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
AGAIN = {"checkpointing": True}
CASES: list[Any] = [
    *((name, AGAIN) for name in ("GPT", "experts", "own function", "in place")),
    *(thorough(name, AGAIN) for name in ("encoder-decoder", "LSTM", "convolution", "LoRA")),
    ("llama", {}),
    thorough("llama that checkpoints itself", {}),
    *(thorough("GPT", {"strategy": each}) for each in LEVELS),
    ("GPT", {"mp_policy": BF16, "config": DOUBLE_BUFFER}),
    thorough("GPT", {"codec_rules": [fe.Float8()], "microbatches": 3, "outer_strategy": "optim"}),
    thorough("GPT", {"optimizer": lambda params: torch.optim.AdamW(params, foreach=False)}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_simulations_are_identical_with_and_without_the_cache(
    name: str, options: dict[str, Any]
) -> None:
    """Simulate with the cache, once it is filled, and without."""
    build, batch = MODELS[name]
    known = OperationCache()
    run: dict[str, Any] = {"mesh": (2, 4), "strategy": "optim_grads_params", **options}
    simulate = partial(fe.simulate, build, 8, batch=batch, **run)
    # Autograd may copy gradients in a process's first simulation that it does not copy later.
    simulate(known=known)
    found, must = simulate(known=known), simulate(known=WorkedOut())
    assert must.seconds > 0
    assert len(must.spans) > 20
    assert found.memory == must.memory
    assert found.exposed == must.exposed
    assert found.spans == must.spans
    assert found == must
    assert known.num_hits > known.num_misses


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
    # Operations without a recipe miss again: collectives, tensors over storages of the engine.
    assert known.num_misses - before < afresh / 2


# --- single operations ---


class Cached(TorchDispatchMode):
    """Runs every operation through the cache."""

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
    # An operation on a tensor of the same shape as below, but without a constant value.
    torch.zeros(()) * 2
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
