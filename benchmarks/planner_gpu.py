"""Plans compared with what ``gpu_jobs.py`` measured: step time and peak memory on one GPU.

    python benchmarks/planner_gpu.py                     # a minute

Needs no GPU: it reads ``results/gpu_jobs.json``, and the machine that ``fsdp-engine calibrate``
measured on the same card, ``results/h200_machine.json``. Three of its figures were measured by
``gpu_kernels.py`` there, with the operations by which ``calibrate`` measures them since.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import gpu_jobs
import harness
import torch
from torch import nn

import fsdp_engine as fe

MACHINE = harness.RESULTS / "h200_machine.json"
MEASURED = harness.RESULTS / "gpu_jobs.json"
KERNELS = harness.RESULTS / "gpu_kernels.json"


def measured_machine() -> fe.Machine:
    """The machine, with the figures that its file does not have."""
    machine = fe.Machine.load(MACHINE)
    kernels = json.loads(KERNELS.read_text(encoding="utf-8"))["results"]
    seconds = {name: each["seconds"] for name, each in kernels.items()}
    elements, wide, large = 8192 * 4096, 8192 * 14336, 2**27
    bandwidth = 3 * 4 * wide / seconds["x * y, wide, fp32"]
    irregular = (
        seconds["x * row, bf16"] / elements - 4 / bandwidth,
        seconds["contiguous, heads transposed, bf16"] / elements - 4 / bandwidth,
        seconds["fp32 of bf16"] / large - 6 / bandwidth,
    )
    # Of heads of 64 and 128: see `attention_head` of `fsdp_engine/simulation/kernels.py`.
    small, full = (
        2048 / size * (seconds[name] + seconds[f"{name}, backward"])
        for size, name in ((size, f"attention 2048 long, heads of {size}") for size in (64, 128))
    )
    processor = dataclasses.replace(
        machine.processor,
        memory_bandwidth=bandwidth,
        irregular_seconds=sum(irregular) / len(irregular),
        attention_head=128 * (small / full - 1) / (2 - small / full),
    )
    return dataclasses.replace(machine, processor=processor)


def compare(name: str, found: dict[str, Any], machine: fe.Machine) -> dict[str, float]:
    """Planned and measured seconds and peak bytes of a job."""
    job = gpu_jobs.the_gpu_s_jobs()[name]

    def build() -> nn.Module:
        with torch.device("meta"):
            return job.build()

    planned = fe.simulate(
        build,
        1,
        batch=job.batch(torch.device("meta")),
        machine=machine,
        strategy="optim_grads_params",
        mp_policy=gpu_jobs.POLICY,
        optimizer=gpu_jobs.make_optimizer,
        compile=job.compiled,
        **job.options,
    )
    return {
        "planned seconds": planned.seconds,
        "measured seconds": harness.quartiles(found["milliseconds"])[1] / 1e3,
        "planned bytes": planned.peak_bytes,
        "measured bytes": found["peak bytes"],
    }


def main() -> None:
    machine = measured_machine()
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["results"]
    results = {name: compare(name, found, machine) for name, found in measured.items()}
    rows = [
        [
            job,
            f"{each['planned seconds'] * 1e3:.1f}",
            f"{each['measured seconds'] * 1e3:.1f}",
            f"{each['planned seconds'] / each['measured seconds']:.2f}",
            f"{each['planned bytes'] / 2**30:.2f}",
            f"{each['measured bytes'] / 2**30:.2f}",
            f"{each['planned bytes'] / each['measured bytes']:.3f}",
        ]
        for job, each in results.items()
    ]
    columns = ["job", "planned ms", "measured ms", "ratio"]
    columns += ["planned GiB", "measured GiB", "ratio"]
    harness.print_table(f"plans for {machine.name}", columns, rows)
    harness.write_results("planner_gpu", results)


if __name__ == "__main__":
    main()
