"""Plans compared with what ``gpu.py`` measured: step time and peak memory of one rank on one GPU.

    python benchmarks/planner_gpu.py

Needs no GPU: it reads ``results/gpu.json``, and the machine that ``fsdp-engine calibrate`` measured
on the same card, ``results/h200_machine.json``. The sections with one rank are compared: emulated
collectives are device copies, which no plan knows.
"""

from __future__ import annotations

import json
from typing import Any

import harness
import torch

import fsdp_engine as fe
from gpt import GPT, GPTConfig

SECTIONS = ("world 1", "world 1, 16 sequences")
MACHINE = harness.RESULTS / "h200_machine.json"
MEASURED = harness.RESULTS / "gpu.json"
POLICY = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def compare(run: dict[str, Any], machine: fe.Machine) -> dict[str, dict[str, float]]:
    """Planned and measured seconds and peak bytes of a section's levels."""
    config = GPTConfig(**run["config"])
    tokens = torch.randint(0, config.vocab_size, (run["sequences"], config.sequence_length))
    planning = fe.plan(
        lambda: GPT(config),
        (tokens, tokens.roll(-1, 1)),
        world_size=1,
        machine=machine,
        checkpointing=(False,),
        mp_policy=POLICY,
    )
    found = {}
    for each in planning.outcomes:
        assert each.times is not None
        engine = run["engines"][each.candidate.strategy]
        milliseconds = harness.quartiles(engine["milliseconds"]["step"])[1]
        found[each.candidate.strategy] = {
            "planned seconds": each.times.step,
            "measured seconds": milliseconds / 1e3,
            "planned bytes": each.peak_bytes,
            "measured bytes": engine["peak bytes"],
        }
    return found


def main() -> None:
    machine = fe.Machine.load(MACHINE)
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["results"]
    results = {name: compare(measured[name], machine) for name in SECTIONS}
    rows = [
        [
            section,
            level,
            f"{each['planned seconds'] * 1e3:.1f}",
            f"{each['measured seconds'] * 1e3:.1f}",
            f"{each['planned seconds'] / each['measured seconds']:.2f}",
            f"{each['planned bytes'] / 2**30:.2f}",
            f"{each['measured bytes'] / 2**30:.2f}",
            f"{each['planned bytes'] / each['measured bytes']:.3f}",
        ]
        for section, found in results.items()
        for level, each in found.items()
    ]
    columns = ["section", "level", "planned ms", "measured ms", "ratio"]
    columns += ["planned GiB", "measured GiB", "ratio"]
    harness.print_table(f"plans for {machine.name}", columns, rows)
    harness.write_results("planner_gpu", results)


if __name__ == "__main__":
    main()
