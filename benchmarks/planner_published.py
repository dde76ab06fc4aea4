"""Published speeds of FSDP on GPUs, compared with the planner's for the same jobs.

    python benchmarks/planner_published.py                   # twenty minutes
    python benchmarks/planner_published.py --only MPT        # results of others stay in the file
    python benchmarks/planner_published.py --only selective
    python benchmarks/planner_published.py --only "TP 8"     # those in fp8 need torchao

A plausibility check, not a measurement: other engines (FSDP2 for torchtitan's jobs, FSDP for those
of llm-foundry and of IBM) ran these jobs, fully sharded on one axis over all ranks, or within each
node (HSDP). Their schedules are close to level 3 of this engine, and the machine model is from a
data sheet and a few fractions (``simulation/machine.py``). ``achievable_flops`` of Hopper was
chosen with ten of the jobs on H100 in view; nothing else was fitted to jobs. Jobs that are "held
out" were planned after the figures had been chosen. Only three figures of Hopper were added later,
from other sources: the rate of fp8, the time of a product besides its flops, and the speed at 500
W. Sources are given with each job. Pipelines are in ``planner_published_pipelines.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import harness
import torch
from _published_plans import (
    asynchronous,
    kempner_forge,
    loss_in_fp32,
    loss_of_logits,
    torchtitan,
    torchtitan_fp8,
    with_symmetric_memory,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

import fsdp_engine as fe
from fsdp_engine.planner.command_inputs import example_inputs, in_fp8
from fsdp_engine.planner.simulation.operations import OperationCache

H100_REPORT = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
# Read its tables at commit c720cb8, where they are text.
TP_REPORT = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
A100_REPORT = "torchtitan, docs/performance.md of 2024"
IBM_REPORT = "PyTorch blog of 2024-03-13, Maximizing training throughput using PyTorch FSDP"
KEMPNER_REPORT = "KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md"
MPT_REPORT = "llm-foundry, scripts/train/benchmarking/README.md"

# Tokens a second of a Llama 3 8B in training on H100 with limits of 500 and of 700 W: M. Mayr et
# al., "AI Application Benchmarking", arXiv:2603.16164, table 4.
AT_500_WATTS = 27_705.3 / 30_271.0
# "Each H100 GPU is equipped with 96GB HBM2e with 2.4 TB/sec peak memory bandwidth", 400 Gb/s a GPU,
# "we used the default 500W power limit".
GRAND_TETON = dataclasses.replace(
    fe.H100,
    name="8 x H100 96 GB HBM2e a node, 400 Gb/s a GPU",
    processor=dataclasses.replace(
        fe.H100.processor,
        memory_bandwidth=2.4e12,
        memory_bytes=96 * 2**30,
        achievable_flops=AT_500_WATTS * fe.H100.processor.achievable_flops,
    ),
)
# "A100 40GB with 1600 Gbps node-node interconnect (RoCE)"; 1,555 GB/s is the data sheet's.
A100_40 = dataclasses.replace(
    fe.A100,
    name="8 x A100 40 GB a node, 200 Gb/s a GPU",
    processor=dataclasses.replace(fe.A100.processor, memory_bandwidth=1.555e12, memory_bytes=40e9),
)

# "400Gbps inter-node interconnect", "800Gbps": of a node of eight.
IBM_A100, IBM_H100 = (
    dataclasses.replace(
        machine,
        name=f"8 x {name} a node, {bandwidth} Gb/s a node",
        between_nodes=dataclasses.replace(machine.between_nodes, bandwidth=bandwidth * 1e9 / 8 / 8),
    )
    for machine, name, bandwidth in ((fe.A100, "A100", 400), (fe.H100, "H100", 800))
)

# "8 nodes, 4x NVIDIA H200 (141 GB) per node, NVLink intra-node, InfiniBand inter-node", whose rate
# is not stated: the preset's.
KEMPNER = dataclasses.replace(fe.H200, name="4 x H200 SXM a node, 400 Gb/s a GPU", ranks_per_node=4)

BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# "PURE" in llm-foundry: gradients are also reduced in bf16.
PURE = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
# KempnerForge's models are in bf16, and so is the optimizer's state; gradients are reduced in fp32.
ALL_BF16 = fe.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, main_params_dtype=torch.bfloat16
)


def llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    groups: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], nn.Module]:
    """Builds transformers' Llama."""

    def build() -> nn.Module:
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            vocab_size=vocabulary,
        )
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
            return model

    return build


def mpt(hidden: int, layers: int, heads: int, length: int = 2048) -> Callable[[], nn.Module]:
    """Builds a GPT-2 of the sizes of an MPT, whose blocks have the same matrices: embedding and
    head are tied, the MLP is four times as wide, attention is fused."""

    def build() -> nn.Module:
        config = GPT2Config(
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            n_positions=length,
            vocab_size=50368,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        with torch.device("meta"):
            return GPT2LMHeadModel(config)

    return build


LLAMA2_7B = llama(4096, 11008, 32, 32, 32, 32000)
LLAMA2_34B = llama(8192, 22016, 48, 64, 8, 32000)
LLAMA2_13B = llama(5120, 13824, 40, 40, 40, 32000)
LLAMA2_70B = llama(8192, 28672, 80, 64, 8, 32000)
LLAMA3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA3_70B = llama(8192, 28672, 80, 64, 8, 128256)
# KempnerForge's 7B, 13B and 70B: 8.03B, 14.84B and 70.55B parameters, in bf16.
KEMPNER_7B = llama(4096, 14336, 32, 32, 8, 128256, torch.bfloat16)
KEMPNER_13B = llama(5120, 17920, 40, 40, 8, 128256, torch.bfloat16)
KEMPNER_70B = llama(8192, 28672, 80, 64, 8, 128256, torch.bfloat16)
# scripts/train/yamls/pretrain/mpt-*.yaml
MPT_13B = mpt(5120, 40, 40)
MPT_30B = mpt(7168, 48, 56)
MPT_70B = mpt(8192, 80, 64)


@dataclass(frozen=True)
class Job:
    """A job, and its published results.

    Attributes:
        build: Returns the model, on the meta device.
        rows, length: Sequences, and tokens of each, in a microbatch of one rank (or of the ranks
            that share sequences and matrices).
        recomputed: The activations that were recomputed in backward, according to the report: a key
            of ``CHECKPOINTING``.
        tokens_per_second: Published speed of one GPU.
        gib: Published memory of one GPU; None: unpublished.
        microbatches: Number of microbatches per step.
        policy: The policy of dtypes.
        mesh: For HSDP, the number of nodes and of ranks in a node; None: one axis.
        is_held_out: Whether the job was added after ``achievable_flops`` was chosen.
        loss: Computes the loss from an output without labels; None: transformers' own loss.
        tensor_parallel, context_parallel: Number of ranks that share matrices, and sequences.
        parallelize: Applies tensor parallelism.
        is_compiled: Whether each block is compiled.
        is_fp8: Whether linears except the head multiply in fp8, with a scale for each tensor.
        is_async: Whether tensor parallelism is asynchronous.
    """

    name: str
    source: str
    machine: fe.Machine
    world_size: int
    build: Callable[[], nn.Module]
    rows: int
    length: int
    recomputed: str
    tokens_per_second: float
    gib: float | None = None
    microbatches: int = 1
    policy: fe.MixedPrecisionPolicy = BF16
    mesh: tuple[int, int] | None = None
    is_held_out: bool = False
    loss: Callable[[Any], Tensor] | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    parallelize: Callable[[nn.Module, DeviceMesh], None] | None = None
    is_compiled: bool = False
    is_fp8: bool = False
    is_async: bool = False

    @property
    def num_groups(self) -> int:
        """Ranks, or groups of ranks, with batches of their own."""
        return self.world_size // (self.tensor_parallel * self.context_parallel)

    @property
    def parallelism(self) -> str:
        """Such as "FSDP 4, CP 2, compiled, fp8"."""
        if self.mesh is not None:
            return "HSDP {} x {}".format(*self.mesh)
        sizes = {"FSDP": self.num_groups, "CP": self.context_parallel, "TP": self.tensor_parallel}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one GPU"]
        if self.is_async:
            parts[-1] += " asynchronous"
        ways = {"compiled": self.is_compiled, "fp8": self.is_fp8}
        return ", ".join(parts + [name for name, is_taken in ways.items() if is_taken])


def mpt_job(
    name: str,
    machine: fe.Machine,
    world_size: int,
    build: Callable[[], nn.Module],
    rows: int,
    speed: float,
    **options: Any,
) -> Job:
    """A row of llm-foundry's tables, with 2,048 tokens per sample."""
    options = {"recomputed": "all", "policy": PURE, "length": 2048, **options}
    return Job(
        *(name, MPT_REPORT, with_triton_attention(machine), world_size, build, rows),
        tokens_per_second=speed,
        **options,
    )


def with_triton_attention(machine: fe.Machine) -> fe.Machine:
    """The machine with the kernels of llm-foundry's jobs, whose script has ``--attn_impl`` "triton"
    by default (``submit_benchmarks.py``): FlashAttention in Triton. Compared with it,
    FlashAttention-2 is "1.3-1.5x faster [...] in the forward pass and around 2x faster in the
    backward pass" (T. Dao, 2023, section 4.1)."""
    own = machine.processor
    assert own.attention_backward_share is not None
    processor = dataclasses.replace(
        own,
        attention_share=own.attention_share / 1.4,
        attention_backward_share=own.attention_backward_share / 2,
    )
    return dataclasses.replace(machine, processor=processor)


# Hidden size, layers and heads by model: scripts/train/yamls/pretrain/mpt-*.yaml.
_MPT_SIZES = {
    "1B": (2048, 24, 16),
    "3B": (2560, 32, 20),
    "7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "30B": (7168, 48, 56),
}
# Model, length, GPUs, microbatch, microbatches, tokens/s of a GPU, activation checkpointing.
_MPT_H100 = """
30B 2048 32 14 3 2308 True
30B 2048 16 10 3 2263 True
13B 32768 8 1 3 1976 True
13B 16384 8 3 3 2985 True
13B 4096 8 10 3 4717 True
13B 2048 32 2 1 4811 False
13B 2048 16 2 1 4767 False
13B 1024 8 40 3 5502 True
7B 65536 8 1 2 1956 True
7B 32768 8 2 2 3318 True
7B 8192 8 8 2 6935 True
7B 4096 8 16 2 8611 True
7B 2048 8 6 1 10643 False
7B 1024 8 64 2 10203 True
3B 65536 8 1 2 3262 True
3B 32768 8 3 6 5873 True
3B 16384 8 1 6 11152 False
3B 8192 8 3 6 16578 False
3B 4096 8 5 6 20964 False
3B 2048 64 6 3 22525 False
3B 2048 32 6 3 23021 False
3B 2048 16 10 3 24142 False
3B 1024 8 20 6 27046 False
3B 512 8 40 6 27965 False
1B 65536 8 1 2 5506 True
1B 32768 8 1 4 12025 False
1B 16384 8 2 4 19649 False
1B 8192 8 3 4 29157 False
1B 4096 8 7 4 38535 False
1B 2048 64 20 1 44402 False
1B 2048 32 20 1 45130 False
1B 2048 16 20 1 46037 False
1B 2048 8 14 1 45455 False
1B 1024 8 18 4 48910 False
1B 512 8 56 4 52275 False
"""


def mpt_h100_jobs() -> list[Job]:
    """All rows of llm-foundry's table of H100 in bf16 with models of 1B to 30B and at most 6
    microbatches, but those that were in view when fractions of the machine were chosen."""
    found = []
    for line in _MPT_H100.strip().splitlines():
        name, *numbers, recomputes = line.split()
        length, ranks, rows, microbatches, speed = map(int, numbers)
        found.append(
            mpt_job(
                *(f"MPT {name}", fe.H100, ranks, mpt(*_MPT_SIZES[name], length), rows, speed),
                length=length,
                microbatches=microbatches,
                recomputed="all" if recomputes == "True" else "nothing",
                policy=BF16,
                is_held_out=True,
            )
        )
    return found


JOBS = [
    Job("Llama 2 13B", A100_REPORT, fe.A100, 64, LLAMA2_13B, 2, 4096, "nothing", 2162),
    Job("Llama 2 13B", A100_REPORT, fe.A100, 64, LLAMA2_13B, 2, 4096, "every 2nd block", 1914),
    Job("Llama 2 13B", A100_REPORT, fe.A100, 64, LLAMA2_13B, 2, 4096, "selective", 1904),
    Job("Llama 2 70B", A100_REPORT, fe.A100, 64, LLAMA2_70B, 1, 4096, "selective", 355),
    Job("Llama 2 70B", A100_REPORT, fe.A100, 64, LLAMA2_70B, 2, 4096, "all", 353),
    Job("Llama 3 8B", A100_REPORT, fe.A100, 64, LLAMA3_8B, 1, 8192, "every 2nd block", 2904),
    Job("Llama 3 8B", A100_REPORT, fe.A100, 64, LLAMA3_8B, 1, 8192, "selective", 2973),
    Job("Llama 3 70B", A100_REPORT, fe.A100, 64, LLAMA3_70B, 1, 8192, "all", 331),
    Job("Llama 3.1 8B", H100_REPORT, GRAND_TETON, 8, LLAMA3_8B, 2, 8192, "selective", 5762, 82.4),
    Job("Llama 3.1 8B", H100_REPORT, GRAND_TETON, 128, LLAMA3_8B, 2, 8192, "selective", 5605, 67.0),
    Job(
        *("Llama 2 7B, HSDP", IBM_REPORT, IBM_A100, 128, LLAMA2_7B, 2, 4096, "nothing", 3700),
        mesh=(16, 8),
    ),
    Job("Llama 2 13B", IBM_REPORT, IBM_A100, 128, LLAMA2_13B, 2, 4096, "every 2nd block", 1800),
    Job("Llama 2 34B", IBM_REPORT, IBM_A100, 128, LLAMA2_34B, 2, 4096, "all", 700),
    Job("Llama 2 70B", IBM_REPORT, IBM_A100, 128, LLAMA2_70B, 2, 4096, "all", 370),
    Job(
        *("Llama 2 7B, HSDP", IBM_REPORT, IBM_H100, 96, LLAMA2_7B, 2, 4096, "nothing", 7500),
        mesh=(12, 8),
    ),
    Job("Llama 2 13B", IBM_REPORT, IBM_H100, 96, LLAMA2_13B, 2, 4096, "every 2nd block", 3800),
    Job("Llama 2 34B", IBM_REPORT, IBM_H100, 96, LLAMA2_34B, 2, 4096, "all", 1550),
    Job("Llama 2 70B", IBM_REPORT, IBM_H100, 96, LLAMA2_70B, 2, 4096, "all", 800),
    mpt_job("MPT 13B", A100_40, 16, MPT_13B, 10, 1993),
    mpt_job("MPT 13B", A100_40, 128, MPT_13B, 16, 1972),
    mpt_job("MPT 30B", A100_40, 32, MPT_30B, 4, 857),
    mpt_job("MPT 30B", A100_40, 128, MPT_30B, 6, 865),
    mpt_job("MPT 70B", A100_40, 64, MPT_70B, 2, 276),
    mpt_job("MPT 70B", A100_40, 128, MPT_70B, 4, 376),
    mpt_job("MPT 70B", fe.A100, 64, MPT_70B, 8, 410, microbatches=4),
    mpt_job("MPT 13B", fe.H100, 8, MPT_13B, 2, 4792, recomputed="nothing", policy=BF16),
    mpt_job("MPT 13B", fe.H100, 64, MPT_13B, 2, 4800, recomputed="nothing", policy=BF16),
    mpt_job("MPT 70B", fe.H100, 32, MPT_70B, 2, 882, microbatches=16, policy=BF16),
    mpt_job("MPT 70B", fe.H100, 64, MPT_70B, 8, 1039, microbatches=4, policy=BF16),
    *mpt_h100_jobs(),
    # 35,405 tokens/s of 8 GPUs; the report's only job without torch.compile or tensor parallelism.
    Job(
        *("Llama 3 13B", KEMPNER_REPORT, KEMPNER, 8, KEMPNER_13B, 4, 4096, "all", 35405 / 8),
        gib=88.5,
        microbatches=4,
        policy=ALL_BF16,
        loss=loss_of_logits,
        is_held_out=True,
    ),
]

# In torchtitan's report of A100s, "selective layer" is every second block. In that of H100s,
# "selective" is by operation, as in its configs of that time (llama3_8b.toml). IBM's jobs
# checkpoint "every n blocks"; the ratio of HFU to MFU of their 13B model is that of n = 2.
CHECKPOINTING = {
    "nothing": False,
    "every 2nd block": fe.Recompute(every=2),
    "selective": "selective",
    "all": True,
}
_LOSS_PARALLEL = (torchtitan, torchtitan_fp8)


# Model, microbatch, microbatches, tensor-parallel ranks, GPUs, tokens/s of all, GiB of one. The
# report's "GB" are GiB of ``max_memory_allocated`` (kempnerforge/metrics/memory.py).
_KEMPNER = """
7B 2 4 1 1 10471 80.7
7B 2 4 1 2 18728 62.4
7B 4 2 1 4 38983 61.1
7B 4 2 2 2 13163 57.8
7B 4 2 4 4 25135 39.4
7B 4 2 2 4 25980 45.9
7B 4 2 4 8 44299 32.7
7B 4 2 4 16 82988 29.4
7B 4 2 4 32 155917 27.6
13B 4 4 4 8 27345 45.1
13B 4 4 4 16 53814 39.2
13B 4 4 4 32 104309 36.3
70B 2 4 4 32 17657 93.2
"""
_KEMPNER_MODELS = {"7B": KEMPNER_7B, "13B": KEMPNER_13B, "70B": KEMPNER_70B}


def kempner_jobs() -> list[Job]:
    """The jobs of KempnerForge's report that were compiled."""
    found = []
    for line in _KEMPNER.strip().splitlines():
        name, *numbers, speed, gib = line.split()
        rows, microbatches, tensor_parallel, ranks = map(int, numbers)
        found.append(
            Job(
                *(f"Llama 3 {name}", KEMPNER_REPORT, KEMPNER, ranks, _KEMPNER_MODELS[name]),
                rows=rows,
                length=4096,
                recomputed="all",
                tokens_per_second=float(speed) / ranks,
                gib=float(gib),
                microbatches=microbatches,
                policy=ALL_BF16,
                loss=loss_of_logits,
                tensor_parallel=tensor_parallel,
                parallelize=kempner_forge if tensor_parallel > 1 else None,
                is_compiled=True,
                is_held_out=True,
            )
        )
    return found


_TITAN_MODELS = {"8B": LLAMA3_8B, "70B": LLAMA3_70B}


def titan_job(
    model: str,
    source: str,
    world_size: int,
    rows: int,
    length: int,
    recomputed: str,
    speed: float,
    gib: float | None = None,
    *,
    is_fp8: bool,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    is_async: bool = False,
) -> Job:
    """A job of torchtitan on H100."""
    plan = torchtitan_fp8 if is_fp8 else torchtitan
    return Job(
        *(f"Llama 3.1 {model}", source, GRAND_TETON, world_size, _TITAN_MODELS[model]),
        *(rows, length, recomputed, speed, gib),
        loss=loss_in_fp32,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        parallelize=plan if tensor_parallel > 1 else None,
        is_compiled=True,
        is_fp8=is_fp8,
        is_async=is_async,
        is_held_out=True,
    )


# torchtitan's config of the 70B model (llama3_70b.toml)
# has sequences of 8,192 tokens, as that of the 8B model.
PARALLEL_JOBS = [
    *kempner_jobs(),
    titan_job("8B", H100_REPORT, 8, 2, 8192, "selective", 8532, 76.8, is_fp8=True),
    titan_job("8B", H100_REPORT, 128, 2, 8192, "selective", 8380, 61.8, is_fp8=True),
    *(
        titan_job(
            *("8B", H100_REPORT, 8, 1, degree * 32768, "all", speed, gib),
            is_fp8=True,
            context_parallel=degree,
        )
        for degree, speed, gib in (
            (1, 3890, 83.9),
            (2, 2540, 84.2),
            (4, 1071, 84.0),
            (8, 548, 84.5),
        )
    ),
    *(
        titan_job(*job, speed, gib, is_fp8=is_fp8, tensor_parallel=8, is_async=is_async)
        for job, is_fp8, *of_both in (
            (("8B", TP_REPORT, 64, 12, 8192, "selective"), False, (4378, None), (4809.4, None)),
            (("8B", TP_REPORT, 64, 12, 8192, "selective"), True, (5078.1, None), (5570.1, None)),
            (("70B", TP_REPORT, 256, 16, 8192, "all"), False, (597.3, None), (652.4, None)),
            (("70B", TP_REPORT, 256, 16, 8192, "all"), True, (809.8, None), (942.4, None)),
            (("70B", H100_REPORT, 256, 16, 8192, "all"), True, (829, 71.9), (876, 67.6)),
        )
        for is_async, (speed, gib) in zip((False, True), of_both, strict=True)
    ),
]


def plan(job: Job) -> dict[str, Any]:
    """Plan the job at level 3 on one axis, or within each node."""
    batch = example_inputs(job.build(), (job.rows, job.length))
    if job.loss is not None:
        del batch["labels"]
    shards_loss = job.parallelize in _LOSS_PARALLEL
    apply = job.parallelize
    if apply is not None and job.is_async:
        apply = with_symmetric_memory(apply)
    with loss_parallel() if shards_loss else nullcontext(), asynchronous(job.is_async):
        found = fe.simulate(
            in_fp8(job.build, "fp8") if job.is_fp8 else job.build,
            job.world_size,
            batch=batch,
            machine=job.machine,
            mesh=job.mesh,
            strategy="optim_grads_params",
            checkpointing=CHECKPOINTING[job.recomputed],
            microbatches=job.microbatches,
            mp_policy=job.policy,
            known=OperationCache(),
            loss=job.loss,
            tensor_parallel=job.tensor_parallel,
            context_parallel=job.context_parallel,
            parallelize=apply,
            compile=job.is_compiled,
        )
    tokens = job.microbatches * job.rows * job.length * job.num_groups
    speed = tokens / job.world_size / found.seconds
    return {
        "job": job.name,
        "source": job.source,
        "machine": job.machine.name,
        "ranks": job.world_size,
        "rows": job.rows,
        "length": job.length,
        "microbatches": job.microbatches,
        "reductions": "bf16" if job.policy.reduce_dtype == torch.bfloat16 else "fp32",
        "recomputed": job.recomputed,
        "tensor parallel": job.tensor_parallel,
        "context parallel": job.context_parallel,
        "parallelism": job.parallelism,
        "compiled": job.is_compiled,
        "fp8": job.is_fp8,
        "asynchronous": job.is_async,
        "held out": job.is_held_out,
        "published tokens/s": job.tokens_per_second,
        "published GiB": job.gib,
        "planned tokens/s": speed,
        "planned over published": speed / job.tokens_per_second,
        "planned GiB": found.peak_bytes / 2**30,
        "exposed": found.exposed_seconds / found.seconds,
        "exposed of tensor parallel": found.exposed_by_lane.get("tensor parallel", 0.0)
        / found.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        help='jobs with this in their name, source, recomputation or parallelism ("CP 2", "fp8")',
    )
    only = parser.parse_args().only
    path = harness.RESULTS / "planner_published.json"
    known = json.loads(path.read_text())["results"] if only else []
    rows = []
    for job in [*JOBS, *PARALLEL_JOBS]:
        if any(only in text for text in (job.name, job.source, job.recomputed, job.parallelism)):
            rows.append(plan(job))
        else:
            rows += [each for each in known if _is_of(job, each)]
    columns = ["job", "GPU", "ranks", "batch", "recomputed", "parallel", "published", "planned"]
    harness.print_table(
        "tokens a second of one GPU, and GiB, published and planned",
        [*columns, "ratio", "exposed", "GiB published", "planned"],
        [_cells(row) for row in rows],
    )
    harness.write_results("planner_published", rows)


def _is_of(job: Job, row: dict[str, Any]) -> bool:
    mine = [job.name, job.source, job.machine.name, job.world_size, job.rows, job.length]
    mine += [job.recomputed, job.tensor_parallel, job.context_parallel, job.is_compiled, job.is_fp8]
    names = ["job", "source", "machine", "ranks", "rows", "length"]
    names += ["recomputed", "tensor parallel", "context parallel", "compiled", "fp8"]
    # Older rows have no key "asynchronous": none of their jobs was.
    return mine == [row[name] for name in names] and job.is_async == row.get("asynchronous", False)


def _cells(row: dict[str, Any]) -> list[str]:
    gib = row["published GiB"]
    return [
        row["job"],
        row["machine"].split()[2],  # "8 x H100 ..."
        str(row["ranks"]),
        f"{row['microbatches']} x {row['rows']} x {row['length']}",
        row["recomputed"],
        row["parallelism"],
        f"{row['published tokens/s']:,.0f}",
        f"{row['planned tokens/s']:,.0f}",
        f"{row['planned over published']:.2f}",
        f"{row['exposed']:.0%}",
        "" if gib is None else f"{gib:.1f}",
        f"{row['planned GiB']:.1f}",
    ]


if __name__ == "__main__":
    main()
