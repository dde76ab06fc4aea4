"""Steps of jobs on one GPU, for ``planner_gpu.py`` to compare plans with: time and peak memory.

    python benchmarks/gpu_jobs.py [--steps 12] [--jobs NAME ...] [--kernels FOLDER]

Each job is one rank over NCCL at level 3 with bf16 compute, fp32 main weights, reductions in fp32
and fused AdamW: models of different sizes and lengths, with compiled blocks, activation
checkpointing and state on the host; where torchao is installed, also with its linears in fp8.
Weights are random.

Without a CUDA device the jobs run over gloo with tiny sizes, to test the script itself; nothing is
written.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from _gpu_models import card, mark, milliseconds, on_cuda, start, synchronize, the_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_engine as fe
from fsdp_engine.planner.command_inputs import in_fp8
from fsdp_engine.planner.simulation.compiled import compile_blocks
from gpt import GPT, GPTConfig

Build = Callable[[], nn.Module]
POLICY = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gpt(length: int, layers: int, width: int, heads: int) -> nn.Module:
    """The GPT of ``examples/gpt.py``."""
    return GPT(GPTConfig(sequence_length=length, num_layers=layers, width=width, num_heads=heads))


def llama(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, vocabulary: int
) -> nn.Module:
    """Transformers' Llama."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        use_cache=False,  # with a cache, Dynamo recompiles blocks, up to its limit
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        build: Builds the model.
        vocabulary: Number of distinct tokens.
        rows, length: Number of sequences in a batch, and of tokens in each.
        compiled: Whether blocks are compiled.
        options: Options of ``fe.shard``.
    """

    build: Build
    vocabulary: int
    rows: int
    length: int
    compiled: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_llama(self) -> bool:
        return self.vocabulary != GPTConfig.vocab_size

    def batch(self, device: torch.device) -> Any:
        """Random tokens, which are their own labels."""
        tokens = torch.randint(0, self.vocabulary, (self.rows, self.length), device=device)
        if self.is_llama:
            return {"input_ids": tokens, "labels": tokens}
        return tokens, tokens


def the_gpu_s_jobs() -> dict[str, Job]:
    """The jobs that a GPU runs, by name."""
    # Eight blocks of the size of Llama 3 8B's.
    blocks = partial(llama, 4096, 14336, 8, 32, 8, 32000)
    small = partial(llama, 2048, 8192, 16, 32, 8, 32000)
    return _jobs(
        blocks, small, partial(gpt, 1024, 20, 2048, 16), partial(gpt, 1024, 12, 768, 12), 4096
    )


def _tiny_jobs() -> dict[str, Job]:
    blocks, gpts = partial(llama, 64, 128, 2, 2, 1, 32000), partial(gpt, 32, 2, 64, 4)
    return _jobs(blocks, blocks, gpts, gpts, 128)


def _jobs(
    blocks: Build, small: Build, gpt_1b: Build, gpt_100m: Build, length: int
) -> dict[str, Job]:
    whole, selective = {"checkpointing": True}, {"checkpointing": "selective"}
    on_host = {"offload": fe.Offload(optimizer_state="host")}
    llamas, gpts = 32000, GPTConfig.vocab_size
    short = length // 4
    fp8: dict[str, Job] = {}
    if importlib.util.find_spec("torchao"):
        build = in_fp8(blocks, "8B blocks, fp8")
        fp8["8B blocks, fp8"] = Job(build, llamas, 2, length)
        fp8["8B blocks, fp8, compiled"] = Job(build, llamas, 2, length, compiled=True)
    return {
        "8B blocks": Job(blocks, llamas, 2, length),
        "8B blocks, compiled": Job(blocks, llamas, 2, length, compiled=True),
        "8B blocks, whole blocks recomputed": Job(blocks, llamas, 2, length, options=whole),
        "8B blocks, selective": Job(blocks, llamas, 2, length, options=selective),
        "8B blocks, selective, compiled": Job(
            blocks, llamas, 2, length, compiled=True, options=selective
        ),
        "8B blocks, 16,384 long": Job(blocks, llamas, 1, 4 * length, options=whole),
        "8B blocks, short": Job(blocks, llamas, 16, length // 8),
        "Llama 1B": Job(small, llamas, 4, length),
        "Llama 1B, compiled": Job(small, llamas, 4, length, compiled=True),
        "Llama 1B, state on the host": Job(small, llamas, 4, length, options=on_host),
        "GPT 1B": Job(gpt_1b, gpts, 16, short),
        "GPT 1B, one sequence": Job(gpt_1b, gpts, 1, short),
        "GPT 1B, compiled": Job(gpt_1b, gpts, 16, short, compiled=True),
        "GPT 100M": Job(gpt_100m, gpts, 32, short),
        **fp8,
    }


JOBS = the_gpu_s_jobs() if on_cuda() else _tiny_jobs()


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    """Fused AdamW."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def run(job: Job, mesh: DeviceMesh, steps: int, kernels: Path | None) -> dict[str, Any]:
    """Milliseconds of each step, and bytes at the peak of the third one."""
    torch.manual_seed(0)
    before = torch.cuda.memory_stats()["requested_bytes.all.current"] if on_cuda() else 0
    with the_device():
        model = job.build()
        batch = job.batch(the_device())
    if job.compiled:
        compile_blocks(model)
    fe.shard(model, mesh=mesh, strategy="optim_grads_params", mp_policy=POLICY, **job.options)
    optimizer = make_optimizer(model.parameters())
    fe.shard_optimizer(optimizer)

    def step() -> None:
        loss = (model(**batch) if isinstance(batch, dict) else model(*batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    gc.collect()
    synchronize()
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()
    step()
    synchronize()
    found: dict[str, Any] = {"milliseconds": []}
    if on_cuda():
        stats = torch.cuda.memory_stats()
        found["peak bytes"] = stats["requested_bytes.all.peak"] - before
        found["rest bytes"] = stats["requested_bytes.all.current"] - before
        found["reserved bytes"] = stats["reserved_bytes.all.peak"]
    for _ in range(steps):
        begin = mark()
        step()
        end = mark()
        synchronize()
        found["milliseconds"].append(milliseconds(begin, end))
    if kernels is not None and on_cuda():
        kernels.write_text(json.dumps(kernels_of(step), indent=1))
    return found


def kernels_of(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Names of a step's kernels, their number, and microseconds; the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.events() or ():
        times[event.name] += event.device_time
        counts[event.name] += 1
    return [(name, counts[name], time) for name, time in times.most_common(60)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12 if on_cuda() else 2)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--kernels", type=Path, help="folder for the time of each job's kernels")
    args = parser.parse_args()
    mesh = start(1)
    results: dict[str, Any] = {}
    rows = []
    for name in args.jobs:
        kernels = args.kernels and args.kernels / f"{name.replace(' ', '_')}.json"
        found = results[name] = run(JOBS[name], mesh, args.steps, kernels)
        torch.compiler.reset()
        gc.collect()
        low, middle, high = harness.quartiles(found["milliseconds"])
        peak = f"{found['peak bytes'] / 2**30:.2f}" if on_cuda() else "-"
        rows.append([name, f"{middle:.1f} ({low:.1f}-{high:.1f})", peak])
        print(*rows[-1], sep="  ", flush=True)
        if on_cuda():
            torch.cuda.empty_cache()
            harness.write_results(f"gpu_jobs_{card()}", results)
    harness.print_table("jobs on one GPU", ["job", "step ms", "peak GiB"], rows)
    dist.destroy_process_group()
    if not on_cuda():
        print("REHEARSAL: no CUDA device here; nothing was written.")


if __name__ == "__main__":
    main()
