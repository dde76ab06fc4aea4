"""Step time by unit size: units of single blocks compared with joined units.

    python benchmarks/unit_size.py [--rounds 60] [--parts peers gloo clock]

"gloo": a step of eight blocks of two linears of various widths, batch 64, on two gloo ranks of one
thread each, with two, four or all blocks in a unit, relative to a unit for each block; AdamW
(fused). All settings of a width run in one process per rank, one step of each in every round;
ratios are computed per round.

"peers": four blocks of width 128 (linears to 512 and back to 128), 131,000 parameters each, against
DDP and FSDP2 (``fully_shard`` on each block and the root).

"clock": steps on simulated H100s (``fe.simulate``; eight in a node, and 64 in eight nodes):
sixteen transformer blocks of various widths in bf16, 16,384 tokens per rank. The step time by the
number of blocks in a unit, relative to a unit for each block.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_engine as fe
from gpt import GPT, GPTConfig

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ROWS = 64
NUM_BLOCKS = 8
# Widths of blocks. The two linears of a block map to four times the width, and back.
WIDTHS = (64, 128, 256)
# One, two, four or all blocks per unit.
GROUPS = (1, 2, 4, 8)


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
    engine = fe.shard(model, strategy=level, options=fe.Options(min_unit_size=least))
    assert len([unit for unit in engine.units if unit.buffers]) == num_blocks // group
    return make_step(model, sharded=True, width=width)


def measure_gloo(width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each level by the number of blocks in a unit."""
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


CLOCK_BLOCKS = 16
CLOCK_WIDTHS = (256, 512, 640, 768, 1024)
CLOCK_GROUPS = (1, 2, 16)
# ranks on each axis, outer first, and the level.
CLOCK_CASES = (
    ((8,), "optim_grads_params"),
    ((8, 8), "optim_grads_params"),
    ((8, 8), "optim"),
)
SEQUENCES, LENGTH = 8, 2048


def clock_config(width: int) -> GPTConfig:
    """A GPT with a small embedding and head compared with its blocks."""
    return GPTConfig(
        vocab_size=256,
        sequence_length=LENGTH,
        num_layers=CLOCK_BLOCKS,
        width=width,
        num_heads=max(1, width // 64),
    )


def clock_numel(width: int) -> int:
    """Elements of a block of the GPT."""
    with torch.device("meta"):
        return sum(each.numel() for each in GPT(clock_config(width)).blocks[0].parameters())


def simulated_step(mesh: tuple[int, ...], level: str, width: int, group: int) -> float:
    """Simulated seconds of a step with ``group`` blocks in a unit."""
    tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    return fe.simulate(
        partial(GPT, clock_config(width)),
        math.prod(mesh),
        batch=(tokens, tokens),
        mesh=mesh,
        strategy=level,
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        options=fe.Options(min_unit_size=0 if group == 1 else group * clock_numel(width)),
    ).seconds


def measure_clock() -> list[dict[str, Any]]:
    """A record for each mesh, level and width: seconds by blocks in a unit."""
    return [
        {
            "ranks": math.prod(mesh),
            "level": level,
            "elements of a block": clock_numel(width),
            "seconds": {g: simulated_step(mesh, level, width, g) for g in CLOCK_GROUPS},
        }
        for mesh, level in CLOCK_CASES
        for width in CLOCK_WIDTHS
    ]


def report_gloo(width: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print one width's table; returns medians and ratios."""
    size = block_numel(width)
    rows: list[list[str]] = []
    record: dict[str, Any] = {}
    for level in LEVELS:
        base = f"{level} 1"
        over = {g: harness.ratios(times, f"{level} {g}", base) for g in GROUPS[1:]}
        record[level] = {
            "ms, single": harness.quartiles([1e3 * each for each in times[base]]),
            "over single": {str(g): ratio for g, ratio in over.items()},
        }
        milliseconds = f"{record[level]['ms, single'][1]:.1f}"
        rows.append([level, milliseconds, *(harness.show_ratio(each) for each in over.values())])
    harness.print_table(
        f"{NUM_BLOCKS} blocks of {size:,} elements, two gloo ranks: step over one of single blocks",
        ["level", "ms, single", *(f"units of {g}" for g in GROUPS[1:])],
        rows,
    )
    return {"elements of a block": size, "levels": record}


def report_peers(times: dict[str, list[float]]) -> dict[str, Any]:
    """Print the table; returns medians and ratios."""
    rows, record = [], {}
    for name, each in times.items():
        over = {base: harness.ratios(times, name, base) for base in ("DDP", "FSDP2")}
        low, middle, high = harness.quartiles([1e3 * value for value in each])
        record[name] = {"ms": {"median": middle, "q1": low, "q3": high}, "over": over}
        rows.append(
            [name, f"{middle:.2f}", *(harness.show_ratio(ratio) for ratio in over.values())]
        )
    harness.print_table(
        f"four blocks of {block_numel(128):,} elements, two gloo ranks",
        ["engine", "ms", "x DDP", "x FSDP2"],
        rows,
    )
    return record


def report_clock(found: list[dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for each in found:
        seconds = each["seconds"]
        ratios = [f"{seconds[g] / seconds[1]:.3f}" for g in CLOCK_GROUPS[1:]]
        numel = f"{each['elements of a block']:,}"
        rows.append([str(each["ranks"]), each["level"], numel, f"{seconds[1] * 1e3:.1f}", *ratios])
    harness.print_table(
        f"{CLOCK_BLOCKS} blocks, simulated H100s: a step over that of single blocks",
        ["ranks", "level", "elements of a block", "ms, single", *map(str, CLOCK_GROUPS[1:])],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ("peers", "gloo", "clock")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    # One file per part, since parts are measured separately.
    if "peers" in args.parts:
        times = harness.run_ranks(measure_peers, 2, 3 * args.rounds)
        harness.write_results("unit_size_peers", report_peers(times))
    if "gloo" in args.parts:
        widths = []
        for width in WIDTHS:
            times = harness.run_ranks(measure_gloo, 2, width, args.rounds)
            widths.append(report_gloo(width, times))
            harness.write_results("unit_size_gloo", widths)
    if "clock" in args.parts:
        found = measure_clock()
        report_clock(found)
        harness.write_results("unit_size_clock", found)


if __name__ == "__main__":
    main()
