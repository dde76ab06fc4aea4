"""Which degrees of tensor, context, pipeline and data parallelism the planner takes for 405B
parameters on 512 H100.

    python benchmarks/planner_degrees.py               # 20 minutes of one core
    python benchmarks/planner_degrees.py --only PP     # rows of others stay in the file
    python benchmarks/planner_degrees.py --layers 8    # another number of layers, for a try

The shapes of "The Llama 3 Herd of Models" (2024, table 3: 126 layers, width 16,384, feed-forward
53,248, 128 heads, 8 of keys and values; 128,256 tokens as in the published config), transformers'
own class and ``tp_plan``, 8,192 tokens a sequence, 4M tokens a step, bf16 compute with fp32 main
weights, AdamW, blocks recomputed, 64 nodes of eight H100. For 1, 2, 4 and 8 tensor-parallel ranks
with 1, 2, 4 and 8 context-parallel ones the microbatch is the largest that fits; the candidates are
those of a quick plan. Pipelines of 8 and 16 ranks have microbatches of one sequence, alone and with
8 tensor-parallel ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any
from unittest import mock

import harness
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_engine as fe
from fsdp_engine.planner import strategy_search

WORLD_SIZE = 512
LENGTH = 8192
GLOBAL_BATCH = 2**22
LAYERS = 126
SEARCHES: dict[str, dict[str, Any]] = {
    "TP, CP": {"tensor_parallel": "auto", "context_parallel": (1, 2, 4, 8)},
    "PP": {
        "tensor_parallel": (1, 8),
        "pipeline": (8, 16),
        "schedules": ("1F1B", "Interleaved1F1B"),
        "microbatch_sizes": (1,),
    },
}


def llama(layers: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def batch(size: int) -> dict[str, Tensor]:
    tokens = torch.zeros(size, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def planned(layers: int, search: dict[str, Any]) -> dict[str, Any]:
    """The outcomes of a plan, and how long it took."""
    began = time.perf_counter(), time.process_time()
    with mock.patch.object(strategy_search, "QUICK_FITTING", math.inf):
        plan = fe.plan(
            lambda: llama(layers),
            batch,
            world_size=WORLD_SIZE,
            **search,
            global_batch=GLOBAL_BATCH,
            checkpointing=(True,),
            mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            offload=None,
            quick=True,
            progress=True,
        )
    took = time.perf_counter() - began[0], time.process_time() - began[1]
    print(plan)
    rows = []
    for outcome in plan.outcomes:
        candidate, times = outcome.candidate, outcome.times
        assert times is not None
        rows.append(
            {
                "tensor_parallel": candidate.tensor_parallel,
                "context_parallel": candidate.context_parallel,
                "pipeline": candidate.pipeline,
                "schedule": candidate.schedule,
                "mesh": list(candidate.mesh),
                "levels": candidate.levels,
                "microbatches": candidate.microbatches,
                "microbatch_size": candidate.microbatch_size,
                "peak_bytes": outcome.peak_bytes,
                "lacking": outcome.lacking,
                "step": times.step,
                "rate": outcome.rate,
                "mfu": times.mfu,
                "shares": times.shares(),
            }
        )
    return {"rows": rows, "wall_seconds": took[0], "processor_seconds": took[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--only", choices=SEARCHES)
    given = parser.parse_args()
    path = harness.RESULTS / "planner_degrees.json"
    found = json.loads(path.read_text())["results"] if given.only and path.exists() else {}
    for name, search in SEARCHES.items():
        if given.only in (None, name):
            found[name] = planned(given.layers, search)
    if given.layers == LAYERS:
        harness.write_results("planner_degrees", found)


if __name__ == "__main__":
    main()
