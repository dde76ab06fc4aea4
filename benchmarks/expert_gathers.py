"""Gathers, bytes and host messages of a mixture of experts at level 3, counted.

    python benchmarks/expert_gathers.py [--steps 6] [--ranks 2 4]

A GPT of two blocks has 8, 64 or 128 experts in each block, of which each token uses two. Each rank
has 4, 16 or 64 tokens, drawn at random, so that small batches leave experts unused. "one unit": a
block and all of its experts are one unit. "experts as units" and "experts named": each expert is a
unit and steps run within ``engine.together()``, without and with ``engine.will_use`` after each
router. Counts are means over steps of rank 0: gathers, unsharded bytes of the gathered parameters
(of which a rank receives (ranks - 1) / ranks), and votes, the messages in which ranks exchange the
units that they need next. The peak is that of the unsharded parameters on the rank.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.extensions.different_modules.gather_rounds import GatherRounds
from fsdp_engine.runtime.unit import Unit
from gpt import GPT, GPTConfig
from routed_experts import MoE, name_routed_experts

LEVEL = "optim_grads_params"
EXPERTS, TOKENS = (8, 64, 128), (4, 16, 64)
NUM_LAYERS, WIDTH = 2, 32
NUM_WARMUP = 3
BLOCKS, ITEMS = "blocks.*", "blocks.*.mlp.experts.items.*"
WAYS = {
    "one unit": [BLOCKS],
    "experts as units": [BLOCKS, ITEMS],
    "experts named": [BLOCKS, ITEMS],
}


def count_steps(way: str, num_experts: int, num_tokens: int, num_steps: int) -> dict[str, float]:
    """Returns the counts of one way."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = GPTConfig(sequence_length=64, num_layers=NUM_LAYERS, width=WIDTH, mlp_ratio=2)
    model = GPT(config)
    for block in model.blocks:
        block.mlp = MoE(config, num_experts)
    # Allow gradients of one layer in flight, since each wait for a reduction sends a message, too.
    num_elements = sum(param.numel() for param in model.blocks[0].parameters())
    options = fe.Options(min_unit_size=0, staging_limit=num_elements)
    engine = fe.shard(model, strategy=LEVEL, units=WAYS[way], options=options)
    if way == "experts named":
        name_routed_experts(model, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fe.shard_optimizer(optimizer)
    generator = torch.Generator().manual_seed(rank)
    found: Counter[str] = Counter()
    gather, again, send = Unit.gather, Unit.gather_again, GatherRounds._send

    def note(unit: Unit) -> None:
        found["gathers"] += 1
        found["bytes"] += 4 * unit.num_elements

    def gathering(unit: Unit, *args: Any, **kwargs: Any) -> None:
        note(unit)
        gather(unit, *args, **kwargs)

    def gathering_again(unit: Unit) -> None:
        note(unit)
        again(unit)

    def sending(rounds: GatherRounds, *args: Any, **kwargs: Any) -> None:
        found["votes"] += 1
        send(rounds, *args, **kwargs)

    with (
        mock.patch.object(Unit, "gather", gathering),
        mock.patch.object(Unit, "gather_again", gathering_again),
        mock.patch.object(GatherRounds, "_send", sending),
    ):
        for step in range(NUM_WARMUP + num_steps):
            if step == NUM_WARMUP:
                found.clear()
                engine.peak_memory_bytes(reset=True)
            tokens = torch.randint(0, config.vocab_size, (1, num_tokens), generator=generator)
            if way == "one unit":
                model(tokens, tokens.roll(-1, 1)).loss.backward()
            else:
                with engine.together():
                    model(tokens, tokens.roll(-1, 1)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = engine.peak_memory_bytes()["full"]
    return {name: count / num_steps for name, count in found.items()} | {"peak": float(peak)}


def count(num_steps: int) -> list[dict[str, Any]]:
    """Returns the counts of all ways and sizes."""
    return [
        {
            "experts": num_experts,
            "tokens": num_tokens,
            "ways": {way: count_steps(way, num_experts, num_tokens, num_steps) for way in WAYS},
        }
        for num_experts in EXPERTS
        for num_tokens in TOKENS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    found = {str(num): harness.run_ranks(count, num, args.steps) for num in args.ranks}
    for ranks, cases in found.items():
        rows = [
            [
                f"{case['experts']} experts, {case['tokens']} tokens, {way}",
                f"{row['gathers']:.0f}",
                f"{row['bytes'] / 1e6:.1f}",
                f"{row.get('votes', 0):.0f}",
                f"{row['peak'] / 1e6:.2f}",
            ]
            for case in cases
            for way, row in case["ways"].items()
        ]
        columns = ["way", "gathers", "MB", "votes", "peak MB"]
        harness.print_table(f"{ranks} ranks, a step of {NUM_LAYERS} layers", columns, rows)
    harness.write_results("expert_gathers", {"layers": NUM_LAYERS, "ranks": found})


if __name__ == "__main__":
    main()
