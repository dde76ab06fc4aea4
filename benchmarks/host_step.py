"""The step on the host: main weights, gradients and state in the memory of a CPU.

    python benchmarks/host_step.py [--elements 500] [--rounds 7] [--sections step ranks]
        [--packages SITE_PACKAGES]

*step*: one rank at level 3 with ``--elements`` millions in 100 matrices, on 1 and on 2 threads. All
optimizers step on the same memory: fp32 weights, gradients and AdamW's state, 16 bytes per
element. The bound is 28 bytes per element (weight, gradient and state are read; weight and state
are written) over the bandwidth that torch reaches on the same threads, measured between the steps:
the fastest of a copy, STREAM's triad, and a scaling in place.

``DeepSpeedCPUAdam`` needs DeepSpeed, for example in the folder ``--packages``. It compiles its
kernel on first use::

    python -m venv /tmp/deepspeed && /tmp/deepspeed/bin/pip install torch==2.13.0 setuptools ninja
    DS_BUILD_OPS=0 /tmp/deepspeed/bin/pip install --no-build-isolation deepspeed
    python benchmarks/host_step.py --packages /tmp/deepspeed/lib/python3.11/site-packages

torchao's ``CPUOffloadOptimizer`` requires an accelerator. On the host it calls a fused AdamW for
each parameter. The script measures these calls.

*ranks*: 1 to 8 ranks share ``RANKS_ELEMENTS`` at level 3, with AdamW's fused or default step and
state in memory or on disk. Each rank has one thread, as torchrun sets it; one thread per core
(``OMP_NUM_THREADS``); or, without ``OMP_NUM_THREADS``, the number that the engine sets. The time
ends when the last rank has stepped. Each section takes some minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
import psutil
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe

NUM_MATRICES = 100
BYTES_HELD = 16
BYTES_MOVED = 28
LIMIT = 1.15
RANKS = (1, 2, 4, 8)
RANKS_ELEMENTS = 20e6
STREAM_ELEMENTS = 64 << 20  # of each of three arrays
OURS, OURS_DEFAULT = "engine, fused", "engine, default"
PLAIN, PLAIN_EACH = "torch, fused", "torch, fused, one optimizer for each parameter"
DEEPSPEED = "DeepSpeedCPUAdam"
IN_MEMORY, DEFAULT, ON_DISK = "fused, in memory", "default, in memory", "fused, on disk"
ONE_THREAD, ALL_CORES, SHARED = "one thread", "all cores", "set by the engine"


def build(num_elements: float, offload: fe.Offload | None = None) -> tuple[nn.Module, fe.Engine]:
    """A sharded model of matrices with gradients, none of which is subnormal."""
    width = math.isqrt(int(num_elements / NUM_MATRICES))
    with torch.device("meta"):
        layers = [nn.Linear(width, width, bias=False) for _ in range(NUM_MATRICES)]
        model = nn.Sequential(*layers)
    engine = fe.shard(
        model,
        strategy="optim_grads_params",
        units=[nn.Linear],
        options=fe.Options(min_unit_size=0),
        extensions=[] if offload is None else [offload],
    )
    model(torch.ones(1, width)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            for value in (param, param.grad):
                local(value).normal_()
    return model, engine


def local(value: Any) -> torch.Tensor:
    """This rank's slice."""
    slice_: torch.Tensor = value.local
    return slice_.detach()


def share_state(optimizer: Any, params: list[Any], states: list[dict[str, Any]]) -> None:
    """Let an optimizer use the state tensors of another."""
    count: Any = 0 if type(optimizer).__name__ == DEEPSPEED else torch.zeros(())
    for param, state in zip(params, states, strict=True):
        step = count if isinstance(count, int) else count.clone()
        optimizer.state[param] = {**state, "step": step}


def all_steps(num_elements: float) -> tuple[dict[str, Any], int, Any]:
    """The step of each optimizer, over the same memory; the number of elements; the model."""
    model, _ = build(num_elements)
    params: list[Any] = list(model.parameters())
    options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
    ours = fe.shard_optimizer(torch.optim.AdamW(params, fused=True, **options))
    ours.step()
    states = [{k: ours.state[p][k] for k in ("exp_avg", "exp_avg_sq")} for p in params]
    default = fe.shard_optimizer(torch.optim.AdamW(params, **options))
    share_state(default, params, states)

    slices = [nn.Parameter(local(param)) for param in params]
    for slice_, param in zip(slices, params, strict=True):
        slice_.grad = local(param.grad)
    plain_states = [{key: local(value) for key, value in state.items()} for state in states]
    plain = torch.optim.AdamW(slices, fused=True, **options)
    share_state(plain, slices, plain_states)
    each = [torch.optim.AdamW([slice_], fused=True, **options) for slice_ in slices]
    for one, slice_, state in zip(each, slices, plain_states, strict=True):
        share_state(one, [slice_], [state])

    steps: dict[str, Any] = {
        OURS: ours.step,
        OURS_DEFAULT: default.step,
        PLAIN: plain.step,
        PLAIN_EACH: lambda: [one.step() for one in each],
    }
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        theirs = DeepSpeedCPUAdam(slices, adamw_mode=True, **options)
        share_state(theirs, slices, plain_states)
        steps[DEEPSPEED] = theirs.step
    return steps, sum(slice_.numel() for slice_ in slices), model


def streams() -> tuple[dict[str, Any], dict[str, int]]:
    """Operations that only move bytes, and how many they move."""
    a, b, c = (torch.ones(STREAM_ELEMENTS) for _ in range(3))
    steps: dict[str, Any] = {
        "copy": lambda: a.copy_(b),
        "triad": lambda: torch.add(b, c, alpha=1.5, out=a),
        "scale in place": lambda: c.mul_(1.0),
    }
    array = 4 * STREAM_ELEMENTS
    return steps, {"copy": 2 * array, "triad": 3 * array, "scale in place": 2 * array}


def step_times(num_threads: int, num_elements: float, rounds: int) -> dict[str, Any]:
    """Seconds of each step, GB/s of each stream, and ratios to the bound."""
    assert torch.get_num_threads() == num_threads
    steps, count, model = all_steps(num_elements)
    moves, moved = streams()
    before = os.getloadavg()[0]
    times = harness.interleave({**steps, **moves}, rounds, warmup=1)
    rates = {
        name: harness.spread([moved[name] / 1e9 / each for each in times[name]]) for name in moves
    }
    fastest = max(rates, key=lambda name: rates[name]["median"])
    scale = BYTES_MOVED * count / moved[fastest]
    times["bound"] = [scale * each for each in times[fastest]]
    del model
    return {
        "elements": count,
        "load before": before,
        "GB/s": rates,
        "bound by": fastest,
        "seconds": {name: harness.spread(times[name]) for name in ("bound", *steps)},
        "of the bound": {name: harness.ratios(times, name, "bound") for name in steps},
        "of torch, fused": {name: harness.ratios(times, name, PLAIN) for name in steps},
    }


def use_threads(num_threads: int) -> None:
    """Set the number of this rank's threads."""
    torch.set_num_threads(num_threads)


def rank_times(rounds: int, folder: str) -> dict[str, list[float]]:
    """Seconds until all ranks have stepped."""
    steps: dict[str, Callable[[], None]] = {}
    kept = []
    disk = fe.Offload(optimizer_state="disk", folder=folder)
    for name, offload in ((IN_MEMORY, None), (DEFAULT, None), (ON_DISK, disk)):
        model, _ = build(RANKS_ELEMENTS, offload)
        fused = True if name != DEFAULT else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
        fe.shard_optimizer(optimizer)
        kept.append(model)

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            dist.barrier()

        steps[name] = step
    return harness.interleave(steps, rounds, warmup=1)


@contextmanager
def omp_threads(num_threads: int | None) -> Iterator[None]:
    """Context in which new processes have this ``OMP_NUM_THREADS``; None: the variable is unset."""
    before = os.environ.pop("OMP_NUM_THREADS", None)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def in_ranks(
    num_ranks: int, num_threads: int | None, function: Callable[..., Any], *args: Any
) -> Any:
    """Run ``function`` on ranks with ``num_threads`` threads each (None: not set, torch uses all
    cores), and return rank 0's result."""
    with omp_threads(num_threads):
        set_up = partial(use_threads, num_threads or os.cpu_count() or 1)
        return harness.run_ranks(function, num_ranks, *args, set_up=set_up)


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    for threads, found in results.get("step", {}).items():
        rows = [
            [
                name,
                harness.show_ratio(each),
                *(
                    harness.show_ratio(found[key][name]) if name in found[key] else ""
                    for key in ("of the bound", "of torch, fused")
                ),
            ]
            for name, each in found["seconds"].items()
        ]
        rates = ", ".join(f"{k} {v['median']:.1f}" for k, v in found["GB/s"].items())
        title = f"{found['elements'] / 1e6:.0f}M elements, threads: {threads}; GB/s: {rates}"
        harness.print_table(title, ["", "seconds", "of the bound", f"of {PLAIN}"], rows)
    if found := results.get("ranks"):
        rows = [
            [state, threads, *(harness.show_ratio(found[threads][str(n)][state]) for n in RANKS)]
            for state in (IN_MEMORY, DEFAULT, ON_DISK)
            for threads in (ONE_THREAD, ALL_CORES, SHARED)
        ]
        columns = ["AdamW, state", "threads of a rank", *(f"{n} ranks" for n in RANKS)]
        harness.print_table(f"{RANKS_ELEMENTS / 1e6:.0f}M elements, seconds", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=float, default=500, help="millions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--packages", help="a folder of packages with DeepSpeed")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for state on disk")
    parser.add_argument("--sections", nargs="+", default=["step", "ranks"])
    options = parser.parse_args()
    path = harness.RESULTS / "host_step.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    if options.packages:
        # Ranks inherit this path. Packages of this environment come first.
        sys.path.append(options.packages)
        scripts = os.path.join(options.packages, "..", "..", "..", "bin")
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ["PATH"]])  # ninja
    if "step" in options.sections:
        free, needed = psutil.virtual_memory().available, options.elements * 1e6 * BYTES_HELD * 1.5
        if free < needed:
            raise SystemExit(f"--elements: expected {needed / 1e9:.0f} GB free; found {free / 1e9}")
        results["step"] = {
            str(n): in_ranks(1, n, step_times, n, options.elements * 1e6, options.rounds)
            for n in (1, 2)
        }
    if "ranks" in options.sections:
        cores = os.cpu_count() or 1
        results["ranks"] = {
            "elements": RANKS_ELEMENTS,
            "load before": os.getloadavg()[0],
            **{
                name: {
                    str(n): {
                        state: harness.spread(seconds)
                        for state, seconds in in_ranks(
                            n, threads, rank_times, options.rounds, options.folder
                        ).items()
                    }
                    for n in RANKS
                }
                for name, threads in ((ONE_THREAD, 1), (ALL_CORES, cores), (SHARED, None))
            },
        }
    show(results)
    harness.write_results("host_step", results)


if __name__ == "__main__":
    main()
