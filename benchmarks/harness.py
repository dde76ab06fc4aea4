"""Shared code of benchmarks: ranks in processes, interleaved timing, ratios, tables, results."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    set_up: Callable[[], None] | None = None,
) -> Any:
    """Run ``function(*args)`` on ``world_size`` ranks of one thread; returns rank 0's result.

    ``function`` and ``set_up``, which runs first on each rank, are module-level functions. The
    result has to be serializable as JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, backend, set_up, function, args)
        mp.spawn(_rank_main, arguments, world_size)
        return json.loads((Path(folder) / "result").read_text())


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    set_up: Callable[[], None] | None,
    function: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    if set_up is not None:
        set_up()
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    result = function(*args)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def interleave(
    steps: dict[str, Callable[[], None]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each step in each round. Every round runs all steps, in a random order.

    Ranks start each step together, and use the same order.
    """
    draw = random.Random(0)
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(warmup + rounds):
        draw.shuffle(names)
        for name in names:
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.barrier()
            start = clock()
            steps[name]()
            elapsed = clock() - start
            if round_number >= warmup:
                times[name].append(elapsed)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, for results files."""
    low, middle, high = quartiles(values)
    return {"median": middle, "q1": low, "q3": high}


def ratios(times: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Median and quartiles of the ratio of ``name`` to ``base`` per round."""
    pairs = [a / b for a, b in zip(times[name], times[base], strict=True)]
    return spread(pairs)


def show_ratio(ratio: dict[str, float]) -> str:
    """ "0.72 (0.70-0.75)": median and quartiles."""
    return f"{ratio['median']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on the terminal; the first column is left-aligned."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=max(120, Console().width)).print(table)


def write_results(name: str, results: Any) -> None:
    """Write ``benchmarks/results/<name>.json`` with a line on the machine."""
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.processor()
