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
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

import fsdp_engine as fe
from fsdp_engine.planner.simulation.compiled import simulated_compiler
from fsdp_engine.planner.simulation.flex_attention import computed_share
from fsdp_engine.planner.simulation.machine import Attention, Link, Machine, Processor
from tests.planner.simulation.memory_runs import HOST

compiled = torch.compile(flex_attention)


def flex(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, call: Any = compiled, **options: Any
) -> Any:
    return call(query, key, value, block_mask=mask, **options)


def at(documents: Tensor, index: Tensor) -> Tensor:
    return torch.ops.aten.index(documents, [index])


ROWS, LENGTH, HEADS, SIZE = 2, 1024, 4, 16
WIDTH, WORDS = HEADS * SIZE, 128
BLOCK = 128
NUM_BLOCKS = LENGTH // BLOCK
F32 = torch.float32
FLEX = "flex_attention"
# Only attention takes time, at this rate for any length.
RATE = 1e12
ONLY_FLOPS = Machine(
    "flops", Processor({F32: RATE}, 1e30, 1e12), Link(1e30, 0.0), Link(1e30, 0.0), 8
)
# FlexAttention at the rate of other attention.
EQUAL = dataclasses.replace(
    fe.H100,
    processor=dataclasses.replace(fe.H100.processor, flex_share=1.0, flex_backward_share=1.0),
)

# Compiled as in torchtitan, so that selective checkpoints recognize the compiled region.
visible = torch.compile(flex_attention, options={"wrap_inductor_compiled_regions": True})

Mask = Callable[..., Tensor]
thorough = partial(pytest.param, marks=pytest.mark.thorough)


@pytest.fixture(scope="module", autouse=True)
def _traces() -> Iterator[None]:
    """Keeps Dynamo's traces from one test to the next."""
    with simulated_compiler():
        yield


def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def within(size: int) -> Mask:
    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < size)

    return mask


# Four equal documents in each row.
DOCUMENTS = (torch.arange(LENGTH) * 4 // LENGTH).expand(ROWS, LENGTH).contiguous()


def made(
    mask: Mask, rows: int | None = None, heads: int | None = None, length: int = LENGTH
) -> Any:
    return create_block_mask(mask, rows, heads, length, length, device="cpu")


def causal_of(documents: Tensor) -> BlockMask:
    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[row, query] == documents[row, key]

    return made(and_masks(causal, same), ROWS)


class Block(nn.Module):
    """Attention by ``attend``, with ``heads`` heads of keys and values, and a linear."""

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
        self, attend: Callable[..., Tensor], make: Any, depth: int = 2, **sizes: int
    ) -> None:
        super().__init__()
        self.make = make
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attend, **sizes) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.table(tokens), self.make(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return x.sum()


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def no_mask(tokens: Tensor) -> None:
    return None


def causal_mask(tokens: Tensor) -> BlockMask:
    return made(causal)


TOKENS = torch.zeros(ROWS, LENGTH, dtype=torch.long)


def simulate(
    attend: Callable[..., Tensor],
    make: Callable[[Tensor], BlockMask | None] = causal_mask,
    *,
    machine: Machine = ONLY_FLOPS,
    model: dict[str, int] | None = None,
    **options: Any,
) -> fe.Simulation:
    build = partial(Model, attend, make, **(model or {}))
    return fe.simulate(build, 8, batch=TOKENS, machine=machine, strategy="no_shard", **options)


def kernels(found: fe.Simulation, label: str, phase: str) -> list[float]:
    """Seconds of the kernels of this name."""
    return [
        each.end - each.start
        for each in found.spans
        if each.lane == "compute" and each.label == label and each.phase == phase
    ]


# Blocks.


def share(mask: Mask, *buffers: Tensor, length: int = LENGTH, heads: int = 1) -> float:
    """The share of blocks that ``mask`` requires, computed from its graph and ``buffers`` alone."""
    index = [torch.zeros((), dtype=torch.int) for _ in range(4)]
    graph = make_fx(mask)(*index, *buffers)
    with FakeTensorMode():
        counts = torch.zeros(1, heads, -(-length // BLOCK), dtype=torch.int)
    block_mask = (length, length, counts, None, None, None, BLOCK, BLOCK, graph)
    return computed_share(block_mask, buffers, length, length)


def by_head(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < 128 * (head + 1))


@pytest.mark.parametrize(("mask", "heads"), [(causal, None), (within(256), None), (by_head, 8)])
@pytest.mark.parametrize("length", [500, 5120])
def test_blocks_of_a_mask_are_those_of_torch(mask: Mask, heads: int | None, length: int) -> None:
    """With a mask for each head, the share is the mean over heads."""
    expected = made(mask, None, heads, length)
    assert expected.full_kv_num_blocks is not None
    computed = int(expected.kv_num_blocks.sum() + expected.full_kv_num_blocks.sum())
    part = computed / (heads or 1) / (-(-length // BLOCK)) ** 2
    found = share(mask, length=length, heads=heads or 1)
    assert found == (part if heads is None else pytest.approx(part))


# Time.

CAUSAL_BLOCKS = NUM_BLOCKS * (NUM_BLOCKS + 1) // 2


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        thorough(no_mask, NUM_BLOCKS**2, id="none"),
        # Documents depend on token values, which are unknown: each row counts as one document.
        pytest.param(causal_of, CAUSAL_BLOCKS, id="of tokens"),
        # Four documents of two blocks each; causal attention computes three of four blocks in each.
        pytest.param(lambda tokens: causal_of(DOCUMENTS), 4 * 3, id="documents"),
    ],
)
def test_time_is_that_of_the_blocks_of_the_mask(make: Any, blocks: int) -> None:
    found = simulate(flex, make, model={"depth": 1})
    product = 2 * ROWS * HEADS * BLOCK * BLOCK * SIZE  # of a block, in floating-point operations
    assert kernels(found, FLEX, "forward") == pytest.approx([2 * product * blocks / RATE])
    backward = kernels(found, f"{FLEX}_backward", "backward")
    assert backward == pytest.approx([5 * product * blocks / RATE])
    assert found.model_flops == pytest.approx(model_flops(1))


def model_flops(depth: int = 2) -> int:
    """Model flops: all pairs of tokens, without the scores that backward recomputes."""
    linears = 6 * ROWS * LENGTH * 4 * WIDTH * WIDTH
    attention = (2 + 4) * 2 * ROWS * HEADS * LENGTH * LENGTH * SIZE
    return depth * (linears + attention)


# Memory.


def between(found: fe.Simulation) -> int:
    """Bytes of activations between forward and backward."""
    start = min(
        each.start for each in found.spans if each.lane == "compute" and each.phase == "backward"
    )
    *_, (_, sizes) = (entry for entry in found.memory_series if entry[0] <= start)
    return sizes[-1]


@pytest.mark.parametrize(("heads", "size"), [thorough(HEADS, SIZE), (2, 24)])
def test_a_compiled_kernel_keeps_its_arguments_its_output_and_sums(heads: int, size: int) -> None:
    """Heads of keys may be fewer and of any size."""
    one, two = (
        simulate(
            partial(flex, enable_gqa=True), model={"depth": depth, "heads": heads, "size": size}
        )
        for depth in (1, 2)
    )
    arguments = (HEADS + 2 * heads) * size
    # The block's input, queries, keys, values and the output, and a sum for each query and head.
    kept = WIDTH + arguments + HEADS * size + HEADS
    assert between(two) - between(one) == pytest.approx(ROWS * LENGTH * kept * 4, rel=0.005)
    product = 2 * ROWS * HEADS * BLOCK * BLOCK * size * CAUSAL_BLOCKS
    assert kernels(two, FLEX, "forward") == pytest.approx([2 * product / RATE] * 2)


@pytest.mark.parametrize("compile", [False, thorough(True)])
def test_causal_attention_has_the_memory_of_flash_attention(compile: bool) -> None:
    plain, found = (
        simulate(attend, make, machine=EQUAL, compile=compile)
        for attend, make in ((sdpa, no_mask), (flex, causal_mask))
    )
    # Flash attention's backward sums gradients of queries in fp32, which are 6 % of the peak of
    # this small compiled model.
    sums = ROWS * LENGTH * WIDTH * F32.itemsize
    assert plain.peak_bytes - sums * 1.01 <= found.peak_bytes <= plain.peak_bytes * 1.01
    assert found.model_flops == plain.model_flops
    own = "_scaled_dot_product_flash_attention_for_cpu"
    for phase, suffix in (("forward", ""), ("backward", "_backward")):
        assert len(kernels(found, FLEX + suffix, phase)) == 2
        assert len(kernels(plain, own + suffix, phase)) == 2


# Checkpoints.

SELECTIVE = {"checkpointing": "selective"}


@pytest.mark.parametrize(
    ("attend", "options", "recomputed"),
    [
        (flex, {"checkpointing": True}, 2),
        (flex, SELECTIVE, 2),  # checkpoints do not recognize the compiled code
        (partial(flex, call=visible), SELECTIVE, 0),
        (flex, {**SELECTIVE, "compile": True}, 0),
    ],
)
def test_selective_checkpoints_keep_the_output(
    attend: Callable[..., Tensor], options: dict[str, Any], recomputed: int
) -> None:
    found = simulate(attend, **options)
    assert len(kernels(found, FLEX, "forward")) == 2
    assert len(kernels(found, FLEX, "backward")) == recomputed
    assert len(kernels(found, f"{FLEX}_backward", "backward")) == 2
    assert found.model_flops == pytest.approx(model_flops())


def test_a_machine_whose_host_computes_has_no_backward() -> None:
    with pytest.raises(fe.SimulationError, match="does not support backward on CPU"):
        simulate(flex, no_mask, machine=HOST)


def test_long_masks_are_sampled() -> None:
    blocks = 131_072 // BLOCK
    assert share(causal, length=131_072) == (blocks + 1) / (2 * blocks)
    before, every = 1024 // BLOCK, blocks * (blocks + 1) / 2
    skipped = (blocks - before) * (blocks - before - 1) / 2
    assert share(within(1024), length=131_072) == (every - skipped) / blocks**2


@pytest.mark.parametrize(
    ("mask", "bound"),
    [
        (lambda r, h, q, k, of: (q >= k) & (at(of, q) == at(of, k)), causal),
        (lambda r, h, q, k, of: (q >= k) | (at(of, q) == 0), None),
        (lambda r, h, q, k, of: (q >= k) & ~(at(of, k) == 0), causal),
        (lambda r, h, q, k, of: ~((q < k) | (at(of, k) == 0)), causal),
    ],
    ids=["documents", "prefix", "no padding", "neither"],
)
def test_conditions_of_unknown_tensors_count_as_true(mask: Mask, bound: Mask | None) -> None:
    documents = DOCUMENTS[0]
    with FakeTensorMode() as mode:
        counted = share(mask, mode.from_tensor(documents))
    assert counted == (1.0 if bound is None else share(bound))

    def with_values(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask(row, head, query, key, documents)

    known = share(mask, documents)
    assert known == pytest.approx(1 - made(with_values).sparsity() / 100)
    assert known <= counted


def test_a_mask_that_cannot_be_run_counts_in_full() -> None:
    table = torch.arange(8)  # too short
    assert share(lambda r, h, q, k, of: (q >= k) & (at(of, k) > 0), table) == 1.0


def test_presets_have_the_published_rates() -> None:
    shape = Attention(4096, 4096, head_size=128)
    for machine, forward, backward in ((fe.A100, 0.90, 0.85), (fe.H100, 1.25, 1.03)):
        for is_backward, rate in ((False, forward), (True, backward)):
            plain = dataclasses.replace(shape, is_backward=is_backward)
            fast = dataclasses.replace(plain, is_flex=True)
            seconds = partial(machine.processor.seconds, 1e15, 0, torch.bfloat16)
            assert seconds(attention=plain) / seconds(attention=fast) == pytest.approx(rate)


def test_an_eager_call_holds_all_scores_and_selective_checkpoints_keep_its_output() -> None:
    found, again = (
        simulate(partial(flex, call=flex_attention), **each) for each in ({}, SELECTIVE)
    )
    assert not kernels(found, FLEX, "forward")
    assert len(kernels(found, "logsumexp", "forward")) == 2
    scores = ROWS * HEADS * LENGTH * LENGTH * F32.itemsize
    assert 3 * scores < found.peak_bytes < 8 * scores
    assert found.model_flops == pytest.approx(model_flops())
    # All keys are computed.
    products = kernels(found, "bmm", "forward")
    assert products == pytest.approx([2 * ROWS * HEADS * LENGTH * LENGTH * SIZE / RATE] * 4)
    assert len(kernels(again, "logsumexp", "forward")) == 2
    assert not kernels(again, "logsumexp", "backward")
