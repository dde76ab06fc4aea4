"""Measures links to places of offloaded tensors for ``calibrate``: pinned host memory, a disk, and
the bandwidth of host memory itself.

Copies are made as in the engine (``hardware.py``, ``DiskBlock``), on all ranks at once: first each
direction alone, then both directions. Let a >= b be the rates of the two directions alone. Copies
of N bytes in both directions that begin together take

    T = N / (a f) + (N - N b / a) / b

if both rates are multiplied by f while both run, and the slower copy continues alone. The figure
``both`` is f (a + b).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fsdp_engine.kernel_interface import Hardware, allocator
from fsdp_engine.planner.simulation.machine import TwoWayLink
from fsdp_engine.planner.state_places import offload_module

Agree = Callable[[float], float]
Action = Callable[[], object]

_LARGE_ON_DEVICE, _LARGE_ON_DISK = 2**28, 2**26  # bytes per copy
_LARGE_ON_HOST = 2**28  # bytes per rank, more than its share of caches
_SMALL = 2**12
_LEAST, _MOST = 5, 50  # numbers of repetitions

_wall_seconds = Hardware(torch.device("cpu")).seconds


def measure_host_link(device: torch.device, seconds: float, agree: Agree) -> TwoWayLink:
    """Measure copies between a device and pinned host memory.

    Args:
        device: An accelerator.
        seconds: Measurement time.
        agree: Combines the ranks' values by the maximum.
    """
    hardware = Hardware(device)
    actions = hardware.host_copies(_LARGE_ON_DEVICE, _SMALL)
    return _link(actions, _LARGE_ON_DEVICE, hardware.seconds, seconds, agree)


def measure_host_memory(num_ranks: int, num_cores: int, seconds: float, agree: Agree) -> float:
    """Measure the memory bandwidth of a node, in bytes per second of reads and writes together. All
    ranks multiply a tensor in place, which reads and writes each byte once, like an optimizer step.

    Args:
        num_ranks: Number of ranks in the node.
        num_cores: Number of cores in the node. Each rank uses its share of them.
        seconds: Measurement time.
        agree: Combines the ranks' values by the maximum.
    """
    memory = allocator.zeros(_LARGE_ON_HOST // 4, torch.float32, "cpu")
    action = partial(memory.mul_, 1.0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(num_cores // num_ranks, 1))
    try:
        taken = _medians({"step": action}, _wall_seconds, seconds, agree)["step"]
    finally:
        torch.set_num_threads(num_threads)
    return num_ranks * 2 * memory.nbytes / taken


def measure_disk(folder: Path, seconds: float, agree: Agree) -> TwoWayLink:
    """Measure reads and writes of files in a folder.

    Args:
        folder: The folder of a local disk.
        seconds: Measurement time.
        agree: Combines the ranks' values by the maximum.

    Raises:
        OSError: The folder cannot be written, or has too little space.
    """
    num_bytes = _LARGE_ON_DISK
    disk = offload_module("disk_memory")
    file = disk.DiskFile(folder)
    small = disk.DiskBlock(_SMALL, file)
    blocks = [disk.DiskBlock(num_bytes, file) for _ in range(2)]
    memory = [allocator.zeros(num_bytes, torch.uint8, "cpu") for _ in range(2)]
    target = allocator.zeros(_SMALL, torch.uint8, "cpu")
    threads = disk.DiskThreads()
    for block in blocks:
        block.write(memory[1])
    read: Action = partial(blocks[0].read, memory[0])
    write: Action = partial(blocks[1].write, memory[1])

    def both() -> None:
        for pending in [threads.read(read), threads.write(write)]:
            pending.wait()

    actions: dict[str, Action] = {
        "small": partial(small.read, target),
        "into": read,
        "out": write,
        "both": both,
    }
    return _link(actions, num_bytes, _wall_seconds, seconds, agree)


def _link(
    actions: dict[str, Action],
    num_bytes: int,
    timed: Callable[[Action], float],
    seconds: float,
    agree: Agree,
) -> TwoWayLink:
    """Time copies of ``num_bytes``, and return the link."""
    taken = _medians(actions, timed, seconds, agree)
    latency = min(taken["small"], min(taken["into"], taken["out"]) / 2)
    into, out, both = (taken[name] - latency for name in ("into", "out", "both"))
    return link_of(num_bytes, into, out, both, latency)


def _medians(
    actions: dict[str, Action], timed: Callable[[Action], float], seconds: float, agree: Agree
) -> dict[str, float]:
    """Time the actions alternately, on all ranks at once. Returns median seconds by name."""
    for action in actions.values():
        timed(action)
    once = agree(sum(timed(action) for action in actions.values()))
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(min(max(round(seconds / once), _LEAST), _MOST)):
        for name, action in actions.items():
            agree(0.0)  # a barrier
            found[name].append(timed(action))
    return {name: agree(statistics.median(each)) for name, each in found.items()}


def link_of(num_bytes: int, into: float, out: float, both: float, latency: float) -> TwoWayLink:
    """Returns the link on which copies of ``num_bytes`` take the given seconds; see the module
    docstring."""
    fast, slow = min(into, out), max(into, out)
    share = min(fast / max(both - slow + fast, fast), 1.0)
    rates = num_bytes / into, num_bytes / out
    return TwoWayLink(*rates, both=share * sum(rates), latency=latency)
