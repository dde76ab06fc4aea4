"""Results from recipes equal those of torch, and simulations with the cache are identical.

Complete simulations are compared exactly, with all fields: seconds, every span, exposed times,
memory by kind, budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.simulation.operations import OperationCache, Recipe
from tests.models import (
    DIM,
    Chain,
    EncoderDecoder,
    Mlp,
    NestedModel,
    Normalised,
    Recurrent,
    Regression,
    Transformer,
    lora_model,
    odd_model,
    token_batch,
    vector_batch,
)
from tests.pairs import PAIRS

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class WorkedOut(OperationCache):
    """A cache that stores no recipes."""

    def run(
        self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Recipe | None]:
        return func(*args, **kwargs), None


class GroupedHeads(nn.Module):
    """Attention with fewer heads for keys and values, rotated by position."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, size: int = 6) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.q = nn.Linear(DIM, heads * size, bias=False)
        self.kv = nn.Linear(DIM, 2 * kv_heads * size, bias=False)
        self.out = nn.Linear(heads * size, DIM, bias=False)
        self.norm = nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)[None]
        length, half = rows.shape[1], self.size // 2
        q = self.q(rows).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(rows).unflatten(-1, (2 * self.kv_heads, self.size)).chunk(2, -2)
        angle = torch.arange(length).float()[:, None] * torch.ones(half)
        turn = torch.cat([angle, angle], -1)
        q = q * turn.cos() + torch.cat([-q[..., half:], q[..., :half]], -1) * turn.sin()
        k = k.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)
        v = v.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))[0]


class Experts(nn.Module):
    """Rows are routed to their two best experts, up to their capacity."""

    def __init__(self, experts: int = 4, hidden: int = 10) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, DIM, hidden) / DIM)
        self.down = nn.Parameter(torch.randn(experts, hidden, DIM) / hidden)

    def forward(self, x: Tensor) -> Tensor:
        room = math.ceil(2 * x.shape[0] / self.router.out_features)
        gates, chosen = self.router(x).softmax(-1).topk(2)
        wanted = F.one_hot(chosen, self.router.out_features)  # rows, 2, experts
        place = wanted.flatten(0, 1).cumsum(0).view_as(wanted) * wanted - 1
        seat = (
            F.one_hot(place.clamp(0, room - 1), room) * ((place >= 0) & (place < room))[..., None]
        )
        weights = torch.einsum("nk,nkes->nes", gates, seat.to(x.dtype))
        rows = torch.einsum("nes,nd->esd", (weights > 0).to(x.dtype), x)
        done = torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)
        return x + torch.einsum("nes,esd->nd", weights, done)


class Convolution(nn.Module):
    """Vectors as small pictures of three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x.unflatten(-1, (3, 2, -1))
        found = F.max_pool2d(F.relu(self.norm(self.convolution(pictures))), 3, 1, 1)
        return x + F.dropout(found, 0.1, self.training).flatten(1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grads[0]


class Custom(nn.Module):
    """A function of the user's own, a view of another dtype, complex numbers, in-place changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = Cube.apply(self.linear(x))
        turned = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        y = torch.view_as_real(turned * torch.ones_like(turned)).flatten(-2)
        mask = x.detach().view(torch.int32) > torch.tensor(0)
        y = y.masked_fill(mask, 0.0).clone()
        y.mul_(self.scale).transpose_(0, 1).transpose_(0, 1)
        y[:, 0] += 1.0
        return x + y


def experts() -> Regression:
    return Chain(Experts(), Experts())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT": (lambda: Transformer(3), lambda: token_batch(4, 0)),
    "tied": (lambda: Transformer(2, tied=True), lambda: token_batch(4, 0)),
    "grouped heads": (lambda: Chain(GroupedHeads(), GroupedHeads()), lambda: vector_batch(8, 0)),
    "encoder-decoder": (EncoderDecoder, lambda: vector_batch(8, 0)),
    "experts": (experts, lambda: vector_batch(8, 0)),
    "LSTM": (lambda: Chain(Recurrent(), Recurrent()), lambda: vector_batch(8, 0)),
    "convolution": (lambda: Chain(Convolution(), Convolution()), lambda: vector_batch(8, 0)),
    "LoRA": (lora_model, lambda: vector_batch(8, 0)),
    "buffers": (lambda: Chain(Normalised(), Normalised(), Mlp()), lambda: vector_batch(8, 0)),
    "odd sizes": (odd_model, lambda: vector_batch(8, 0, 7)),
    "containers": (NestedModel, lambda: vector_batch(8, 0)),
    "custom": (lambda: Chain(Custom(), Custom(), Custom()), lambda: vector_batch(8, 0)),
}


def recomputed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Its blocks run again in backward."""

    def built() -> nn.Module:
        model = build()
        for blocks in model.modules():
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    block.forward = _checkpointed(block.forward)
        return model

    return built


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


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


def _cases() -> list[Any]:
    """Each model at level 3; at all levels one model, and the others as they take turns."""
    quick = [("optim_grads_params", True)]
    return [
        pytest.param(
            name,
            level,
            again,
            id=f"{name}-{level}{'-checkpointed' if again else ''}",
            marks=() if (level, again) in quick else pytest.mark.thorough,
        )
        for number, name in enumerate(MODELS)
        for place, level in enumerate(LEVELS)
        for again in (False, True)
        if name == "GPT" or (level, again) in quick or (number + place) % len(LEVELS) == 0
    ]


@pytest.mark.parametrize(("name", "level", "again"), _cases())
def test_simulations_are_identical_with_and_without_the_cache(
    name: str, level: str, again: bool
) -> None:
    build, batch = MODELS[name]
    known = OperationCache()
    compare(recomputed(build) if again else build, batch, known, strategy=level)
    assert known.num_hits > known.num_misses


OPTIONS: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatches": 3, "outer_strategy": "optim"},
    "bf16": {"mp_policy": fe.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "double buffer": {"config": fe.DistributedDataParallelConfig(fsdp_double_buffer=True)},
    "fp8": {"codec_rules": [fe.Float8()]},
    "SGD": {"optimizer": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)},
    "one by one": {"optimizer": lambda params: torch.optim.AdamW(params, foreach=False)},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(each, id=name, marks=() if name == "bf16" else pytest.mark.thorough)
        for name, each in OPTIONS.items()
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


@pytest.mark.thorough
def test_one_planning_of_all_pairs() -> None:
    build, batch = MODELS["GPT"]
    known = OperationCache()
    for inner, outer in PAIRS:
        for again in (False, True):
            model = recomputed(build) if again else build
            compare(model, batch, known, strategy=inner, outer_strategy=outer)


def test_a_llama_of_transformers_that_checkpoints_itself() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )

    def build(again: bool) -> nn.Module:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    tokens = torch.zeros(1, 16, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    known = OperationCache()
    for again in (False, True):
        # Without checkpointing a cache of keys and values is filled: blocks with side effects.
        compare(lambda again=again: build(again), batch, known, strategy="optim_grads_params")


# --- single operations ---


class Compared(TorchDispatchMode):
    """A cache that also runs every operation, and compares its results with the recipe's."""

    def __init__(self, mode: FakeTensorMode, known: OperationCache) -> None:
        super().__init__()
        self._mode = mode
        self._known = known
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_known = self._known.num_hits
        found, _ = self._known.run(self._mode, func, args, kwargs)
        if self._known.num_hits > is_known:
            self.names.add(str(func))
            if not func._schema.is_mutable:
                must = func(*args, **kwargs)
                assert type(found) is type(must)
                alike(found, must)
        return found


def alike(found: Any, must: Any) -> None:
    if isinstance(must, tuple | list):
        for each, other in zip(found, must, strict=True):
            alike(each, other)
    elif isinstance(must, Tensor):
        for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_sparse"):
            assert getattr(found, name) == getattr(must, name)
        for method in ("stride", "storage_offset", "is_conj", "is_neg", "is_inference"):
            assert getattr(found, method)() == getattr(must, method)()
        assert found.untyped_storage().nbytes() == must.untyped_storage().nbytes()
        assert torch._C._dispatch_keys(found) == torch._C._dispatch_keys(must)
        assert set(vars(found)) == set(vars(must))
    else:
        assert found == must


def twice(function: Callable[..., Any], *shapes: tuple[int, ...]) -> set[str]:
    """Call it twice with fake tensors, forward and backward. Returns the number of hits."""
    mode, known = FakeTensorMode(), OperationCache()
    with mode, Compared(mode, known) as compared:
        for _ in range(2):
            inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
            found = function(*inputs)
            if found.requires_grad:
                found.sum().backward()
    return compared.names


@pytest.mark.parametrize(
    ("name", "function", "shapes"),
    [
        ("add_.Tensor", lambda x: (x * 1).add_(x), [(3, 4)]),
        ("t.default", lambda x: x.t() @ x, [(3, 4)]),
        ("split.Tensor", lambda x: sum(x.split(2, 1)), [(3, 4)]),
        ("expand.default", lambda x: x[:, None].expand(3, 5, 4), [(3, 4)]),
        ("slice.Tensor", lambda x: x[1:, ::2] * 1, [(3, 4)]),
        ("unbind.int", lambda x: sum(x.unbind(1)), [(3, 4)]),
        ("cat.default", lambda x, y: torch.cat([x, y], 1), [(3, 4), (3, 2)]),
        ("index.Tensor", lambda x: x[torch.zeros(2, dtype=torch.long)], [(3, 4)]),
        ("topk.default", lambda x: x.topk(2).values, [(3, 4)]),
        ("native_layer_norm.default", lambda x: F.layer_norm(x, (4,)), [(3, 4)]),
        ("convolution.default", F.conv1d, [(2, 3, 8), (4, 3, 3)]),
        ("convolution_backward.default", F.conv1d, [(2, 3, 8), (4, 3, 3)]),
        ("bernoulli_.float", lambda x: F.dropout(x, 0.5, True), [(3, 4)]),
        ("zeros_like.default", lambda x: x + torch.zeros_like(x), [(3, 4)]),
        ("mul.out", lambda x: torch.mul(x.detach(), 2, out=torch.empty(3, 4)), [(3, 4)]),
        ("_to_copy.default", lambda x: x.to(torch.bfloat16), [(3, 4)]),
        (
            "_scaled_dot_product_flash_attention_for_cpu.default",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            [(1, 2, 6, 8)] * 3,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_by_recipes(
    name: str, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    assert f"aten.{name}" in twice(function, *shapes)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("transpose_.default", lambda x: (x * 1).transpose_(0, 1) * 1),
        ("view.dtype", lambda x: x.detach().view(torch.int16) + 1),
        ("mul.Tensor", lambda x: torch.view_as_real(torch.complex(x, x) * 2)),
        ("resize_.default", lambda x: x.detach().clone().resize_(2, 3) + 1),
        ("_local_scalar_dense.default", lambda x: x * torch.tensor(2.0).item()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operations_without_a_recipe(name: str, function: Callable[..., Any]) -> None:
    assert f"aten.{name}" not in twice(function, (3, 4))


def test_a_view_is_one() -> None:
    mode, known = FakeTensorMode(), OperationCache()
    with mode, Compared(mode, known):
        for _ in range(2):
            x = torch.zeros(3, 4)
            y = x.t()
            assert y._is_view()
            assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert y._base is x
            before = x._version
            y.add_(1)
            assert x._version == before + 1
            assert x.add_(1) is x


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


def test_equal_numbers_of_other_types_are_other_arguments() -> None:
    mode, known = FakeTensorMode(), OperationCache()
    with mode, Compared(mode, known):
        for _ in range(2):
            x = torch.zeros(3, dtype=torch.bool)
            kinds = [(x + value).dtype for value in (True, 1, 1.0)]
            assert kinds == [torch.bool, torch.int64, torch.float32]


def test_the_default_dtype_counts() -> None:
    mode, known = FakeTensorMode(), OperationCache()
    before = torch.get_default_dtype()
    try:
        with mode, Compared(mode, known):
            for dtype in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                assert torch.zeros(3).dtype == dtype
                assert (torch.arange(3) / 2).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_constants_keep_their_value() -> None:
    mode, known = FakeTensorMode(), OperationCache()
    with mode, Compared(mode, known):
        torch.zeros(()) * 2  # of the same shape, without a constant value
        for value in (1.0, 2.0, 3.0):
            assert (torch.tensor(value) * 2).item() == 2 * value


def test_shapes_that_hang_on_values_raise_every_time() -> None:
    mode, known = FakeTensorMode(), OperationCache()
    with mode, Compared(mode, known):
        for _ in range(2):
            x = torch.zeros(3)
            for function in (torch.nonzero, lambda x: x[x > 0], torch.unique):
                with pytest.raises(Exception, match=r"nonzero|index|unique"):
                    function(x)


def test_fakes_of_two_modes_are_not_mixed() -> None:
    known = OperationCache()
    for mode in (FakeTensorMode(), FakeTensorMode()):
        with mode, Compared(mode, known):
            found = torch.zeros(3) + 1
            assert isinstance(found, FakeTensor)
            assert found.fake_mode is mode
    assert known.num_hits == 2
