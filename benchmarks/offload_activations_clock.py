"""Activations on the host, on the simulated clock of H100 machines, beside recomputation.

    python benchmarks/offload_activations_clock.py

A GPT of eight blocks (``examples/gpt.py``, fused attention) of various widths on eight ranks of a
node (``fe.H100``, whose GPUs share the memory of their node): level 3, bf16, AdamW, a sequence of
8,192 tokens a rank. Activations are kept, recomputed or on the host.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import harness
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.copy_lanes import names_of_copies
from gpt import GPT, GPTConfig

WIDTHS = (4096, 6144, 8192, 12288, 16384)
RANKS, BLOCKS, TOKENS, WORDS, HEAD = 8, 8, 8192, 32_000, 128
WAYS = {"kept": False, "recomputed": True, "on the host": "offload"}


def build(width: int) -> nn.Module:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return GPT(GPTConfig(WORDS, TOKENS, BLOCKS, width, width // HEAD))


def run() -> list[dict[str, Any]]:
    """Simulate, print."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    record: list[dict[str, Any]] = []
    rows = []
    for width in WIDTHS:
        found = {
            way: fe.simulate(
                partial(build, width),
                RANKS,
                batch=(tokens, tokens),
                machine=fe.H100,
                mp_policy=policy,
                checkpointing=checkpointing,
            )
            for way, checkpointing in WAYS.items()
        }
        moved = found["on the host"]
        copied = [moved.copied_bytes[lane] for lane in names_of_copies("activations")]
        record.append(
            {
                "width": width,
                "seconds": {way: each.seconds for way, each in found.items()},
                "peak bytes": {way: each.peak_bytes for way, each in found.items()},
                "bytes on the host": moved.elsewhere["host"],
                "copied bytes": moved.copied_bytes,
                "bytes of a token and an element": copied[1] / (BLOCKS * TOKENS * width),
                "copies take at least": fe.H100.link_to_state("host", RANKS).least_seconds(*copied),
                "exposed": moved.exposed_by_lane,
            }
        )
        seconds = record[-1]["seconds"]
        rows.append(
            [
                str(width),
                *(f"{each * 1e3:,.0f}" for each in seconds.values()),
                *(f"{each / 2**30:.1f}" for each in record[-1]["peak bytes"].values()),
                f"{moved.elsewhere['host'] / 2**30:.1f}",
            ]
        )
    columns = ["width", *(f"ms, {way}" for way in WAYS), *(f"GiB, {way}" for way in WAYS)]
    columns.append("GiB of host memory")
    harness.print_table("A step on eight simulated H100s", columns, rows)
    return record


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    harness.write_results("offload_activations_clock", run())


if __name__ == "__main__":
    main()
