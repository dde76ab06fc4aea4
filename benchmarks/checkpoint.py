"""Saving and loading 85M parameters with AdamW: this engine, FSDP2 with plain DCP, torch.save.

    python benchmarks/checkpoint.py [--size 85M] [--rounds 8]

Two gloo ranks; every round runs all variants in a random order, and ratios are computed per round.
All variants write to the same disk and sync their files. "torch.save" is the same number of bytes
written by one rank with fsync. Loads read from the page cache, "cold" ones from the disk. DCP
overwrites its previous checkpoint, so that a crash leaves none. This engine writes to another
folder and removes the previous one after the save has returned, before the next variant; "new
folder" does the same with DCP. This engine verifies checksums on load; "unchecked" disables that,
which is possible in this benchmark only.

*Blocked* is the time for which an asynchronous save blocks the caller, *total* the time until it is
complete. Resharding is a load by four ranks of a checkpoint of two ranks, compared with one of four
ranks. Planning is DCP's local plan of a save on one rank, over the fake process group: 10,000
parameters.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_engine as fe
from fsdp_engine.checkpoint.folder import training_entries
from fsdp_engine.checkpoint.reader import Reader
from gpt import GPT, GPTConfig

SIZES = {
    "10M": GPTConfig(sequence_length=128, num_layers=6, width=384, num_heads=6),
    "85M": GPTConfig(sequence_length=128, num_layers=12, width=768, num_heads=12),
}
ENGINE, FSDP2, PLAIN = "fsdp_engine", "FSDP2 + DCP", "torch.save, one rank"
BESIDE = "new folder"
UNCHECKED = "unchecked"
# The first rounds use pages of memory and blocks of the disk for the first time.
WARMUP = 3
TARGETS = (
    # what, way, over, at most
    ("save", ENGINE, f"save: {FSDP2}", 1.0),
    ("save", ENGINE, f"save: {FSDP2}, {BESIDE}", 1.0),
    ("load", ENGINE, f"load: {FSDP2}", 1.0),
    ("load", f"{ENGINE}, cold", f"load: {FSDP2}, cold", 1.0),
    ("load", ENGINE, f"load: {ENGINE}, {UNCHECKED}", 1.1),
    ("load", f"{ENGINE}, cold", f"load: {ENGINE}, {UNCHECKED}, cold", 1.1),
    ("blocked", ENGINE, f"save: {ENGINE}", 0.15),
)


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Create optimizer state by a step with zero gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def make_engine(config: GPTConfig) -> tuple[nn.Module, fe.Engine, torch.optim.Optimizer]:
    """This engine at level 3."""
    torch.manual_seed(0)
    model = GPT(config)
    engine = fe.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fill(optimizer)
    return model, engine, optimizer


def make_fsdp2(config: GPTConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2, every block a unit."""
    torch.manual_seed(0)
    model = GPT(config)
    for module in (*model.blocks, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fill(optimizer)
    return model, optimizer


def prepare(folder: str, cold: bool) -> None:
    """Read all files into the page cache, or evict them from it."""
    if dist.get_rank() == 0:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    if cold:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    else:
                        while file.read(1 << 24):
                            pass


def measure(size: str, rounds: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each variant of save and load by round, and bytes on disk."""
    config = SIZES[size]
    _, engine, optimizer = make_engine(config)
    checkpointer = fe.Checkpointer(f"{folder}/engine", engine, optimizer, keep=1)
    other, other_optimizer = make_fsdp2(config)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    numel = sum(p.numel() for p in GPT(config).parameters())
    plain = [torch.zeros(numel) for _ in range(3)] if dist.get_rank() == 0 else []
    started = {ENGINE: 0.0, FSDP2: 0.0}
    count = iter(range(10**6))
    beside: list[str] = []

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def fsdp2_save() -> None:
        dcp.save(state(), checkpoint_id=f"{folder}/fsdp2")

    def fsdp2_save_beside() -> None:
        path = f"{folder}/fsdp2-{next(count)}"
        dcp.save(state(), checkpoint_id=path)
        beside.append(path)

    def fsdp2_load() -> None:
        read = state()
        dcp.load(read, checkpoint_id=f"{folder}/fsdp2")
        set_state_dict(
            other,
            other_optimizer,
            model_state_dict=read["model"],
            optim_state_dict=read["optimizer"],
        )

    def plain_save() -> None:
        if plain:
            with open(f"{folder}/plain", "wb") as file:
                torch.save(plain, file)
                file.flush()
                os.fsync(file.fileno())

    def plain_load() -> None:
        if plain:
            torch.load(f"{folder}/plain")

    def engine_async() -> None:
        checkpointer.save_async(next(count))

    def fsdp2_async() -> None:
        started[FSDP2] = dcp.async_save(
            state(), checkpoint_id=f"{folder}/fsdp2_async", process_group=group
        )  # type: ignore[assignment]

    def fsdp2_wait() -> None:
        started[FSDP2].result()  # type: ignore[attr-defined]

    def verified_load() -> None:
        checkpointer.load(verify=True)

    def unchecked_load() -> None:
        checked = Reader._checked
        Reader._checked = lambda reader, file, name: file  # type: ignore[assignment, method-assign]
        try:
            checkpointer.load()
        finally:
            Reader._checked = checked  # type: ignore[method-assign]

    steps: dict[str, list[tuple[str, Callable[[], Any]]]] = {
        f"save: {ENGINE}": [("save", lambda: checkpointer.save(next(count)))],
        f"save: {FSDP2}": [("save", fsdp2_save)],
        f"save: {FSDP2}, {BESIDE}": [("save", fsdp2_save_beside)],
        f"save: {PLAIN}": [("save", plain_save)],
        f"load: {ENGINE}": [("load", checkpointer.load)],
        f"load: {ENGINE}, verified": [("load", verified_load)],
        f"load: {ENGINE}, {UNCHECKED}": [("load", unchecked_load)],
        f"load: {ENGINE}, cold": [("load", checkpointer.load)],
        f"load: {ENGINE}, {UNCHECKED}, cold": [("load", unchecked_load)],
        f"load: {FSDP2}, cold": [("load", fsdp2_load)],
        f"load: {FSDP2}": [("load", fsdp2_load)],
        f"load: {PLAIN}": [("load", plain_load)],
        f"async: {ENGINE}": [("blocked", engine_async), ("total", checkpointer.wait)],
        f"async: {FSDP2}": [("blocked", fsdp2_async), ("total", fsdp2_wait)],
    }
    for _, save in (steps[f"save: {way}"][0] for way in (ENGINE, FSDP2, PLAIN)):
        save()  # for the loads
    times: dict[str, list[float]] = {}
    draw = random.Random(0)
    names = list(steps)
    for round_number in range(WARMUP + rounds):
        draw.shuffle(names)
        for name in names:
            checkpointer.wait()
            while len(beside) > 1:
                shutil.rmtree(beside.pop(0), ignore_errors=True)  # by the first rank that gets here
            os.sync()  # writes of previous variants must not be synced by this one
            prepare(folder, cold=name.endswith("cold"))
            dist.barrier()
            start = time.perf_counter()
            for what, call in steps[name]:
                call()
                if what != "blocked":
                    dist.barrier()
                if round_number >= WARMUP:
                    key = f"{what}: {name.partition(': ')[2]}"
                    times.setdefault(key, []).append(time.perf_counter() - start)
    written = sum(f.stat().st_size for f in Path(folder, "engine").rglob("*") if f.is_file())
    times["bytes on disk / bytes of tensors"] = [written / (3 * numel * 4)]
    return times


def save_for(size: str, folder: str) -> None:
    """Save a checkpoint from all ranks."""
    _, engine, optimizer = make_engine(SIZES[size])
    fe.Checkpointer(f"{folder}/of{dist.get_world_size()}", engine, optimizer).save(1)


def reshard(size: str, rounds: int, folder: str) -> dict[str, list[float]]:
    """Seconds to load checkpoints of two and of four ranks."""
    _, engine, optimizer = make_engine(SIZES[size])
    loads = {
        f"{ranks} to 4 ranks": fe.Checkpointer(f"{folder}/of{ranks}", engine, optimizer).load
        for ranks in (2, 4)
    }
    return harness.interleave(loads, rounds, 1)  # type: ignore[arg-type]


def planning(num_params: int = 10_000) -> dict[str, float]:
    """Milliseconds of the local plan of a save, by number of ranks."""
    found = {}
    for world in (8, 64, 256, 1024):
        dist.init_process_group("fake", store=FakeStore(), rank=world // 2, world_size=world)
        units = (
            nn.Sequential(*(nn.Linear(24, 24 + place % 3) for place in range(num_params // 100)))
            for _ in range(50)
        )
        model = nn.ModuleList(units)
        engine = fe.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            planner = dcp.DefaultSavePlanner()
            planner.set_up_planner(training_entries(engine, optimizer), None, False)
            planner.create_local_plan()
            times.append(time.perf_counter() - start)
        found[str(world)] = sorted(times)[2] * 1e3
        dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="85M")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="checkpoints-")
    try:
        plans = planning()
        times = harness.run_ranks(measure, 2, args.size, args.rounds, folder)
        for ranks in (2, 4):
            harness.run_ranks(save_for, ranks, args.size, folder)
        resharded = harness.run_ranks(reshard, 4, args.size, args.rounds, folder)
    finally:
        shutil.rmtree(folder)
    disk = times.pop("bytes on disk / bytes of tensors")[0]
    rows, record = [], {}
    for name in sorted(times):
        low, middle, high = harness.quartiles(times[name])
        record[name] = {"seconds": {"median": middle, "q1": low, "q3": high}}
        rows.append([name, f"{middle:.3f} ({low:.3f}-{high:.3f})"])
    for name, values in resharded.items():
        low, middle, high = harness.quartiles(values)
        record[f"load {name}"] = {"seconds": {"median": middle, "q1": low, "q3": high}}
        rows.append([f"load {name}", f"{middle:.3f} ({low:.3f}-{high:.3f})"])
    harness.print_table(f"{args.size} with AdamW, 2 ranks: seconds", ["what", "s"], rows)
    checks = []
    for what, way, base, limit in TARGETS:
        ratio = harness.ratios(times, f"{what}: {way}", base)
        record[f"{what}: {way}"]["over " + base] = ratio
        verdict = "met" if ratio["median"] <= limit else "missed"
        checks.append([f"{what} / {base}", harness.show_ratio(ratio), f"{limit:.2f}", verdict])
    ratio = harness.ratios(resharded, "2 to 4 ranks", "4 to 4 ranks")
    record["load 2 to 4 ranks"]["over 4 to 4 ranks"] = ratio
    verdict = "met" if ratio["median"] <= 1.3 else "missed"
    checks.append(["reshard 2 to 4 / 4 to 4", harness.show_ratio(ratio), "1.30", verdict])
    verdict = "met" if disk <= 1.01 else "missed"
    checks.append(["bytes on disk / bytes of tensors", f"{disk:.4f}", "1.01", verdict])
    harness.print_table("targets", ["ratio", "found", "at most", ""], checks)
    plan_rows = [[world, f"{ms:.0f}"] for world, ms in plans.items()]
    harness.print_table("local plan of a save, 10,000 parameters", ["ranks", "ms"], plan_rows)
    results = {"size": args.size, "ways": record, "disk": disk, "planning_ms": plans}
    harness.write_results("checkpoint", results)


if __name__ == "__main__":
    main()
