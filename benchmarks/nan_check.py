"""Cost of ``check_for_nan_in_grad``: steps with and without it, and passes over memory.

    python benchmarks/nan_check.py [--rounds 20] [--levels no_shard optim_grads_params]

Two gloo ranks and the 10M GPT of ``step_time.py``. Processor time of rank 0 is measured instead of
wall time, to reduce the influence of other programs. "passes" is the time of the check of all
gradients, divided by the time to read their memory once (``torch.sum``). On a CPU "the check of
single parameters" runs only after "the check" has found something; on other devices it runs alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from step_time import LEVELS, SIZES

import fsdp_engine as fe
from gpt import GPT

SIZE = "10M"
CHECK = " with check"


def make_step(level: str, checks: bool) -> Callable[[], None]:
    """A training step at ``level``."""
    config, num_sequences = SIZES[SIZE]
    torch.manual_seed(0)
    model = GPT(config)
    fe.shard(model, strategy=level, extensions=[fe.GradientChecks()] if checks else [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    fe.shard_optimizer(optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (num_sequences, config.sequence_length)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)

    def step() -> None:
        model(tokens, tokens.roll(-1, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_steps(levels: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of rank 0's processors for each step."""
    steps = {}
    for level in levels:
        for checks in (False, True):
            steps[level + CHECK * checks] = make_step(level, checks)
    return harness.interleave(steps, rounds, clock=time.process_time)


def measure_passes(rounds: int) -> dict[str, list[float]]:
    """Seconds of variants of the check for the gradients of a block, in one process."""
    config, _ = SIZES[SIZE]
    sizes = [p.numel() for p in GPT(config).blocks[0].parameters()]
    flat = torch.randn(sum(sizes))
    views = flat.split(sizes)
    ways: dict[str, Callable[[], Any]] = {
        "torch.sum": flat.sum,
        "the check": lambda: torch.aminmax(flat),
        "the check of single parameters": lambda: torch._foreach_norm(views, float("inf")),
    }
    return harness.interleave(ways, rounds, clock=time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=[LEVELS[0], LEVELS[3]])
    args = parser.parse_args()
    torch.set_num_threads(1)

    passes = measure_passes(10 * args.rounds)
    rows: list[list[str]] = []
    record: dict[str, Any] = {"passes": {}, "steps": {}}
    for name in ("the check", "the check of single parameters"):
        record["passes"][name] = ratio = harness.ratios(passes, name, "torch.sum")
        rows.append([name, harness.show_ratio(ratio)])
    harness.print_table("gradients of a block, fp32", ["", "passes over memory"], rows)

    times = harness.run_ranks(measure_steps, 2, args.levels, args.rounds)
    rows = []
    for level in args.levels:
        seconds = harness.quartiles(times[level])[1]
        ratio = harness.ratios(times, level + CHECK, level)
        record["steps"][level] = {"seconds without": seconds, "with / without": ratio}
        cell = f"{ratio['median']:.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})"
        rows.append([level, f"{seconds * 1e3:.0f}", cell])
    columns = ["level", "ms of processor, without", "with / without"]
    harness.print_table(f"a step of {SIZE}, fp32", columns, rows)
    harness.write_results("nan_check", record)


if __name__ == "__main__":
    main()
