"""The arguments of ``train_gpt.py``: one frozen dataclass, its fields are the command line."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt import CHECKPOINTING, GPTConfig

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FP8_GATHERS = ("none", "tensor", "row", "block")


def option(default: Any, help: str, **argument: Any) -> Any:
    """A field with what ``argparse`` needs to know about it."""
    return dataclasses.field(default=default, metadata={"help": help, **argument})


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on.

    Raises:
        ValueError: a number is out of its range, ``mesh`` is not like ``4`` or ``2x2``, or there
            is no model of these sizes.
    """

    # What to train on, and how long.
    data: Path | None = option(None, "folder of text (default: source of the standard library)")
    steps: int = option(1800, "optimizer steps of the whole schedule")
    stop_at: int | None = option(None, "end after this step, as an interrupted run would")
    batch_size: int = option(16, "sequences of a microbatch, over all ranks")
    grad_accumulation: int = option(1, "microbatches of a step")
    sequence_length: int = option(128, "bytes of a sequence")
    seed: int = option(0, "of the weights, of the order of the data and of the sample")

    # The model.
    layers: int = option(4, "number of blocks")
    width: int = option(128, "of the residual stream")
    heads: int = option(4, "attention heads")

    # The optimizer.
    optimizer: str = option(
        "adamw",
        "of matrices within blocks; all else is stepped by AdamW",
        choices=("adamw", "muon"),
    )
    lr: float = option(3e-3, "peak learning rate")
    warmup: int = option(50, "steps of linear warm-up; a cosine to a tenth follows")
    weight_decay: float = option(0.1, "on matrices")
    clip: float = option(1.0, "largest norm of the gradient")

    # The engine.
    strategy: str = option("optim_grads_params", "sharding on the inner axis", choices=LEVELS)
    outer_strategy: str = option("no_shard", "sharding on the outer axis", choices=LEVELS)
    mesh: str | None = option(None, 'ranks: "4", or outer x inner as in "2x2" (default: one axis)')
    dtype: str = option(
        "fp32", "of parameters in use, and of activations", choices=("fp32", "bf16")
    )
    fp8_gather: str = option(
        "none",
        "gather matrices in fp8, with a scale per tensor, row or 128 x 128 block",
        choices=FP8_GATHERS,
    )
    activation_checkpointing: str = option(
        "none", "recompute each block in backward", choices=CHECKPOINTING
    )
    compile: bool = option(False, "torch.compile each block")
    optimizer_state: str = option(
        "device", "memory in which it is kept between steps", choices=("device", "host", "disk")
    )
    state_folder: Path | None = option(None, "folder on a local disk, with --optimizer-state disk")
    meta_init: bool = option(False, "build the model without memory; the engine fills its shards")

    # What it leaves behind.
    out: Path = option(Path("runs/train_gpt"), "folder for metrics.json, curves.png, checkpoints")
    save: Path | None = option(
        None, "directory of checkpoints (default: OUT/checkpoints); an existing run is resumed"
    )
    save_every: int = option(600, "steps between checkpoints; there is one at the end, too")
    async_save: bool = option(False, "continue training while a checkpoint is written")
    local_save: Path | None = option(
        None, "directory of this node, such as /dev/shm/run, for frequent checkpoints in memory"
    )
    local_save_every: int = option(20, "steps between checkpoints in memory")
    resume: Path | None = option(
        None, "directory of checkpoints of another run to start from, on any ranks and strategy"
    )
    eval_every: int = option(200, "steps between evaluations on held-out text")
    eval_sequences: int = option(256, "sequences of an evaluation, in whole batches")
    sample: bool = option(True, "end with a sample of generated text")
    sample_bytes: int = option(400, "length of the sample")
    prompt: str | None = option(None, "start of the sample (default: start of the held-out text)")

    def __post_init__(self) -> None:
        for field in ("steps", "batch_size", "grad_accumulation", "sequence_length", "eval_every"):
            self._check(field, at_least=1)
        for field in ("layers", "width", "heads", "eval_sequences", "sample_bytes", "save_every"):
            self._check(field, at_least=1)
        self._check("local_save_every", at_least=1)
        self._check("warmup", at_least=0)
        if self.stop_at is not None:
            self._check("stop_at", at_least=1)
        if self.optimizer_state == "disk" and self.state_folder is None:
            raise ValueError("state_folder: expected a folder for state on a disk; found None")
        _ = self.mesh_shape, self.model_config  # these raise if invalid

    def _check(self, field: str, at_least: int) -> None:
        found = getattr(self, field)
        if found < at_least:
            raise ValueError(f"{field}: expected at least {at_least}; found {found}")

    @property
    def mesh_shape(self) -> tuple[int, ...] | None:
        """``(inner,)`` or ``(outer, inner)``; ``None``: all ranks on one axis."""
        if self.mesh is None:
            return None
        sizes = self.mesh.split("x")
        if len(sizes) > 2 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f'mesh: expected like "4" or "2x2"; found {self.mesh!r}')
        return tuple(int(size) for size in sizes)

    @property
    def model_config(self) -> GPTConfig:
        return GPTConfig(
            sequence_length=self.sequence_length,
            num_layers=self.layers,
            width=self.width,
            num_heads=self.heads,
            checkpointing=self.activation_checkpointing,
        )

    @property
    def precision(self) -> str:
        """The dtypes of parameters, for display."""
        if self.fp8_gather == "none":
            return self.dtype
        return f"{self.dtype}, gathered as fp8 by {self.fp8_gather}"

    @property
    def last_step(self) -> int:
        """The step after which this run ends."""
        return self.steps if self.stop_at is None else min(self.steps, self.stop_at)

    @property
    def num_eval_batches(self) -> int:
        """Batches of an evaluation."""
        return -(-self.eval_sequences // self.batch_size)

    @property
    def save_folder(self) -> Path:
        return self.out / "checkpoints" if self.save is None else self.save

    def as_dict(self) -> dict[str, Any]:
        """The settings as values that JSON can store."""
        values = dataclasses.asdict(self)
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


# Field annotations are strings here; these are the types that the command line reads.
_READERS = {"int": int, "float": float, "str": str, "Path": Path}


def parse_settings(arguments: list[str] | None = None) -> Settings:
    """Settings from the command line; exits with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py", description="Train a byte-level GPT on real text, under torchrun."
    )
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        described = dict(field.metadata)
        if field.type == "bool":
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=field.default, **described)
            continue
        if field.default is not None:
            described["help"] += f" (default: {field.default})"
        reader = _READERS[str(field.type).removesuffix(" | None")]
        parser.add_argument(flag, type=reader, default=field.default, **described)
    try:
        return Settings(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
