"""Costs of checkpoints in the memory of two nodes, beside those on a disk.

    python benchmarks/local_checkpoints.py [--rounds 10] [--model 85M]

Two ranks at level 3, each a node with a folder of its own in ``/dev/shm``, on one machine. Each
round measures for how long a save blocks training, how long a complete save takes, and how long a
load takes. A load uses the files of both nodes, or follows the loss of one node's folder, whose
files then come from the other node. "disk" is ``Checkpointer`` in a temporary folder. A step beside
a save in the background is compared with one without.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from step_time import SIZES

import fsdp_engine as fe
from gpt import GPT

LEVEL = "optim_grads_params"


def measure(rounds: int, size: str, folder: str, memory: str) -> dict[str, object]:
    """Seconds of each action in each round, and bytes of a rank's state."""
    config, num_sequences = SIZES[size]
    torch.manual_seed(0)
    model = GPT(config)
    engine = fe.shard(model, strategy=LEVEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    shape = (num_sequences, config.sequence_length)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)

    def step() -> None:
        model(tokens, tokens.roll(-1, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    node = Path(memory) / f"node{rank}"
    local = fe.LocalCheckpointer(node, engine, optimizer)
    disk = fe.Checkpointer(folder, engine, optimizer, keep=1)
    kept = Path(memory) / "kept"

    def load_without_a_node() -> None:
        if rank == 1:
            node.rename(kept)
        dist.barrier()
        start = time.perf_counter()
        local.load()
        times.append(time.perf_counter() - start)
        dist.barrier()
        if rank == 1:
            shutil.rmtree(node)
            kept.rename(node)

    def wait() -> None:
        local.wait()
        disk.wait()
        dist.barrier()

    actions: dict[str, Callable[[], object]] = {
        "local: training waits": lambda: local.save_async(1),
        "disk: training waits": lambda: disk.save_async(1),
        "local: complete": lambda: local.save(1),
        "disk: complete": lambda: disk.save(1),
        "local: load": lambda: local.load(),
        "disk: load": lambda: disk.load(),
        "step": step,
    }
    found: dict[str, list[float]] = {name: [] for name in actions}
    found |= {"local: load, a node lost": [], "step beside a save": []}
    for number in range(rounds + 1):
        seconds: dict[str, float] = {}
        for name, action in actions.items():
            dist.barrier()
            start = time.perf_counter()
            action()
            seconds[name] = time.perf_counter() - start
            wait()
        times: list[float] = []
        load_without_a_node()
        seconds["local: load, a node lost"] = times[0]
        local.save_async(1)
        start = time.perf_counter()
        step()
        seconds["step beside a save"] = time.perf_counter() - start
        wait()
        if number:  # the first one allocates host memory
            for name, value in seconds.items():
                found[name].append(value)
    files = [file for each in Path(memory).glob("node*/step-*") for file in each.iterdir()]
    num_bytes = sum(file.stat().st_size for file in files)
    local.close()
    disk.close()
    return {
        "seconds": found,
        "bytes_in_memory": num_bytes,
        "bytes_of_state": 12 * sum(p.numel() for p in model.parameters()),
    }


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", choices=sorted(SIZES), default="85M")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        found = harness.run_ranks(measure, 2, options.rounds, options.model, folder, memory)
    seconds = found.pop("seconds")
    results = {
        "model": options.model,
        "ranks": 2,
        **found,
        "seconds": {name: harness.spread(each) for name, each in seconds.items()},
        "step_beside_a_save": harness.ratios(seconds, "step beside a save", "step"),
        "load_to_disk": harness.ratios(seconds, "local: load", "disk: load"),
        "complete_to_disk": harness.ratios(seconds, "local: complete", "disk: complete"),
    }
    rows = [
        [name, f"{each['median']:.2f} ({each['q1']:.2f}-{each['q3']:.2f})"]
        for name, each in results["seconds"].items()
    ]
    harness.print_table(f"{options.model}, two ranks", ["", "seconds"], rows)
    harness.write_results("local_checkpoints", results)


if __name__ == "__main__":
    main()
