"""Published speeds of FSDP2 on GPUs, and what the planner says of the same jobs.

    python benchmarks/planner_published.py        # a few minutes

A sanity check, not a measurement: another engine (FSDP2) ran these, its schedule is close to level
3 here, and the machine is known from a data sheet and a few assumed fractions
(``simulation/machine.py``). Nothing was fitted to these figures. Sources are given with each job.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import harness
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_engine as fe
from fsdp_engine.planner.inputs import inputs_of
from fsdp_engine.simulation.known_operations import KnownOperations

H100_REPORT = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
A100_REPORT = "torchtitan, docs/performance.md of 2024"

# "Each H100 GPU is equipped with 96GB HBM2e with 2.4 TB/sec peak memory bandwidth", 400 Gb/s a GPU.
GRAND_TETON = dataclasses.replace(
    fe.H100,
    name="8 x H100 96 GB HBM2e a node, 400 Gb/s a GPU",
    processor=dataclasses.replace(
        fe.H100.processor, memory_bandwidth=2.4e12, memory_bytes=96 * 2**30
    ),
)

LLAMA2_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "vocab_size": 32000,
}
LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA3_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@dataclass(frozen=True)
class Job:
    """What was run, and what was published of it.

    Attributes:
        config: of transformers' Llama.
        rows, length: of a rank's batch.
        recomputed: what the report says was recomputed in backward.
        tokens_per_second: of one GPU, published.
        gib: memory of one GPU, published; None: it was not.
    """

    name: str
    source: str
    machine: fe.Machine
    world_size: int
    config: dict[str, int]
    rows: int
    length: int
    recomputed: str
    tokens_per_second: float
    gib: float | None = None


JOBS = [
    Job("Llama 2 13B", A100_REPORT, fe.A100, 64, LLAMA2_13B, 2, 4096, "nothing", 2162),
    Job("Llama 3 70B", A100_REPORT, fe.A100, 64, LLAMA3_70B, 1, 8192, "all", 331),
    Job("Llama 3.1 8B", H100_REPORT, GRAND_TETON, 8, LLAMA3_8B, 2, 8192, "some", 5762, 82.4),
    Job("Llama 3.1 8B", H100_REPORT, GRAND_TETON, 128, LLAMA3_8B, 2, 8192, "some", 5605, 67.0),
]

# "Selective" checkpointing keeps some and recomputes some, so it lies between these two.
TRIES = {"nothing": (False,), "all": (True,), "some": (False, True)}


def plan(job: Job, *, recomputes: bool) -> dict[str, Any]:
    """The job at level 3 on one axis, in bf16 with reductions in fp32, as torchtitan's default."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return LlamaForCausalLM(LlamaConfig(**cast(dict[str, Any], job.config)))

    known = KnownOperations()
    found = fe.simulate(
        build,
        job.world_size,
        batch=inputs_of(build(), (job.rows, job.length)),
        machine=job.machine,
        strategy="optim_grads_params",
        checkpointing=recomputes,
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        known=known,
    )
    speed = job.rows * job.length / found.seconds
    return {
        "job": job.name,
        "source": job.source,
        "machine": job.machine.name,
        "ranks": job.world_size,
        "rows": job.rows,
        "length": job.length,
        "published recomputation": job.recomputed,
        "published tokens/s": job.tokens_per_second,
        "published GiB": job.gib,
        "planned recomputation": "all" if recomputes else "nothing",
        "planned tokens/s": speed,
        "planned over published": speed / job.tokens_per_second,
        "planned GiB": found.peak_bytes / 2**30,
        "exposed": found.exposed_seconds / found.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    rows = [plan(job, recomputes=each) for job in JOBS for each in TRIES[job.recomputed]]
    columns = ["job", "GPU", "ranks", "batch", "recomputed", "published", "planned", "ratio"]
    harness.print_table(
        "tokens a second of one GPU, and GiB, published and planned",
        [*columns, "exposed", "GiB published", "planned"],
        [_cells(row) for row in rows],
    )
    harness.write_results("planner_published", rows)


def _cells(row: dict[str, Any]) -> list[str]:
    gib = row["published GiB"]
    return [
        row["job"],
        row["machine"].split()[2],  # "8 x H100 ..."
        str(row["ranks"]),
        f"{row['rows']} x {row['length']}",
        f"{row['published recomputation']} / {row['planned recomputation']}",
        f"{row['published tokens/s']:,.0f}",
        f"{row['planned tokens/s']:,.0f}",
        f"{row['planned over published']:.2f}",
        f"{row['exposed']:.0%}",
        "" if gib is None else f"{gib:.1f}",
        f"{row['planned GiB']:.1f}",
    ]


if __name__ == "__main__":
    main()
