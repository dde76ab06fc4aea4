"""Planned peak memory for a machine of ``calibrate``, compared with that of two gloo ranks.

    python benchmarks/planner_calibrated.py
    python benchmarks/planner_calibrated.py --machine machine.json    # made by `calibrate`

``planner_memory.py`` plans for a machine with round figures. Here the figures are those of this
machine, and the models (``_planner_models.py``) have their peak at the end of
backward, where reductions are in flight: a U-Net, a mixture of experts, a vision transformer. The
measured value is that of every live storage in the third step (``live_storages.py``). Plans of the
same runs for ``fe.H100`` show the peaks without memory that only ranks on a CPU allocate.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from _planner_models import WEIGHT_BOUND

import fsdp_engine as fe
from fsdp_engine.planner.simulation.calibrate import calibrate
from fsdp_engine.strategies import LEVELS
from tests.planner.simulation.memory_runs import NUM_RANKS, Run, measured, planned

NUM_STEPS = 3


def measure(cases: list[list[Any]]) -> list[int]:
    """The larger of both ranks' peaks in each case."""
    peaks = torch.tensor([measured(Run(*case), NUM_STEPS) for case in cases])
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return [int(each) for each in peaks]


def compare(run: Run, held: int, machine: fe.Machine) -> dict[str, Any]:
    """The measured peak, and plans for this machine and for a device."""
    found, on_device = planned(run, machine), planned(run, fe.H100)
    return {
        "model": run.name,
        "level": run.level,
        "measured": held,
        "planned": found.peak_bytes,
        "percent": 100 * (found.peak_bytes / held - 1),
        "transient": found.memory["transient"],
        "on a device": on_device.peak_bytes,
        "transient on a device": on_device.memory["transient"],
    }


def main() -> None:
    """Calibrate, measure, plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--machine", type=Path, help="a file of `calibrate`, in place of measuring")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.machine
        if path is None:
            path = Path(folder) / "machine.json"
            calibrate(verbose=True).save(path)
        machine = fe.Machine.load(path)
    runs = [Run(name, level) for name in WEIGHT_BOUND for level in LEVELS]
    start = time.perf_counter()
    peaks = harness.run_ranks(measure, NUM_RANKS, [[run.name, run.level] for run in runs])
    print(f"{len(runs)} runs of two ranks in {time.perf_counter() - start:.0f} s")
    results = [compare(run, peak, machine) for run, peak in zip(runs, peaks, strict=True)]
    columns = ["model", "level", "measured", "planned", "off by", "on a device"]
    rows = [
        [
            each["model"],
            each["level"],
            *(f"{each[name] / 1e6:.2f}" for name in ("measured", "planned")),
            f"{each['percent']:+.4f} %",
            f"{each['on a device'] / 1e6:.2f}",
        ]
        for each in results
    ]
    harness.print_table("Peak in MB", columns, rows)
    harness.write_results("planner_calibrated", results)


if __name__ == "__main__":
    main()
