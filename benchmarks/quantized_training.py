"""Held-out loss with gradients that are summed in few bits: the example's GPT on two gloo ranks.

    python benchmarks/quantized_training.py [--steps 150] [--seeds 3]

Model, text, order of the data and schedule are those of ``examples/train_gpt.py`` at level
``optim_grads_params``, with AdamW and with Muon (``--optimizer muon``). Sums are in fp32, or
``fe.QuantizedReduction(axis="inner")`` sends 8 or 4 bits, with and without error feedback. All are
trained alternately, step by step on the same batches, from the same weights, for each seed. The
goals are a loss that is not above that of fp32 by more than 0.3 % with 8 bits, and by more than 1 %
with 4 bits and feedback. A rank's own summand is not quantized: on two ranks, half of each sum.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import harness
from _curves import Curves, compare, shown, train_alternately, verdict

import fsdp_engine as fe

# The example's files import each other as scripts do.
from settings import Settings
from train_gpt import Job
from train_gpt import prepare as prepare_job

NAME = "quantized_training"
NUM_RANKS = 2
OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}
BASE = "fp32"
# By name: bits, error feedback, and the goal for the ratio of the loss to that of fp32.
WAYS = {
    "8 bits": (8, True, 1.003),
    "8 bits, no feedback": (8, False, None),
    "4 bits": (4, True, 1.01),
    "4 bits, no feedback": (4, False, None),
}


def prepare(settings: Settings, way: str) -> Job:
    """A job whose gradients are summed in this way."""
    if way == BASE:
        return prepare_job(settings, Job)
    bits, feedback, _ = WAYS[way]
    reduction = fe.QuantizedReduction(bits, axis="inner", error_feedback=feedback)
    with mock.patch.object(fe, "shard", partial(_shard_with, reduction)):
        return prepare_job(settings, Job)


def _shard_with(extension, model, mesh, *, extensions, shard=fe.shard, **given):  # type: ignore[no-untyped-def]
    return shard(model, mesh, extensions=[*extensions, extension], **given)


def train(steps: int, seed: int) -> Curves:
    found: Curves = {}
    for name, kind in OPTIMIZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            settings = partial(Settings, steps=steps, seed=seed, optimizer=kind)
            found |= train_alternately(
                {
                    f"{name}, {way}": prepare(settings(out=Path(folder) / way), way)
                    for way in (BASE, *WAYS)
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    curves = [harness.run_ranks(train, NUM_RANKS, args.steps, seed) for seed in range(args.seeds)]
    bases = {f"{name}, {way}": f"{name}, {BASE}" for name in OPTIMIZERS for way in (BASE, *WAYS)}
    record = compare(curves, bases)
    rows = []
    for name, found in record.items():
        limit = WAYS.get(name.split(", ", 1)[1], (0, False, None))[2]
        goal = "" if limit is None else f"{verdict(found['most'], limit)} (at most {limit})"
        rows.append([name, *shown(found), goal])
    columns = ["optimizer, sums", "held-out loss by seed", "x fp32", "goal"]
    harness.print_table(f"{args.steps} steps, {len(curves)} seeds", columns, rows)
    results = {"steps": args.steps, "held_out": record, "curves": curves}
    harness.write_results(NAME, results)


if __name__ == "__main__":
    main()
