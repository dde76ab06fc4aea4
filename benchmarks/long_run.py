"""Speed and memory over a long run of the example's training.

    python benchmarks/long_run.py [--steps 3000] [--turn 100]

Training of ``examples/train_gpt.py`` (two blocks, four sequences a step) on two gloo ranks, once
for each memory configuration. All configurations are running and train alternately, so that other
load on the machine affects all of them. For each turn: processor time (user and system) and page
faults per step, and the resident set at its end. Processor time and page faults of one process
depend less on other programs than wall time does.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

EXAMPLE = ["--layers", "2", "--batch-size", "4", "--steps", "1000000", "--warmup", "50"]
WAYS = {
    # name: environment, whether the engine returns freed pages to the system
    "MALLOC_TOP_PAD_ of 64 MiB": ({"MALLOC_TOP_PAD_": str(64 * 2**20)}, False),
    "glibc's defaults": ({}, False),
    "freed pages returned": ({}, True),
}
MEBIBYTE = 2**20


def rank_main(rank: int, store: str, turns: Any, arguments: list[str], hands_back: bool) -> None:
    """Train on command. Sends the measurements of each turn."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(hours=4),  # the other configurations train in between
    )
    from curve import memory_in_use
    from fsdp_engine.memory import allocator
    from settings import parse_settings
    from train_gpt import Job, StepReader, prepare

    if not hands_back:
        allocator.BACKWARDS_PER_TRIM = sys.maxsize
    job = prepare(parse_settings(arguments), Job)
    reader = StepReader(job, job.curve)
    step = 0
    turns.send(None)
    while num_steps := turns.recv():
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for _ in range(num_steps):
            reader.add(step, *job.train_step(step))
            step += 1
            if step % 10 == 0:
                reader.read()
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        turns.send(
            {
                "step": step,
                "seconds": seconds / num_steps,
                "processor_seconds": processor / num_steps,
                "page_faults": (after.ru_minflt - before.ru_minflt) / num_steps,
                "resident_mib": memory_in_use(job.device) / MEBIBYTE,
            }
        )
    os._exit(0)  # without cleanup, since other configurations may be running


def start(way: str, folder: str) -> list[Any]:
    """Start two ranks. Returns the pipes to them when they are ready to train."""
    environment, hands_back = WAYS[way]
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        del os.environ[name]
    os.environ.update(environment)  # spawned processes inherit it
    store = tempfile.mktemp(dir=folder)
    arguments = [*EXAMPLE, "--out", f"{folder}/run"]
    pipes = []
    for rank in range(2):
        ours, theirs = mp.get_context("spawn").Pipe()
        mp.get_context("spawn").Process(
            target=rank_main, args=(rank, store, theirs, arguments, hands_back), daemon=True
        ).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    return pipes


def report(curves: dict[str, list[dict[str, float]]]) -> None:
    """First, middle and last turns."""
    rows = []
    for way, turns in curves.items():
        for turn in (turns[0], turns[len(turns) // 2], turns[-1]):
            rows.append(
                [
                    way,
                    f"{turn['step']:.0f}",
                    f"{turn['processor_seconds'] * 1e3:.1f}",
                    f"{turn['seconds'] * 1e3:.1f}",
                    f"{turn['page_faults']:,.0f}",
                    f"{turn['resident_mib']:.0f}",
                ]
            )
    columns = ["memory", "up to step", "processor ms", "ms", "page faults", "resident MiB"]
    harness.print_table("a step of rank 0, mean over a turn", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--turn", type=int, default=100, help="steps of a turn")
    args = parser.parse_args()
    curves: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        pipes = {way: start(way, folder) for way in WAYS}
        for number in range(args.steps // args.turn):
            for way, ranks in pipes.items():
                for pipe in ranks:
                    pipe.send(args.turn)
                of_rank_0, _ = [pipe.recv() for pipe in ranks]
                curves[way].append(of_rank_0)
            print(f"{(number + 1) * args.turn} of {args.steps} steps", flush=True)
            if number % 5 == 4 or (number + 1) * args.turn == args.steps:
                harness.write_results("long_run", curves)
        for ranks in pipes.values():
            for pipe in ranks:
                pipe.send(0)
    report(curves)


if __name__ == "__main__":
    main()
