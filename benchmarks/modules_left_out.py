"""Step time at level 3 where ranks leave out different blocks of a GPT.

    python benchmarks/modules_left_out.py [--rounds 30] [--ranks 2] [--model 10M]

All ways train the same model in turn. "all blocks" is a step without ``engine.together()``;
"all blocks, together" is the same within it, which shows what rounds cost where ranks agree. In
"10 % left out" each rank leaves out each block with probability 0.1, drawn anew by each rank in
each step. Where ranks have to enter the same modules, a block that is left out is run and its
result is dropped ("dummy passes"), which costs the time of "all blocks". FSDP2 runs all blocks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import harness
import torch
import torch.distributed as dist
from step_time import SIZES
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
from gpt import GPT

LEVEL = "optim_grads_params"
LEFT_OUT = 0.1


class SomeBlocks(nn.ModuleList):
    """A list of blocks. Iterating over it skips random blocks."""

    def __init__(self, blocks: nn.ModuleList, draw: random.Random) -> None:
        super().__init__(blocks)
        self._draw = draw

    def __iter__(self) -> Iterator[nn.Module]:
        return (block for block in super().__iter__() if self._draw.random() >= LEFT_OUT)


def make_steps(size: str) -> dict[str, Callable[[], None]]:
    """A step of each way."""
    config, num_sequences = SIZES[size]
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (num_sequences, config.sequence_length)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    steps: dict[str, Callable[[], None]] = {}

    def add(name: str, model: GPT, engine: fe.Engine | None) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            with engine.together() if engine is not None else nullcontext():
                model(tokens, tokens.roll(-1, 1)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step

    for name in ("all blocks", "all blocks, together", "10 % left out, together"):
        torch.manual_seed(0)
        model = GPT(config)
        engine = fe.shard(model, strategy=LEVEL)
        if name.startswith("10"):
            model.blocks = SomeBlocks(model.blocks, random.Random(dist.get_rank()))
        add(name, model, engine if name.endswith("together") else None)
    torch.manual_seed(0)
    model = GPT(config)
    for block in (*model.blocks, model):
        fully_shard(block)
    add("FSDP2, all blocks", model, None)
    return steps


def measure(rounds: int, size: str) -> dict[str, list[float]]:
    """Seconds of steps."""
    return harness.interleave(make_steps(size), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=SIZES, default="10M")
    args = parser.parse_args()
    times = harness.run_ranks(measure, args.ranks, args.rounds, args.model)
    base = "all blocks"
    ratios = {name: harness.ratios(times, name, base) for name in times if name != base}
    rows = [[name, harness.show_ratio(ratio)] for name, ratio in ratios.items()]
    harness.print_table("step time over that of all blocks", ["way", "ratio"], rows)
    record = {
        "ranks": args.ranks,
        "model": args.model,
        "seconds": harness.spread(times[base]),
        "ratios": ratios,
    }
    harness.write_results("modules_left_out", record)


if __name__ == "__main__":
    main()
