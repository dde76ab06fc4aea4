"""Train a small Llama on text by transformers' ``Trainer``, sharded by fsdp_engine.

    torchrun --nproc-per-node 2 examples/train_transformers.py --strategy optim_grads_params

Runs on CPU or CUDA, also by ``python`` alone; needs ``pip install "fsdp_engine[transformers]"``.
It evaluates on held-out text, writes some text, and saves the model to ``OUT/model`` as
``from_pretrained`` reads it. Started again with the same ``--out``, after a kill at any moment, it
resumes from its latest checkpoint, on any number of ranks that divides the batch.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from corpus import printable, read_corpus
from fsdp_engine.integrations.transformers import FSDPEngineTrainer
from settings import LEVELS


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level Llama by transformers' Trainer, sharded by fsdp_engine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--strategy", choices=LEVELS, default="optim_grads_params")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a step")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences of a rank at once")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints")
    parser.add_argument("--data", type=Path, help="a folder of text; Python's library, if none")
    parser.add_argument("--out", type=Path, default=Path("runs/train_transformers"))
    return parser


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Text cut into sequences of equal length, every byte a token."""

    def __init__(self, text: torch.Tensor, length: int, most: int | None = None) -> None:
        count = text.numel() // length
        self.rows = text[: count * length].view(count, length)[:most]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.rows[index].long()
        return {"input_ids": tokens, "labels": tokens}


def build_model(settings: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights. The engine broadcasts those of rank 0."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=settings.width,
        intermediate_size=3 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=4 * settings.sequence_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def training_arguments(settings: argparse.Namespace) -> TrainingArguments:
    """Arguments with the same global batch on any number of ranks, by gradient accumulation."""
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    at_once = settings.microbatch * num_ranks
    if settings.batch_size % at_once:
        raise ValueError(
            f"batch-size: expected a multiple of {at_once}, {settings.microbatch} sequences on "
            f"each of {num_ranks} ranks; found {settings.batch_size}"
        )
    return TrainingArguments(
        output_dir=str(settings.out),
        use_cpu=not torch.cuda.is_available(),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.microbatch,
        per_device_eval_batch_size=settings.microbatch,
        gradient_accumulation_steps=settings.batch_size // at_once,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, settings.steps // 10),
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=settings.bf16,
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        save_total_limit=settings.keep,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )


def write_text(trainer: FSDPEngineTrainer, start: torch.Tensor, count: int) -> str:
    """What the model adds to the start of a text; the same on every rank."""
    torch.manual_seed(0)
    prompt = start.long()[None].to(trainer.args.device)
    with trainer.engine.unsharded():  # otherwise each generated byte gathers all weights
        text: Any = trainer.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=True,
            temperature=0.7,
            synced_gpus=False,
        )
    return printable(bytes(text[0].tolist()))


def run(settings: argparse.Namespace) -> None:
    """The whole job, on one rank."""
    corpus = read_corpus(settings.data)
    trainer = FSDPEngineTrainer(
        model=build_model(settings),
        args=training_arguments(settings),
        train_dataset=Sequences(corpus.train, settings.sequence_length),
        eval_dataset=Sequences(corpus.held_out, settings.sequence_length, most=64),
        shard={"strategy": settings.strategy},
    )
    say = print if trainer.is_world_process_zero() else lambda *_: None
    say(f"text: {corpus}")
    say(trainer.engine.describe())
    latest = get_last_checkpoint(settings.out) if settings.out.is_dir() else None
    if latest is not None:
        say(f"continues from {latest}")
    trainer.train(resume_from_checkpoint=latest)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(settings.out / "model"))
    sample = write_text(trainer, corpus.held_out[: settings.sequence_length // 2], 100)
    say(f"--- sample ---\n{sample}\n--------------")
    say(f"held-out text, nats a byte: {loss:.4f}; model in {settings.out / 'model'}")
    if trainer.is_world_process_zero():
        metrics = {"held_out": loss, "log": trainer.state.log_history}
        (settings.out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(make_parser().parse_args())
