"""Find the largest GPT that this machine's memory and disk can train, and train it for some steps.

    python examples/train_largest.py --folder /path/on/a/local/disk [--memory 4] [--steps 3]

One process, on a CPU, with everything on disk that ``fe.Offload`` can keep there. Two small models
of the same width are trained for two steps, each in a process of its own. Each further block adds
the same number of bytes in memory and on disk, so the two measurements give the number of blocks
that fit. Memory is the growth of the anonymous resident set (``RssAnon``, Linux) from before the
model to its peak; it excludes pages of files, which the system can drop. glibc maps allocations
above 64 KiB (``MALLOC_MMAP_THRESHOLD_``), so that holes of its heap add little to the peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import fsdp_engine as fe
from corpus import BatchPlan, read_corpus
from gpt import GPT, GPTConfig

GIB = 2**30
# Bytes of an element: fp32, and AdamW's two moments.
ROLE_BYTES = {"main_weights": 4, "gradients": 4, "optimizer_state": 8}
PROBES = (4, 24)  # blocks
# Fraction of the memory and of the disk space to use, since runs differ by some percent.
SHARE = 0.85
HEAD = 64  # width of an attention head


def offloaded_roles() -> set[str]:
    """Returns the roles of ``ROLE_BYTES`` that this release can offload."""
    return {field.name for field in dataclasses.fields(fe.Offload)} & ROLE_BYTES.keys()


def offload(folder: Path) -> fe.Offload:
    """Returns an extension that keeps all offloadable roles on disk."""
    places: dict[str, Any] = dict.fromkeys(offloaded_roles(), "disk")
    return fe.Offload(folder=folder, **places)


def bytes_on_disk(num_elements: int) -> int:
    """Bytes on disk of a model's state, with :func:`offload`."""
    return num_elements * sum(ROLE_BYTES[role] for role in offloaded_roles())


class PeakMemory:
    """A thread that samples this process's anonymous resident memory."""

    def __init__(self) -> None:
        self.start = self.peak = self.now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """Returns the current anonymous resident memory in bytes."""
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            self.peak = max(self.peak, self.now())

    def end(self) -> int:
        """Returns the most that was sampled, above the start."""
        self._ends.set()
        self._thread.join()
        return self.peak - self.start


@dataclass(frozen=True)
class Job:
    """A model to train for some steps.

    Attributes:
        config: Config of the model.
        folder: Folder on the disk for the state.
        steps: Number of steps.
        data: Folder of text. None: Python's standard library.
    """

    config: GPTConfig
    folder: Path
    steps: int
    data: Path | None = None

    @property
    def num_elements(self) -> int:
        """Number of the model's parameters."""
        with torch.device("meta"):
            return sum(param.numel() for param in GPT(self.config).parameters())

    def train(self, say: Callable[[str], None]) -> int:
        """Returns the most bytes of memory that it took."""
        text = read_corpus(self.data).train
        plan = BatchPlan(1, 1, 1, self.config.sequence_length)
        memory = PeakMemory()
        torch.manual_seed(0)
        with torch.device("meta"):
            model = GPT(self.config)
        engine = fe.shard(model, strategy="optim_grads_params", extensions=[offload(self.folder)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        fe.shard_optimizer(optimizer)
        for step in range(self.steps):
            began = time.perf_counter()
            batch = plan.train_batch(text, step, 0, 0)
            loss = model(batch.tokens, batch.targets).loss
            loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - began
            say(f"step {step + 1}: loss {loss.item():.3f}, {seconds:.1f} s")
        dist.destroy_process_group()
        return memory.end()


def silent(line: str) -> None:
    """Print nothing."""


def peak_of(job: Job, say: Callable[[str], None] = silent) -> int:
    """Bytes of memory that a job takes in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job.train, say).result()


def report(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


def width_for(memory: int) -> int:
    """A width for which weights, gradients and state of four blocks fill a quarter of memory."""
    largest = math.sqrt(memory / 4 / (4 * sum(ROLE_BYTES.values()) * 12))
    return int(min(4096, max(HEAD, 2 ** math.floor(math.log2(largest)))))


def config_of(width: int, num_layers: int, sequence_length: int) -> GPTConfig:
    """Returns a config in which backward recomputes the activations of each block."""
    return GPTConfig(
        sequence_length=sequence_length,
        num_layers=num_layers,
        width=width,
        num_heads=width // HEAD,
        checkpointing="non-reentrant",
    )


def largest(memory: int, disk: int, folder: Path, sequence_length: int, data: Path | None) -> Job:
    """The job with the most blocks.

    Raises:
        ValueError: there is too little memory, or space on the disk, for the smaller probe.
    """
    width = width_for(memory)
    jobs = [Job(config_of(width, n, sequence_length), folder, 2, data) for n in PROBES]
    peaks = [peak_of(job) for job in jobs]
    limits = (
        ("memory", int(SHARE * memory), peaks, "bytes in memory"),
        (
            "disk",
            int(SHARE * disk),
            [bytes_on_disk(job.num_elements) for job in jobs],
            "bytes on the disk",
        ),
    )
    counts = []
    for name, limit, (first, second), what in limits:
        if limit < first:
            raise ValueError(f"--{name}: expected at least {first} {what}; found {limit}")
        inputs = 4 * sequence_length * width  # bytes that a block keeps at least for backward
        per_block = max(inputs, (second - first) / (PROBES[1] - PROBES[0]))
        counts.append(PROBES[0] + int((limit - first) / per_block))
        report(f"{name}: {per_block / 2**20:.2f} MiB a block, of {limit / GIB:.2f} GiB")
    return Job(config_of(width, min(counts), sequence_length), folder, 0, data)


def describe(job: Job, memory: int) -> str:
    """The model, and where its bytes are."""
    config, count = job.config, job.num_elements
    on_disk = offloaded_roles()
    places = [
        f"  {role}: {size * count / GIB:.2f} GiB {'on disk' if role in on_disk else 'in memory'}"
        for role, size in ROLE_BYTES.items()
    ]
    total = sum(ROLE_BYTES.values()) * count
    return "\n".join(
        [
            f"GPT of {count:,} parameters: {config.num_layers} blocks of width {config.width}",
            *places,
            f"  together {total / GIB:.2f} GiB, {total / memory:.2f} times the memory",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", type=float, help="GiB (default: all that is free)")
    parser.add_argument("--disk", type=float, help="GiB (default: all free space of the folder)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--data", type=Path, help="folder of text (default: standard library)")
    args = parser.parse_args()
    free = psutil.virtual_memory().available
    memory = free if args.memory is None else args.memory * GIB
    disk = shutil.disk_usage(args.folder).free if args.disk is None else args.disk * GIB
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(name, str(2**16))  # for processes that start from now on
    try:
        job = largest(int(memory), int(disk), args.folder, args.sequence_length, args.data)
    except ValueError as error:
        sys.exit(str(error))
    job = dataclasses.replace(job, steps=args.steps)
    report(describe(job, int(memory)))
    peak = peak_of(job, report)
    report(f"at most {peak / GIB:.3f} GiB in memory, of {memory / GIB:.3f}")


if __name__ == "__main__":
    main()
