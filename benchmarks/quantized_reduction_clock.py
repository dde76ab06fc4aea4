"""Simulated step times with reductions of gradients in few bits between nodes.

    python benchmarks/quantized_reduction_clock.py

64 H100 in 8 nodes, 4,096 tokens a rank, bf16 parameters, fp32 main weights, AdamW; 400, 100 and 25
Gb/s a GPU between nodes. An 8B Llama is replicated by each node, which shards it (HSDP), and is not
recomputed. A 70B Llama would not fit so: its optimizer state is sharded over all ranks, and its
blocks are recomputed. Sums between nodes are sent as the row says. Sums within a node are sent
in bf16, except in the first row. Encoding and decoding take the time of their operations, none of
them fused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import harness
import torch
from simulated import Llama, LlamaShape
from torch import nn

import fsdp_engine as fe

RANKS, NODES = 64, 8
SEQUENCE = 4096
SECONDS_OF_A_DAY = 86_400
GIGABITS = (400, 100, 25)
# "The Llama 3 Herd of Models", table 3.
SHAPE_70B = LlamaShape(num_blocks=80, width=8192, heads=64, groups=8, hidden=28_672)
# The model, its outer level, and other extensions.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, list[Any]]] = {
    "8B": (Llama, "no_shard", []),
    "70B": (lambda: Llama(SHAPE_70B), "optim", [fe.Recompute()]),
}
WAYS: dict[str, tuple[torch.dtype, list[Any]]] = {
    "fp32": (torch.float32, []),
    "bf16": (torch.bfloat16, []),
    "8 bits": (torch.bfloat16, [fe.QuantizedReduction(8)]),
    "4 bits": (torch.bfloat16, [fe.QuantizedReduction(4)]),
}


def machine_at(gigabits: int) -> fe.Machine:
    """H100 machines with this bandwidth between nodes, in Gb/s a GPU."""
    between = fe.H100.between_nodes
    bandwidth = between.bandwidth * gigabits / GIGABITS[0]
    name = fe.H100.name.replace(f"{GIGABITS[0]} Gb/s", f"{gigabits} Gb/s")
    return replace(fe.H100, name=name, between_nodes=replace(between, bandwidth=bandwidth))


def run(model: str, gigabits: int, way: str) -> dict[str, Any]:
    """Simulate a step."""
    build, outer, others = MODELS[model]
    reduce_dtype, extensions = WAYS[way]
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long)
    found = fe.simulate(
        build,
        RANKS,
        mesh=(NODES, RANKS // NODES),
        batch=(tokens, tokens),
        machine=machine_at(gigabits),
        strategy="optim_grads_params",
        outer_strategy=outer,
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
        extensions=[*others, *extensions],
    )
    return {
        "seconds": found.seconds,
        "compute": found.compute_seconds,
        "exposed": found.exposed_seconds,
        "messages": found.message_seconds,
        "peak_bytes": found.peak_bytes,
        "tokens_a_day": RANKS * SEQUENCE * SECONDS_OF_A_DAY / found.seconds,
    }


def main() -> None:
    """Simulate, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    record: dict[str, Any] = {}
    for model in args.models:
        for gigabits in GIGABITS:
            steps = {way: run(model, gigabits, way) for way in WAYS}
            record[f"{model}, {gigabits} Gb/s"] = steps
            rows = [
                [
                    way,
                    f"{each['seconds'] * 1e3:.0f}",
                    f"{each['seconds'] / steps['fp32']['seconds']:.2f}",
                    f"{each['seconds'] / steps['bf16']['seconds']:.2f}",
                    f"{each['compute'] * 1e3:.0f}",
                    f"{each['exposed'] * 1e3:.0f}",
                    f"{each['tokens_a_day'] / 1e9:.1f}",
                    f"{each['peak_bytes'] / 2**30:.1f}",
                ]
                for way, each in steps.items()
            ]
            columns = [
                "sums between nodes",
                "step ms",
                "of fp32's",
                "of bf16's",
                "compute ms",
                "exposed ms",
                "10^9 tokens a day",
                "peak GiB",
            ]
            harness.print_table(f"{model} Llama, {gigabits} Gb/s between nodes", columns, rows)
    harness.write_results("quantized_reduction_clock", record)


if __name__ == "__main__":
    main()
