"""Planned step times compared with this machine's steps on two gloo ranks.

    python benchmarks/planner_time.py
    python benchmarks/planner_time.py --rounds 4 --models gpt        # a short run
    python benchmarks/planner_time.py --machine machine.json         # made by `calibrate`

The machine is calibrated, then the ten strategy pairs are planned (``fe.plan``), then all are run,
interleaved. Pairs with an outer level have both ranks on the outer axis, the others on the inner
one. Two models: the GPT of ``simulated.py`` (5M parameters, fp32), and one of half as many blocks
of twice the width with half the tokens, whose steps are dominated by communication and optimizer.

Printed and written, for each model: predicted and measured step time, their ratio, the rank
correlation, the processor time of a rank's step (if it differs much from the step time, other
programs were running), and exposed communication (``engine.measure()``). For two memory limits (one
that all fit, one half way between the smallest and the largest peak) also the measured slowdown of
the planner's choice relative to the fastest candidate that fits. Whether candidates fit is taken
from the plan; ``planner_memory.py`` measures that. Takes about six minutes; other programs on the
machine distort the figures.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from simulated import PAIRS, rank_correlation
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.planner.simulation.calibrate import calibrate
from gpt import GPT, GPTConfig

MODELS = {
    "gpt": (GPTConfig(sequence_length=128, num_layers=6, width=256, num_heads=4), 4),
    "wide": (GPTConfig(sequence_length=128, num_layers=3, width=512, num_heads=8), 2),
}
ALONE = PAIRS[0][1]  # for an outer axis of one rank
NEAR = 1.05


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank."""
    config, sequences = MODELS[name]
    tokens = torch.randint(0, config.vocab_size, (sequences, config.sequence_length))
    return tokens, tokens.roll(-1, 1)


def ranks_of(pair: tuple[str, str]) -> tuple[int, ...]:
    """The mesh of a pair: two ranks on one axis, or on the outer one."""
    return (2,) if pair[1] == ALONE else (2, 1)


def plan(name: str, machine: fe.Machine) -> dict[str, dict[str, float]]:
    """Seconds of a step and bytes at most, by pair."""
    planning = fe.plan(
        lambda: GPT(MODELS[name][0]),
        batch(name),
        world_size=2,
        machine=machine,
        meshes=[(2,), (2, 1)],
        checkpointing=(False,),
        memory=2**50,
        options=fe.Options(min_unit_size=0),
    )
    found = {}
    for each in planning.outcomes:
        pair = (each.candidate.strategy, each.candidate.outer_strategy)
        if each.candidate.mesh == ranks_of(pair):
            assert each.times is not None
            found[" / ".join(pair)] = {"seconds": each.times.step, "bytes": each.peak_bytes}
    return found


def measure(name: str, rounds: int) -> dict[str, Any]:
    """For each pair the step time, processor time of this rank, and exposed communication, in
    seconds, on two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    meshes: dict[tuple[int, ...], Any] = {
        sizes: init_device_mesh("cpu", sizes) for sizes in ((2,), (2, 1))
    }
    made = {" / ".join(pair): make_step(name, pair, meshes[ranks_of(pair)]) for pair in PAIRS}
    busy: dict[str, list[float]] = {key: [] for key in made}

    def timed(key: str) -> None:
        start = time.process_time()
        made[key][1]()
        busy[key].append(time.process_time() - start)

    times = harness.interleave({key: functools.partial(timed, key) for key in made}, rounds)
    waited = {}
    for key, (engine, step) in made.items():
        with engine.measure() as measured:
            for _ in range(2):
                step()
        waited[key] = measured.waited_seconds / measured.num_steps
    return {"times": times, "busy": busy, "waited": waited}


def make_step(name: str, pair: tuple[str, str], mesh: Any) -> tuple[fe.Engine, Callable[[], None]]:
    """An engine and a step of a fresh model."""
    torch.manual_seed(0)
    model = GPT(MODELS[name][0])
    engine = fe.shard(model, mesh, *pair, options=fe.Options(min_unit_size=0))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fe.shard_optimizer(optimizer)
    inputs = batch(name)

    def step() -> None:
        model(*inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return engine, step


def choices(planned: dict[str, dict[str, float]], measured: dict[str, float]) -> dict[str, Any]:
    """By limit: the planner's choice, the fastest pair, and the slowdown of the choice."""
    peaks = [each["bytes"] for each in planned.values()]
    limits = {"all fit": max(peaks), "half way": (min(peaks) + max(peaks)) / 2}
    found = {}
    for name, limit in limits.items():
        fitting = [key for key, each in planned.items() if each["bytes"] <= limit]
        chosen = min(fitting, key=lambda key: planned[key]["seconds"])
        fastest = min(fitting, key=lambda key: measured[key])
        found[name] = {
            "limit": limit,
            "fitting": fitting,
            "chosen": chosen,
            "fastest": fastest,
            "slower": measured[chosen] / measured[fastest],
        }
    return found


def run(name: str, machine: fe.Machine, rounds: int) -> dict[str, Any]:
    """Plan, measure, print."""
    planned = plan(name, machine)
    found = harness.run_ranks(measure, 2, name, rounds)
    middle = {key: harness.quartiles(times)[1] for key, times in found["times"].items()}
    rows, steps = [], {}
    for key, each in planned.items():
        low, median, high = harness.quartiles(found["times"][key])
        ratio = each["seconds"] / median
        steps[key] = {
            "predicted": each["seconds"],
            "planned bytes": each["bytes"],
            "measured": {"median": median, "q1": low, "q3": high, "times": found["times"][key]},
            "busy": (busy := harness.quartiles(found["busy"][key])[1]),
            "waited": found["waited"][key],
            "ratio": ratio,
        }
        spread = f"{median * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})"
        cells = [f"{each['seconds'] * 1e3:.0f}", spread, f"{ratio:.2f}", f"{busy * 1e3:.0f}"]
        waited, peak = found["waited"][key] * 1e3, each["bytes"] / 2**20
        rows.append([key, *cells, f"{waited:.0f}", f"{peak:.0f}"])
    columns = ["pair", "predicted ms", "measured ms (quartiles)", "ratio"]
    columns += ["processor ms", "waited ms", "peak MiB"]
    harness.print_table(f"{name}: a step on two gloo ranks", columns, rows)
    keys = list(planned)
    correlation = rank_correlation([planned[k]["seconds"] for k in keys], [middle[k] for k in keys])
    chosen = choices(planned, middle)
    print(f"rank correlation {correlation:.2f}")
    for limit, each in chosen.items():
        verdict = "within 5 %" if each["slower"] <= NEAR else "NOT within 5 %"
        print(
            f"{limit} ({each['limit'] / 2**20:.0f} MiB, {len(each['fitting'])} pairs): takes "
            f"{each['chosen']}; fastest is {each['fastest']}; slower by "
            f"{each['slower'] - 1:.1%}, {verdict}",
            flush=True,
        )
    return {"steps": steps, "rank correlation": correlation, "choices": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20, help="steps of each pair")
    parser.add_argument("--machine", type=Path, help="a file of `calibrate`, in place of measuring")
    parser.add_argument("--keep", action="store_true", help="write no results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"load average {load:.1f}" + (": the machine is not quiet" if load > 1 else ""))
    machine = fe.Machine.load(args.machine) if args.machine else calibrate(verbose=True)
    results = {name: run(name, machine, args.rounds) for name in args.models}
    if not args.keep:
        figures = {
            "processor": {
                **{str(key): each for key, each in machine.processor.matrix_flops.items()},
                "memory_bandwidth": machine.processor.memory_bandwidth,
                "overlap": machine.processor.overlap,
                "attention_share": machine.processor.attention_share,
                "function_seconds": machine.processor.function_seconds,
            },
            "link": vars(machine.within_node),
            "host_seconds": machine.host_seconds,
            "load average": load,
        }
        harness.write_results("planner_time", {"machine": figures, "models": results})


if __name__ == "__main__":
    main()
