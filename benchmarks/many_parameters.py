"""Host time of the engine per microbatch, with 10,000 small parameters in 10 units.

    python benchmarks/many_parameters.py [--rounds 8]

One rank, without communication. The measurement is processor time of this thread within the methods
of ``fsdp_engine/buffers/`` that run once per unit or backward, without modules, autograd and the
hook of each gradient. The result is the minimum over rounds, with the garbage collector disabled.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections import defaultdict
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.buffers.gradients import Gradients
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.published_gradients import PublishedGradients
from fsdp_engine.buffers.weights import Weights
from fsdp_engine.strategies import LEVELS

NUM_UNITS, PER_UNIT, NUMEL = 10, 1000, 16
METHODS: dict[type, tuple[str, ...]] = {
    ParamAndGradBuffer: ("follow_requires_grad", "begin_backward", "publish_gradients"),
    PublishedGradients: ("end_backward", "put_back"),
    Gradients: ("begin", "end_writing", "reduce", "release"),
    Weights: ("gather", "gathered", "release"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weights = (nn.Parameter(torch.randn(NUMEL)) for _ in range(PER_UNIT))
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack(list(self.weights)).sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Stopwatch:
    """Seconds within methods, by name, including their callees."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._is_running = False

    def watch(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return method(*args, **kwargs)
            self._is_running, start = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[f"{owner.__name__}.{name}"] += time.thread_time() - start
                self._is_running = False

        setattr(owner, name, timed)


def measure(stopwatch: Stopwatch, level: str, num_micro: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a microbatch, by method."""
    torch.manual_seed(0)
    model = Model()
    engine = fe.shard(model, strategy=level, options=fe.Options(min_unit_size=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    x, found = torch.randn(4, NUMEL), []
    for _ in range(rounds):
        stopwatch.seconds.clear()
        for _ in range(num_micro - 1):
            with engine.no_sync():
                model(x).backward()
        model(x).backward()
        found.append(dict(stopwatch.seconds))
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
    return {name: 1e3 * min(each[name] for each in found[2:]) / num_micro for name in found[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    stopwatch = Stopwatch()
    for owner, names in METHODS.items():
        for name in names:
            stopwatch.watch(owner, name)
    results, rows = {}, []
    for level in LEVELS:
        for num_micro in (1, 3):
            found = measure(stopwatch, level, num_micro, options.rounds)
            results[f"{level}, {num_micro} microbatches"] = found
            most = sorted(found, key=lambda name: found[name])[-3:][::-1]
            shown = ", ".join(f"{name} {found[name]:.1f}" for name in most)
            rows.append([f"{level}, {num_micro}", f"{sum(found.values()):.1f}", shown])
    columns = ["level, microbatches", "ms a microbatch", "slowest methods"]
    harness.print_table(f"{NUM_UNITS * PER_UNIT:,} parameters", columns, rows)
    harness.write_results("many_parameters", results)


if __name__ == "__main__":
    main()
