"""One training script, with FSDP2 or with this engine behind FSDP2's names.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --engine fsdp2
    torchrun --nproc-per-node 2 examples/train_fsdp2.py --engine fsdp_engine

The two differ in one import. Both see the same batches and begin with the same weights, so that the
losses in ``OUT/losses.csv`` can be compared. With ``--engine fsdp_engine``, ``--strategy`` takes
every level. Runs on CPU, or on CUDA if there is a device for each rank. Without torchrun there is
one rank.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from corpus import BatchPlan, read_corpus
from gpt import GPT, GPTConfig
from settings import LEVELS


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT by FSDP2's names, under torchrun or by itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--engine", choices=("fsdp2", "fsdp_engine"), default="fsdp_engine")
    parser.add_argument("--strategy", choices=LEVELS, help="of fsdp_engine alone")
    parser.add_argument(
        "--outer", type=int, default=1, help="rows of the mesh: more than 1 is HSDP"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of all ranks")
    parser.add_argument("--grad-accumulation", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute dtype")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--data", type=Path, help="a folder of text; Python's library, if none")
    parser.add_argument("--out", type=Path, default=Path("runs/train_fsdp2"))
    return parser


def sharding_of(settings: argparse.Namespace) -> Any:
    """The module that has ``fully_shard``."""
    if settings.engine == "fsdp2":
        from torch.distributed import fsdp

        return fsdp
    from fsdp_engine import fsdp2

    return fsdp2


def build_model(settings: argparse.Namespace, device: torch.device) -> Any:
    """A GPT: each block is sharded, then norm and head together, then the model."""
    names = sharding_of(settings)
    shape = (settings.outer, dist.get_world_size() // settings.outer)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh if settings.outer > 1 else mesh["shard"]}
    if settings.dtype == "bf16":
        options["mp_policy"] = names.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if settings.strategy is not None:
        options["strategy"] = settings.strategy
    torch.manual_seed(0)
    with device:
        model = GPT(GPTConfig())
    for block in model.blocks:
        names.fully_shard(block, **options)
    names.fully_shard([model.norm, model.head], **options)
    names.fully_shard(model, **options)
    return model


def train(settings: argparse.Namespace, device: torch.device) -> list[float]:
    """The mean losses of all steps."""
    rank, size, num = dist.get_rank(), dist.get_world_size(), settings.grad_accumulation
    text = read_corpus(settings.data).train
    model = build_model(settings, device)
    plan = BatchPlan(settings.batch_size, num, size, model.config.sequence_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    losses = []
    for step in range(settings.steps):
        total = torch.zeros((), device=device)
        for microbatch in range(num):
            model.set_requires_gradient_sync(microbatch == num - 1)
            batch = plan.train_batch(text, step, microbatch, rank).to(device)
            loss = model(batch.tokens, batch.targets).loss / num
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / size)
        if rank == 0 and (step % 10 == 9 or step == settings.steps - 1):
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            print(f"step {step + 1:4d}  loss {losses[-1]:.4f}  norm {float(whole):.3f}")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=settings.out / "checkpoint")
    return losses


def main(arguments: list[str] | None = None) -> None:
    """Train, and leave a table of losses and a checkpoint."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    if settings.engine == "fsdp2" and settings.strategy is not None:
        parser.error("--strategy: expected it with --engine fsdp_engine; found it with fsdp2")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # without torchrun: one rank
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    losses = train(settings, device)
    if dist.get_rank() == 0:
        lines = ["step,loss", *(f"{step},{loss!r}" for step, loss in enumerate(losses))]
        (settings.out / "losses.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
