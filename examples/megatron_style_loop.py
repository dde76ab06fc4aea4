"""A training loop in the style of Megatron-Core: tensor x data parallelism, on fsdp_engine.

    torchrun --nproc-per-node 4 examples/megatron_style_loop.py --tensor-parallel 2
    python examples/megatron_style_loop.py --out runs/one    # the same losses, from one process

Every group of ``--tensor-parallel`` ranks holds one copy of a byte-level GPT, sharded by
``tensor_parallel.py``; copies are trained data-parallel, at any sharding level. Any number of ranks
sees the same global batches and begins with the same weights, so the losses in ``OUT/losses.csv``
can be compared. Restarted with the same ``--tensor-parallel``, a run resumes from its latest
checkpoint, along the same losses. Runs on CPU, or on CUDA if there is a device for each rank.
Gradients are not clipped: the norm would need sums over data *and* tensor ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_engine as fe
from corpus import Batch, BatchPlan, Corpus, read_corpus
from gpt import GPTConfig
from settings import LEVELS
from tensor_parallel import IGNORED, TensorParallelGPT

NEWLINE = ord("\n")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT, tensor x data parallel, under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--data", type=Path, help="folder of text (without: source of the standard library)")
    add("--steps", type=int, default=200, help="optimizer steps of the whole run")
    add("--stop-at", type=int, help="end after this step without saving, as if interrupted")
    add("--batch-size", type=int, default=16, help="sequences of a microbatch, over all ranks")
    add("--microbatches", type=int, default=2, help="of a step")
    add("--sequence-length", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=4, help="number of blocks")
    add("--width", type=int, default=128, help="of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="name")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--token-weighted", action=flag, default=False, help="uneven sequences, mean over tokens")
    add("--tensor-parallel", type=int, default=1, help="ranks that share one copy of the model")
    add("--strategy", choices=LEVELS, default="optim", help="sharding over data-parallel ranks")
    add("--overlap", action=flag, default=True, help="communicate during forward and backward")
    add("--bucket-size", type=int, help="elements that are reduced at once")
    add("--out", type=Path, default=Path("runs/megatron"), help="losses.csv and checkpoints")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    return parser


def start_processes() -> torch.device:
    """Join the other ranks, if torchrun started some; returns this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def only_whole_lines(batch: Batch) -> Batch:
    """Truncate sequences after their last newline, so that lengths differ as with padding."""
    length = batch.targets.shape[1]
    ends = torch.where(batch.targets == NEWLINE, torch.arange(length), -1).amax(dim=1)
    ends[ends < 0] = length  # one long line
    padding = torch.arange(length) > ends[:, None]
    return Batch(batch.tokens, batch.targets.masked_fill(padding, IGNORED))


@dataclass
class Job:
    """What a training run needs, on one rank."""

    options: argparse.Namespace
    corpus: Corpus
    plan: BatchPlan
    mesh: DeviceMesh
    device: torch.device
    groups: fe.ModelParallelGroups
    model: fe.DistributedDataParallel
    optimizer: torch.optim.Optimizer
    checkpointer: fe.Checkpointer

    def train_step(self, step: int) -> float:
        """One optimizer step; returns the mean loss of all tokens, in nats a byte.

        By default all tokens have a loss, and each rank's loss is a mean. With
        ``--token-weighted`` sequences have uneven lengths, each rank's loss is a sum, and
        gradients become those of the mean over all tokens of the step.
        """
        weighted, num = self.options.token_weighted, self.options.microbatches
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        num_tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.zero_grad_buffer()
        for microbatch in range(num):
            batch = self.batch(step, microbatch)
            counted = (batch.targets != IGNORED).sum()
            last = microbatch == num - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.model(batch.tokens, batch.targets)
                (loss if weighted else loss / counted / num).backward()
            total += loss.detach()
            num_tokens += counted
        fe.finalize_model_grads([self.model], num_tokens if weighted else None, groups=self.groups)
        self.optimizer.step()
        return self.mean_loss(total, num_tokens)

    def batch(self, step: int, microbatch: int) -> Batch:
        """Returns full sequences, the same on all ranks that share a copy of the model."""
        rank = self.mesh.get_local_rank("dp")
        batch = self.plan.train_batch(self.corpus.train, step, microbatch, rank)
        if self.options.token_weighted:
            batch = only_whole_lines(batch)
        return batch.to(self.device)

    def mean_loss(self, total: torch.Tensor, num_tokens: torch.Tensor) -> float:
        """Returns the mean over all tokens.

        Args:
            total: The sum of losses over this rank's part of the sequences.
            num_tokens: The number of tokens in the full sequences.
        """
        sums = torch.stack([total, num_tokens / self.mesh["tp"].size()])
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def resume(self) -> int:
        """Continue from the latest checkpoint, if any; returns the number of steps done.

        Tensor ranks hold different weights under the same names, so each tensor rank has its own
        folder of checkpoints, for all of its data-parallel ranks. A killed run may have saved its
        last checkpoint in some folders only, so the latest step that all folders have is loaded.
        """
        found: list[list[int]] = [[]] * self.mesh["tp"].size()
        dist.all_gather_object(found, self.checkpointer.steps(), group=self.groups.tensor)
        done = max(set(found[0]).intersection(*found[1:]), default=0)
        if done:
            self.checkpointer.load(done)
        return done

    def train(self, first: int) -> None:
        """Train from step ``first`` to the last one."""
        options, log = self.options, LossLog(self.options.out / "losses.csv", first)
        last = min(options.steps, options.stop_at or options.steps)
        for step in range(first, last):
            loss = self.train_step(step)
            done = step + 1
            if dist.get_rank() == 0:
                log.append(done, loss)
                if done % 10 == 0 or done == last:
                    print(f"step {done:5d}   loss {loss:.4f}", flush=True)
            if done % options.save_every == 0 or done == options.steps:
                self.checkpointer.save(done)
        self.checkpointer.close()


class LossLog:
    """A file with a line for each step. Resumed runs append to it.

    Only rank 0 writes. Lines of steps after the loaded checkpoint are removed.
    """

    def __init__(self, path: Path, num_done: int) -> None:
        self.path = path
        if dist.get_rank() == 0:
            lines = path.read_text().splitlines() if path.exists() else []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in ["step,loss", *lines[1:][:num_done]]))

    def append(self, step: int, loss: float) -> None:
        with self.path.open("a") as file:
            file.write(f"{step},{loss!r}\n")


def prepare(options: argparse.Namespace) -> Job:
    """Read the text, build this rank's part of the model, wrap it, and build its optimizer.

    Raises:
        ValueError: sizes that do not go together.
    """
    device = start_processes()
    num_tensor = options.tensor_parallel
    if num_tensor < 1 or dist.get_world_size() % num_tensor:
        raise ValueError(
            f"tensor_parallel: expected a divisor of the {dist.get_world_size()} ranks; "
            f"found {num_tensor}"
        )
    num_data = dist.get_world_size() // num_tensor
    plan = BatchPlan(
        options.batch_size, options.microbatches, num_data, options.sequence_length, options.seed
    )
    mesh = init_device_mesh(device.type, (num_data, num_tensor), mesh_dim_names=("dp", "tp"))
    groups = fe.ModelParallelGroups(tensor=mesh.get_group("tp"), data=mesh.get_group("dp"))

    sizes = GPTConfig(
        sequence_length=options.sequence_length,
        num_layers=options.layers,
        width=options.width,
        num_heads=options.heads,
    )
    torch.manual_seed(options.seed)
    module = TensorParallelGPT(sizes, mesh.get_group("tp")).to(device)
    config = fe.DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=options.strategy,
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=options.overlap,
        bucket_size=options.bucket_size,
    )
    model = fe.DistributedDataParallel(module, config, mesh["dp"])

    optimizer: torch.optim.Optimizer
    if options.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    fe.shard_optimizer(optimizer)
    folder = options.out / "checkpoints" / f"tp{mesh.get_local_rank('tp')}"
    checkpointer = fe.Checkpointer(folder, model.engine, optimizer)
    corpus = read_corpus(options.data)
    return Job(options, corpus, plan, mesh, device, groups, model, optimizer, checkpointer)


def run(options: argparse.Namespace) -> None:
    """The whole job, on one rank."""
    job = prepare(options)
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(f"text: {job.corpus}")
    say(f"ranks: {job.mesh['dp'].size()} data x {job.mesh['tp'].size()} tensor")
    say(job.model.engine.describe())
    first = job.resume()
    if first:
        say(f"resumed after step {first} from {options.out / 'checkpoints'}")
    job.train(first)
    say(f"losses in {options.out / 'losses.csv'}, checkpoints in {options.out / 'checkpoints'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(make_parser().parse_args())
