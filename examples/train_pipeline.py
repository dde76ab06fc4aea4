"""Pipeline x data parallelism: torch's schedules, and stages that fsdp_engine shards.

    torchrun --nproc-per-node 4 examples/train_pipeline.py --pipeline 2
    python examples/train_pipeline.py --out runs/one    # the same losses, from one process

A byte-level GPT is cut into stages. The ranks of a pipeline hold one or two of them each, and the
ranks that hold the same stages share their parameters, gradients and optimizer state at any
sharding level. Any number of ranks sees the same global batches and begins with the same weights,
so the losses in ``OUT/losses.csv`` can be compared. Runs on CPU, or on CUDA if there is a device
for each rank.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from corpus import Batch, BatchPlan, Corpus, read_corpus
from fsdp_engine.pipelining import PipelineStage
from gpt import GPT, GPTConfig
from megatron_style_loop import LossLog, start_processes
from settings import LEVELS

# Stages of rank r: r (SINGLE); r and r + ranks (LOOPED); r and 2 * ranks - 1 - r (V_SHAPED).
SINGLE, LOOPED = ("GPipe", "1F1B"), ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble",)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT, pipeline x data parallel, under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of text (without: source of the standard library)")
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="sequences of a microbatch, over all ranks")
    add("--microbatches", type=int, default=4, help="of a step")
    add("--sequence-length", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=4, help="number of blocks")
    add("--width", type=int, default=128, help="of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--pipeline", type=int, default=1, help="ranks of a pipeline")
    add("--schedule", choices=SINGLE + LOOPED + V_SHAPED, default="1F1B", help="of torch")
    add("--strategy", choices=LEVELS, default="optim_grads", help="over data-parallel ranks")
    add("--out", type=Path, default=Path("runs/pipeline"), help="folder for losses.csv")
    return parser


class Stage(nn.Module):
    """Consecutive blocks of a GPT. The first stage embeds tokens, the last one has the head.

    Parameters keep the names that they have in the whole model.
    """

    def __init__(self, whole: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        if self.is_first:
            self.token_embedding = whole.token_embedding
            self.position_embedding = whole.position_embedding
        count = len(whole.blocks)
        mine = range(count * index // num_stages, count * (index + 1) // num_stages)
        self.blocks = nn.ModuleDict({str(each): whole.blocks[each] for each in mine})
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[batch, seq]`` (first stage) or activations ``[batch, seq, width]`` to
        activations or logits ``[batch, seq, vocab]`` (last stage)."""
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(positions)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens, in nats."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass
class Job:
    """What a training run needs, on one rank.

    Attributes:
        engines: Engines of this rank's stages.
        has_first, has_last: Whether this rank has the pipeline's first or last stage.
    """

    options: argparse.Namespace
    corpus: Corpus
    plan: BatchPlan
    device: torch.device
    schedule: Any
    engines: list[fe.Engine]
    optimizer: torch.optim.Optimizer
    has_first: bool
    has_last: bool

    @property
    def data_rank(self) -> int:
        """This rank's place among those that hold the same stages."""
        return self.engines[0].mesh.rank

    def train_step(self, step: int) -> float:
        """One optimizer step; returns the mean loss of all tokens, in nats a byte."""
        batch = self.batch(step)
        losses: list[Tensor] = []
        args = [batch.tokens] if self.has_first else []
        known = {"target": batch.targets, "losses": losses} if self.has_last else {}
        self.schedule.step(*args, return_outputs=False, **known)
        self.optimizer.step()
        self.optimizer.zero_grad()
        num_data = self.engines[0].mesh.size
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:  # empty unless this rank has the last stage
            total += loss.detach() / len(losses) / num_data
        dist.all_reduce(total)
        return float(total)

    def batch(self, step: int) -> Batch:
        """All microbatches of this rank's pipeline, one after the other."""
        count = self.options.microbatches
        parts = [
            self.plan.train_batch(self.corpus.train, step, index, self.data_rank)
            for index in range(count)
        ]
        tokens = torch.cat([part.tokens for part in parts])
        targets = torch.cat([part.targets for part in parts])
        return Batch(tokens, targets).to(self.device)


def stage_indices(schedule: str, rank: int, num_ranks: int) -> list[int]:
    """Which stages a rank of the pipeline holds."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank if schedule in V_SHAPED else rank + num_ranks]


def prepare(options: argparse.Namespace) -> Job:
    """Read the text, build and shard this rank's stages, and build their optimizer.

    Raises:
        ValueError: sizes that do not go together.
    """
    device = start_processes()
    num_ranks = options.pipeline
    if num_ranks < 1 or dist.get_world_size() % num_ranks:
        raise ValueError(
            f"pipeline: expected a divisor of the {dist.get_world_size()} ranks; found {num_ranks}"
        )
    num_data = dist.get_world_size() // num_ranks
    plan = BatchPlan(
        options.batch_size, options.microbatches, num_data, options.sequence_length, options.seed
    )
    mesh = init_device_mesh(device.type, (num_ranks, num_data), mesh_dim_names=("pp", "dp"))
    group = mesh.get_group("pp")

    sizes = GPTConfig(
        sequence_length=options.sequence_length,
        num_layers=options.layers,
        width=options.width,
        num_heads=options.heads,
    )
    indices = stage_indices(options.schedule, mesh.get_local_rank("pp"), num_ranks)
    num_stages = num_ranks * len(indices)
    torch.manual_seed(options.seed)
    whole = GPT(sizes)
    modules = [Stage(whole, index, num_stages).to(device) for index in indices]
    engines = [fe.shard(module, mesh["dp"], options.strategy) for module in modules]
    stages = [
        PipelineStage(module, index, num_stages, device, group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule = getattr(pipelining, f"Schedule{options.schedule}")(
        stages if len(stages) > 1 else stages[0], options.microbatches, loss_fn=cross_entropy
    )
    params = [param for module in modules for param in module.parameters()]
    optimizer = fe.shard_optimizer(torch.optim.AdamW(params, lr=options.lr))
    corpus = read_corpus(options.data)
    has_first, has_last = 0 in indices, num_stages - 1 in indices
    return Job(options, corpus, plan, device, schedule, engines, optimizer, has_first, has_last)


def run(options: argparse.Namespace) -> None:
    """The whole job, on one rank."""
    job = prepare(options)
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(f"text: {job.corpus}")
    say(f"ranks: {options.pipeline} pipeline x {job.engines[0].mesh.size} data")
    for engine in job.engines:
        say(engine.describe())
    log = LossLog(options.out / "losses.csv", 0)
    for step in range(options.steps):
        loss = job.train_step(step)
        done = step + 1
        if dist.get_rank() == 0:
            log.append(done, loss)
            if done % 10 == 0 or done == options.steps:
                print(f"step {done:5d}   loss {loss:.4f}", flush=True)
    say(f"losses in {options.out / 'losses.csv'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(make_parser().parse_args())
