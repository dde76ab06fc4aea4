"""Train a byte-level GPT on real text, sharded by fsdp_engine.

    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy optim_grads_params

Runs on CPU or CUDA. It leaves ``metrics.json``, ``curves.png`` and checkpoints in ``--out``.
Restarted, after a kill or with more ``--steps``, it resumes from its latest checkpoint, on any
number of ranks and with any strategy, along the same loss curve; ``--resume`` starts from that of
another run. With ``--local-save`` there are frequent checkpoints in memory of the nodes, too.
SIGUSR1 and SIGTERM make it save after the step that runs, and end. How clusters start it:
``docs/clusters.md``.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_engine as fe
from corpus import Batch, BatchPlan, Corpus, bigram_cross_entropy, printable, read_corpus
from curve import Curve, HeldOutRecord, StepRecord, memory_in_use
from gpt import GPT
from interruption import Interruption, end_by
from plots import draw_curves
from progress import Progress
from settings import Settings, parse_settings

# Losses stay on the device for this many steps; then one all-reduce averages them.
STEPS_PER_READ = 10


def start_processes() -> torch.device:
    """Join the other ranks, if a launcher started some; returns this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def build_mesh(settings: Settings, device: torch.device) -> DeviceMesh | None:
    """The mesh of ``--mesh``, or ``None`` for all ranks on one axis."""
    shape = settings.mesh_shape
    if shape is None:
        return None
    return init_device_mesh(device.type, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def build_model(settings: Settings, device: torch.device) -> GPT:
    """The whole model with the same values on every rank, or without values on the meta device."""
    torch.manual_seed(settings.seed)
    with torch.device("meta" if settings.meta_init else device):
        return GPT(settings.model_config)


def build_optimizers(settings: Settings, model: GPT) -> list[torch.optim.Optimizer]:
    """Returns AdamW with weight decay for matrices only. With ``--optimizer muon``, Muon steps the
    matrices of blocks, each on one rank; AdamW steps each rank's slices of the others."""
    of_muon = []
    if settings.optimizer == "muon":
        of_muon = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not each for each in of_muon)]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=True)
    ]
    if of_muon:
        # With updates of the size of AdamW's, so that the learning rate is the same.
        muon = torch.optim.Muon(
            of_muon,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    for optimizer in optimizers:
        fe.shard_optimizer(optimizer)
    return optimizers


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth at the end of the schedule."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean of ``values`` over all ranks, element by element."""
    total = values.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@dataclass
class Job:
    """What a training run needs, on one rank."""

    settings: Settings
    corpus: Corpus
    plan: BatchPlan
    model: GPT
    engine: fe.Engine
    optimizers: list[torch.optim.Optimizer]
    device: torch.device
    rank: int
    curve: Curve
    checkpointer: fe.Checkpointer
    local: fe.LocalCheckpointer | None

    def train_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns this rank's mean loss and the norm of the whole gradient."""
        num = self.settings.grad_accumulation
        total = torch.zeros((), device=self.device)
        for microbatch in range(num):
            batch = self.plan.train_batch(self.corpus.train, step, microbatch, self.rank)
            last = microbatch == num - 1
            with contextlib.nullcontext() if last else self.engine.no_sync():
                loss = self.loss(batch) / num
                loss.backward()
            total += loss.detach()
        norm = self.engine.clip_grad_norm_(self.settings.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, step)
            optimizer.step()
            optimizer.zero_grad()
        return total, norm

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy of this rank's part of a batch, in nats a byte."""
        batch = batch.to(self.device)
        loss: torch.Tensor | None = self.model(batch.tokens, batch.targets).loss
        assert loss is not None
        return loss

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean cross-entropy in nats a byte of the held-out sequences, divided over the ranks."""
        num = self.settings.num_eval_batches
        total = torch.zeros((), device=self.device)
        for index in range(num):
            text = self.corpus.held_out
            total += self.loss(self.plan.held_out_batch(text, num, index, self.rank))
        return float(mean_over_ranks(total)) / num

    def resume(self) -> str:
        """Continue from this run's latest checkpoint, else from that of ``--resume``, if any.

        Returns a line that says so, or nothing.
        """
        source, folder = self.checkpointer, self.settings.save_folder
        latest = max(source.steps(), default=-1)
        if self.local is not None and max(self.local.steps(), default=-1) > latest:
            assert self.settings.local_save is not None
            source, folder = self.local, self.settings.local_save
        elif latest < 0:
            if self.settings.resume is None:
                return ""
            folder = self.settings.resume
            source = fe.Checkpointer(
                folder, self.engine, self.optimizers, extra={"curve": self.curve}
            )
        step = source.load().step
        if source is self.local and step is not None:
            self.local.save_async(step)  # restores the copies that lost nodes had
        line = f"resumed after step {step} from {folder}"
        if step is not None and step >= self.settings.last_step:
            line += "; nothing is left to train: raise --steps, or start anew in another --out"
        return line

    def save(self, step: int) -> None:
        """Save a checkpoint of ``step`` steps, in the background if wanted."""
        if self.settings.async_save:
            self.checkpointer.save_async(step)
        else:
            self.checkpointer.save(step)

    def train(self) -> int:
        """Train from the end of the curve to the last step, and append records to the curve.

        Returns the number of the signal that ended training early, or 0.
        """
        with Interruption() as interruption:
            stop = self._train(interruption)
        self.checkpointer.close()
        if self.local is not None:
            self.local.remove()
        return stop

    def _train(self, interruption: Interruption) -> int:
        settings, curve = self.settings, self.curve
        first = len(curve.steps)
        if not curve.held_out:
            curve.held_out.append(HeldOutRecord(0, self.held_out_loss()))
        reader = StepReader(self, curve)
        progress = Progress(first, settings.last_step, shown=self.rank == 0)
        stop = 0
        for step in range(first, settings.last_step):
            reader.add(step, *self.train_step(step))
            done = step + 1
            stop = interruption.heard() if done < settings.last_step else 0
            evaluate = done % settings.eval_every == 0 or done == settings.last_step
            save = done % settings.save_every == 0 or done == settings.last_step or stop > 0
            save_locally = self.local is not None and done % settings.local_save_every == 0
            if evaluate or save or save_locally or done % STEPS_PER_READ == 0:
                progress.advance(done, reader.read())
            if evaluate:
                curve.held_out.append(HeldOutRecord(done, self.held_out_loss()))
                progress.say(f"step {done:5d}   held-out loss {curve.held_out[-1].loss:.4f}")
            if save:
                self.save(done)
            elif self.local is not None and save_locally:
                self.local.save_async(done)
            if evaluate or save or save_locally:
                reader.restart_clock()
            if stop:
                break
        progress.close()
        return stop

    def sample(self) -> str:
        """A prompt and the text that the model adds to it; the same on every rank."""
        settings = self.settings
        if settings.prompt:
            prompt = torch.tensor(list(settings.prompt.encode()))
        else:
            prompt = self.corpus.held_out[: settings.sequence_length // 2].long()
        generator = torch.Generator().manual_seed(settings.seed)
        tokens = self.model.generate(
            prompt.to(self.device), settings.sample_bytes, temperature=0.7, generator=generator
        )
        return printable(bytes(tokens.tolist()))


AnyJob = TypeVar("AnyJob", bound=Job)


class StepReader:
    """Collects what steps return and reads it, averaged over ranks, every few steps."""

    def __init__(self, job: Job, curve: Curve) -> None:
        self.job = job
        self.curve = curve
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor, int]] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last read from the measured speed."""
        self.since = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Keep the loss and the gradient's norm of ``step``, without waiting for the device."""
        self.pending.append((step, loss, norm, memory_in_use(self.job.device)))

    def read(self) -> str:
        """Append the recorded values to the curve; returns a line for the progress bar."""
        settings, plan = self.job.settings, self.job.plan
        losses = mean_over_ranks(torch.stack([loss for _, loss, _, _ in self.pending])).tolist()
        norms = torch.stack([norm for _, _, norm, _ in self.pending]).tolist()
        tokens = plan.batch_size * plan.num_microbatches * plan.sequence_length
        speed = tokens * len(self.pending) / (time.perf_counter() - self.since)
        for (step, _, _, memory), loss, norm in zip(self.pending, losses, norms, strict=True):
            rate = learning_rate(settings, step)
            self.curve.steps.append(StepRecord(step + 1, loss, norm, rate, speed, memory))
        self.pending.clear()
        self.restart_clock()
        last = self.curve.steps[-1]
        return f"loss {last.loss:.3f}, {speed:,.0f} tokens/s, {last.memory_bytes / 2**20:,.0f} MiB"


def prepare(settings: Settings, kind: type[AnyJob]) -> AnyJob:
    """Read the text, build the model, shard it, and build its optimizers."""
    device = start_processes()
    mesh = build_mesh(settings, device)
    corpus = read_corpus(settings.data)
    model = build_model(settings, device)
    if settings.compile:
        for block in model.blocks:
            block.compile()
    policy = None
    if settings.dtype == "bf16":
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    extensions: list[fe.EngineExtension] = [
        fe.Offload(settings.optimizer_state, settings.state_folder)
    ]
    if settings.fp8_gather != "none":
        extensions.append(fe.Float8(settings.fp8_gather))
    engine = fe.shard(
        model,
        mesh,
        strategy=settings.strategy,
        outer_strategy=settings.outer_strategy,
        mp_policy=policy,
        extensions=extensions,
    )
    plan = BatchPlan(
        batch_size=settings.batch_size,
        num_microbatches=settings.grad_accumulation,
        num_ranks=dist.get_world_size(),
        sequence_length=settings.sequence_length,
        seed=settings.seed,
    )
    optimizers = build_optimizers(settings, model)
    curve = Curve()
    extra = {"curve": curve}
    checkpointer = fe.Checkpointer(settings.save_folder, engine, optimizers, extra=extra)
    local = None
    if settings.local_save is not None:
        local = fe.LocalCheckpointer(settings.local_save, engine, optimizers, extra=extra)
    return kind(
        settings,
        corpus,
        plan,
        model,
        engine,
        optimizers,
        device,
        dist.get_rank(),
        curve,
        checkpointer,
        local,
    )


def held_out_bigram(job: Job) -> float:
    """Bigram cross-entropy of exactly the bytes that :meth:`Job.held_out_loss` predicts."""
    plan = BatchPlan(job.plan.batch_size, 1, 1, job.plan.sequence_length)
    num = job.settings.num_eval_batches
    batches = [plan.held_out_batch(job.corpus.held_out, num, index, 0) for index in range(num)]
    tokens = torch.cat([batch.tokens for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    return bigram_cross_entropy(job.corpus.train, tokens, targets)


def run(settings: Settings) -> None:
    """The whole job, on one rank."""
    job = prepare(settings, Job)
    say = print if job.rank == 0 else lambda *_: None
    say(f"text: {job.corpus}")
    say(f"parameters: {settings.precision}")
    say(job.engine.describe())
    bigram = held_out_bigram(job)

    if resumed := job.resume():
        say(resumed)
    began = time.perf_counter()
    stop = job.train()
    seconds = time.perf_counter() - began

    curve = job.curve
    step = len(curve.steps)
    if stop:
        say(f"ended by {signal.Signals(stop).name}; saved step {step}; start again to continue")
        dist.destroy_process_group()
        end_by(stop)
        return
    held_out = curve.held_out[-1].loss
    if job.rank == 0:
        curve.write_json(
            settings.out / "metrics.json",
            settings=settings.as_dict(),
            num_ranks=job.plan.num_ranks,
            bigram=bigram,
            seconds=seconds,
        )
        num_ranks = job.plan.num_ranks
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        title = f"{settings.strategy}, {ranks}, {settings.precision}"
        draw_curves(settings.out / "curves.png", curve, bigram, title)
    say(f"trained to step {step} in {seconds:.0f} s; checkpoints in {settings.save_folder}")
    say(f"curves in {settings.out / 'curves.png'}, numbers in {settings.out / 'metrics.json'}")
    say(f"held-out text, nats a byte: bigram {bigram:.4f}, this model {held_out:.4f}")
    if settings.sample:
        text = job.sample()
        say(f"--- sample ---\n{text}\n--------------")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(parse_settings())
