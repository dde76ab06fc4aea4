"""Optimizer state on a disk: rates of the disk, time of a step, and memory that it saves.

    python benchmarks/offload.py [--rounds 9] [--size 85M] [--mib 256] [--layers 32] [--steps 2]
        [--folder FOLDER] [--sections rates step memory]

*rates*: one process reads a file of ``--mib`` into memory, and writes it back, in pieces: buffered
(after a write ``fdatasync``, then ``POSIX_FADV_DONTNEED``), with ``O_DIRECT``, and with
``O_DIRECT`` through an aligned staging buffer of one piece. ``DiskBlock`` reads in the first way,
and writes in the last one.

*step*: ``optimizer.step()`` of fused AdamW at level 3, on one rank and on two, with state on disk
and in memory, against plain copies of as many bytes as the rank's state has: read a piece, write it
back, ``fdatasync`` at the end; on two ranks both copy at the same time. The ratio is that of rates:
1.0 is as fast as the plain copy. "buffered" is the step on a file system without
``O_DIRECT``.

*memory*: two ranks train a GPT at level 3, with everything in memory, with state on disk, and with
everything on disk. Then a rank's memory has a cap (``RLIMIT_DATA``: private writable memory,
resident or not): ``HEADROOM`` times what the job with everything on disk allocated after its start.
Under this cap that job must train with the same losses, and the one in memory must fail. glibc maps
allocations above 1 MiB (``MALLOC_MMAP_THRESHOLD_``): otherwise holes of its heap, which differ
between runs, add to the peak.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from resident_memory import reset_peak, resident
from step_time import SIZES

import fsdp_engine as fe
from fsdp_engine.extensions.offload import disk_memory
from gpt import GPT, GPTConfig

LEVEL = "optim_grads_params"
MIB = 1 << 20
PIECES = (1, 4, 16, 64)  # MiB
HEADROOM = 1.08
STATE_BYTES = 8  # of AdamW, per element
BYTES = 16  # of AdamW, fp32 weight and gradient, per element
ON_DISK, BUFFERED, IN_MEMORY = "state on disk", "state on disk, buffered", "state in memory"
ALL_ON_DISK = "all on disk"
PLAIN, PLAIN_DIRECT = "plain copy", "plain copy, O_DIRECT"


class PlainFile:
    """An unlinked file of ``num_bytes``, a multiple of 4096, and memory of that size.

    Attributes:
        memory: Page-aligned memory.
        shifted: Memory of the same size that is aligned to 64 bytes only, as tensors are.
        file: The file's descriptor, buffered or with ``O_DIRECT``.
    """

    def __init__(self, num_bytes: int, folder: str, is_direct: bool) -> None:
        self.file, name = tempfile.mkstemp(dir=folder)
        if is_direct:
            os.close(self.file)
            self.file = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.unlink(name)
        os.posix_fallocate(self.file, 0, num_bytes)
        self.num_bytes = num_bytes
        pages = memoryview(mmap.mmap(-1, num_bytes + 4096))
        self.memory, self.shifted = pages[:num_bytes], pages[64 : num_bytes + 64]
        self._staging = memoryview(mmap.mmap(-1, max(PIECES) * MIB))
        self.write(self.memory, MIB)
        os.fdatasync(self.file)
        self.forget()

    def forget(self) -> None:
        """Evict the file from the page cache."""
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _places(self, piece: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self.num_bytes, piece):
            yield start, min(start + piece, self.num_bytes)

    def read(self, memory: memoryview, piece: int) -> None:
        """Read into ``memory``."""
        for start, end in self._places(piece):
            os.preadv(self.file, [memory[start:end]], start)

    def write(self, memory: memoryview, piece: int) -> None:
        """Write from ``memory``, not synchronized."""
        for start, end in self._places(piece):
            os.pwritev(self.file, [memory[start:end]], start)

    def read_staged(self, memory: memoryview, piece: int) -> None:
        """Read into ``memory`` through the staging buffer."""
        for start, end in self._places(piece):
            staged = self._staging[: end - start]
            os.preadv(self.file, [staged], start)
            memory[start:end] = staged

    def write_staged(self, memory: memoryview, piece: int) -> None:
        """Write from ``memory`` through the staging buffer."""
        for start, end in self._places(piece):
            staged = self._staging[: end - start]
            staged[:] = memory[start:end]
            os.pwritev(self.file, [staged], start)

    def synchronize(self) -> None:
        """Wait until the file is on the disk, and evict it from the page cache."""
        os.fdatasync(self.file)
        self.forget()

    def copy(self) -> None:
        """The plain copy: each piece is read and written back."""
        piece = 16 * MIB
        for start, end in self._places(piece):
            staged = self._staging[: end - start]
            os.preadv(self.file, [staged], start)
            os.pwritev(self.file, [staged], start)
        self.synchronize()


def rates(num_bytes: int, rounds: int, folder: str) -> dict[str, Any]:
    """GB/s of reads and writes by way and piece."""
    buffered, direct = (PlainFile(num_bytes, folder, each) for each in (False, True))
    steps: dict[str, Callable[[], None]] = {}

    def add(name: str, action: Callable[..., None], *args: Any, then: Any = None) -> None:
        def step() -> None:
            action(*args)
            if then is not None:
                then()

        steps[name] = step

    for mib in PIECES:
        piece = mib * MIB
        plain, aligned, shifted = buffered.shifted, direct.memory, direct.shifted
        add(f"read, buffered, {mib}", buffered.read, plain, piece, then=buffered.forget)
        add(f"read, direct, {mib}", direct.read, aligned, piece)
        add(f"read, direct and staged, {mib}", direct.read_staged, shifted, piece)
        add(f"write, buffered, {mib}", buffered.write, plain, piece, then=buffered.synchronize)
        add(f"write, direct, {mib}", direct.write, aligned, piece)
        add(f"write, direct and staged, {mib}", direct.write_staged, shifted, piece)
        add(
            f"write, direct and staged, fdatasync, {mib}",
            direct.write_staged,
            shifted,
            piece,
            then=direct.synchronize,
        )
    times = harness.interleave(steps, rounds)
    found = {
        name: harness.spread([num_bytes / 1e9 / each for each in seconds])
        for name, seconds in times.items()
    }
    return {"bytes": num_bytes, "GB/s": found}


@contextmanager
def without_direct_writes() -> Iterator[None]:
    """Context in which new ``DiskBlock``s use the page cache."""
    original = disk_memory._open_direct
    disk_memory._open_direct = lambda name: None
    try:
        yield
    finally:
        disk_memory._open_direct = original


def steps(size: str, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds of steps and plain copies in each round, and bytes of the rank's state."""
    config, num_sequences = SIZES[size]
    tokens = torch.randint(0, config.vocab_size, (num_sequences, config.sequence_length))
    actions: dict[str, Callable[[], None]] = {}
    models = []

    def add(name: str, offload: fe.Offload | None) -> int:
        torch.manual_seed(0)
        model = GPT(config)
        fe.shard(model, strategy=LEVEL, extensions=[] if offload is None else [offload])
        optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))
        model(tokens, tokens.roll(-1, 1)).loss.backward()

        def step() -> None:
            optimizer.step()

        actions[name] = step
        models.append(model)
        return sum(param.numel() for param in model.parameters()) // dist.get_world_size()

    disk = fe.Offload(optimizer_state="disk", folder=folder)
    add(IN_MEMORY, None)
    num_elements = add(ON_DISK, disk)
    with without_direct_writes():
        add(BUFFERED, disk)
    num_bytes = STATE_BYTES * num_elements // 4096 * 4096
    files = [PlainFile(num_bytes, folder, is_direct) for is_direct in (False, True)]
    actions |= {PLAIN: files[0].copy, PLAIN_DIRECT: files[1].copy}
    times = harness.interleave(actions, rounds)
    return {"seconds": times, "bytes of a rank's state": num_bytes}


def step_time(size: str, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds of steps, and ratios of their rates to those of plain copies, by number of ranks."""
    results: dict[str, Any] = {"size": size}
    for num_ranks in (1, 2):
        found = harness.run_ranks(steps, num_ranks, size, rounds, folder)
        seconds = found.pop("seconds")
        results[str(num_ranks)] = {
            **found,
            "seconds": {name: harness.spread(each) for name, each in seconds.items()},
            "rates": {
                name: {base: harness.ratios(seconds, base, name) for base in (PLAIN, PLAIN_DIRECT)}
                for name in (ON_DISK, BUFFERED)
            },
            "to memory": harness.ratios(seconds, ON_DISK, IN_MEMORY),
        }
    return results


class DataSize:
    """A thread that samples this process's private writable memory (VmData)."""

    def __init__(self) -> None:
        self.peak = resident("VmData")
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            self.peak = max(self.peak, resident("VmData"))

    def end(self) -> int:
        """Returns the most that was sampled."""
        self._ends.set()
        self._thread.join()
        return self.peak


def train(
    config: GPTConfig, offload: fe.Offload | None, num_steps: int, cap: int | None
) -> dict[str, Any]:
    """Train; ``cap`` limits the memory that this rank allocates after its start."""
    dist.barrier()  # establishes connections, whose memory is then excluded
    reset_peak()
    start, start_data = resident("VmRSS"), resident("VmData")
    if cap is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (start_data + cap, start_data + cap))
    size = DataSize()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(config)
    engine = fe.shard(model, strategy=LEVEL, extensions=[] if offload is None else [offload])
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, config.vocab_size, (1, config.sequence_length), generator=generator)
    losses, seconds = [], []
    for _ in range(num_steps):
        begin = time.perf_counter()
        loss = model(tokens, tokens.roll(-1, 1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    mine = torch.tensor([resident("VmHWM") - start, size.end() - start_data], dtype=torch.int64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    peak, data = mine.tolist()
    return {
        "losses": losses,
        "seconds of a step": statistics.median(seconds),
        "peak resident bytes": peak,
        "peak allocated bytes": data,
        "resident bytes at the start": start,
        "peak bytes by role": dict(engine.peak_memory_bytes()),
        "elements": sum(param.numel() for param in model.parameters()),
    }


def memory(num_layers: int, num_steps: int, folder: str) -> dict[str, Any]:
    """Run jobs with everything in memory, with state on disk, and with everything on disk, without
    a cap on memory; then two of them with a cap."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # of the ranks' processes
    config = GPTConfig(sequence_length=64, num_layers=num_layers, width=1024, num_heads=16)
    everything = fe.Offload(
        optimizer_state="disk", main_weights="disk", gradients="disk", folder=folder
    )
    places = {
        ALL_ON_DISK: everything,
        ON_DISK: fe.Offload(optimizer_state="disk", folder=folder),
        IN_MEMORY: None,
    }
    free = {
        name: harness.run_ranks(train, 2, config, place, num_steps, None)
        for name, place in places.items()
    }
    cap = int(HEADROOM * free[ALL_ON_DISK]["peak allocated bytes"])
    capped = harness.run_ranks(train, 2, config, everything, num_steps, cap)
    if any(capped["losses"] != each["losses"] for each in free.values()):
        raise SystemExit("losses: expected the same ones from all jobs; found others")
    try:
        harness.run_ranks(train, 2, config, None, num_steps, cap)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        death = str(error).strip().splitlines()[-1]
    else:
        raise SystemExit(f"state in memory: expected that {cap} bytes are too few; it trained")
    needs = BYTES * capped["elements"] // 2
    return {
        "layers": num_layers,
        "ranks": 2,
        "without a cap": free,
        "cap": cap,
        "bytes of weights, gradients and state": needs,
        "factor": needs / cap,
        "under the cap": {ALL_ON_DISK: capped, IN_MEMORY: death},
    }


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    if found := results.get("rates"):
        rows = [[name, harness.show_ratio(each)] for name, each in found["GB/s"].items()]
        harness.print_table(f"{found['bytes'] / MIB:.0f} MiB", ["", "GB/s"], rows)
    for num_ranks in ("1", "2"):
        if found := results.get("step", {}).get(num_ranks):
            rows = [
                [
                    name,
                    harness.show_ratio(each),
                    *(harness.show_ratio(ratio) for ratio in found["rates"].get(name, {}).values()),
                ]
                for name, each in found["seconds"].items()
            ]
            columns = ["", "seconds", f"rate over {PLAIN}", f"over {PLAIN_DIRECT}"]
            rows = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
            harness.print_table(f"{results['step']['size']}, ranks: {num_ranks}", columns, rows)
    if found := results.get("memory"):
        rows = [
            [
                name,
                f"{each['peak resident bytes'] / MIB:.0f}",
                f"{each['peak allocated bytes'] / MIB:.0f}",
                f"{each['seconds of a step']:.2f}",
            ]
            for name, each in [
                *found["without a cap"].items(),
                ("under the cap", found["under the cap"][ALL_ON_DISK]),
            ]
        ]
        rows.append(["state in memory, under the cap", found["under the cap"][IN_MEMORY]])
        rows = [[*row, *[""] * (4 - len(row))] for row in rows]
        title = f"MiB of a rank; cap {found['cap'] / MIB:.0f}, factor {found['factor']:.2f}"
        harness.print_table(title, ["", "resident", "allocated", "seconds of a step"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", choices=list(SIZES), default="85M")
    parser.add_argument("--mib", type=int, default=256, help="of the file whose rates are measured")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--sections", nargs="+", default=["rates", "step", "memory"])
    options = parser.parse_args()
    path = harness.RESULTS / "offload.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    if "rates" in options.sections:
        results["rates"] = rates(options.mib * MIB, options.rounds, options.folder)
    if "step" in options.sections:
        results["step"] = step_time(options.size, options.rounds, options.folder)
    if "memory" in options.sections:
        results["memory"] = memory(options.layers, options.steps, options.folder)
    show(results)
    harness.write_results("offload", results)


if __name__ == "__main__":
    main()
