"""Simulated step time of a mixture of experts at level 3, whose experts are gathered by routing.

    python benchmarks/expert_gathers_clock.py [--cases 64,8,16 8,64,16] [--blocks 2] [--steps 2]

Nodes of 8 H100, gathers and reductions in bf16. A case is a number of ranks, of experts, and of
tokens of each rank. Its results replace those of the case in the file. Each block has attention of
width 4,096 and experts of 1.4B parameters in all, as Mixtral 8x7B has: 8 experts of hidden size
14,336, or 64 or 128 smaller ones. Each token uses two experts, drawn uniformly and anew on each
rank and in each step. "one unit": a block and all of its experts are one unit, without
``engine.together()``. "experts as units" and "experts named": each expert is a unit and steps run
within the context, without and with ``engine.will_use`` after each router.

As in ``modules_left_out_clock.py`` the engines run and exchange messages; times are simulated.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import harness
import torch
from modules_left_out_clock import MICRO, Job, Ranks, Way, show
from simulated import LlamaBlock
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe

WIDTH, HEADS, GROUPS, HIDDEN, NUM_WORDS, TOP_K = 4096, 32, 8, 8 * 14_336, 32_000, 2
CASES = ("64,8,16", "8,8,16", "8,64,16")
NAMED = "experts named"
WAYS = (
    Way("one unit", num_warmup=1),
    Way("experts as units", together=True, left_out=1.0, num_warmup=2),
    Way(NAMED, together=True, left_out=1.0, num_warmup=2),
)


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class RoutedExperts(nn.Module):
    """Experts with random routing, since fake tensors have no values.

    Attributes:
        draw: Draws the routing of this rank.
        name: Called with the experts that are routed to.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.items = nn.ModuleList(Expert(HIDDEN // num_experts) for _ in range(num_experts))
        self.draw = random.Random(0)
        self.name: Callable[[list[nn.Module]], None] = lambda experts: None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        counts: Counter[int] = Counter()
        for _ in range(len(flat)):
            counts.update(self.draw.sample(range(len(self.items)), TOP_K))
        self.name([self.items[index] for index in sorted(counts)])
        result = torch.zeros_like(flat)
        for index in sorted(counts):
            tokens = torch.arange(counts[index], device=x.device)
            result = result.index_add(0, tokens, self.items[index](flat[tokens]))
        return result.view_as(x)


class Model(nn.Module):
    """Blocks of attention and routed experts."""

    def __init__(self, num_blocks: int, num_experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock(WIDTH, HEADS, GROUPS, 64) for _ in range(num_blocks))
        self.experts = nn.ModuleList(RoutedExperts(num_experts) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cosine, sine = (
            torch.ones(tokens.shape[1], WIDTH // HEADS, dtype=x.dtype) for _ in range(2)
        )
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x, cosine, sine)
            x = x + experts(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class ExpertRanks(Ranks):
    """Runs the steps of all ranks, each with its own routing."""

    def prepare(self, model: Any, engine: fe.Engine, rank: int) -> Callable[[Way], None]:
        """See the base class."""
        for layer in model.experts:
            layer.draw = random.Random(rank)

        def set_names(way: Way) -> None:
            for layer in model.experts:
                layer.name = engine.will_use if way.name == NAMED else lambda experts: None

        return set_names


def run_case(
    num_ranks: int, num_experts: int, num_tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the spreads of each way."""
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    tokens = torch.zeros(1, num_tokens, dtype=torch.long)
    options = fe.Options(min_unit_size=0, staging_limit=3 * WIDTH * HIDDEN)
    found: dict[str, Any] = {}
    for ways, units in (
        (WAYS[:1], ["blocks.*", "experts.*"]),
        (WAYS[1:], ["blocks.*", "experts.*.items.*"]),
    ):
        job = Job(
            (num_ranks,),
            fe.H100,
            lambda: Model(args.blocks, num_experts),
            lambda: (tokens, tokens),
            policy,
            {"units": units, "options": options},
        )
        steps = ExpertRanks(job, args.latency * MICRO, args.steps, ways).run()
        found |= steps
    base = found[WAYS[0].name][0]["seconds"]
    return {
        way: {
            "over one unit": harness.spread([each["seconds"] / base for each in steps]),
            **{name: harness.spread([each[name] for each in steps]) for name in steps[0]},
        }
        for way, steps in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=CASES, help="ranks,experts,tokens")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--latency", type=int, default=100, help="of a host message, microseconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = harness.RESULTS / "expert_gathers_clock.json"
    cases = json.loads(path.read_text())["results"]["cases"] if path.exists() else {}
    for case in args.cases:
        num_ranks, num_experts, num_tokens = map(int, case.split(","))
        cases[case] = ways = run_case(num_ranks, num_experts, num_tokens, args)
        title = f"{num_ranks} ranks, {num_experts} experts, {num_tokens} tokens a rank"
        show(title, ways, "over one unit")
        record = {"latency us": args.latency, "blocks": args.blocks, "cases": cases}
        harness.write_results("expert_gathers_clock", record)


if __name__ == "__main__":
    main()
