"""Overlap of steps on the asynchronous device, compared with the simulated clock and FSDP2.

The device of ``tests/async_device`` has fixed delays: all kernels and copies take the same time,
and a collective takes as long as the forward of a block. The simulated clock uses the same figures
as a ``Machine``. It computes the step time from the order of submissions alone; on the device the
time also depends on streams, process groups and the speed of the host.

A second table counts host syncs and waits between streams in a steady step. It includes DDP, which
has to find the parameters that no rank used, as the engine has.

    python benchmarks/async_device.py
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
from fsdp_engine.planner.simulation.machine import Link, Processor
from tests.async_device import device as on
from tests.async_device.build import build
from tests.models import Mlp

NUM_BLOCKS, DIM, ROWS = 8, 64, 4
# Seconds of a kernel, and of a collective, equal to the forward of a block of four kernels.
KERNEL = 20e-3
COLLECTIVE = 4 * KERNEL
STEPS_IN_A_ROUND = 1
# Way, and arguments of `shard` or `fully_shard`.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "optim_grads_params": ("engine", {"strategy": "optim_grads_params"}),
    "optim_grads": ("engine", {"strategy": "optim_grads"}),
    "optim": ("engine", {"strategy": "optim"}),
    "FSDP2": ("fsdp2", {"reshard_after_forward": True}),
    "FSDP2, no reshard": ("fsdp2", {"reshard_after_forward": False}),
    "DDP": ("ddp", {"find_unused_parameters": True}),
}
# The ways whose step time is measured.
TIMED = [way for way in WAYS if way != "DDP"]


class Gated(Mlp):
    """A block with an additional parameter, which forward reads only if ``is_read``."""

    def __init__(self, is_read: bool) -> None:
        super().__init__(DIM, DIM)
        self.gate = nn.Parameter(torch.ones(DIM))
        self.is_read = is_read

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gate if self.is_read else x)


class Model(nn.Module):
    """Blocks of four kernels in forward.

    Args:
        unused: Ranks on which an additional parameter of the last block is not read: "all", or
            "one" (rank 0). "none": there is no such parameter.
    """

    def __init__(self, unused: str = "none") -> None:
        super().__init__()
        self.unused = unused
        self.blocks = nn.ModuleList(Mlp(DIM, DIM) for _ in range(NUM_BLOCKS))
        if unused != "none":
            self.blocks[-1] = Gated(unused == "one" and dist.get_rank() == 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def simulated(way: str) -> dict[str, float]:
    """Simulated seconds of a step, of its compute, and of its communication."""
    free = Link(1e18, COLLECTIVE)  # one hop between two ranks, independent of the size
    machine = fe.Machine(
        "the asynchronous device",
        Processor({torch.float32: 1e18}, 1e18, 1e12, call_seconds=KERNEL),
        free,
        free,
        ranks_per_node=8,
    )
    found = fe.simulate(
        Model,
        2,
        batch=torch.zeros(ROWS, DIM),
        machine=machine,
        optimizer=adamw,
        options=fe.Options(min_unit_size=0),
        **WAYS[way][1],
    )
    return {
        "seconds": found.seconds,
        "compute": found.compute_seconds,
        "messages": sum(found.message_seconds.values()),
        "exposed": found.exposed_seconds,
    }


def make_step(way: str, model: Model, clips: bool = False) -> Callable[[], None]:
    """One training step on the device, without a host sync at the end."""
    kind, options = WAYS[way]
    called: nn.Module = model
    if kind == "engine":
        fe.shard(model, options=fe.Options(min_unit_size=0), **options)
    elif kind == "ddp":
        called = nn.parallel.DistributedDataParallel(model.to(on.DEVICE), **options)
    else:
        model.to(on.DEVICE)
        mesh = dist.init_device_mesh(on.NAME, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        if model.unused == "one":  # or ranks would send different sizes
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    optimizer = adamw(model.parameters())
    if kind == "engine":
        fe.shard_optimizer(optimizer)
    x = torch.ones(ROWS, DIM).to(on.DEVICE)

    def step() -> None:
        called(x).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(rounds: int) -> dict[str, Any]:
    """The measurements of one rank."""
    times = measured(rounds)
    return {"times": times, "counts": [counted(*case) for case in COUNTED]}


def measured(rounds: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, by way."""
    torch.manual_seed(0)
    start = Model()
    steps = {way: make_step(way, copy.deepcopy(start)) for way in TIMED}

    def several(step: Callable[[], None]) -> None:
        for _ in range(STEPS_IN_A_ROUND):
            step()
        torch.accelerator.synchronize()

    with on.delays(compute=KERNEL, copy=KERNEL, collective=COLLECTIVE):
        times = harness.interleave(
            {way: functools.partial(several, step) for way, step in steps.items()}, rounds, warmup=1
        )
    return {way: [each / STEPS_IN_A_ROUND for each in seconds] for way, seconds in times.items()}


# Way, whether gradients are clipped, ranks on which a parameter gets no gradient.
COUNTED = [
    (way, clips, unused)
    for way in ("optim_grads_params", "optim_grads", "optim", "FSDP2", "DDP")
    for clips, unused in ((False, "none"), (True, "none"), (True, "all"), (True, "one"))
]


def counted(way: str, clips: bool, unused: str) -> dict[str, Any]:
    """Host syncs of a steady step, by reason and line, and its waits between streams."""
    torch.manual_seed(0)
    step = make_step(way, Model(unused), clips)
    for _ in range(3):
        step()
    torch.accelerator.synchronize()
    with on.without_wait(-1):
        with on.count_host_syncs() as syncs:
            step()
        num_waits = on.num_stream_waits()
    return {
        "way": way,
        "clips": clips,
        "unused": unused,
        "host_syncs": sum(syncs.values()),
        "sites": sorted(f"{reason} at {site}" for reason, site in syncs),
        "stream_waits": num_waits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    build()
    clock = {way: simulated(way) for way, (kind, _) in WAYS.items() if kind == "engine"}
    found = harness.run_ranks(
        run, 2, args.rounds, backend=f"cpu:gloo,{on.NAME}:{on.NAME}", set_up=on.install
    )
    rows = []
    for way, seconds in found["times"].items():
        median = statistics.median(seconds)
        simulated_ms = clock[way]["seconds"] * 1e3 if way in clock else None
        rows.append(
            [
                way,
                f"{median * 1e3:.0f} ({min(seconds) * 1e3:.0f}-{max(seconds) * 1e3:.0f})",
                "" if simulated_ms is None else f"{simulated_ms:.0f}",
                "" if simulated_ms is None else f"{median * 1e3 / simulated_ms:.2f}",
            ]
        )
    harness.print_table("a step, ms", ["way", "device", "clock", "device / clock"], rows)
    harness.print_table(
        "a steady step",
        ["way", "clips", "unused", "host syncs", "stream waits"],
        [
            [str(each[key]) for key in ("way", "clips", "unused", "host_syncs", "stream_waits")]
            for each in found["counts"]
        ],
    )
    for each in found["counts"]:
        if each["sites"]:
            print(each["way"], each["clips"], each["unused"], each["sites"])
    harness.write_results(
        "async_device",
        {"kernel": KERNEL, "collective": COLLECTIVE, "blocks": NUM_BLOCKS, "clock": clock, **found},
    )


if __name__ == "__main__":
    main()
