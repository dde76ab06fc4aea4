"""Simulated steps: compared with this machine's own times, and for H100 machines.

    python benchmarks/simulated.py                  # both
    python benchmarks/simulated.py --only measured
    python benchmarks/simulated.py --only llama
    python benchmarks/simulated.py --only budgets

``measured``: two gloo ranks of one thread, a GPT of about 6M parameters, fp32, the ten pairs of
inner and outer level, and three budgets (no prefetch, one block, the default). The machine is
calibrated first, then steps are simulated, then measured, interleaved. Pairs with an outer level
have both ranks on the outer axis, the others on the inner one.

``llama``: the shape of an 8B Llama on 64 H100 in 8 nodes, 4,096 tokens per rank, gathers and
reductions in bf16, fp32 main weights, AdamW, no recomputation; the ten pairs on (8, 8) ranks.

``budgets``: the same model, a smaller one with a large embedding that is tied to its head, and a
GPT of 85M parameters on one node: step time, exposed communication and transient memory with zero,
one and two mean blocks as ``prefetch_window`` and ``staging_limit``, and with these unset. Only
pairs that shard gradients; the others have no staging, and gather all outdated parameters at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.comm.mesh import init_from_environment
from fsdp_engine.planner.simulation.calibrate import calibrate
from fsdp_engine.strategies import ALL_STRATEGIES
from gpt import GPT, GPTConfig

PAIRS = [(each.inner.name, each.outer.name) for each in ALL_STRATEGIES]
GPT_CONFIG = GPTConfig(sequence_length=128, num_layers=6, width=256, num_heads=4)
SEQUENCES = 4
CUT_GRADIENTS = ("optim_grads", "optim_grads_params")
BUDGETS = {"none": 0, "one block": 12 * GPT_CONFIG.width**2, "default": None}


def sizes_for(outer: str) -> tuple[int, int]:
    """(outer, inner) ranks, two in all."""
    return (1, 2) if outer == PAIRS[0][1] else (2, 1)


def options_for(budget: int | None) -> fe.Options:
    """A unit for each block, and the budget."""
    return fe.Options(prefetch_window=budget, staging_limit=budget, min_unit_size=0)


def gpt_batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank."""
    shape = (SEQUENCES, GPT_CONFIG.sequence_length)
    tokens = torch.randint(0, GPT_CONFIG.vocab_size, shape)
    return tokens, tokens.roll(-1, 1)


def cases() -> list[tuple[str, tuple[str, str], int | None]]:
    """(name, pair, budget)."""
    return [(f"{' / '.join(p)}, {name}", p, b) for p in PAIRS for name, b in BUDGETS.items()]


def predict(machine: fe.Machine) -> dict[str, float]:
    """Seconds of a step of each case, simulated."""
    found = {}
    for name, pair, budget in cases():
        result = fe.simulate(
            lambda: GPT(GPT_CONFIG),
            2,
            mesh=sizes_for(pair[1]),
            batch=gpt_batch(),
            machine=machine,
            strategy=pair[0],
            outer_strategy=pair[1],
            options=options_for(budget),
        )
        found[name] = result.seconds
    return found


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each case, on two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    init_from_environment()
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in ((1, 2), (2, 1))}
    return harness.interleave(
        {
            name: make_step(pair, budget, meshes[sizes_for(pair[1])])
            for name, pair, budget in cases()
        },
        rounds,
    )


def make_step(pair: tuple[str, str], budget: int | None, mesh: Any) -> Callable[[], None]:
    """A step of a fresh model."""
    torch.manual_seed(0)
    model = GPT(GPT_CONFIG)
    fe.shard(model, mesh, *pair, options=options_for(budget))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fe.shard_optimizer(optimizer)
    batch = gpt_batch()

    def step() -> None:
        model(*batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation."""
    places = [torch.tensor(each).argsort().argsort().double() for each in (first, second)]
    return float(torch.corrcoef(torch.stack(places))[0, 1])


def run_measured(rounds: int) -> dict[str, Any]:
    """Calibrate, predict, measure, print."""
    machine = calibrate()
    predicted = predict(machine)
    times = harness.run_ranks(measure, 2, rounds)
    rows: list[list[str]] = []
    record: dict[str, Any] = {}
    for name in predicted:
        low, middle, high = harness.quartiles(times[name])
        least = min(times[name])
        ratios = {"median": predicted[name] / middle, "least": predicted[name] / least}
        record[name] = {
            "predicted": predicted[name],
            "measured": {"median": middle, "q1": low, "q3": high, "least": least},
            "ratio": ratios,
        }
        spread = f"{middle * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})"
        cells = [f"{predicted[name] * 1e3:.0f}", spread, f"{least * 1e3:.0f}"]
        rows.append([name, *cells, f"{ratios['median']:.2f}", f"{ratios['least']:.2f}"])
    correlations = {
        what: rank_correlation(
            list(predicted.values()), [record[name]["measured"][what] for name in predicted]
        )
        for what in ("median", "least")
    }
    columns = [
        "pair, budget",
        "predicted ms",
        "measured ms (quartiles)",
        "least",
        "ratio",
        "ratio to least",
    ]
    harness.print_table("Two gloo ranks: a step", columns, rows)
    print(f"rank correlation: {correlations}")
    link, processor = machine.within_node, machine.processor
    figures = {
        "matrix_flops": {str(key): each for key, each in processor.matrix_flops.items()},
        "memory_bandwidth": processor.memory_bandwidth,
        "link_bandwidth": link.bandwidth,
        "link_latency": link.latency,
        "processor_share": link.processor_share,
        "host_seconds": machine.host_seconds,
    }
    return {"machine": figures, "steps": record, "rank correlation": correlations}


class LlamaBlock(nn.Module):
    """Attention with grouped keys and values, and a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, groups * self.size, bias=False)
        self.values = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.queries, self.keys, self.values)
        )
        q, k = (each * cosine + each.roll(self.size // 2, -1) * sine for each in (q, k))
        k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


@dataclass(frozen=True)
class LlamaShape:
    """The shape of Llama 3 8B: 32 blocks, width 4,096, 8 groups of keys and values, 128,256 words
    ("The Llama 3 Herd of Models", table 3)."""

    num_blocks: int = 32
    width: int = 4096
    heads: int = 32
    groups: int = 8
    hidden: int = 14_336
    words: int = 128_256
    tied: bool = False


# The shape of Gemma 2B ("Gemma: Open Models Based on Gemini Research and Technology", table 1),
# except for the size of heads.
LARGE_EMBEDDING = LlamaShape(18, 2048, 8, 1, 16_384, 256_128, tied=True)


class Llama(nn.Module):
    """A model of the given shape."""

    def __init__(self, shape: LlamaShape = LlamaShape()) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(
            LlamaBlock(shape.width, shape.heads, shape.groups, shape.hidden)
            for _ in range(shape.num_blocks)
        )
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cosine, sine = (torch.ones(tokens.shape[1], self.size, dtype=x.dtype) for _ in range(2))
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def run_llama() -> dict[str, Any]:
    """Simulate, print."""
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    rows, record = [], {}
    for pair in PAIRS:
        began = time.process_time()
        found = fe.simulate(
            Llama,
            64,
            mesh=(8, 8),
            batch=(tokens, tokens),
            machine=fe.H100,
            strategy=pair[0],
            outer_strategy=pair[1],
            mp_policy=policy,
        )
        took = time.process_time() - began
        worst: dict[str, float] = {}
        for each in found.exposed:
            key = f"{each.unit}, {each.phase}, {each.lane}"
            worst[key] = worst.get(key, 0.0) + each.seconds
        first = max(worst, key=lambda key: worst[key]) if worst else "nothing"
        record[" / ".join(pair)] = {
            "seconds": found.seconds,
            "compute": found.compute_seconds,
            "exposed": found.exposed_seconds,
            "exposed where": worst,
            "messages": found.message_seconds,
            "memory": found.memory,
            "simulation took, seconds of one core": took,
        }
        rows.append(
            [
                " / ".join(pair),
                f"{found.seconds * 1e3:.0f}",
                f"{found.compute_seconds * 1e3:.0f}",
                f"{found.exposed_seconds * 1e3:.0f}",
                f"{first}: {worst.get(first, 0.0) * 1e3:.0f}",
                f"{found.peak_bytes / 2**30:.0f}",
                f"{took:.0f}",
            ]
        )
    columns = [
        "pair",
        "step ms",
        "compute",
        "exposed",
        "longest exposed",
        "peak GiB",
        "took s of a core",
    ]
    harness.print_table("8B Llama, 64 x H100, 4,096 tokens a rank, bf16", columns, rows)
    return record


def budget_models() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, int], Any]]:
    """(build function, ranks, batch of one rank)."""
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    small = GPTConfig(sequence_length=1024, num_layers=12, width=768, num_heads=12)
    few = torch.zeros(8, 1024, dtype=torch.long)
    return {
        "8B Llama, 8 x 8": (Llama, (8, 8), (tokens, tokens)),
        "large tied embedding, 8 x 8": (lambda: Llama(LARGE_EMBEDDING), (8, 8), (tokens, tokens)),
        "GPT of 85M, 1 x 8": (lambda: GPT(small), (1, 8), (few, few)),
    }


def run_budgets() -> dict[str, Any]:
    """Simulate and print each model."""
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    record: dict[str, Any] = {}
    for name, (build, sizes, batch) in budget_models().items():
        with torch.device("meta"):
            whole = build()
        numbers = [sum(p.numel() for p in block.parameters()) for block in whole.blocks]  # type: ignore[union-attr]
        mean = sum(numbers) // len(numbers)
        budgets = {"0": 0, "1": mean, "unset": None, "2": 2 * mean}
        rows = []
        for pair in PAIRS:
            if pair[0] not in CUT_GRADIENTS or (sizes[0] == 1 and pair[1] != PAIRS[0][1]):
                continue
            cells = []
            for label, budget in budgets.items():
                options: dict[str, Any] = {
                    "strategy": pair[0],
                    "outer_strategy": pair[1],
                    "mp_policy": policy,
                    "options": fe.Options(prefetch_window=budget, staging_limit=budget),
                }
                world_size = sizes[0] * sizes[1]
                found = fe.simulate(
                    build, world_size, mesh=sizes, batch=batch, machine=fe.H100, **options
                )
                planned = fe.estimate(
                    whole,
                    world_size=world_size,
                    outer_size=sizes[0],
                    **options,
                )
                transient = planned.full_bytes + planned.staging_bytes
                record.setdefault(name, {}).setdefault(" / ".join(pair), {})[label] = {
                    "seconds": found.seconds,
                    "exposed": found.exposed_seconds,
                    "transient bytes": transient,
                    "peak bytes": found.peak_bytes,
                }
                times = f"{found.seconds * 1e3:.1f}, {found.exposed_seconds * 1e3:.1f}"
                cells.append(f"{times}, {transient / 2**20:.0f}")
            rows.append([" / ".join(pair), *cells])
            print(rows[-1], flush=True)
        title = f"{name}: step ms, exposed ms, transient MiB, by mean blocks of budget"
        harness.print_table(title, ["pair", *budgets], rows)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("measured", "llama", "budgets"))
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only in (None, "measured"):
        harness.write_results("simulated_gloo", run_measured(args.rounds))
    if args.only in (None, "llama"):
        harness.write_results("simulated_llama", run_llama())
    if args.only in (None, "budgets"):
        harness.write_results("simulated_budgets", run_budgets())


if __name__ == "__main__":
    main()
