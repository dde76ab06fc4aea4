"""Published speeds of compiled blocks on GPUs, compared with the planner's for the same jobs.

    python benchmarks/planner_compiled.py                   # half a minute

The jobs of ``planner_published.py`` that were published both without and with ``torch.compile`` of
each block: torchtitan's Llama 3.1 8B. Each is planned in both ways. A plausibility check, as there;
nothing was fitted.
"""

from __future__ import annotations

from typing import Any

import harness
from planner_published import CHECKPOINTING, JOBS, Job

import fsdp_engine as fe
from fsdp_engine.planner.command_inputs import example_inputs
from fsdp_engine.planner.simulation.operations import OperationCache

# By ranks: tokens a second of one GPU, and GiB.
COMPILED = {8: (6667, 77.0), 128: (6514, 62.0)}


def plan(job: Job) -> dict[str, Any]:
    """The job without and with compiled blocks, published and planned."""
    row: dict[str, Any] = {"job": job.name, "source": job.source, "machine": job.machine.name}
    row["ranks"] = job.world_size
    eager = job.tokens_per_second, job.gib
    for way, (speed, gib) in (("eager", eager), ("compiled", COMPILED[job.world_size])):
        found = fe.simulate(
            job.build,
            job.world_size,
            batch=example_inputs(job.build(), (job.rows, job.length)),
            machine=job.machine,
            strategy="optim_grads_params",
            checkpointing=CHECKPOINTING[job.recomputed],
            mp_policy=job.policy,
            known=OperationCache(),
            compile=way == "compiled",
        )
        row[way] = {
            "published tokens/s": speed,
            "planned tokens/s": job.rows * job.length / found.seconds,
            "published GiB": gib,
            "planned GiB": found.peak_bytes / 2**30,
        }
    return row


def main() -> None:
    jobs = [job for job in JOBS if job.name == "Llama 3.1 8B" and job.world_size in COMPILED]
    rows = [plan(job) for job in jobs]
    cells = []
    for row in rows:
        for way in ("eager", "compiled"):
            each = row[way]
            ratio = each["planned tokens/s"] / each["published tokens/s"]
            numbers = [f"{number:,.1f}" for number in each.values()]
            cells.append([row["job"], str(row["ranks"]), way, *numbers, f"{ratio:.2f}"])
    columns = ["job", "ranks", "blocks", "tokens/s", "planned", "GiB", "planned", "ratio"]
    harness.print_table("published and planned", columns, cells)
    harness.write_results("planner_compiled", rows)


if __name__ == "__main__":
    main()
