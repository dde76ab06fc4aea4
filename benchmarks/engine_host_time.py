"""Host time of the engine's own code: steps of small blocks at every level, on a GPU or on a CPU.

    python benchmarks/engine_host_time.py                     # half a minute, a minute on a CPU

One rank. Units are blocks of P parameters of 8 elements, so that a device waits for its host. The
script measures the time of a step, and counts its operations (as a simulation does) and calls of
lanes. The time of the engine's own code is the step time minus that of a plain model and that of
the added operations. ``fsdp_engine/planner/simulation/clock.py`` has this time per call of a lane.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import harness
import torch
import torch.distributed as dist
from _gpu_models import BF16, LEVELS, card, on_cuda, start, synchronize, the_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.comm.host_lane import HostLane

PLAIN = "plain model"
# Units, and parameters of each.
GRID = ((10, 1), (20, 1), (20, 4), (10, 12), (20, 12))
REPETITIONS, ROUNDS = 15, 2
CALLS = ("submit", "record", "wait", "manage")
POLICY = fe.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(num_params))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_step(mesh: DeviceMesh, units: int, num_params: int, level: str) -> Callable[[], None]:
    model: Any = nn.Sequential(*(Block(num_params) for _ in range(units))).to(the_device())
    is_plain = level == PLAIN
    if is_plain:
        model.to(BF16)
    else:
        fe.shard(model, mesh=mesh, strategy=level, mp_policy=POLICY, units=[Block])
    x = torch.ones(2, 8, device=the_device(), dtype=BF16 if is_plain else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if not is_plain:
        fe.shard_optimizer(optimizer)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    return step


def seconds_of(step: Callable[[], None]) -> float:
    found = []
    for _ in range(REPETITIONS):
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def counts_of(make: Callable[[], Callable[[], None]]) -> dict[str, int]:
    """Operations of a step, and calls of lanes."""
    counts: Counter[str] = Counter()

    def counted(lane: type, name: str) -> Any:
        function = getattr(lane, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(self, *args, **kwargs)

        return patch.object(lane, name, call)

    step = make()
    patches = [counted(lane, name) for lane in (DeviceLane, HostLane) for name in CALLS]
    for each in patches:
        each.start()
    try:
        with Operations() as operations:  # type: ignore[no-untyped-call]
            step()
    finally:
        for each in patches:
            each.stop()
    return {"operations": operations.count, **counts}


def main() -> None:
    mesh = start(1)
    rows = []
    for units, num_params in GRID:
        for level in (PLAIN, *LEVELS):
            make = partial(make_step, mesh, units, num_params, level)
            row: dict[str, Any] = {"units": units, "parameters": num_params, "level": level}
            row["seconds"] = [seconds_of(make()) for _ in range(ROUNDS)]
            rows.append({**row, **counts_of(make)})
    columns = ["units", "parameters of each", "level", "us", "operations", *CALLS]
    harness.print_table(
        "steps of small blocks",
        columns,
        [
            [str(row["units"]), str(row["parameters"]), row["level"]]
            + [f"{min(row['seconds']) * 1e6:,.0f}"]
            + [str(row.get(name, 0)) for name in ("operations", *CALLS)]
            for row in rows
        ],
    )
    dist.destroy_process_group()
    harness.write_results(f"engine_host_time_{card() if on_cuda() else 'cpu'}", rows)


if __name__ == "__main__":
    main()
