"""Train a byte-level GPT with Lightning's Trainer, sharded by fsdp_engine.

    python examples/train_lightning.py --devices 2
    torchrun --nproc-per-node 2 examples/train_lightning.py

Runs on CPU or CUDA. It leaves ``losses.json`` and a checkpoint in ``--out``. Started again, after a
kill or with more ``--steps``, it resumes from there, on any number of ranks and with any strategy,
along the same curve.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from corpus import Batch, BatchPlan, Corpus, read_corpus
from fsdp_engine.integrations.lightning import FSDPEngineStrategy
from gpt import GPT, GPTConfig
from settings import LEVELS

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with Lightning, by itself or under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of text (without: source of the standard library)")
    add("--steps", type=int, default=600, help="optimizer steps of the whole schedule")
    add("--batch-size", type=int, default=16, help="sequences of a microbatch, over all ranks")
    add("--grad-accumulation", type=int, default=1, help="microbatches of a step")
    add("--sequence-length", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=4, help="number of blocks")
    add("--width", type=int, default=128, help="of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--devices", default="auto", help="ranks on this machine; ignored under torchrun")
    add("--accelerator", default="auto", help="cpu, gpu or auto")
    add("--precision", choices=PRECISIONS, default="32-true", help="of Lightning")
    add("--strategy", choices=LEVELS, default="optim_grads_params", help="of fsdp_engine")
    add("--eval-every", type=int, default=100, help="steps between evaluations on held-out text")
    add("--eval-sequences", type=int, default=128, help="of an evaluation, in whole batches")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--out", type=Path, default=Path("runs/lightning"), help="output folder")
    return parser


class TrainBatches:
    """Iterates over this rank's part of all microbatches of a run. Lightning saves the position in
    checkpoints, so a run that is resumed in the middle of an epoch continues with the next batch,
    on any number of ranks."""

    def __init__(self, options: argparse.Namespace, plan: BatchPlan, text: Tensor, rank: int):
        self.options, self.plan, self.text, self.rank = options, plan, text, rank
        self.done = 0

    def __len__(self) -> int:
        return int(self.options.steps * self.plan.num_microbatches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.done < len(self):
            step, microbatch = divmod(self.done, self.plan.num_microbatches)
            self.done += 1
            yield _pair(self.plan.train_batch(self.text, step, microbatch, self.rank))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: the number of microbatches done."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in ``state``."""
        self.done = state["done"]


class HeldOutBatches:
    """This rank's part of the sequences of an evaluation."""

    def __init__(self, options: argparse.Namespace, plan: BatchPlan, text: Tensor, rank: int):
        self.num: int = -(-options.eval_sequences // options.batch_size)
        self.plan, self.text, self.rank = plan, text, rank

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.num):
            yield _pair(self.plan.held_out_batch(self.text, self.num, index, self.rank))


def _pair(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.tokens, batch.targets


class LitGPT(LightningModule):
    """The GPT, its data and its optimizer, as Lightning wants them."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus) -> None:
        super().__init__()
        self.options, self.corpus = options, corpus
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        """Build the model on the meta device. The engine initializes its shards."""
        if self.gpt is None:
            torch.manual_seed(self.options.seed)
            sizes = GPTConfig(
                sequence_length=self.options.sequence_length,
                num_layers=self.options.layers,
                width=self.options.width,
                num_heads=self.options.heads,
            )
            with torch.device("meta"):
                self.gpt = GPT(sizes)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of this rank's part, in nats a byte."""
        assert self.gpt is not None
        loss: Tensor | None = self.gpt(*batch).loss
        assert loss is not None
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a microbatch."""
        loss = self.loss(batch)
        self.log("loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds to the held-out loss."""
        loss = self.loss(batch)
        self.log("held_out", loss, prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        """AdamW, with warm-up and a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.options.lr, betas=(0.9, 0.98))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> TrainBatches:
        """Each rank's part of the text to train on."""
        return TrainBatches(self.options, self._plan(), self.corpus.train, self.global_rank)

    def val_dataloader(self) -> HeldOutBatches:
        """Each rank's part of the held-out text."""
        return HeldOutBatches(self.options, self._plan(), self.corpus.held_out, self.global_rank)

    def _rate(self, step: int) -> float:
        warmup: int = min(50, self.options.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.options.steps - warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    def _plan(self) -> BatchPlan:
        options = self.options
        return BatchPlan(
            options.batch_size,
            options.grad_accumulation,
            self.trainer.world_size,
            options.sequence_length,
            options.seed,
        )


class Losses(Callback):
    """Mean losses of steps over all ranks, and held-out losses. Checkpoints contain them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.steps: list[float] = []
        self.held_out: dict[str, float] = {}
        self._sum = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the microbatch's loss, which Lightning has divided by the microbatches of a step."""
        self._sum += float(trainer.strategy.reduce(outputs["loss"].detach().clone()))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps.append(self._sum)
            self._sum = 0.0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the loss of an evaluation."""
        self.held_out[str(trainer.global_step)] = float(trainer.callback_metrics["held_out"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the losses to the file."""
        if trainer.is_global_zero:
            text = json.dumps({"steps": self.steps, "held_out": self.held_out}, indent=1)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(text + "\n", encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        """Returns all losses so far."""
        return {"steps": self.steps, "held_out": self.held_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the losses of a checkpoint."""
        self.steps, self.held_out = state_dict["steps"], state_dict["held_out"]


def places(options: argparse.Namespace) -> dict[str, Any]:
    """The Trainer's numbers of devices and nodes, for ranks of torchrun or of Lightning."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return {"devices": options.devices}
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": here, "num_nodes": int(os.environ["WORLD_SIZE"]) // here}


def run(options: argparse.Namespace) -> None:
    """The whole job, on one rank."""
    # The folder exists when a run is resumed.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")
    module = LitGPT(options, read_corpus(options.data))
    folder = options.out / "checkpoints"
    # The checkpoint is replaced atomically, so a kill leaves the previous one.
    saver = ModelCheckpoint(
        folder, save_top_k=0, save_last=True, every_n_train_steps=options.save_every
    )
    losses = Losses(options.out / "losses.json")
    strategy = FSDPEngineStrategy(options.strategy)
    trainer = Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        precision=options.precision,
        max_epochs=1,
        max_steps=options.steps,
        accumulate_grad_batches=options.grad_accumulation,
        gradient_clip_val=options.clip,
        val_check_interval=min(options.eval_every, options.steps) * options.grad_accumulation,
        num_sanity_val_steps=0,
        callbacks=[saver, losses],
        logger=False,
        default_root_dir=options.out,
        **places(options),
    )
    last = folder / "last.ckpt"
    trainer.fit(module, ckpt_path=last if last.exists() else None)
    if trainer.global_step % options.save_every:
        trainer.save_checkpoint(last)
    if trainer.is_global_zero:
        print(strategy.engine.describe())
        print(f"trained to step {trainer.global_step}; checkpoint in {last}")
        print(f"loss {losses.steps[-1]:.4f}, held-out losses {losses.held_out}, in {losses.file}")


if __name__ == "__main__":
    run(make_parser().parse_args())
