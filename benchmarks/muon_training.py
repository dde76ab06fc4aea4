"""Held-out loss with Muon beside AdamW: the example's GPT on two gloo ranks.

    python benchmarks/muon_training.py [--steps 400] [--seeds 2]

Model, text, order of the data and schedule are those of ``examples/train_gpt.py`` with
``--optimizer muon`` (matrices of blocks by ``torch.optim.Muon``, all else by AdamW) and without, at
level ``optim_grads_params``. Both are trained alternately, step by step on the same batches, from
the same weights, for each seed. The goal is a loss that is not above AdamW's by more than 0.5 %.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import harness
from _curves import Curves, compare, shown, train_alternately, verdict

# The example's files import each other as scripts do.
from settings import Settings
from train_gpt import Job, prepare

NAME = "muon_training"
NUM_RANKS = 2
MOST_LOSS = 1.005
OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}


def train(steps: int, seed: int) -> Curves:
    with tempfile.TemporaryDirectory() as folder:
        return train_alternately(
            {
                name: prepare(
                    Settings(steps=steps, seed=seed, optimizer=kind, out=Path(folder) / name), Job
                )
                for name, kind in OPTIMIZERS.items()
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    curves = [harness.run_ranks(train, NUM_RANKS, args.steps, seed) for seed in range(args.seeds)]
    record = compare(curves, dict.fromkeys(OPTIMIZERS, "AdamW"))
    rows = [
        [name, *shown(found), "" if name == "AdamW" else verdict(found["most"], MOST_LOSS)]
        for name, found in record.items()
    ]
    columns = ["optimizer", "held-out loss by seed", "x AdamW", f"at most {MOST_LOSS}"]
    harness.print_table(f"{args.steps} steps, {len(curves)} seeds", columns, rows)
    results = {"steps": args.steps, "held_out": record, "curves": curves}
    harness.write_results(NAME, results)


if __name__ == "__main__":
    main()
