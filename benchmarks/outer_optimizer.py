"""Held-out loss of replicas that exchange weights every so many steps, with the example's GPT.

    python benchmarks/outer_optimizer.py [--steps 300] [--seeds 1] [--replicas 2 4]

Model, text, order of the data and schedule are those of ``examples/train_gpt.py``. Each rank is a
replica. The reference sums gradients in each step. All runs train on the same tokens: a batch of 16
sequences a step is divided over the ranks. They are trained alternately, step by step, from the
same weights; held-out losses are those of the outer weights. Bytes are those that a replica sends
per element, averaged over steps, by formula: an all-reduce over R replicas sends 2 (R - 1) / R
times its elements.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from _curves import Curves, compare, shown, train_alternately

import fsdp_engine as fe

# The example's files import each other as scripts do.
from settings import Settings
from train_gpt import Job
from train_gpt import prepare as prepare_job

NAME = "outer_optimizer"
BASE = "each step"
STREAM = {"fragments": "units", "delay": 1, "bits": 4}
# By name: arguments of the extension.
WAYS: dict[str, dict[str, Any]] = {
    "every 20": {"every": 20},
    "every 50": {"every": 50},
    "every 20, 4 bits, by units": {"every": 20, **STREAM},
    "every 50, 4 bits, by units": {"every": 50, **STREAM},
}


@dataclass
class OuterJob(Job):
    """A job of one replica."""

    outer: Any = None

    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        found = super().train_step(step)
        self.outer.step(self.engine)
        return found

    def held_out_loss(self) -> float:
        """See the base class: that of the outer weights."""
        with self.outer.swapped(self.engine):
            return super().held_out_loss()


def prepare(settings: Settings, way: str, replicas: int) -> Job:
    """A job that exchanges weights in this way."""
    if way == BASE:
        return prepare_job(settings, Job)
    outer = fe.OuterOptimizer(**WAYS[way])
    with mock.patch.object(fe, "shard", partial(_shard_with, outer, replicas)):
        return prepare_job(settings, partial(OuterJob, outer=outer))  # type: ignore[arg-type]


def _shard_with(extension, replicas, model, mesh, *, extensions, shard=fe.shard, **given):  # type: ignore[no-untyped-def]
    del mesh
    options = fe.Options(min_unit_size=0)  # each block of this small model is a unit
    extensions = [*extensions, extension]
    return shard(model, (replicas, 1), extensions=extensions, options=options, **given)


def train(steps: int, seed: int, replicas: int) -> Curves:
    """Train in all ways."""
    with tempfile.TemporaryDirectory() as folder:
        settings = partial(Settings, steps=steps, seed=seed)
        return train_alternately(
            {way: prepare(settings(out=Path(folder) / way), way, replicas) for way in (BASE, *WAYS)}
        )


def bytes_a_step(way: str, replicas: int) -> float:
    """Bytes that a replica sends per element and step."""
    sent = 2 * (replicas - 1) / replicas
    if way == BASE:
        return 4 * sent
    bits = WAYS[way].get("bits")
    per_element = 4 if bits is None else bits / 8 + 4 / 256
    return float(per_element * sent / WAYS[way]["every"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    results: dict[str, Any] = {"steps": args.steps, "replicas": {}}
    for replicas in args.replicas:
        curves = [
            harness.run_ranks(train, replicas, args.steps, seed, replicas)
            for seed in range(args.seeds)
        ]
        record = compare(curves, dict.fromkeys((BASE, *WAYS), BASE))
        for way, found in record.items():
            found["bytes"] = bytes_a_step(way, replicas)
        rows = [[way, *shown(found), f"{found['bytes']:.4f}"] for way, found in record.items()]
        columns = ["exchange", "held-out loss by seed", "x each step", "bytes an element and step"]
        harness.print_table(f"{replicas} replicas, {args.steps} steps", columns, rows)
        results["replicas"][str(replicas)] = {"held_out": record, "curves": curves}
    harness.write_results(NAME, results)


if __name__ == "__main__":
    main()
