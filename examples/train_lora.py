"""Train LoRA adapters over a frozen base model, sharded by fsdp_engine.

    torchrun --nproc-per-node 2 examples/train_lora.py --out runs/train_lora

The base is a small Llama that the script trains first and saves in ``OUT/base``, as transformers
saves it, in bf16. Then the model with PEFT's adapters is sharded, and the saved base is streamed
into the shards. Checkpoints hold the adapters alone. Restarted, after a kill or with more
``--steps``, it resumes from the latest one, on any number of ranks. At the end the adapter is saved
to ``OUT/adapter`` in PEFT's format. Runs on CPU or CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fsdp_engine as fe
from corpus import VOCAB_SIZE, Batch, BatchPlan, Corpus, read_corpus
from settings import LEVELS
from train_gpt import mean_over_ranks, start_processes

# Bytes of an adapter's element at rest: weight, gradient and AdamW's two moments, all fp32.
ADAPTER_BYTES = 4 + 4 + 8


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train LoRA adapters over a frozen base, under torchrun or by itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="of the adapters")
    parser.add_argument("--base-steps", type=int, default=100, help="of the base, on one rank")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of all ranks")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters' matrices")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--strategy", choices=LEVELS, default="optim_grads_params")
    parser.add_argument("--fp8-base", action="store_true", help="gather the base in fp8")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="by transformers")
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a folder of text; Python's library, if none")
    parser.add_argument("--out", type=Path, default=Path("runs/train_lora"))
    return parser


@dataclass
class History:
    """Mean losses over all ranks, in nats a byte, of each step; held-out losses by step."""

    train: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Returns the losses, for a checkpoint."""
        return {"train": self.train, "held_out": self.held_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the losses of a checkpoint."""
        self.train, self.held_out = state["train"], state["held_out"]


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the next bytes."""
    logits = model(input_ids=batch.tokens, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())


def make_base(settings: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
    """Train a base model on this rank and save it. If the folder exists, it is complete."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=settings.width,
        intermediate_size=2 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=settings.sequence_length,
    )
    with device:
        model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = BatchPlan(settings.batch_size, 1, 1, settings.sequence_length, settings.seed + 1)
    for step in range(settings.base_steps):
        loss_of(model, plan.train_batch(corpus.train, step, 0, 0).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    made = settings.out / f"base.{os.getpid()}"
    model.to(torch.bfloat16).save_pretrained(made)
    shutil.rmtree(settings.out / "base", ignore_errors=True)
    os.replace(made, settings.out / "base")


def build_model(settings: argparse.Namespace) -> PeftModel:
    """The base with adapters, without values."""
    config = AutoConfig.from_pretrained(settings.out / "base")
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.name_or_path = str(settings.out / "base")  # PEFT writes it into the adapter's config
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def memory(
    model: torch.nn.Module, settings: argparse.Namespace, num_ranks: int
) -> tuple[list[str], int]:
    """Compute a rank's bytes at rest by a formula and by ``fe.estimate``.

    Args:
        model: The model, before it is sharded.

    Returns:
        Lines to print, and the bytes of ``fe.estimate``.
    """
    frozen = [each for each in model.parameters() if not each.requires_grad]
    base = sum(each.numel() * each.element_size() for each in frozen)
    elements = sum(each.numel() for each in model.parameters() if each.requires_grad)
    found = fe.estimate(
        model,
        world_size=num_ranks,
        strategy=settings.strategy,
        extensions=extensions(settings),
        optimizer_bytes_per_element=8,
    )
    at_rest = found.weight_bytes + found.grad_bytes + found.optimizer_bytes
    lines = [f"base {base:,} bytes, frozen; adapters of {elements:,} elements"]
    if settings.strategy == "optim_grads_params" and not settings.fp8_base:
        formula = (base + ADAPTER_BYTES * elements) / num_ranks
        lines.append(f"formula: (base + {ADAPTER_BYTES} x adapters) / ranks = {formula:,.0f} bytes")
    lines.append(f"fe.estimate: {at_rest:,} bytes, padding included")
    return lines, at_rest


def extensions(settings: argparse.Namespace) -> list[fe.Float8]:
    """Returns fp8 gathers for the base. Adapters are excluded: they are small, and trained."""
    return [fe.Float8(exclude=("**.lora_A.**", "**.lora_B.**"))] if settings.fp8_base else []


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on this rank."""
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    return sum(getattr(each, "local", each).nbytes for each in tensors)


@dataclass
class Job:
    """A run, on one rank."""

    settings: argparse.Namespace
    device: torch.device
    corpus: Corpus
    plan: BatchPlan
    model: PeftModel
    engine: fe.Engine
    optimizer: torch.optim.Optimizer
    memory: list[str]
    expected_at_rest: int
    history: History = field(default_factory=History)
    at_rest: int = 0  # bytes of the engine and the optimizer, after its step

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean over held-out sequences, which are divided over the ranks."""
        self.model.eval()
        num, text = self.settings.eval_batches, self.corpus.held_out
        batches = [self.plan.held_out_batch(text, num, i, dist.get_rank()) for i in range(num)]
        losses = [loss_of(self.model, batch.to(self.device)) for batch in batches]
        self.model.train()
        return float(mean_over_ranks(torch.stack(losses).mean()))

    def train_step(self, step: int) -> float:
        """One step; returns the mean loss of all ranks."""
        batch = self.plan.train_batch(self.corpus.train, step, 0, dist.get_rank())
        loss = loss_of(self.model, batch.to(self.device))
        loss.backward()
        self.engine.clip_grad_norm_(self.settings.clip)
        self.optimizer.step()
        self.at_rest = sum(self.engine.memory_bytes().values()) + optimizer_bytes(self.optimizer)
        self.optimizer.zero_grad()
        return float(mean_over_ranks(loss))

    def train(self, checkpointer: fe.Checkpointer, say: Any) -> None:
        """Train from the end of the history to the last step."""
        settings, history = self.settings, self.history
        if not history.train:
            history.held_out["0"] = self.held_out_loss()
            say(f"step     0   held-out loss {history.held_out['0']:.4f}")
        for step in range(len(history.train), settings.steps):
            history.train.append(self.train_step(step))
            done = step + 1
            if done % settings.eval_every == 0 or done == settings.steps:
                loss = history.held_out[str(done)] = self.held_out_loss()
                say(f"step {done:5d}   held-out loss {loss:.4f}")
            if done % settings.save_every == 0 or done == settings.steps:
                checkpointer.save(done)

    @torch.no_grad()
    def difference_from_peft(self) -> float:
        """Save the adapter, load it with PEFT, and return the largest difference of logits."""
        folder = self.settings.out / "adapter"
        fe.save_pretrained(self.engine, folder)
        self.model.eval()
        tokens = self.plan.held_out_batch(self.corpus.held_out, 1, 0, 0).to(self.device).tokens
        own = self.model(input_ids=tokens, use_cache=False).logits
        base: Any = AutoModelForCausalLM.from_pretrained(self.settings.out / "base")
        adapted = PeftModel.from_pretrained(base.to(self.device), str(folder))
        theirs = adapted(input_ids=tokens, use_cache=False)
        return float((own - theirs.logits).abs().max())


def prepare(settings: argparse.Namespace) -> Job:
    """Read the text, make the base if there is none, shard it under adapters, and load it."""
    device = start_processes()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    num_ranks = dist.get_world_size()
    corpus = read_corpus(settings.data)
    settings.out.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0 and not (settings.out / "base").is_dir():
        make_base(settings, corpus, device)
    dist.barrier()
    model = build_model(settings)
    lines, at_rest = memory(model, settings, num_ranks)
    engine = fe.shard(
        model,
        strategy=settings.strategy,
        initial_values="empty",
        extensions=extensions(settings),
    )
    torch.manual_seed(settings.seed)  # for the adapters' values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "load_pretrained.*lora_")  # they are not in the base
        fe.load_pretrained(engine, settings.out / "base", strict=False)
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.lr, weight_decay=0.0)
    fe.shard_optimizer(optimizer)
    plan = BatchPlan(settings.batch_size, 1, num_ranks, settings.sequence_length, settings.seed)
    return Job(settings, device, corpus, plan, model, engine, optimizer, lines, at_rest)


def run(settings: argparse.Namespace) -> None:
    """The whole job, on one rank."""
    job = prepare(settings)
    is_first = dist.get_rank() == 0

    def say(text: object) -> None:
        if is_first:
            print(text, flush=True)

    say(job.engine.describe())
    checkpointer = fe.Checkpointer(
        settings.out / "checkpoints",
        job.engine,
        job.optimizer,
        extra={"history": job.history},
        trainable_only=True,
    )
    if checkpointer.steps():
        say(f"resumed after step {checkpointer.load().step}")
    job.train(checkpointer, say)
    checkpointer.close()
    for line in job.memory:
        say(f"memory: {line}")
    say(f"memory: measured {job.at_rest:,} bytes on this rank after an optimizer step")
    difference = job.difference_from_peft()
    say(f"PEFT reads {settings.out / 'adapter'}: logits differ by {difference:g} at most")
    if is_first:
        metrics = {**job.history.state_dict(), "difference": difference}
        metrics |= {"at_rest": job.at_rest, "expected_at_rest": job.expected_at_rest}
        (settings.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(make_parser().parse_args())
