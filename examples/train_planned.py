"""Plan, then train with the strategy that the planner takes.

    torchrun --nproc-per-node 4 examples/train_planned.py
    torchrun --nproc-per-node 4 examples/train_planned.py --memory 48      # MiB of a rank
    torchrun --nproc-per-node 8 examples/train_planned.py --machine h100

Every rank plans by itself, before there is a process group. The planner simulates the engine on a
machine, which is this one (measured first) or the one of ``--machine``. ``fe.shard`` compares the
plans of all ranks. Without torchrun there is one rank. Exits with 3 if nothing fits.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp_engine as fe
from corpus import BatchPlan, read_corpus
from fsdp_engine.planner.simulation.calibrate import calibrate
from gpt import GPT, GPTConfig
from train_gpt import start_processes

SEQUENCES = 4  # of a rank, in a step


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with the strategy that the planner takes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--memory", type=float, help="MiB that a rank may hold; None: all")
    parser.add_argument("--machine", help="preset, or file of `calibrate`; None: measure")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", type=Path, help="a folder of text; Python's library, if none")
    return parser


def plan(settings: argparse.Namespace, num_ranks: int) -> fe.StrategyPlan:
    """Run all strategies on the simulated machine."""
    machine = (
        calibrate(seconds=0.2) if settings.machine is None else fe.Machine.named(settings.machine)
    )
    tokens = torch.zeros(SEQUENCES, GPTConfig().sequence_length, dtype=torch.long)
    return fe.plan(
        lambda: GPT(GPTConfig()),
        (tokens, tokens),
        world_size=num_ranks,
        machine=machine,
        memory=None if settings.memory is None else settings.memory * 2**20,
    )


def train(settings: argparse.Namespace, planning: fe.StrategyPlan) -> list[float]:
    """The mean losses of all steps."""
    device = start_processes()
    torch.manual_seed(0)
    with device:
        model = GPT(GPTConfig())
    engine = fe.shard(model, strategy=planning)
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True))
    text = read_corpus(settings.data).train
    batches = BatchPlan(SEQUENCES * size, 1, size, model.config.sequence_length)
    losses = []
    for step in range(settings.steps):
        batch = batches.train_batch(text, step, 0, rank).to(device)
        loss = model(batch.tokens, batch.targets).loss
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
    if rank == 0:
        print(f"\ntrained with {engine.strategy}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        held = {kind: f"{n / 2**20:.1f} MiB" for kind, n in engine.memory_bytes().items() if n}
        print(f"the engine holds {held} on this rank")
    dist.destroy_process_group()
    return losses


def main(arguments: list[str] | None = None) -> None:
    """Plan, print the plan, and train."""
    settings = make_parser().parse_args(arguments)
    planning = plan(settings, int(os.environ.get("WORLD_SIZE", "1")))
    if os.environ.get("RANK", "0") == "0":
        print(planning, flush=True)
    if planning.chosen is None:
        sys.exit(3)
    train(settings, planning)


if __name__ == "__main__":
    main()
