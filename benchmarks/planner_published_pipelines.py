"""Published speeds of a pipeline on GPUs, compared with a simulation of the same job.

    python benchmarks/planner_published_pipelines.py                  # six minutes; needs torchao
    python benchmarks/planner_published_pipelines.py --only "1F1B, 8" # others stay in the file

torchtitan's Llama 3.1 405B on 512 H100, whose ranks have three axes: FSDP 8, tensor parallelism 8,
pipelines 8; compiled, in fp8, all activations recomputed. A plausibility check, as
``planner_published.py``; nothing was fitted, and the job was added after all figures of the machine
had been chosen.

The report states schedules, local batch and ranks. Other options are torchtitan's defaults:

- 8 microbatches of four sequences, as many as a pipeline has ranks. Since pull request 781 of
  2025-01-07, after the report's commit, the default is as many as there are stages. The interleaved
  schedule, with two stages a rank, then has 16 microbatches of two sequences: the third row.
- The first and the last stage have fewer layers than the others (``generate_split_points`` in
  ``torchtitan/parallelisms/pipelining_utils.py``).
- Parameters are gathered once a step, and gradients are reduced once: FSDP does not reshard after
  forward in a pipeline (``apply_fsdp`` in ``parallelize_llama.py``), and torch's stages accumulate
  unsharded gradients. Level 1 does the same.
- Sequences of 8,192 tokens (``train_configs/llama3_405b.toml``).

Tensor parallelism is asynchronous.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import harness
import torch
from _published_plans import asynchronous, torchtitan_fp8_stage, with_symmetric_memory
from planner_published import BF16, GRAND_TETON, H100_REPORT, llama
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.planner.command_inputs import in_fp8

RANKS, PIPELINE, TENSOR_PARALLEL = 512, 8, 8
LAYERS, LENGTH, LOCAL_BATCH = 126, 8192, 32
# By schedule: stages of a rank, tokens a second of one GPU, GiB.
PUBLISHED = {"1F1B": (1, 100, 82.5), "Interleaved1F1B": (2, 128, 72.7)}
# Schedules and microbatches.
JOBS = (("1F1B", 8), ("Interleaved1F1B", 8), ("Interleaved1F1B", 16))


def layers_of(index: int, num_stages: int) -> int:
    """Layers of a stage, as ``generate_split_points`` has them."""
    least, further = divmod(LAYERS, num_stages)
    return least + (0 < index <= further)


def stage(index: int, num_stages: int) -> nn.Module:
    """Builds a stage in fp8."""
    # fe.CausalLMStages gives each stage an equal share of the layers.
    layers = layers_of(index, num_stages) * num_stages
    build = llama(16384, 53248, layers, 128, 8, 128256)
    return fe.CausalLMStages(in_fp8(build, "fp8"))(index, num_stages)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy in fp32, on sharded logits."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def plan(schedule: str, microbatches: int) -> dict[str, Any]:
    """Simulate the job with one of its schedules."""
    stages_per_rank, published, gib = PUBLISHED[schedule]
    rows = LOCAL_BATCH // microbatches
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    with loss_parallel(), asynchronous(True):
        found = fe.simulate_pipeline(
            stage,
            RANKS,
            pipeline=PIPELINE,
            microbatches=microbatches,
            batch=tokens,
            target=tokens,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            loss=loss,
            tensor_parallel=TENSOR_PARALLEL,
            parallelize=with_symmetric_memory(torchtitan_fp8_stage),
            machine=GRAND_TETON,
            quick=True,
            strategy="optim",
            extensions=[fe.Recompute()],
            mp_policy=BF16,
        )
    speed = found.tokens_per_second / RANKS
    return {
        "job": "Llama 3.1 405B",
        "source": H100_REPORT,
        "machine": GRAND_TETON.name,
        "ranks": RANKS,
        "tensor parallel": TENSOR_PARALLEL,
        "pipeline": PIPELINE,
        "schedule": schedule,
        "microbatches": microbatches,
        "rows": rows,
        "length": LENGTH,
        "published tokens/s": published,
        "published GiB": gib,
        "planned tokens/s": speed,
        "planned over published": speed / published,
        "planned GiB": [each / 2**30 for each in found.peak_bytes],
        "bubble": [each / found.seconds for each in found.bubble_seconds],
        "exposed": [each / found.seconds for each in found.exposed_seconds],
        "seconds": found.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help='jobs with this, such as "Interleaved1F1B, 16"')
    only = parser.parse_args().only
    path = harness.RESULTS / "planner_published_pipelines.json"
    known = json.loads(path.read_text())["results"] if only else []
    rows = []
    for job in JOBS:
        if only in f"{job[0]}, {job[1]}":
            rows.append(plan(*job))
        else:
            rows += [row for row in known if (row["schedule"], row["microbatches"]) == job]
    harness.print_table(
        "tokens a second of one GPU, and GiB, published and simulated",
        ["schedule", "microbatches", "published", "simulated", "ratio", "GiB", "simulated"],
        [
            [
                row["schedule"],
                f"{row['microbatches']} x {row['rows']} x {row['length']}",
                f"{row['published tokens/s']:,.0f}",
                f"{row['planned tokens/s']:,.0f}",
                f"{row['planned over published']:.2f}",
                f"{row['published GiB']:.1f}",
                f"{max(row['planned GiB']):.1f}",
            ]
            for row in rows
        ],
    )
    harness.write_results("planner_published_pipelines", rows)


if __name__ == "__main__":
    main()
