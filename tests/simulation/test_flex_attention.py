"""Simulations of ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

import fsdp_engine as fe
from fsdp_engine.simulation.compiled import simulated_compiler
from fsdp_engine.simulation.flex_attention import FlexKernel, computed_share
from fsdp_engine.simulation.machine import Attention, Link, Machine, Processor
from tests.simulation.memory_runs import HOST
from tests.simulation.small_llama import llama

ROWS, LENGTH, HEADS, SIZE = 2, 1024, 4, 16
WIDTH, WORDS = HEADS * SIZE, 128
BLOCK = 128
NUM_BLOCKS = LENGTH // BLOCK
WINDOW = 256
F32 = torch.float32
FLEX = "flex_attention"
# Attention alone takes time: flops over this rate, also with short sequences.
RATE = 1e12
ONLY_FLOPS = Machine(
    "flops", Processor({F32: RATE}, 1e30, 1e12), Link(1e30, 0.0), Link(1e30, 0.0), 8
)
# FlexAttention at the rate of other attention.
EQUAL = dataclasses.replace(
    fe.H100,
    processor=dataclasses.replace(fe.H100.processor, flex_share=1.0, flex_backward_share=1.0),
)

compiled = torch.compile(flex_attention)
# As torchtitan compiles it: selective checkpoints see the compiled region.
visible = torch.compile(flex_attention, options={"wrap_inductor_compiled_regions": True})

Mask = Callable[..., Tensor]


def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def window(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < WINDOW)


def in_documents(documents: Tensor) -> Mask:
    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[row, query] == documents[row, key]

    return mask


def _documents() -> Tensor:
    """Of four equal documents in each row."""
    return (torch.arange(LENGTH) * 4 // LENGTH).expand(ROWS, LENGTH)


MakeMask = Callable[[Tensor], BlockMask | None]


@pytest.fixture(scope="module", autouse=True)
def _traces() -> Iterator[None]:
    """Keeps what Dynamo has traced for the next test."""
    with simulated_compiler():
        yield


def _made(mask: Mask, rows: int | None = None) -> BlockMask:
    return create_block_mask(mask, rows, None, LENGTH, LENGTH, device="cpu")


def _no_mask(tokens: Tensor) -> None:
    return None


def _causal(tokens: Tensor) -> BlockMask:
    return _made(causal)


class Block(nn.Module):
    """Attention and a linear.

    Args:
        attend: takes queries, keys, values and the mask.
        heads: of keys and values.
        size: of a head.
    """

    def __init__(self, attend: Callable[..., Tensor], heads: int = HEADS, size: int = SIZE) -> None:
        super().__init__()
        self.attend, self.heads, self.size = attend, heads, size
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * heads) * size)
        self.out = nn.Linear(HEADS * size, WIDTH)

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        parts = self.qkv(x).split([HEADS * self.size, *[self.heads * self.size] * 2], -1)
        query, key, value = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        attended = self.attend(query, key, value, mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Blocks with one mask, which ``make`` makes of the tokens."""

    def __init__(
        self, attend: Callable[..., Tensor], make: MakeMask, depth: int = 2, **options: Any
    ) -> None:
        super().__init__()
        self.make = make
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attend, **options) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.table(tokens), self.make(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return x.sum()


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    return compiled(query, key, value, block_mask=mask, enable_gqa=True)


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


def _visible(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    return visible(query, key, value, block_mask=mask)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.zeros(ROWS, length, dtype=torch.long)


def _simulate(
    attend: Callable[..., Tensor],
    make: MakeMask = _no_mask,
    *,
    machine: Machine = ONLY_FLOPS,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> fe.Simulation:
    build = partial(Model, attend, make, **(model or {}))
    options = {"strategy": "no_shard", **options}
    return fe.simulate(build, 8, batch=_tokens(), machine=machine, **options)


def _kernels(found: fe.Simulation, label: str, phase: str) -> list[float]:
    """Seconds of the kernels of this name."""
    return [
        each.end - each.start
        for each in found.spans
        if each.lane == "compute" and each.label == label and each.phase == phase
    ]


# Blocks.


def _share(mask: Mask, *buffers: Tensor, length: int = LENGTH, heads: int = 1) -> float:
    """The computed share of a mask without values, whose function reads ``buffers``."""
    index = [torch.zeros((), dtype=torch.int) for _ in range(4)]
    graph = make_fx(mask)(*index, *buffers)
    with FakeTensorMode():
        counts = torch.zeros(1, heads, -(-length // BLOCK), dtype=torch.int)
    block_mask = (length, length, counts, None, None, None, BLOCK, BLOCK, graph)
    return computed_share(block_mask, buffers, length, length)


def sinks(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & ((query - key < 64) | (key < 4))


def by_head(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < 128 * (head + 1))


@pytest.mark.parametrize("mask", [causal, window, sinks])
@pytest.mark.parametrize("length", [500, 2048, 5120])
def test_blocks_of_a_mask_are_those_of_torch(mask: Mask, length: int) -> None:
    made = create_block_mask(mask, None, None, length, length, device="cpu")
    assert made.full_kv_num_blocks is not None
    computed = int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum())
    assert _share(mask, length=length) == computed / (-(-length // BLOCK)) ** 2


def test_masks_of_each_head_are_averaged() -> None:
    made = create_block_mask(by_head, None, 8, LENGTH, LENGTH, device="cpu")
    assert _share(by_head, heads=8) == pytest.approx(1 - made.sparsity() / 100)


def test_long_masks_are_sampled() -> None:
    blocks = 131_072 // BLOCK
    assert _share(causal, length=131_072) == (blocks + 1) / (2 * blocks)
    before, every = 1024 // BLOCK, blocks * (blocks + 1) / 2
    skipped = (blocks - before) * (blocks - before - 1) / 2
    near = partial(_in_window, 1024)
    assert _share(near, length=131_072) == (every - skipped) / blocks**2


def _in_window(size: int, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < size)


def _at(documents: Tensor, index: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.index(documents, [index])
    return found


def _causal_in_documents(*args: Tensor) -> Tensor:
    _, _, query, key, documents = args
    return (query >= key) & (_at(documents, query) == _at(documents, key))


def _prefix(*args: Tensor) -> Tensor:
    _, _, query, key, documents = args
    return (query >= key) | (_at(documents, query) == 0)


def _no_padding(*args: Tensor) -> Tensor:
    _, _, query, key, documents = args
    return (query >= key) & ~(_at(documents, key) == 0)


def _neither(*args: Tensor) -> Tensor:
    _, _, query, key, documents = args
    return ~((query < key) | (_at(documents, key) == 0))


@pytest.mark.parametrize(
    ("mask", "bound"),
    [(_causal_in_documents, causal), (_prefix, None), (_no_padding, causal), (_neither, causal)],
)
def test_conditions_of_unknown_tensors_count_as_true(mask: Mask, bound: Mask | None) -> None:
    documents = _documents()[0]
    with FakeTensorMode() as mode:
        unknown = mode.from_tensor(documents)
        counted = _share(mask, unknown)
    assert counted == (1.0 if bound is None else _share(bound))

    def with_values(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask(row, head, query, key, documents)

    made = create_block_mask(with_values, None, None, LENGTH, LENGTH, device="cpu")
    known = _share(mask, documents)
    assert known == pytest.approx(1 - made.sparsity() / 100)
    assert known <= counted


def test_a_mask_that_cannot_be_run_counts_in_full() -> None:
    table = torch.arange(8)  # too short
    assert _share(lambda *args: (args[2] >= args[3]) & (_at(args[4], args[3]) > 0), table) == 1.0


# Time.

CAUSAL_BLOCKS = NUM_BLOCKS * (NUM_BLOCKS + 1) // 2
# A window of two blocks reaches into two further ones.
WINDOW_BLOCKS = 3 * NUM_BLOCKS - 3
# Of four documents of two blocks each: three of four blocks.
DOCUMENT_BLOCKS = 4 * 3


def _of_tokens(tokens: Tensor) -> BlockMask:
    return _made(and_masks(causal, in_documents(tokens)), ROWS)


def _of_real_documents(tokens: Tensor) -> BlockMask:
    return _made(and_masks(causal, in_documents(_DOCUMENTS)), ROWS)


def _outside(tokens: Tensor) -> BlockMask:
    return _OUTSIDE


_DOCUMENTS = _documents().contiguous()
_OUTSIDE = _of_real_documents(_DOCUMENTS)


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (_no_mask, NUM_BLOCKS**2),
        (_causal, CAUSAL_BLOCKS),
        (lambda tokens: _made(window), WINDOW_BLOCKS),
        (_of_tokens, CAUSAL_BLOCKS),  # as if each row were one document
        (lambda tokens: _made(in_documents(tokens), ROWS), NUM_BLOCKS**2),
        (_of_real_documents, DOCUMENT_BLOCKS),
        (_outside, DOCUMENT_BLOCKS),
    ],
)
def test_time_is_that_of_the_blocks_of_the_mask(make: MakeMask, blocks: int) -> None:
    found = _simulate(_flex, make)
    product = 2 * ROWS * HEADS * BLOCK * BLOCK * SIZE  # of a block, in floating-point operations
    assert _kernels(found, FLEX, "forward") == pytest.approx([2 * product * blocks / RATE] * 2)
    backward = _kernels(found, f"{FLEX}_backward", "backward")
    assert backward == pytest.approx([5 * product * blocks / RATE] * 2)
    assert found.model_flops == pytest.approx(_model_flops())


def _model_flops() -> int:
    """Of two blocks: all pairs count, and no scores that backward computes again."""
    linears = 6 * ROWS * LENGTH * 4 * WIDTH * WIDTH
    attention = (2 + 4) * 2 * ROWS * HEADS * LENGTH * LENGTH * SIZE
    return 2 * (linears + attention)


@pytest.mark.parametrize(("heads", "size"), [(HEADS, 24), (1, SIZE), (2, SIZE)])
def test_heads_of_keys_may_be_fewer_and_of_any_size(heads: int, size: int) -> None:
    found = _simulate(_flex, _causal, model={"heads": heads, "size": size})
    product = 2 * ROWS * HEADS * BLOCK * BLOCK * size * CAUSAL_BLOCKS
    assert _kernels(found, FLEX, "forward") == pytest.approx([2 * product / RATE] * 2)


def test_presets_have_the_published_rates() -> None:
    shape = Attention(4096, 4096, head_size=128)
    for machine, forward, backward in ((fe.A100, 0.90, 0.85), (fe.H100, 1.25, 1.03)):
        for is_backward, share in ((False, forward), (True, backward)):
            plain = dataclasses.replace(shape, is_backward=is_backward)
            flex = dataclasses.replace(plain, is_flex=True)
            seconds = partial(machine.processor.seconds, 1e15, 0, torch.bfloat16)
            assert seconds(attention=plain) / seconds(attention=flex) == pytest.approx(share)


# Memory.


def _between(found: fe.Simulation) -> int:
    """Bytes of activations between forward and backward."""
    start = min(
        each.start for each in found.spans if each.lane == "compute" and each.phase == "backward"
    )
    *_, (_, sizes) = (entry for entry in found.memory_series if entry[0] <= start)
    return sizes[-1]


@pytest.mark.parametrize(("heads", "size"), [(HEADS, SIZE), (2, 24)])
def test_a_compiled_kernel_keeps_its_arguments_its_output_and_sums(heads: int, size: int) -> None:
    shapes = {"heads": heads, "size": size}
    one, two = (
        _between(_simulate(_flex, _causal, model={**shapes, "depth": depth})) for depth in (1, 2)
    )
    arguments = (HEADS + 2 * heads) * size
    # The block's input, queries, keys, values and the output, and a sum for each query and head.
    kept = WIDTH + arguments + HEADS * size + HEADS
    assert two - one == pytest.approx(ROWS * LENGTH * kept * F32.itemsize, rel=0.005)


@pytest.mark.parametrize("compile", [False, True])
def test_causal_attention_has_the_memory_of_flash_attention(compile: bool) -> None:
    sdpa, flex = (
        _simulate(attend, make, machine=EQUAL, compile=compile)
        for attend, make in ((_sdpa, _no_mask), (_flex, _causal))
    )
    # Flash attention's backward sums gradients of queries in fp32; of the small compiled model they
    # are 6 % of the peak.
    sums = ROWS * LENGTH * WIDTH * F32.itemsize
    assert sdpa.peak_bytes - sums * 1.01 <= flex.peak_bytes <= sdpa.peak_bytes * 1.01
    assert flex.model_flops == sdpa.model_flops
    own = "_scaled_dot_product_flash_attention_for_cpu"
    for phase, suffix in (("forward", ""), ("backward", "_backward")):
        both = _kernels(flex, FLEX + suffix, phase), _kernels(sdpa, own + suffix, phase)
        assert len(both[0]) == len(both[1]) == 2


@pytest.mark.parametrize("length", [2048, 4096, 16384])
def test_causal_blocks_take_the_time_of_causal_attention(length: int) -> None:
    share = (length // BLOCK + 1) / (2 * length // BLOCK)
    heads = torch.empty(1, 1, length, 128, device="meta")
    kernel = FlexKernel(heads, heads, heads, share, is_backward=False)
    seconds = partial(EQUAL.processor.seconds, num_bytes=0, dtype=torch.bfloat16)
    causal_seconds = seconds(1e15, attention=Attention(length, length, is_causal=True))
    assert seconds(share * 1e15, attention=kernel.shape) == pytest.approx(causal_seconds, rel=0.04)


def test_an_eager_call_holds_all_scores() -> None:
    eager = _simulate(_eager, _causal)
    assert not _kernels(eager, FLEX, "forward")
    assert len(_kernels(eager, "logsumexp", "forward")) == 2
    scores = ROWS * HEADS * LENGTH * LENGTH * F32.itemsize
    assert 3 * scores < eager.peak_bytes < 8 * scores
    assert eager.model_flops == pytest.approx(_model_flops())
    # All keys are computed.
    products = _kernels(eager, "bmm", "forward")
    assert products == pytest.approx([2 * ROWS * HEADS * LENGTH * LENGTH * SIZE / RATE] * 4)


# Checkpoints.


@pytest.mark.parametrize(
    ("attend", "options", "recomputed"),
    [
        (_flex, {"checkpointing": True}, 2),
        (_flex, {"checkpointing": "selective"}, 2),  # compiled code is not seen
        (_visible, {"checkpointing": True}, 2),
        (_visible, {"checkpointing": "selective"}, 0),
        (_flex, {"checkpointing": True, "compile": True}, 2),
        (_flex, {"checkpointing": "selective", "compile": True}, 0),
    ],
)
def test_selective_checkpoints_keep_the_output(
    attend: Callable[..., Tensor], options: dict[str, Any], recomputed: int
) -> None:
    found = _simulate(attend, _causal, **options)
    assert len(_kernels(found, FLEX, "forward")) == 2
    assert len(_kernels(found, FLEX, "backward")) == recomputed
    assert len(_kernels(found, f"{FLEX}_backward", "backward")) == 2
    assert found.model_flops == pytest.approx(_model_flops())


def test_selective_checkpoints_keep_the_output_of_an_eager_call() -> None:
    found = _simulate(_eager, _causal, checkpointing="selective")
    assert len(_kernels(found, "logsumexp", "forward")) == 2
    assert not _kernels(found, "logsumexp", "backward")


# Models.


def _with_results(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    request = AuxRequest(lse=True, max_scores=True)
    found, others = compiled(query, key, value, block_mask=mask, return_aux=request)
    return found * (others.lse - others.max_scores)[..., None].exp()


def test_other_results_have_memory() -> None:
    plain, found = (_simulate(each, _causal, model={"depth": 1}) for each in (_flex, _with_results))
    assert len(_kernels(found, FLEX, "forward")) == 1
    # The result that is multiplied, the factor, and the largest scores.
    numbers = ROWS * LENGTH * HEADS * (SIZE + 1)
    assert _between(found) - _between(plain) >= numbers * F32.itemsize


def _llama(attention: str, compile: bool) -> fe.Simulation:
    tokens = {"input_ids": _tokens(), "labels": _tokens()}
    build = partial(llama, attn_implementation=attention)
    return fe.simulate(build, 8, batch=tokens, machine=EQUAL, compile=compile)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_llama_of_transformers(compile: bool) -> None:
    sdpa, flex = (_llama(name, compile) for name in ("sdpa", "flex_attention"))
    assert len(_kernels(flex, FLEX, "forward")) == 2
    assert flex.model_flops == sdpa.model_flops
    assert flex.peak_bytes == pytest.approx(sdpa.peak_bytes, rel=0.02)
    assert flex.seconds == pytest.approx(sdpa.seconds, rel=0.05)


def test_plans_try_models_with_it() -> None:
    build = partial(Model, _flex, _causal)
    found = fe.plan(build, _tokens(), world_size=8, machine=EQUAL, quick=True)
    assert found.chosen is not None
    assert {each.candidate.checkpointing for each in found.outcomes} >= {False, True, "selective"}
    assert found.simulate is not None
    simulated = found.simulate(found.chosen.candidate)
    assert found.chosen.times is not None
    assert found.chosen.times.step == pytest.approx(simulated.seconds)
    assert len(_kernels(simulated, FLEX, "forward")) == 2


def test_a_machine_whose_host_computes_has_no_backward() -> None:
    with pytest.raises(fe.SimulationError, match="does not support backward on CPU"):
        _simulate(_flex, machine=HOST)
