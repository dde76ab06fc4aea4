"""Simulations of torch's context parallelism."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.simulation.clock import CONTEXT_LANE
from fsdp_engine.simulation.machine import Link
from fsdp_engine.simulation.meshes import meshes_with_values
from fsdp_engine.simulation.operations import OperationCache
from fsdp_engine.simulation.stage_messages import is_stage_lane
from tests.simulation.memory_runs import HOST
from tests.simulation.small_llama import llama

WIDTH, HEADS, KEY_HEADS, LENGTH, NUM_BLOCKS = 256, 4, 2, 4096, 2
SIZE = WIDTH // HEADS  # of a head
MICROBATCHES = 5  # of a pipeline
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Block(nn.Module):
    """Causal attention with fewer heads of keys, and a matrix."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, enable_gqa=True
        )
        return x + self.out(found.transpose(1, 2).flatten(2))


def one_block() -> nn.Module:
    return blocks(1)


def blocks(count: int = NUM_BLOCKS) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(count)))


def simulated(size: int, build: Any = blocks, **options: Any) -> fe.Simulation:
    """8 ranks in groups of ``size``, two sequences in each group."""
    given: dict[str, Any] = {"batch": torch.zeros(2, LENGTH, WIDTH), "mp_policy": BF16}
    return fe.simulate(build, 8, context_parallel=size, **{**given, **options})


simulated_once = functools.cache(simulated)


@pytest.mark.parametrize("size", [2, 8])
def test_flops_and_activations_are_divided(size: int) -> None:
    """Activations that a second block adds. Ring attention returns contiguous heads, which are
    copied when they are transposed for the next matrix: that is kept besides."""
    whole, part = ([simulated_once(each, one_block), simulated_once(each)] for each in (1, size))
    for one, all_of_it in zip(part, whole, strict=True):
        assert one.model_flops * size == all_of_it.model_flops
    kept, all_kept = (
        two.memory["activations"] - one.memory["activations"] for one, two in (part, whole)
    )
    assert kept * size == pytest.approx(all_kept + 2 * LENGTH * WIDTH * 2, rel=1e-3)
    assert f"in context-parallel groups of {size}" in part[0].title


def attention_seconds(found: fe.Simulation) -> float:
    return sum(span.end - span.start for span in found.spans if "scaled_dot_product" in span.label)


@pytest.mark.parametrize("size", [2, 8])
def test_attention_takes_its_part_of_the_time(size: int) -> None:
    """The blocks of load-balanced causal attention are half of all, as those of one rank."""
    batch = torch.zeros(1, 2**16, WIDTH)
    whole, part = (simulated(each, batch=batch) for each in (1, size))
    assert attention_seconds(part) * size == pytest.approx(attention_seconds(whole), rel=0.05)


def test_attention_that_is_not_causal_has_no_load_balancing(monkeypatch: Any) -> None:
    def build() -> nn.Module:
        return Block(is_causal=False)

    monkeypatch.setattr(_cp_options, "enable_load_balance", False)
    whole, part = (simulated(size, build) for size in (1, 4))
    assert part.model_flops * 4 == whole.model_flops
    with pytest.raises(fe.SimulationError, match="load balancing with causal attention"):
        simulated(4)


@functools.cache
def pipelined(size: int, schedule: str, *, quick: bool) -> fe.PipelineSimulation:
    """4 data-parallel ranks of each stage in groups of ``size``, messages without latency."""
    link = Link(1e11, 0.0)

    def stage(index: int, num_stages: int) -> nn.Module:
        return nn.Sequential(*[nn.Embedding(WIDTH, WIDTH)] * (index == 0), blocks(1))

    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    return fe.simulate_pipeline(
        stage,
        8,
        pipeline=2,
        context_parallel=size,
        microbatches=MICROBATCHES,
        batch=tokens,
        target=tokens,
        schedule=schedule,
        machine=replace(fe.H100, within_node=link, between_nodes=link),
        quick=quick,
        mp_policy=BF16,
    )


def stage_messages(found: fe.PipelineSimulation) -> list[float]:
    return [
        span.end - span.start
        for rank in found.ranks
        for span in rank.spans
        if is_stage_lane(span.lane)
    ]


@pytest.mark.parametrize("quick", [False, True])
def test_stages_of_a_pipeline_have_a_part_of_each_sequence(quick: bool) -> None:
    """Flops, messages between stages and those of ring attention."""
    whole, part = (pipelined(size, "1F1B", quick=quick) for size in (1, 2))
    assert "data-parallel ranks in context-parallel groups of 2" in part.title
    assert part.num_targets * 2 == whole.num_targets
    messages = stage_messages(whole)
    assert len(messages) == 4 * MICROBATCHES
    assert stage_messages(part) == pytest.approx([each / 2 for each in messages])
    gathered, gradients = kv_bytes(2, 2) / 2, kv_bytes(2, 4)
    for one, all_of_it in zip(part.ranks, whole.ranks, strict=True):
        assert one.model_flops * 2 == all_of_it.model_flops
        assert one.sent_bytes["context"] == MICROBATCHES * (2 * gathered + gradients)


@pytest.mark.parametrize(
    "schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.thorough)]
)
def test_quick_simulations_of_pipelines_with_shared_sequences(schedule: str) -> None:
    quick, full = (pipelined(2, schedule, quick=each) for each in (True, False))
    assert quick.actions == full.actions
    assert quick.seconds == pytest.approx(full.seconds, rel=0.03)
    assert quick.peak_bytes == pytest.approx(full.peak_bytes, rel=0.02)


def test_degrees_that_a_pipeline_does_not_take() -> None:
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    given: dict[str, Any] = {"pipeline": 2, "microbatches": 4, "batch": tokens, "target": tokens}

    def stage(index: int, num_stages: int) -> nn.Module:
        return blocks(1)

    with pytest.raises(ValueError, match="context_parallel: expected a divisor of the 4 ranks"):
        fe.simulate_pipeline(stage, 8, context_parallel=3, **given)
    with pytest.raises(ValueError, match="context_parallel: expected 1 on a machine whose host"):
        fe.simulate_pipeline(stage, 8, context_parallel=2, machine=HOST, **given)
    given["batch"] = torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="context_parallel: expected sequences divisible by 4"):
        fe.simulate_pipeline(stage, 8, context_parallel=2, **given)


def kv_bytes(size: int, itemsize: int) -> int:
    """Of a rank's keys and values, with two sequences."""
    return 2 * 2 * KEY_HEADS * (LENGTH // size) * SIZE * itemsize


@pytest.mark.parametrize("size", [2, 8])
def test_messages_are_those_of_ring_attention(size: int) -> None:
    """Keys and values are gathered in forward and in backward, and their gradients, in fp32, go
    around the ring once."""
    found = simulated_once(size)
    gathered, gradients = (size - 1) * kv_bytes(size, 2), size * kv_bytes(size, 4)
    assert found.sent_bytes["context"] == NUM_BLOCKS * (2 * gathered + gradients)
    spans = [span for span in found.spans if span.lane == CONTEXT_LANE]
    assert [span.phase for span in spans[:NUM_BLOCKS]] == ["forward"] * NUM_BLOCKS
    assert len(spans) == NUM_BLOCKS * (2 + size)


def test_rotation_by_all_to_all() -> None:
    set_rotate_method("alltoall")
    try:
        found = simulated(4)
    finally:
        set_rotate_method("allgather")
    assert found.sent_bytes["context"] == simulated_once(4).sent_bytes["context"]
    spans = [span for span in found.spans if span.lane == CONTEXT_LANE]
    assert len(spans) == NUM_BLOCKS * (2 * 3 + 4)
    expected = fe.H100.within_node.seconds(kv_bytes(4, 2), 1)
    assert spans[0].end - spans[0].start == pytest.approx(expected)


def test_a_ring_over_nodes_has_the_link_between_them() -> None:
    set_rotate_method("alltoall")
    try:
        found = fe.simulate(
            blocks, 16, context_parallel=16, batch=torch.zeros(2, LENGTH, WIDTH), mp_policy=BF16
        )
    finally:
        set_rotate_method("allgather")
    first = next(span for span in found.spans if span.lane == CONTEXT_LANE)
    expected = fe.H100.between_nodes.seconds(kv_bytes(16, 2), 1)
    assert first.end - first.start == pytest.approx(expected)


class Messages(TorchDispatchMode):
    """Operation and bytes of each collective, in ``found``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # operations on local tensors follow
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self.found.append((name, args[0].numel() * args[0].itemsize))
        return out


@contextmanager
def eight_fake_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with meshes_with_values(), FakeTensorMode():
            yield
    finally:
        dist.destroy_process_group()


def test_torchs_own_ring_attention_has_these_messages() -> None:
    """Called without a simulation, on a fused kernel of CUDA's name and shapes."""
    size = 4
    with eight_fake_ranks():
        mesh = init_device_mesh("cpu", (2, size), mesh_dim_names=("dp", "cp"))
        tokens = torch.zeros(2, LENGTH)
        with context_parallel(mesh["cp"], buffers=[tokens], buffer_seq_dims=[1]):
            query, key, value = (
                torch.zeros(
                    2, heads, tokens.shape[1], SIZE, dtype=torch.bfloat16, requires_grad=True
                )
                for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            )
            given = [
                DTensor.from_local(each, mesh["cp"], [Shard(2)], run_check=False)
                for each in (query, key, value)
            ]
            with Messages() as messages:
                out = torch.ops.aten._scaled_dot_product_flash_attention(*given, is_causal=True)[0]
                out.to_local().sum().backward()
    gathered, gradients = kv_bytes(size, 2), kv_bytes(size, 4)
    gather = ("all_gather_into_tensor", gathered)
    assert messages.found == [gather, gather, *[("all_to_all_single", gradients)] * size]


def test_messages_run_beside_attention() -> None:
    """With long sequences, a block of attention takes longer than the message of the next one."""
    found = simulated(8, batch=torch.zeros(1, 2**17, WIDTH))
    busy = found.message_seconds[CONTEXT_LANE]
    assert found.exposed_by_lane.get(CONTEXT_LANE, 0.0) < 0.25 * busy


def test_labels_and_positions_are_sharded() -> None:
    """transformers' own position ids, in the batch, give what a model without them has."""
    tokens = torch.zeros(2, 512, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    positions = torch.arange(512).expand(2, -1)
    part, placed = (
        fe.simulate(llama, 8, batch=given, context_parallel=4)
        for given in (batch, {**batch, "position_ids": positions})
    )
    assert placed.model_flops == part.model_flops
    assert placed.sent_bytes == part.sent_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": True},
        {"checkpointing": "selective"},
        {"checkpointing": "offload"},
        {"microbatches": 2},
        {"mesh": (2, 4)},
        {"offload": fe.Offload(optimizer_state="host")},
    ],
)
def test_with_other_options(options: dict[str, Any]) -> None:
    whole, part = simulated(1, **options), simulated(4, **options)
    assert part.model_flops * 4 == whole.model_flops
    count = options.get("microbatches", 1)
    messages = count * simulated_once(4).sent_bytes["context"]
    if options.get("checkpointing") is True:  # the gather of forward again
        messages += NUM_BLOCKS * 3 * kv_bytes(4, 2)
    assert part.sent_bytes["context"] == messages


def test_dynamo_traces_checkpointed_blocks_in_one_graph() -> None:
    """Side effects within a checkpoint would break it, and its operations would run one by one."""
    from torch._dynamo.utils import counters

    counters.clear()
    found = simulated(4, compile=True, checkpointing=True)
    # The first block's input requires no grad.
    assert counters["stats"]["unique_graphs"] == NUM_BLOCKS
    assert not counters["graph_break"]
    assert attention_seconds(found) == pytest.approx(
        attention_seconds(simulated(4, checkpointing=True))
    )


def test_beside_tensor_parallelism() -> None:
    """Tensor-parallel ranks have a part of the heads, so that messages are smaller."""
    tokens = torch.zeros(2, 512, dtype=torch.long)
    options: dict[str, Any] = {"batch": {"input_ids": tokens, "labels": tokens}}
    alone = fe.simulate(llama, 8, context_parallel=4, **options)
    both = fe.simulate(llama, 16, context_parallel=4, tensor_parallel=2, **options)
    assert both.sent_bytes["context"] == alone.sent_bytes["context"] / 2
    assert both.sent_bytes["tensor"] > 0
    assert "8 ranks in context-parallel groups of 4, of 2 tensor-parallel ranks each" in both.title


@pytest.mark.thorough
def test_an_8b_llama_with_long_sequences_fits_with_context_parallelism() -> None:
    """131,072 tokens on 8 H100."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def build() -> nn.Module:
        with torch.device("meta"):
            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=4096,
                    intermediate_size=14336,
                    num_hidden_layers=32,
                    num_attention_heads=32,
                    num_key_value_heads=8,
                    vocab_size=128256,
                )
            )

    tokens = torch.zeros(1, 131072, dtype=torch.long)
    known = OperationCache()
    whole, part = (
        fe.simulate(
            build,
            8,
            batch={"input_ids": tokens, "labels": tokens},
            context_parallel=size,
            checkpointing=True,
            mp_policy=BF16,
            known=known,
        )
        for size in (1, 8)
    )
    limit = fe.H100.processor.memory_bytes
    assert whole.peak_bytes > limit > part.peak_bytes
    assert part.model_flops * 8 == pytest.approx(whole.model_flops)


class Alone(nn.Module):
    """Attention of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.matrix(x)
        return torch.softmax(query @ query.mT / math.sqrt(WIDTH), -1) @ query


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="context_parallel: expected a divisor of the 8 ranks"):
        simulated(3)
    with pytest.raises(ValueError, match="a divisor of the 4 ranks of the inner axis; found 8"):
        simulated(8, mesh=(2, 4))
    with pytest.raises(TypeError, match="context_parallel: expected"):
        fe.simulate(blocks, 8, batch=torch.zeros(2, 8, WIDTH), context_parallel="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"divisible by 16, twice the .*; found 100 tokens and 8"):
        simulated(8, batch=torch.zeros(2, 100, WIDTH))
    with pytest.raises(ValueError, match="batch: expected a tensor with sequences in dimension 1"):
        simulated(2, batch=torch.zeros(16))
    with pytest.raises(ValueError, match="torch has no ring attention for CPUs; found 2 on"):
        simulated(2, machine=HOST)
    with pytest.raises(ValueError, match="replaces by ring attention; found no call"):
        simulated(2, build=Alone)
    with pytest.raises(fe.SimulationError, match="Load balancing requires `is_causal=True`"):
        simulated(2, build=lambda: Block(is_causal=False))
    assert not dist.is_initialized()
