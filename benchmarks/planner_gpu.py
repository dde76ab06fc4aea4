"""Plans compared with what ``gpu_jobs.py`` measured: step time and peak memory on one GPU.

    python benchmarks/planner_gpu.py                     # three minutes

Needs no GPU: it reads ``results/gpu_jobs_h200.json``, for example, and the machine that
``fsdp-engine calibrate`` measured on the same card, ``results/h200_machine.json``. Jobs in fp8 need
torchao (``pip install --no-deps torchao``).
"""

from __future__ import annotations

import json
from typing import Any

import gpu_jobs
import harness
import torch
from torch import nn

import fsdp_engine as fe

CARDS = ("h100", "h200")


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
    results: dict[str, dict[str, dict[str, float]]] = {}
    for card in CARDS:
        machine = fe.Machine.load(harness.RESULTS / f"{card}_machine.json")
        path = harness.RESULTS / f"gpu_jobs_{card}.json"
        jobs = json.loads(path.read_text(encoding="utf-8"))["results"]
        of_card = results[card.upper()] = {
            name: compare(name, found, machine) for name, found in jobs.items()
        }
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
            for job, each in of_card.items()
        ]
        columns = ["job", "planned ms", "measured ms", "ratio"]
        columns += ["planned GiB", "measured GiB", "ratio"]
        harness.print_table(f"plans for {machine.name}", columns, rows)
    harness.write_results("planner_gpu", results)


if __name__ == "__main__":
    main()
