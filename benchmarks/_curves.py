"""Held-out losses of several jobs of the example, trained alternately on the same batches."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

# The example's files import each other as scripts do.
from train_gpt import Job

# (step, held-out loss) of each evaluation, by name of the job.
Curves = dict[str, list[tuple[int, float]]]


def train_alternately(jobs: Mapping[str, Job]) -> Curves:
    """Train all jobs, which have the same settings, and close their checkpointers."""
    curves: Curves = {name: [] for name in jobs}
    settings = next(iter(jobs.values())).settings
    steps, every = settings.steps, settings.eval_every // 2
    for step in range(steps):
        for job in jobs.values():
            job.train_step(step)
        if (step + 1) % every == 0 or step + 1 == steps:
            for name, job in jobs.items():
                curves[name].append((step + 1, job.held_out_loss()))
            if dist.get_rank() == 0:
                found = ", ".join(f"{name} {curves[name][-1][1]:.4f}" for name in curves)
                print(f"seed {settings.seed}, step {step + 1}: {found}", flush=True)
    for job in jobs.values():
        job.checkpointer.close()
    return curves


def compare(curves: Sequence[Curves], base_of: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Final losses by name, and their ratios to those of another job under the same seed.

    Args:
        curves: The curves of each seed.
        base_of: The name of the job to compare with, by name.
    """
    record: dict[str, dict[str, Any]] = {}
    for name, base in base_of.items():
        losses = [curve[name][-1][1] for curve in curves]
        ratios = [loss / curve[base][-1][1] for loss, curve in zip(losses, curves, strict=True)]
        record[name] = {
            "losses": losses,
            "ratios": ratios,
            "median": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    return record


def shown(found: Mapping[str, Any]) -> list[str]:
    """The losses of one job, and their ratios, as cells of a table."""
    return [
        ", ".join(f"{loss:.4f}" for loss in found["losses"]),
        f"{found['median']:.4f} ({found['least']:.4f}-{found['most']:.4f})",
    ]


def verdict(value: float, limit: float) -> str:
    """Whether a goal is met."""
    return "met" if value <= limit else "missed"
