r"""transformers' ``Trainer`` with optimizers of torchao and bitsandbytes, selected by name in the
training arguments.

::

    torchrun --nproc-per-node 2 tests/programs/train_low_bit.py --out FILE --kinds plain optim

Writes the logs of the trainers, and of trainers that resume from a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.programs.packages import TORCHTITAN

# For the whole process: transformers looks for the package, and for its version.
sys.path.append(str(TORCHTITAN))

import torch
import torch.distributed as dist

from tests.integrations.trainer_scene import arguments, figures, llama, shared_folder, trainer

OPTIMIZERS = ("adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit")
# Weights of 16,384 elements, which are quantised.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SAVED = 3


def train(kind: str, optim: str) -> dict[str, Any]:
    """The log of a trainer and of one that resumes; the optimizer's class; the number of quantised
    tensors in its state."""
    folder = shared_folder()
    changes: dict[str, Any] = {"optim": optim, "save_strategy": "steps"}
    changes |= {"save_steps": SAVED, "learning_rate": 1e-3}
    made = trainer(kind, arguments(folder, **changes), llama(**SIZES))
    made.train()
    resumed = trainer(kind, arguments(folder, **changes), llama(seed=1, **SIZES))
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    optimizer = made.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    values = [value for state in optimizer.state.values() for value in state.values()]
    locals_ = [getattr(value, "_local_tensor", value) for value in values]
    return {
        "logged": _rows(figures(made)),
        "resumed": _rows(figures(resumed)),
        "optimizer": type(optimizer).__name__,
        "num_quantized": sum(map(_is_quantized, locals_)),
    }


def _is_quantized(value: Any) -> bool:
    is_of_torchao = type(value).__name__.startswith("OptimState")
    return is_of_torchao or getattr(value, "dtype", None) is torch.uint8


def _rows(logged: dict[tuple[int, str], float]) -> dict[str, float]:
    return {f"{step} {name}": value for (step, name), value in logged.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", required=True, help='"plain", or levels')
    given = parser.parse_args()
    dist.init_process_group("gloo")
    with torch.compiler.set_stance("force_eager"):
        found = {optim: {kind: train(kind, optim) for kind in given.kinds} for optim in OPTIMIZERS}
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
