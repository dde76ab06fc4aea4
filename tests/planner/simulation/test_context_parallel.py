"""Simulations of torch's context parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.planner.simulation.clock import CONTEXT_LANE
from fsdp_engine.planner.simulation.machine import Link
from fsdp_engine.planner.simulation.stage_messages import is_stage_lane
from tests.planner.simulation.memory_runs import HOST
from tests.planner.simulation.scene import pipelined
from tests.planner.simulation.small_llama import llama

WIDTH, HEADS, KEY_HEADS, LENGTH, NUM_BLOCKS = 256, 4, 2, 4096, 2
SIZE = WIDTH // HEADS  # width of a head
MICROBATCHES = 3  # microbatches of a pipeline's step
LONG = torch.zeros(1, 2**17, WIDTH)
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Block(nn.Module):
    """Causal attention with fewer heads of keys, and a matrix."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, heads * SIZE, bias=False) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        qkv = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in self.qkv)
        found = F.scaled_dot_product_attention(*qkv, is_causal=self.is_causal, enable_gqa=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def blocks(count: int = NUM_BLOCKS) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(count)))


one_block = partial(blocks, 1)
not_causal = partial(Block, is_causal=False)


def simulated(size: int, build: Any = blocks, **options: Any) -> fe.Simulation:
    """8 ranks in groups of ``size``, two sequences in each group."""
    given: dict[str, Any] = {"batch": torch.zeros(2, LENGTH, WIDTH), "mp_policy": BF16, **options}
    return fe.simulate(build, given.pop("world_size", 8), context_parallel=size, **given)


simulated_once = cache(simulated)


def on_context_lane(found: fe.Simulation) -> list[Any]:
    return [span for span in found.spans if span.lane == CONTEXT_LANE]


def test_flops_activations_and_messages() -> None:
    """Activations are measured as those that a second block adds. Ring attention returns contiguous
    heads, which are copied when they are transposed for the next matrix; the copy is kept, too.
    Keys and values are gathered in forward and in backward. Their gradients, in fp32, go around the
    ring once."""
    size = 4
    whole, part = ([simulated(each, one_block), simulated_once(each)] for each in (1, size))
    for one, all_of_it in zip(part, whole, strict=True):
        assert one.model_flops * size == all_of_it.model_flops
    kept, all_kept = (
        two.memory["activations"] - one.memory["activations"] for one, two in (part, whole)
    )
    assert kept * size == pytest.approx(all_kept + 2 * LENGTH * WIDTH * 2, rel=1e-3)
    assert f"in context-parallel groups of {size}" in part[0].title
    found = part[1]
    gathered, gradients = (size - 1) * kv_bytes(size, 2), size * kv_bytes(size, 4)
    assert found.sent_bytes["context"] == NUM_BLOCKS * (2 * gathered + gradients)
    spans = on_context_lane(found)
    assert [span.phase for span in spans[:NUM_BLOCKS]] == ["forward"] * NUM_BLOCKS
    assert len(spans) == NUM_BLOCKS * (2 + size)


def attention_seconds(found: fe.Simulation) -> float:
    return sum(span.end - span.start for span in found.spans if "scaled_dot_product" in span.label)


def test_attention_takes_its_part_of_the_time() -> None:
    """With load balancing, all ranks together compute half of the blocks of causal attention, as a
    single rank does. Messages overlap with attention: a block's attention takes longer than the
    next message."""
    whole, part = (simulated(each, one_block, batch=LONG) for each in (1, 8))
    assert attention_seconds(part) * 8 == pytest.approx(attention_seconds(whole), rel=0.05)
    exposed = part.exposed_by_lane.get(CONTEXT_LANE, 0.0)
    assert exposed < 0.25 * part.message_seconds[CONTEXT_LANE]


def test_attention_that_is_not_causal_has_no_load_balancing(monkeypatch: Any) -> None:
    monkeypatch.setattr(_cp_options, "enable_load_balance", False)
    whole, part = (simulated(size, not_causal) for size in (1, 4))
    assert part.model_flops * 4 == whole.model_flops
    with pytest.raises(fe.SimulationError, match="load balancing with causal attention"):
        simulated(4)


def of_stages(size: int, quick: bool) -> fe.PipelineSimulation:
    """4 data-parallel ranks of each stage in groups of ``size``, messages without latency."""
    link = Link(1e11, 0.0)

    def stage(index: int, num_stages: int) -> nn.Module:
        return nn.Sequential(*[nn.Embedding(WIDTH, WIDTH)] * (index == 0), one_block())

    options = {"world_size": 8, "microbatches": MICROBATCHES, "quick": quick, "mp_policy": BF16}
    options |= {"machine": replace(fe.H100, within_node=link, between_nodes=link), "loss": None}
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    return pipelined(stage, tokens, "1F1B", context_parallel=size, **options)


def stage_messages(found: fe.PipelineSimulation) -> list[float]:
    spans = (span for rank in found.ranks for span in rank.spans if is_stage_lane(span.lane))
    return [span.end - span.start for span in spans]


def test_stages_of_a_pipeline_have_a_part_of_each_sequence() -> None:
    """Flops, messages between stages and those of ring attention, in quick simulations as well."""
    whole, part, full = (of_stages(*each) for each in ((1, True), (2, True), (2, False)))
    assert "data-parallel ranks in context-parallel groups of 2" in part.title
    assert part.num_targets * 2 == whole.num_targets
    messages = stage_messages(whole)
    assert len(messages) == 4 * MICROBATCHES
    gathered, gradients = kv_bytes(2, 2) / 2, kv_bytes(2, 4)
    for found in (part, full):
        assert stage_messages(found) == pytest.approx([each / 2 for each in messages])
        for one, all_of_it in zip(found.ranks, whole.ranks, strict=True):
            assert one.model_flops * 2 == all_of_it.model_flops
            assert one.sent_bytes["context"] == MICROBATCHES * (2 * gathered + gradients)
    assert part.actions == full.actions
    assert part.seconds == pytest.approx(full.seconds, rel=0.03)
    assert part.peak_bytes == pytest.approx(full.peak_bytes, rel=0.02)


def kv_bytes(size: int, itemsize: int) -> int:
    """Bytes of a rank's keys and values, for two sequences."""
    return 2 * 2 * KEY_HEADS * (LENGTH // size) * SIZE * itemsize


def test_labels_positions_and_heads_are_sharded() -> None:
    """Position ids of transformers in the batch do not change the result. Tensor-parallel ranks
    have a part of the heads, so that messages are smaller."""
    tokens = torch.zeros(2, 512, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    options: dict[str, Any] = {"context_parallel": 4}
    alone = fe.simulate(llama, 8, batch=batch, **options)
    batch["position_ids"] = torch.arange(512).expand(2, -1)
    placed = fe.simulate(llama, 8, batch=batch, **options)
    assert placed.model_flops == alone.model_flops
    assert placed.sent_bytes == alone.sent_bytes
    both = fe.simulate(llama, 16, batch=batch, tensor_parallel=2, **options)
    assert both.sent_bytes["context"] == alone.sent_bytes["context"] / 2
    assert both.sent_bytes["tensor"] > 0
    assert "in context-parallel groups of 4, tensor parallelism over 2 ranks" in both.title


LINEAR = {"build": lambda: nn.Linear(WIDTH, WIDTH), "loss": Tensor.sum}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (3, {}, "context_parallel: expected a divisor of the 8 ranks"),
    (8, {"mesh": (2, 4)}, "a divisor of the 4 ranks of the inner axis; found 8"),
    ("2", {}, "context_parallel: expected"),
    (8, {"batch": torch.zeros(2, 100, WIDTH)}, r"by 16, twice the .*; found 100 tokens and 8"),
    (2, {"batch": torch.zeros(16)}, "batch: expected a tensor with sequences in dimension 1"),
    (2, {"machine": HOST}, "torch has no ring attention for CPUs; found 2 on"),
    (2, LINEAR, "replaces by ring attention; found a forward that does not call it"),
    (2, {"build": not_causal}, "Load balancing requires `is_causal=True`"),
]


@pytest.mark.parametrize(("size", "options", "message"), WRONG)
def test_wrong_arguments(size: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, fe.SimulationError), match=message):
        simulated(size, **options)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("size", "world_size", "link"),
    [(4, 8, fe.H100.within_node), (16, 16, fe.H100.between_nodes)],
    ids=["one node", "two nodes"],
)
def test_rotation_by_all_to_all(size: int, world_size: int, link: Link) -> None:
    """A ring over nodes uses the link between them."""
    set_rotate_method("alltoall")
    try:
        found = simulated(size, one_block, world_size=world_size)
    finally:
        set_rotate_method("allgather")
    spans = on_context_lane(found)
    assert len(spans) == 2 * (size - 1) + size
    gathered, gradients = (size - 1) * kv_bytes(size, 2), size * kv_bytes(size, 4)
    assert found.sent_bytes["context"] == 2 * gathered + gradients
    expected = link.seconds(kv_bytes(size, 2), 1)
    assert spans[0].end - spans[0].start == pytest.approx(expected)


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
    if options.get("checkpointing") is True:  # recomputation repeats the gather of forward
        messages += NUM_BLOCKS * 3 * kv_bytes(4, 2)
    assert part.sent_bytes["context"] == messages
