"""Bytes of transient memory with arenas (``fsdp_double_buffer``) and without.

    python benchmarks/planned_memory.py

GPTs on two gloo ranks, in bf16 with gradients in fp32 that are reduced in bf16, so that every kind
of transient memory exists. Without planned addresses: the peak in a step, and idle memory between
steps. With them: the arenas, which are always allocated; and the host time to allocate and free a
storage of a megabyte, alternately. Then arenas alone, for sequences of units of random sizes: their
length relative to the peak of the bytes in use.
"""

from __future__ import annotations

import functools
import gc
import random
import timeit
from typing import Any

import harness
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.extensions.arenas.arena import ALIGNMENT, Arena
from fsdp_engine.extensions.arenas.arena_memory import ArenaMemory
from fsdp_engine.memory.allocator import Memory, TransientStorage
from fsdp_engine.strategies import LEVELS
from gpt import GPT, GPTConfig

NUM_RANKS = 2
MODELS = {
    "8 blocks of width 256, 256 words": GPTConfig(num_layers=8, width=256),
    "12 blocks of width 512, 16,000 words": GPTConfig(
        vocab_size=16_000, num_layers=12, width=512, num_heads=8
    ),
}
ROUNDS = 9
ROLES = ("full", "staging")


def measure(config: GPTConfig) -> dict[str, Any]:
    """By level and budget: bytes of each role."""
    found: dict[str, Any] = {}
    for level in LEVELS:
        for name in ("default", "one unit ahead", "nothing ahead"):
            if name != "default" and level not in ("optim_grads", "optim_grads_params"):
                continue
            found[f"{level}, {name}"] = measure_level(config, level, name)
    return found


def measure_level(config: GPTConfig, level: str, name: str) -> dict[str, Any]:
    """Bytes of each role for one level and budget."""
    found: dict[str, Any] = {}
    budget = {"default": None, "one unit ahead": 1, "nothing ahead": 0}[name]
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)
    for planned in (False, True):
        gc.collect()  # frees the previous engine
        torch.manual_seed(0)
        model = GPT(config)
        engine = fe.shard(
            model,
            strategy=level,
            mp_policy=policy,
            options=fe.Options(prefetch_window=budget, staging_limit=budget, min_unit_size=0),
            extensions=[fe.Arenas()] if planned else [],
        )
        tokens = torch.randint(config.vocab_size, (1, 17)) + 0 * dist.get_rank()
        for step in range(4):
            if step == 2:
                engine.peak_memory_bytes(reset=True)
            with engine.no_sync():
                model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
            model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
            for param in model.parameters():
                param.grad = None
        peak, held = engine.peak_memory_bytes(), engine.memory_bytes()
        for role in ROLES:
            found[f"{role} {'planned' if planned else 'in use'}"] = peak.get(role, 0)
            if planned:
                assert held.get(role, 0) == peak.get(role, 0)
        memory = engine._memory
        if not planned:
            found["idle"] = memory.idle_bytes
    return found


def time_fills() -> dict[str, list[float]]:
    """Microseconds to allocate and free a storage."""

    def cycle(storage: TransientStorage) -> None:
        storage.fill()
        storage.free()

    storages = {}
    for name in ("ordinary", "planned"):
        kind = ArenaMemory if name == "planned" else Memory
        memory = kind(torch.device("cpu"))
        row = [memory.transient(2**20, torch.uint8, "full") for _ in range(50)]
        for storage in row:
            cycle(storage)
        memory.end_backward()
        cycle(row[0])
        storages[name] = row[0]
    found: dict[str, list[float]] = {name: [] for name in storages}
    for _ in range(ROUNDS):
        for name, storage in storages.items():
            seconds = timeit.timeit(functools.partial(cycle, storage), number=2000)
            found[name].append(1e6 * seconds / 2000)
    return found


def random_rows() -> dict[str, list[float]]:
    """Length of the arena relative to the peak of the bytes in use, for sequences of 3 to 60 units
    of 1 to 50 pages, by the number of prefetched units."""
    choose = random.Random(1)
    found: dict[str, list[float]] = {}
    for num_ahead in (1, 2, 3):
        ratios = found[f"{num_ahead} ahead"] = []
        for _ in range(300):
            num_units = choose.randint(3, 60)
            arena = Arena(lambda num_bytes: torch.empty(num_bytes), lambda num_bytes: None)
            for _ in range(num_units):
                arena.begin_unit()
                arena.add(ALIGNMENT * choose.randint(1, 50))
            order = [*range(num_units), *reversed(range(num_units))]
            stops = [num_units] * num_units + [2 * num_units] * num_units
            moments = [
                order[place : min(stop, place + 1 + num_ahead)] for place, stop in enumerate(stops)
            ]
            arena.expect(moments)
            assert arena.memory is not None
            ratios.append(arena.memory.numel() / arena.load)
    return found


def show(title: str, found: dict[str, Any]) -> None:
    """Print the table of one model."""
    rows = []
    for name, each in found.items():
        used = sum(each[f"{role} in use"] for role in ROLES)
        planned = sum(each[f"{role} planned"] for role in ROLES)
        kinds = [f"{role} {kind}" for role in ROLES for kind in ("in use", "planned")]
        ratio = f"{planned / used:.3f}" if used else "-"
        numbers = [f"{each[kind] / 1e6:.2f}" for kind in kinds]
        numbers += [ratio, f"{each['idle'] / 1e6:.2f}"]
        rows.append([name, *numbers])
    columns = ["level, budget", "full in use", "planned", "staging in use", "planned", "ratio"]
    harness.print_table(title, [*columns, "idle, not planned"], rows)


def main() -> None:
    results: dict[str, Any] = {"bytes": {}}
    for name, config in MODELS.items():
        num_elements = sum(param.numel() for param in GPT(config).parameters())
        found = harness.run_ranks(measure, NUM_RANKS, config)
        show(f"MB of transient memory: {name}, {num_elements:,} parameters", found)
        results["bytes"][name] = found
    fills = results["microseconds of fill and drain"] = time_fills()
    for name, times in fills.items():
        first, median, third = harness.quartiles(times)
        print(f"allocate and free, {name}: {median:.2f} us ({first:.2f}-{third:.2f})")
    rows = results["arena over load, units of random sizes"] = random_rows()
    for name, ratios in rows.items():
        first, median, third = harness.quartiles(ratios)
        print(
            f"random sizes, {name}: {median:.3f} ({first:.3f}-{third:.3f}), most {max(ratios):.3f}"
        )
    harness.write_results("planned_memory", results)


if __name__ == "__main__":
    main()
