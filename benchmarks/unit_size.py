"""How large a unit has to be: units of single blocks against joined ones, by size.

    python benchmarks/unit_size.py [--rounds 40] [--parts gloo peers clock]

"gloo": a step of eight blocks of two linears of various widths, batch 64, on two gloo ranks of one
thread each, with a unit for each block over the same blocks in units of a least size, at the four
levels; AdamW (fused). All settings of a width run in one process per rank,
one step of each in every round; ratios are taken round by round.

"peers": four blocks of 128 to 512 and back, 131,000 parameters each, against DDP and FSDP2
(``fully_shard`` on each block and the root).

"clock": the same question on simulated H100s (``fe.simulate``; eight of a node, and 64 in eight
nodes): transformer blocks of various widths in bf16, 2,048 tokens a rank. What the step takes in
units of a least size, over a unit for each block.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_engine as fe
from examples.gpt import GPT, GPTConfig

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ROWS = 64
NUM_BLOCKS = 8
# Width of a block, which has two linears to four times that and back.
WIDTHS = (32, 64, 128, 256, 512)
# Joined by twos, by fours, all of them.
GROUPS = (1, 2, 4, 8)
SMALL = 1_000_000_000


class Blocks(nn.Module):
    """Blocks of two linears, one after another."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def block_numel(width: int) -> int:
    """Elements of a block."""
    return 8 * width * width + 5 * width


def make_step(model: nn.Module, *, sharded: bool, width: int) -> Callable[[], None]:
    """A step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if sharded:
        fe.shard_optimizer(optimizer)
    inputs = torch.randn(ROWS, width)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(num_blocks: int, width: int, level: str, group: int) -> Callable[[], None]:
    """A step of this engine, with ``group`` blocks in a unit."""
    torch.manual_seed(0)
    model = Blocks(num_blocks, width)
    least = 0 if group == 1 else group * block_numel(width)
    engine = fe.shard(model, strategy=level, min_unit_size=least)
    assert len([unit for unit in engine.units if unit.buffers]) == num_blocks // group
    return make_step(model, sharded=True, width=width)


def measure_gloo(width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each level and group."""
    steps = {
        f"{level} {group}": engine_step(NUM_BLOCKS, width, level, group)
        for level in LEVELS
        for group in GROUPS
    }
    return harness.interleave(steps, rounds, warmup=5)


def measure_peers(rounds: int) -> dict[str, list[float]]:
    """Seconds of DDP, FSDP2 and the four levels with single and joined units."""
    num_blocks, width = 4, 128

    def fresh() -> Blocks:
        torch.manual_seed(0)
        return Blocks(num_blocks, width)

    ddp = DistributedDataParallel(fresh(), gradient_as_bucket_view=True)
    fsdp2 = fresh()
    for module in (*fsdp2.blocks, fsdp2):
        fully_shard(module)
    steps = {
        "DDP": make_step(ddp, sharded=False, width=width),
        "FSDP2": make_step(fsdp2, sharded=False, width=width),
    }
    for level in LEVELS:
        steps[f"{level}, single"] = engine_step(num_blocks, width, level, 1)
        torch.manual_seed(0)
        model = fresh()
        fe.shard(model, strategy=level)
        steps[f"{level}, default"] = make_step(model, sharded=True, width=width)
    return harness.interleave(steps, rounds, warmup=5)


MESHES = {"8 x H100": (8,), "64 x H100": (8, 8)}
CLOCK_BLOCKS = 16
CLOCK_WIDTHS = (128, 256, 384, 512, 768, 1024)


def simulated_step(mesh: tuple[int, ...], level: str, width: int, group: int) -> float:
    """Simulated seconds of a step with ``group`` blocks in a unit."""
    config = GPTConfig(
        vocab_size=256,
        sequence_length=2048,
        num_layers=CLOCK_BLOCKS,
        width=width,
        num_heads=max(1, width // 64),
    )
    tokens = torch.zeros(8, config.sequence_length, dtype=torch.long)
    world = 1
    for size in mesh:
        world *= size
    block = sum(p.numel() for p in GPT(config).blocks[0].parameters())
    return fe.simulate(
        partial(GPT, config),
        world,
        batch=(tokens, tokens),
        mesh=mesh,
        strategy=level,
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        min_unit_size=0 if group == 1 else group * block,
    ).seconds


if __name__ == "__main__":
    t = harness.run_ranks(measure_peers, 2, 60)
    for n in t:
        print(
            n,
            f"{harness.quartiles(t[n])[1] * 1e3:.2f}",
            harness.show_ratio(harness.ratios(t, n, "DDP")),
            harness.show_ratio(harness.ratios(t, n, "FSDP2")),
        )
