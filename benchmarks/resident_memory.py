"""Resident set of a rank in training: this engine at level 3 and FSDP2, each in its own processes.

    python benchmarks/resident_memory.py [--size 85M] [--dtypes fp32 bf16] [--rounds 3] [--steps 4]
        [--budget ELEMENTS]

Two gloo ranks of one thread train a GPT (``step_time.py``'s) with fused AdamW. The measurement is
the resident memory of the process, less that before the model was built (with libraries and process
groups): tensors, and additional memory of allocators and libraries.

- *peak of a step*: the peak of resident memory within forward, backward, optimizer step and
  zero_grad (the kernel's high-water mark, reset before each step);
- *between steps*: the resident memory after ``zero_grad``.

Freed memory in glibc's heap is returned to the system before each measurement (``malloc_trim``),
because its size depends on earlier allocations and differs between runs.

The first two steps are excluded. Figures are those of rank 0: the median over the steps of a round;
engines alternate between rounds, in new processes, and ratios are computed per round. In bf16 both
compute and reduce in bf16 with fp32 main weights. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from step_time import SIZES
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
from gpt import GPT

NUM_RANKS = 2
NUM_WARMUP = 2
LEVEL = "optim_grads_params"
ENGINES = (LEVEL, "FSDP2")
LOW = {"fp32": None, "bf16": torch.bfloat16}
MEGABYTE = 1e6
# measurement: target as a multiple of FSDP2's
TARGETS = {"peak": 0.95, "between steps": 1.0}


def resident(field: str) -> int:
    """Bytes of one field of /proc/self/status: VmRSS now, VmHWM at most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: expected {field}; found none")


def trim() -> None:
    """Return freed memory of the heap to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Reset the high-water mark to the current resident memory."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")


def build(engine: str, model: GPT, low: torch.dtype | None, budget: int | None) -> nn.Module:
    """The model, sharded by one of the engines."""
    if engine == LEVEL:
        policy = fe.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        options = fe.Options(prefetch_window=budget, staging_limit=budget)
        fe.shard(model, strategy=LEVEL, mp_policy=policy, options=options)
        return model
    policy2 = FSDP2Policy(param_dtype=low, reduce_dtype=low)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy2)
    fully_shard(model, mp_policy=policy2)
    return model


def measure(
    engine: str, size: str, dtype: str, num_steps: int, budget: int | None
) -> dict[str, float]:
    """One round of one engine: bytes above the start."""
    config, num_sequences = SIZES[size]
    dist.barrier()  # establishes connections, whose memory is then excluded
    trim()
    start = resident("VmRSS")
    torch.manual_seed(0)
    model = build(engine, GPT(config), LOW[dtype], budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if engine == LEVEL:
        fe.shard_optimizer(optimizer)
    shape = (num_sequences, config.sequence_length)
    tokens = torch.randint(0, config.vocab_size, shape)
    found: dict[str, list[int]] = {"peak": [], "between steps": []}
    for number in range(NUM_WARMUP + num_steps):
        reset_peak()
        model(tokens, tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= NUM_WARMUP:
            found["peak"].append(resident("VmHWM") - start)
            trim()
            found["between steps"].append(resident("VmRSS") - start)
    return {what: statistics.median(values) for what, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="85M")
    parser.add_argument("--dtypes", nargs="+", choices=list(LOW), default=list(LOW))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=int, help="elements: prefetch_window and staging_limit")
    options = parser.parse_args()
    results: dict[str, Any] = {"size": options.size, "budget": options.budget, "level": LEVEL}
    rows = []
    for dtype in options.dtypes:
        rounds: dict[str, dict[str, list[float]]] = {engine: {} for engine in ENGINES}
        for number in range(options.rounds):
            for engine in ENGINES if number % 2 == 0 else ENGINES[::-1]:
                given = (engine, options.size, dtype, options.steps, options.budget)
                for what, value in harness.run_ranks(measure, NUM_RANKS, *given).items():
                    rounds[engine].setdefault(what, []).append(value)
        results[dtype] = {"bytes": rounds, "ratios": {}}
        for what, target in TARGETS.items():
            times = {engine: values[what] for engine, values in rounds.items()}
            ratio = harness.ratios(times, LEVEL, "FSDP2")
            results[dtype]["ratios"][what] = ratio
            medians = [statistics.median(times[engine]) / MEGABYTE for engine in ENGINES]
            shown = [f"{value:.0f}" for value in medians]
            rows.append([f"{dtype}, {what}", *shown, harness.show_ratio(ratio), f"{target:.2f}"])
    title = f"Resident set above the start, MB, {options.size} parameters, {NUM_RANKS} gloo ranks"
    harness.print_table(title, ["", *ENGINES, "ratio (quartiles)", "goal"], rows)
    harness.write_results(f"resident_memory_{options.size}", results)


if __name__ == "__main__":
    main()
