"""Planned peak memory (``fe.simulate``) compared with that of two gloo ranks in training.

    python benchmarks/planner_memory.py [--models decoder LSTM] [--levels optim] [--bf16]

Ten small models at four levels, with and without activation checkpointing of units: the third step
with AdamW. The measured value includes every live storage after every operation, by a dispatch mode
that is independent of the engine (``tests/simulation/live_storages.py``), on the rank with the
larger peak. The planned value is from the same step with fake tensors on a machine whose host
computes. Target: within 5 %, and at most 2 % too low.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import harness
import torch
import torch.distributed as dist

from fsdp_engine.strategies import LEVELS
from tests.simulation.memory_models import MODELS
from tests.simulation.memory_runs import NUM_RANKS, Run, measured, planned

TOO_MUCH, TOO_LITTLE = 5.0, -2.0  # per cent
MEGABYTE = 1e6


def measure(cases: list[list[Any]]) -> list[int]:
    """The larger of both ranks' peaks in each case."""
    peaks = torch.tensor([measured(Run(*case)) for case in cases])
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return [int(each) for each in peaks]


def show(results: list[dict[str, Any]]) -> None:
    """One row for each model and checkpointing, a column for each level."""
    cells: dict[tuple[str, bool], dict[str, str]] = {}
    for each in results:
        texts = cells.setdefault((each["model"], each["checkpointed"]), {})
        numbers = [f"{each[what] / MEGABYTE:.2f}" for what in ("planned", "measured")]
        texts[each["level"]] = " / ".join(numbers)
    levels = list(dict.fromkeys(each["level"] for each in results))
    rows = []
    for (model, checkpointed), texts in cells.items():
        alike = [
            each["percent"]
            for each in results
            if (each["model"], each["checkpointed"]) == (model, checkpointed)
        ]
        worst = f"{max(alike, key=abs):+.4f} %"
        name = f"{model}, checkpointed" if checkpointed else model
        rows.append([name, *(texts[level] for level in levels), worst])
    columns = ["model", *levels, "off by at most"]
    harness.print_table("Peak in MB: planned / measured", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument("--bf16", action="store_true", help="compute and send in bf16")
    options = parser.parse_args(arguments)
    runs = [
        Run(name, level, checkpointed, options.bf16)
        for name in options.models
        for checkpointed in (False, True)
        for level in options.levels
    ]
    cases = [[run.name, run.level, run.checkpointed, run.in_bf16] for run in runs]
    start = time.perf_counter()
    held = harness.run_ranks(measure, NUM_RANKS, cases)
    print(f"{len(runs)} runs of two ranks in {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    results = []
    for run, peak in zip(runs, held, strict=True):
        found = planned(run)
        results.append(
            {
                "model": run.name,
                "level": run.level,
                "checkpointed": run.checkpointed,
                "planned": found.peak_bytes,
                "measured": peak,
                "percent": 100 * (found.peak_bytes / peak - 1),
                "kinds": found.memory,
            }
        )
    print(f"planned in {time.perf_counter() - start:.0f} s")
    show(results)
    percents = [each["percent"] for each in results]
    print(f"from {min(percents):+.4f} % to {max(percents):+.4f} %")
    missed = [each for each in results if not TOO_LITTLE <= each["percent"] <= TOO_MUCH]
    print(f"beyond {TOO_LITTLE:+} % and {TOO_MUCH:+} %: {len(missed)} of {len(results)}")
    name = "planner_memory_bf16" if options.bf16 else "planner_memory"
    if len(options.models) == len(MODELS) and len(options.levels) == len(LEVELS):
        harness.write_results(name, results)


if __name__ == "__main__":
    main()
