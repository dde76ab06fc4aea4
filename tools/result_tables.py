"""Tables in Markdown, each from files of ``benchmarks/results/``: one function per table.

``tools/figures.py`` writes them into the pages.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import harness  # noqa: E402
from checkpoint import TARGETS as CHECKPOINT_TARGETS  # noqa: E402
from step_time import TARGETS as STEP_TARGETS  # noqa: E402

from fsdp_engine.planner.simulation.time_accuracy import ACCURACIES, accuracy_of  # noqa: E402
from tools import measure_tests, mutants  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STEP_TIMES = ("step_time_10M", "step_time_85M")
LEVEL_3 = "optim_grads_params"
MB, MIB, GIB = 1e6, 2**20, 2**30

Rows = Iterable[Sequence[object]]


def results(name: str) -> Any:
    """The results of a benchmark, without the line on the machine."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def measured_on(*names: str) -> str:
    """The machines of results files, and the files."""
    machines = [
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["machine"]
        for name in names
    ]
    lines = dict.fromkeys(
        f"one {each['gpu']}, torch {each['torch']}"
        if "gpu" in each
        else f"{each['processor']}, {each['cores']} cores, torch {each['torch']}"
        for each in machines
    )
    files = ", ".join(f"`{name}.json`" for name in names)
    return f"Measured on {' and '.join(lines)} ({files})."


def table(columns: Sequence[str], rows: Rows) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_machine(text: str, *names: str) -> str:
    """A table, and below it the machine of its results."""
    return f"{text}\n\n{measured_on(*names)}"


def spread(found: dict[str, float], digits: int = 2, factor: float = 1.0) -> str:
    """Median and quartiles: ``0.72 (0.70-0.75)``."""
    median, low, high = (f"{found[key] * factor:,.{digits}f}" for key in ("median", "q1", "q3"))
    return f"{median} ({low}-{high})"


def against(value: float, limit: float) -> str:
    """Whether a figure is at most its target."""
    return f"at most {limit:.2f}: {'met' if value <= limit else '**missed**'}"


def _step_times() -> dict[str, dict[str, Any]]:
    """Step times by model and dtype."""
    return {title: run for name in STEP_TIMES for title, run in results(name).items()}


# --- README.md, docs/internals/benchmarks.md


def step_time_machine() -> str:
    return measured_on(*STEP_TIMES)


def step_time_over_fsdp2() -> str:
    """README's sentence."""
    ratios = [run[LEVEL_3]["over"]["FSDP2"]["median"] for run in _step_times().values()]
    return (
        f"On two CPU ranks a step at `optim_grads_params` takes {min(ratios):.2f} to "
        f"{max(ratios):.2f} of FSDP2's, by model and dtype.\n{_gpu_over_fsdp2()}"
    )


def step_time_targets() -> str:
    runs = _step_times()
    rows = []
    for engine, base, *limits in STEP_TARGETS:
        low, high = (f"{limit:.2f}" for limit in limits)
        row = [f"{engine} / {base}", low if low == high else f"{low} fp32, {high} bf16"]
        for title, run in runs.items():
            if base not in run:
                row.append("-")
                continue
            ratio = run[engine]["over"][base]["median"]
            missed = ratio > limits[title.endswith("bf16")]
            floor = f" ({run['floor of level 3'][base]:.3f})" if engine == LEVEL_3 else ""
            row.append(f"{ratio:.3f}{' **missed**' if missed else ''}{floor}")
        rows.append(row)
    return table(["ratio", "at most", *runs], rows)


def step_times() -> str:
    """A table for each model and dtype."""
    parts = []
    for title, run in _step_times().items():
        engines = {name: row for name, row in run.items() if "seconds" in row}
        bases = list(next(iter(engines.values()))["over"])
        rows = [
            [
                name,
                f"{row['seconds']['median'] * 1e3:.0f}",
                *(spread(row["over"][base]) for base in bases),
            ]
            for name, row in engines.items()
        ]
        parts.append(f"### {title}\n\n{table(['engine', 'ms', *(f'x {b}' for b in bases)], rows)}")
    return "\n\n".join(parts)


def host_time() -> str:
    found = {name: row for name, row in results("host_overhead").items() if name != "ranks"}
    thread = found.pop("watching thread")
    rows = [
        [name, spread(row["us_per_unit"], 0), spread(row["ratio"])] for name, row in found.items()
    ]
    ratio = found[LEVEL_3]["ratio"]["median"]
    return with_machine(
        table(["engine", "us per unit", "x FSDP2"], rows)
        + f"\n\nLevel 3 over FSDP2: {ratio:.3f}, {against(ratio, 0.25)}. The thread that monitors "
        f"stalls takes {thread['us_per_second']:.0f} us of processor time a second, at "
        f"{thread['steps_per_second']:.0f} steps a second.",
        "host_overhead",
    )


def _compositions(what: str) -> str:
    found = results("composition")[what]
    rows = [
        [f"`{name}`", f"{row['seconds']['median'] * 1e3:.0f}", spread(row["over FSDP2"])]
        for name, row in found.items()
        if "seconds" in row
    ]
    targets = [
        f"{name}: {spread(row['ratio'])}, {against(row['ratio']['median'], row['at most'])}."
        for name, row in found.items()
        if "ratio" in row
    ]
    return with_machine(
        table(["engine", "ms per step", "x FSDP2"], rows) + "\n\n" + "\n".join(targets),
        "composition",
    )


def fully_shard_calls() -> str:
    return _compositions("face")


def tensor_parallelism() -> str:
    return _compositions("tensor")


def unit_size_gloo() -> str:
    rows = []
    for block in results("unit_size_gloo"):
        for level, found in block["levels"].items():
            single = statistics.median(found["ms, single"])
            over = [spread(ratio) for ratio in found["over single"].values()]
            rows.append([f"{block['elements of a block']:,}", level, f"{single:.0f}", *over])
    columns = ["elements of a block", "level", "ms, single", "units of 2", "units of 4", "one unit"]
    return with_machine(table(columns, rows), "unit_size_gloo")


def unit_size_peers() -> str:
    peers = ("DDP", "FSDP2")
    rows = [
        [
            name,
            f"{row['ms']['median']:.2f}",
            spread(row["over"]["DDP"]),
            spread(row["over"]["FSDP2"]),
        ]
        for name, row in results("unit_size_peers").items()
    ]
    return with_machine(
        table(["engine", "ms", *(f"x {each}" for each in peers)], rows), "unit_size_peers"
    )


def unit_size_clock() -> str:
    rows = []
    for row in results("unit_size_clock"):
        single, *joined = row["seconds"].values()
        rows.append(
            [
                row["ranks"],
                row["level"],
                f"{row['elements of a block']:,}",
                f"{single * 1e3:.1f}",
                *(f"{seconds / single:.3f}" for seconds in joined),
            ]
        )
    columns = ["ranks", "level", "elements of a block", "ms, single", "units of 2", "one unit"]
    return table(columns, rows)


def long_run() -> str:
    steps = (100, 500, 1000, 2000, 3000)
    rows = []
    for way, samples in results("long_run").items():
        by_step = {sample["step"]: sample for sample in samples}
        shown = [by_step[step] for step in steps]
        rows.append(
            [
                way,
                ", ".join(f"{each['page_faults']:,.0f}" for each in shown),
                ", ".join(f"{each['resident_mib']:.0f}" for each in shown),
                ", ".join(f"{each['processor_seconds'] * 1e3:.0f}" for each in shown),
            ]
        )
    listed = ", ".join(map(str, steps))
    columns = [
        "memory",
        f"page faults of a step: {listed}",
        "resident set, MiB",
        "processor time of a step, ms",
    ]
    return with_machine(table(columns, rows), "long_run")


def optimizer_step() -> str:
    forms: dict[str, dict[str, Any]] = {}
    for name, row in results("optimizer_step").items():
        form, tensors = name.split(", ", 1)
        forms.setdefault(form, {})[tensors] = row
    rows = [
        [
            form,
            f"{kinds['plain tensors']['ms']['median']:.1f}",
            *(spread(row["ratio"]) for kind, row in kinds.items() if kind != "plain tensors"),
        ]
        for form, kinds in forms.items()
    ]
    kinds = [kind for kind in next(iter(forms.values())) if kind != "plain tensors"]
    return with_machine(table(["size, form", "plain tensors, ms", *kinds], rows), "optimizer_step")


def nan_check() -> str:
    found = results("nan_check")
    rows = [[f"{name}, passes over memory", spread(row)] for name, row in found["passes"].items()]
    rows += [
        [f"step at `{level}`, with the check / without", spread(row["with / without"])]
        for level, row in found["steps"].items()
    ]
    return with_machine(table(["measured", "median (quartiles)"], rows), "nan_check")


def uneven_batches() -> str:
    found = results("uneven_batches")
    ways = next(iter(found["errors"].values()))
    names = {"mean_loss": "`engine.mean_loss`", "mean of means": "this engine, mean of means"}
    rows = [
        [
            names.get(way, way),
            *(
                f"{each[way]['median']:.1e} ({each[way]['q1']:.1e}-{each[way]['q3']:.1e})"
                for each in found["errors"].values()
            ),
        ]
        for way in ways
    ]
    columns = [f"error of the gradient, {found['ranks']} ranks"]
    columns += [f"{num} microbatch{'es' if num != '1' else ''} a step" for num in found["errors"]]
    step = (
        "With `mean_loss`, a step of a 10M GPT at level 3 takes "
        f"{spread(found['step'])} of the time of a step with a plain mean; a forward within "
        f"`engine.together()` takes {spread(found['together'])} of the time of one outside of it."
    )
    return f"{with_machine(table(columns, rows), 'uneven_batches')}\n{step}"


def local_checkpoints() -> str:
    found = results("local_checkpoints")
    seconds = {name: f"{each['median']:.2f}" for name, each in found["seconds"].items()}
    rows = [
        [
            "training waits for `save_async`",
            seconds["local: training waits"],
            seconds["disk: training waits"],
        ],
        ["until a save is complete", seconds["local: complete"], seconds["disk: complete"]],
        ["load", seconds["local: load"], seconds["disk: load"]],
        ["load, a node replaced", seconds["local: load, a node lost"], "-"],
    ]
    copies = found["bytes_in_memory"] / found["bytes_of_state"]
    note = (
        f"\n\nA GPT of {found['model']} parameters with AdamW, level 3, two ranks, each a node, on "
        f"one machine. Between saves {copies:.2f} times the state is in memory. A step beside a "
        f"save takes {spread(found['step_beside_a_save'])} of one without."
    )
    return with_machine(table(["seconds", "`/dev/shm`", "disk"], rows) + note, "local_checkpoints")


def host_step() -> str:
    """Steps in the memory of a CPU beside its bandwidth."""
    found = results("host_step")["step"]
    steps = list(dict.fromkeys(name for each in found.values() for name in each["of the bound"]))
    rows = [
        [
            name,
            *(
                spread(each[key][name]) if name in each["of the bound"] else "-"
                for each in found.values()
                for key in ("seconds", "of the bound")
            ),
        ]
        for name in steps
    ]
    columns = [""]
    for threads in found:
        plural = "thread" if threads == "1" else "threads"
        columns += [f"seconds, {threads} {plural}", "x the bound"]
    worst = max(each["of the bound"]["engine, fused"]["median"] for each in found.values())
    rates = "; ".join(
        f"with {threads} {'thread' if threads == '1' else 'threads'} "
        + ", ".join(f"{name} {rate['median']:.0f}" for name, rate in each["GB/s"].items())
        for threads, each in found.items()
    )
    count = next(iter(found.values()))["elements"]
    loads = ", ".join(f"{each['load before']:.1f}" for each in found.values())
    note = (
        f"\n\nAdamW on {count / 1e6:.0f}M fp32 elements in 100 matrices, one rank, level 3; all "
        "on the same memory. The bound is 28 bytes of an element over the largest bandwidth "
        f"(GB/s {rates}). Engine, fused: {worst:.2f}, {against(worst, 1.15)}. torchao's "
        "`CPUOffloadOptimizer` needs an accelerator; on its host it calls one fused AdamW for each "
        f"parameter. Load before: {loads}."
    )
    return with_machine(table(columns, rows) + note, "host_step")


def muon_step() -> str:
    """Steps of Muon in which owners step matrices, and in which every rank steps all of them."""
    found = results("muon_step")["step"]
    base = "of no_shard, as it is"
    rows = [
        [
            size,
            name,
            spread(seconds, 2),
            spread(step[base][name]),
            f"{step['bytes'][name] / 1e6:.1f}" if name in step["bytes"] else "-",
            against(step[base][name]["median"], 0.55) if name.startswith("owners") else "-",
        ]
        for size, step in found.items()
        for name, seconds in step["seconds"].items()
    ]
    columns = ["matrices", "way", "seconds", "x no_shard, as it is", "MB sent", "target"]
    bounds = ", ".join(
        f"{step['bytes of a gather and a scatter'] / 1e6:.1f}" for step in found.values()
    )
    note = (
        "\n\n`torch.optim.Muon`, fp32, 2 ranks of one thread over gloo. MB are those that both "
        f"ranks send in a step; a gather and a scatter of the matrices take {bounds}. *Whole "
        "matrices*: each is one granule, so its owner holds all of it."
    )
    return with_machine(table(columns, rows) + note, "muon_step")


def muon_shares() -> str:
    """Shares of owners at scale, by formula."""
    found = results("muon_step")["shares"]
    rows = [
        [
            name,
            f"{each['matrices']:,}",
            f"{each['of the mean']:.2f}",
            f"{each['of the bound']:.2f}",
            f"{each['every rank does all, ms']:,.0f}",
            f"{each['owners compute, ms']:,.1f}",
            f"{each['a message, ms']:,.1f}",
            f"{each['step, ms']:,.1f}",
        ]
        for name, each in found.items()
    ]
    columns = ["model, ranks", "matrices", "largest share x mean", "x what whole matrices allow"]
    columns += ["every rank does all, ms", "owners compute, ms", "a message, ms", "step, ms"]
    return table(columns, rows)


def host_threads() -> str:
    """Steps of several ranks on the cores of one host, by threads of a rank."""
    found = results("host_step")["ranks"]
    ways = [name for name, value in found.items() if isinstance(value, dict)]
    counts = list(found[ways[0]])
    rows = [
        [state, way, *(spread(found[way][count][state], 3) for count in counts)]
        for state in found[ways[0]][counts[0]]
        for way in ways
    ]
    columns = ["AdamW, state", "threads of a rank"]
    columns += [f"{count} rank{'s' * (count != '1')}" for count in counts]
    note = (
        f"\n\nSeconds until the last rank has stepped; {found['elements'] / 1e6:.0f}M elements of "
        f"all ranks, level 3. Load before: {found['load before']:.1f}."
    )
    return with_machine(table(columns, rows) + note, "host_step")


def offload_rates() -> str:
    """Rates of a disk for ways to read and to write. ``DiskBlock`` uses one of each."""
    found = results("offload")["rates"]
    ways = {
        "page cache": "buffered",
        "`O_DIRECT`": "direct",
        "`O_DIRECT`, staged": "direct and staged",
        "`O_DIRECT`, staged, `fdatasync`": "direct and staged, fdatasync",
    }
    pieces = [name.split(", ")[2] for name in found["GB/s"] if name.startswith("read, buffered")]
    rows = [
        [
            f"{verb}, {name}",
            *(spread(found["GB/s"][f"{verb}, {way}, {mib}"]) for mib in pieces),
        ]
        for verb in ("read", "write")
        for name, way in ways.items()
        if f"{verb}, {way}, {pieces[0]}" in found["GB/s"]
    ]
    columns = ["GB/s by size of a call", *(f"{mib} MiB" for mib in pieces)]
    note = (
        f"\n\n{found['bytes'] / MIB:.0f} MiB in memory that is aligned like tensors, or to pages "
        "for `O_DIRECT` without staging. A write through the page cache ends with `fdatasync`."
    )
    return with_machine(table(columns, rows) + note, "offload")


def offload_step() -> str:
    """Steps with state on a disk beside plain copies of it."""
    found, state = results("offload")["step"], "bytes of a rank's state"
    rows = []
    for num_ranks in ("1", "2"):
        run = found[num_ranks]
        ratio = run["rates"]["state on disk"]
        rows.append(
            [
                num_ranks,
                f"{run[state] / MIB:,.0f}",
                *(spread(run["seconds"][name]) for name in run["seconds"]),
                spread(ratio["plain copy"]),
                spread(ratio["plain copy, O_DIRECT"]),
            ]
        )
    columns = ["ranks", "MiB of state each", *found["1"]["seconds"]]
    columns += ["rate over the plain copy", "over the one with `O_DIRECT`"]
    lowest = {
        base: min(found[each]["rates"]["state on disk"][base]["median"] for each in "12")
        for base in ("plain copy", "plain copy, O_DIRECT")
    }
    met, met_direct = ("met" if each >= 0.8 else "**missed**" for each in lowest.values())
    note = (
        f"\n\nSeconds of `optimizer.step()`: fused AdamW, GPT of {found['size']}, level 3, on a "
        f"virtual disk, whose host may cache. The goal is a rate of 0.8 of a plain copy (`preadv`, "
        f"`pwritev`, `fdatasync`): {met}; of a copy with `O_DIRECT`: {met_direct}."
    )
    return with_machine(table(columns, rows) + note, "offload")


def offload_clock() -> str:
    """Simulated steps with state on the host, beside formulas."""
    goal = 1.10
    rows: list[list[str]] = []
    over: dict[str, list[float]] = {}
    for model, by_ranks in results("offload_clock").items():
        for ranks, by_machine in by_ranks.items():
            for where, row in by_machine.items():
                over.setdefault(where, []).append(row["over the bound"])
                optimizer = row["optimizer seconds, state on the host"]
                rows.append(
                    [
                        f"{model}, {ranks}",
                        where,
                        f"{row['seconds, state on the device'] * 1e3:,.0f}",
                        f"{row['seconds, state on the host'] * 1e3:,.0f}",
                        f"{optimizer * 1e3:,.0f}",
                        f"{row['bound'] * 1e3:,.0f}",
                        f"{row['over the bound']:.2f}",
                        f"{row['peak bytes, state on the device'] / GIB:,.0f}",
                        f"{row['peak bytes, state on the host'] / GIB:,.0f}",
                        f"{row['bytes on the host'] / GIB:,.1f}",
                    ]
                )
    columns = ["model, GPUs", "copies bound by", "step ms: state on the device", "on the host"]
    columns += ["of it, optimizer", "bound", "over the bound"]
    columns += ["GiB of a rank: state on the device", "on the host", "GiB of host memory"]
    verdicts = "; ".join(
        f"{where}: {min(each):.2f} to {most:.2f}, {'met' if most <= goal else '**missed**'}"
        for where, each in over.items()
        if (most := max(each))
    )
    note = (
        f"\n\nThe goal is an optimizer's step of at most {goal:.2f} of the bound. Found: "
        f"{verdicts}. (`offload_clock.json`)"
    )
    return table(columns, rows) + note


def offload_clock_beside() -> str:
    """Simulated steps beside the next forward, and bounds."""
    beside = "state on the host, beside forward"
    longer = "longer at least, beside"
    rows: list[list[str]] = []
    over: list[float] = []
    for model, by_ranks in results("offload_clock").items():
        for ranks, by_machine in by_ranks.items():
            for where, row in by_machine.items():
                found, bounds = row[beside], row[longer]
                seconds = row["seconds, state on the device"]
                model_seconds = seconds - row["optimizer seconds, state on the device"]
                over.append(found["seconds"] / (model_seconds + bounds["forward"]))
                rows.append(
                    [
                        f"{model}, {ranks}",
                        where,
                        f"{row['forward seconds'] * 1e3:,.0f}",
                        f"{row['optimizer seconds, state on the host'] * 1e3:,.0f}",
                        f"{found['longer by'] * 1e3:,.0f}",
                        *(f"{bounds[key] * 1e3:,.0f}" for key in ("forward", "backward", "both")),
                        f"{seconds * 1e3:,.0f}",
                        f"{row['seconds, state on the host'] * 1e3:,.0f}",
                        f"{found['seconds'] * 1e3:,.0f}",
                        f"{row['peak bytes, state on the host'] / GIB:,.1f}",
                        f"{found['peak bytes'] / GIB:,.1f}",
                    ]
                )
    columns = ["model, GPUs", "copies bound by", "forward ms"]
    columns += ["step longer by ms: after backward", "beside forward"]
    columns += ["at least: beside forward", "at least: beside backward", "at least: beside both"]
    columns += ["step ms: state on the device", "on the host", "beside forward"]
    columns += ["GiB of a rank: on the host", "beside forward"]
    note = (
        f"\n\nSteps beside forward take {min(over):.3f} to {max(over):.3f} of the bound of a whole "
        "step. (`offload_clock.json`)"
    )
    return table(columns, rows) + note


def offload_clock_speculative() -> str:
    """Bounds of steps on the host that begin before the norm is known."""
    rows: list[list[str]] = []
    for model, by_ranks in results("offload_clock").items():
        for ranks, by_machine in by_ranks.items():
            row = next(iter(by_machine.values()))
            found = row["stepped on the host after backward"]
            waits = found["waits"]
            rows.append(
                [
                    f"{model}, {ranks}",
                    f"{row['backward seconds'] * 1e3:,.0f}",
                    *(
                        f"{found[key] * 1e3:,.0f}"
                        for key in (
                            "waits",
                            "begun, written elsewhere",
                            "undone, written elsewhere",
                            "begun, copied before",
                            "undone, copied before",
                        )
                    ),
                    *(
                        # The share p of undone steps with begun + p (undone - begun) = waits.
                        f"{(waits - begun) / (found[f'undone, {how}'] - begun):.0%}"
                        if (begun := found[f"begun, {how}"]) < waits
                        else "never"
                        for how in ("written elsewhere", "copied before")
                    ),
                    f"{found['bytes of memory, written elsewhere'] / GIB:,.1f}",
                ]
            )
    columns = ["model, GPUs", "backward ms", "after backward ms: waits for the norm"]
    columns += ["new values written elsewhere", "and undone"]
    columns += ["old values copied before", "and undone"]
    columns += ["faster if fewer are undone than: written elsewhere", "copied before"]
    columns += ["GiB more of a rank's host memory"]
    note = "\n\nFormulas, bound by the host's memory. (`offload_clock.json`)"
    return table(columns, rows) + note


def offload_clock_everything() -> str:
    """Simulated steps with everything on the host, beside formulas."""
    here, there = "everything on the host", "everything on the host, stepped there"
    rows: list[list[str]] = []
    over: dict[str, list[float]] = {here: [], there: []}
    for model, by_ranks in results("offload_clock").items():
        for ranks, by_machine in by_ranks.items():
            for where, row in by_machine.items():
                for key, ratios in over.items():
                    ratios.append(row[key]["seconds"] / row[key]["at least"])
                rows.append(
                    [
                        f"{model}, {ranks}",
                        where,
                        f"{row['seconds, state on the device'] * 1e3:,.0f}",
                        f"{row['seconds, state on the host'] * 1e3:,.0f}",
                        *(
                            f"{row[key][name] * 1e3:,.0f}"
                            for key in over
                            for name in ("seconds", "at least")
                        ),
                        f"{row['FSDP2 at least'] * 1e3:,.0f}",
                        f"{row['ZeRO-Offload at least'] * 1e3:,.0f}",
                        *(f"{row[key]['peak bytes'] / GIB:,.0f}" for key in over),
                        f"{row[here]['bytes on the host'] / GIB:,.1f}",
                    ]
                )
    columns = ["model, GPUs", "copies bound by", "step ms: nothing on the host"]
    columns += [
        "state on the host",
        "everything, stepped on the device",
        "bound",
        "stepped on the host",
        "bound",
    ]
    columns += ["FSDP2", "ZeRO-Offload", "GiB of a rank: stepped on the device"]
    columns += ["stepped on the host", "GiB of host memory"]
    ranges = " and ".join(
        f"{min(each):.2f} to {max(each):.2f} (stepped on the {where})"
        for each, where in zip(over.values(), ("device", "host"), strict=True)
    )
    note = f"\n\nSteps take {ranges} of the bound. (`offload_clock.json`)"
    return table(columns, rows) + note


def offload_activations_clock() -> str:
    """Simulated steps with activations kept, recomputed, and on the host."""
    ways = ("kept", "recomputed", "on the host")
    rows: list[list[str]] = []
    found = results("offload_activations_clock")
    for row in found:
        seconds, peaks = row["seconds"], row["peak bytes"]
        moved = seconds["on the host"]
        rows.append(
            [
                f"{row['width']:,}",
                *(f"{seconds[way] * 1e3:,.0f}" for way in ways),
                f"{moved / seconds['kept']:.2f}",
                f"{moved / seconds['recomputed']:.2f}",
                f"{row['copies take at least'] * 1e3:,.0f}",
                *(f"{peaks[way] / GIB:,.1f}" for way in ways),
                f"{row['bytes on the host'] / GIB:,.1f}",
            ]
        )
    columns = ["width", "step ms: activations kept", "recomputed", "on the host"]
    columns += ["over kept", "over recomputed", "copies take at least"]
    columns += ["GiB of a rank: kept", "recomputed", "on the host", "GiB of host memory"]
    saved = max(row["bytes of a token and an element"] for row in found)
    note = (
        f"\n\nPer token and element of its width, a block saves {saved:.0f} bytes for backward. "
        "(`offload_activations_clock.json`)"
    )
    return table(columns, rows) + note


def offload_memory() -> str:
    """Memory of jobs with state on a disk and without, and under a cap."""
    found = results("offload")["memory"]
    free, capped = found["without a cap"], found["under the cap"]
    rows = [
        [
            f"{name}{where}",
            f"{run['peak allocated bytes'] / MIB:,.0f}",
            f"{run['peak resident bytes'] / MIB:,.0f}",
            f"{run['seconds of a step']:.1f}",
        ]
        for name, run, where in (
            ("nothing", free["state in memory"], ""),
            ("optimizer state", free["state on disk"], ""),
            ("all", free["all on disk"], ""),
            ("all", capped["all on disk"], f", cap of {found['cap'] / MIB:,.0f}"),
        )
    ]
    death = "out of memory" if "allocate memory" in capped["state in memory"] else "dies"
    rows.append([f"nothing, cap of {found['cap'] / MIB:,.0f}", death, "-", "-"])
    needs = found["bytes of weights, gradients and state"]
    elements = capped["all on disk"]["elements"]
    ledger = capped["all on disk"]["peak bytes by role"]["total"]
    columns = ["on disk", "MiB allocated at most", "MiB resident at most", "seconds of a step"]
    note = (
        f"\n\nOne of two ranks, in addition to its memory before the model is built: GPT of "
        f"{elements / 1e6:.0f}M parameters, level 3, fp32. Weights, gradients and state take "
        f"{needs / MIB:,.0f} MiB of a rank, {found['factor']:.2f} times the cap (`RLIMIT_DATA`; "
        f"the goal is 3{'' if found['factor'] >= 3 else ', **missed**'}). The peak of the engine's "
        f"ledger is {ledger / MIB:,.0f} MiB; activations, stacks of threads and buffers of gloo "
        "are not booked in it. "
        "glibc's `MALLOC_MMAP_THRESHOLD_` is 1 MiB."
    )
    return with_machine(table(columns, rows) + note, "offload")


def node_losses() -> str:
    found = results("node_losses")
    seconds = found["seconds"]
    rows = [
        [f"a {kind}", str(found["losses"][kind]), f"{each['median']:.1f}", f"{each['worst']:.1f}"]
        for kind, each in seconds.items()
    ]
    columns = ["lost", "times", "median seconds to the next checkpoint", "worst"]
    equal = "equal" if found["is_equal"] else "**are not**"
    note = (
        f"\n\n{found['steps']:,} steps on {found['nodes']} nodes under torchrun, a checkpoint in "
        f"memory each {found['save_every']} steps. Losses of all steps, weights and optimizer "
        f"state {equal} those of a run without losses, bit for bit. Most of the seconds are "
        "torchrun's and the import of torch."
    )
    return with_machine(table(columns, rows) + note, "node_losses")


def replica_kills() -> str:
    found = results("replica_kills")
    ways = ("engine", "torchft alone")
    rows = [
        [
            moment,
            next(iter(row.values()))["kills"],
            *(
                f"{row[way]['median']:.2f}, {row[way]['worst']:.2f}" if way in row else "-"
                for way in ways
            ),
        ]
        for moment, row in found["seconds to the next committed step of the others"].items()
    ]
    columns = [
        "moment of the kill",
        "kills of each",
        "`ElasticReplicas`, s (median, worst)",
        "torchft alone, s (median, worst)",
    ]
    all_kills = found["seconds to the next committed step of the others"]["all"]
    over = all_kills["engine"]["median"] - all_kills["torchft alone"]["median"]
    text = (
        f"{table(columns, rows)}\n\nThe medians of all kills differ by {over:.2f} s (goal: at most "
        f"2 s). All {found['steps with the bits of a run without kills']} committed steps had the "
        "bits of a run without kills, on all ranks; none was missing or done twice."
    )
    return with_machine(text, "replica_kills")


def replica_healing() -> str:
    found = results("replica_healing")
    rows = []
    for pairs in ("1", "2"):
        for way, row in found[pairs].items():
            rows.append(
                [
                    f"{pairs} of {found['bytes'] / 1e9:.1f} GB",
                    way,
                    f"{row['rate']['median'] / 1e9:.2f}",
                    spread(row["plain sockets"]),
                    spread(row["plain sockets, new memory"]),
                    f"{row['receiver']['median']:.2f}",
                ]
            )
    columns = ["pairs of ranks", "way", "GB/s", "/ plain sockets"]
    columns += ["/ plain sockets, new memory", "new memory of the receiver / state"]
    return with_machine(table(columns, rows), "replica_healing")


def replica_costs() -> str:
    found = results("replica_costs")
    bases = ("outer axis", "torchft DDP", "DDP")
    rows = [
        [
            num_own,
            way,
            f"{1e3 * row['seconds']['median']:.0f}",
            *(spread(row[base]) for base in bases),
        ]
        for num_own, ways in found["steps"].items()
        for way, row in ways.items()
    ]
    columns = ["microbatches a replica", f"step of a GPT of {found['size']}", "ms"]
    columns += [f"/ {base}" for base in bases]
    return with_machine(table(columns, rows), "replica_costs")


def modules_left_out() -> str:
    found = results("modules_left_out")
    rows = [[way, spread(ratio)] for way, ratio in found["ratios"].items()]
    columns = [f"step of a GPT of {found['model']}, {found['ranks']} ranks", "x all blocks"]
    return with_machine(table(columns, rows), "modules_left_out")


def modules_left_out_clock() -> str:
    found = results("modules_left_out_clock_100us")
    rows = [
        [
            way,
            f"{row['seconds']['median'] * 1e3:.0f}",
            spread(row["over all blocks"]),
            f"{row['exposed gathers']['median'] * 1e3:.0f}",
            f"{row['exposed reductions']['median'] * 1e3:.0f}",
            f"{row['gathers']['median']:.0f}",
        ]
        for way, row in found["ways"].items()
    ]
    columns = [f"8B Llama, {' x '.join(map(str, found['ranks']))} x H100", "step ms"]
    columns += ["x all blocks", "exposed gathers ms", "exposed reductions ms", "gathers"]
    return f"{table(columns, rows)}\n\nSimulated (`modules_left_out_clock_100us.json`)."


def expert_gathers() -> str:
    found = results("expert_gathers")
    ways = list(found["ranks"]["2"][0]["ways"])
    rows = []
    for ranks, cases in found["ranks"].items():
        for case in cases:
            each = [case["ways"][way] for way in ways]
            rows.append(
                [
                    f"{ranks} ranks, {case['experts']} experts, {case['tokens']} tokens",
                    " / ".join(f"{way['gathers']:.0f}" for way in each),
                    " / ".join(f"{way['bytes'] / 1e6:.1f}" for way in each),
                    " / ".join(f"{way['votes']:.0f}" for way in each[1:]),
                    " / ".join(f"{way['peak'] / 1e6:.2f}" for way in each),
                ]
            )
    columns = [
        "tokens of a rank",
        "gathers a step",
        "MB gathered",
        "messages",
        "unsharded MB, peak",
    ]
    return f"{table(columns, rows)}\n\nCounted (`expert_gathers.json`)."


def expert_gathers_clock() -> str:
    found = results("expert_gathers_clock")
    rows = [
        [
            "{} ranks, {} experts, {} tokens".format(*case.split(",")),
            way,
            f"{row['seconds']['median'] * 1e3:.1f}",
            spread(row["over one unit"]),
            f"{row['exposed gathers']['median'] * 1e3:.1f}",
            f"{row['gathers']['median']:.0f}",
            f"{row['rounds']['median']:.0f}",
        ]
        for case, ways in found["cases"].items()
        for way, row in ways.items()
    ]
    columns = ["H100s, tokens of a rank", "step", "ms"]
    columns += ["over one unit", "exposed gathers ms", "gathers", "messages"]
    return f"{table(columns, rows)}\n\nSimulated (`expert_gathers_clock.json`)."


def modules_left_out_clock_cpu() -> str:
    found = results("modules_left_out_clock_cpu")
    rows = [
        [way, spread(found["predicted"][way]["over all blocks"]), spread(ratio)]
        for way, ratio in found["measured"].items()
        if way in found["predicted"]
    ]
    columns = ["two gloo ranks, GPT of 10M", "predicted, x all blocks", "measured"]
    return with_machine(table(columns, rows), "modules_left_out_clock_cpu", "modules_left_out")


def simulated_gloo() -> str:
    found = results("simulated_gloo")
    rows = []
    for name, row in found["steps"].items():
        predicted, measured = row["predicted"] * 1e3, row["measured"]
        rows.append(
            [
                name,
                f"{predicted:.0f}",
                spread(measured, 0, 1e3),
                f"{row['ratio']['median']:.2f}",
                f"{measured['least'] * 1e3:.0f}",
                f"{row['ratio']['least']:.2f}",
            ]
        )
    columns = ["inner / outer level, budget", "predicted ms", "measured ms (quartiles)"]
    columns += ["predicted / median", "least ms", "predicted / least"]
    correlation = found["rank correlation"]
    return with_machine(
        table(columns, rows)
        + f"\n\nRank correlation of predicted and measured: {correlation['median']:.2f} with "
        f"medians, {correlation['least']:.2f} with the least of the rounds.",
        "simulated_gloo",
    )


def simulated_llama() -> str:
    rows = []
    for pair, row in results("simulated_llama").items():
        place, most = max(row["exposed where"].items(), key=lambda item: item[1])
        peak = sum(row["memory"].values())
        fits = "" if peak <= 80e9 else " **does not fit**"
        rows.append(
            [
                pair,
                f"{row['seconds'] * 1e3:.0f}",
                f"{row['compute'] * 1e3:.0f}",
                f"{row['exposed'] * 1e3:.1f}",
                f"{place}: {most * 1e3:.1f}",
                f"{peak / GIB:.0f}{fits}",
                f"{row['simulation took, seconds of one core']:.0f}",
            ]
        )
    columns = ["pair", "step ms", "compute ms", "exposed ms", "longest exposed"]
    return table([*columns, "peak GiB", "simulation s"], rows)


def simulated_budgets() -> str:
    parts = []
    headings = {"0": "nothing", "1": "one block", "unset": "**unset**", "2": "two blocks"}
    for model, pairs in results("simulated_budgets").items():
        rows = [
            [
                pair,
                *(
                    f"{row[key]['seconds'] * 1e3:.1f}, {row[key]['exposed'] * 1e3:.1f}, "
                    f"{row[key]['transient bytes'] / MIB:.0f}"
                    for key in headings
                ),
            ]
            for pair, row in pairs.items()
        ]
        parts.append(f"{model}:\n\n{table(['pair', *headings.values()], rows)}")
    return "\n\n".join(parts)


def memory_of_a_step() -> str:
    found = results("memory")
    precisions = ("fp32", "bf16, bf16 reduction", "bf16, fp32 reduction")
    ahead = "level 3, one unit ahead"
    lines = {
        "transient: one unit ahead, as FSDP2": (ahead, "transient"),
        "transient: one unit ahead, bf16 on the wire and fp32 sums": (
            f"{ahead}, bf16 wire",
            "transient",
        ),
        "transient: nothing ahead": ("level 3, nothing ahead", "transient"),
        "transient: default": (LEVEL_3, "transient"),
        "peak of a step: one unit ahead": (ahead, "peak"),
        "peak of a step: default": (LEVEL_3, "peak"),
    }
    rows = [
        [
            title,
            *(
                f"{found[each][run]['over FSDP2'][cell]:.2f}" if run in found[each] else "-"
                for each in precisions
            ),
        ]
        for title, (run, cell) in lines.items()
    ]
    columns = ["level 3 over FSDP2", *precisions]
    return with_machine(table(columns, rows), "memory")


def two_versions() -> str:
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for each in results("two_versions"):
        versions = runs.setdefault(each["configuration"], {"before": [], "after": []})
        versions[each["version"]].append(each)
    rows = []
    for configuration, versions in runs.items():
        before, after = versions["before"], versions["after"]
        ratios = [new["ms"] / old["ms"] for old, new in zip(before, after, strict=True)]
        sizes = (statistics.mean(each["bytes"] for each in runs) / MB for runs in (before, after))
        resident = (max(each["resident_mib"] for each in runs) for runs in (before, after))
        rows.append(
            [
                configuration,
                *(
                    f"{statistics.mean(each['ms'] for each in runs):,.0f}"
                    for runs in (before, after)
                ),
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
                " / ".join(f"{size:.1f}" for size in sizes),
                " / ".join(f"{size:,.0f}" for size in resident),
            ]
        )
    columns = ["level, dtype, elements", "ms before", "ms after", "after over before, by round"]
    columns += ["peak of the ledger MB, before / after", "resident MiB, before / after"]
    return with_machine(table(columns, rows), "two_versions")


def fill_and_drain() -> str:
    found = results("planned_memory")["microseconds of fill and drain"]
    rows = [[name, f"{statistics.median(times):.2f}"] for name, times in found.items()]
    return with_machine(table(["memory", "us to allocate and free 1 MiB"], rows), "planned_memory")


def heap() -> str:
    samples = results("heap")
    in_use = [sample["in_use_mib"] for sample in samples]
    trimmed = [each["resident_mib"] for each in samples if each["step"] % 100 == 0]
    others = [each["resident_mib"] for each in samples if each["step"] % 100]
    rows = [
        ["heap in use", f"{min(in_use):.0f} to {max(in_use):.0f}"],
        ["resident set after `malloc_trim`", f"{min(trimmed):.0f} to {max(trimmed):.0f}"],
        ["resident set between two calls of it", f"{min(others):.0f} to {max(others):.0f}"],
    ]
    last = samples[-1]["step"]
    return with_machine(table([f"{last} steps, one rank", "MiB"], rows), "heap")


def resident_set() -> str:
    found = results("resident_memory_85M")
    limits = {"peak": 0.95, "between steps": 1.00}
    rows = []
    for precision in ("fp32", "bf16"):
        ours, theirs = (found[precision]["bytes"][name] for name in (LEVEL_3, "FSDP2"))
        for when, limit in limits.items():
            ratio = found[precision]["ratios"][when]["median"]
            rows.append(
                [
                    f"{precision}, {when}",
                    f"{statistics.median(ours[when]) / MB:,.0f}",
                    f"{statistics.median(theirs[when]) / MB:,.0f}",
                    f"{ratio:.2f}",
                    against(ratio, limit),
                ]
            )
    columns = ["dtype, moment", f"`{LEVEL_3}`, MB", "FSDP2, MB", "ratio", "target"]
    return with_machine(table(columns, rows), "resident_memory_85M")


def many_parameters() -> str:
    rows = []
    for name, methods in results("many_parameters").items():
        most = sorted(methods.items(), key=lambda item: -item[1])[:2]
        shown = ", ".join(f"`{method}` {ms:.1f}" for method, ms in most)
        rows.append([name, f"{sum(methods.values()):.1f}", shown])
    columns = ["level, microbatches of a step", "ms of a microbatch", "slowest methods"]
    return with_machine(table(columns, rows), "many_parameters")


def planner_scale() -> str:
    rows = []
    for model, run in results("planner_scale")["shared"].items():
        gib = run["resident_bytes"] / GIB
        met = run["processor_seconds"] <= 600 and gib <= 4
        rows.append(
            [
                model,
                len(run["rows"]),
                f"{run['processor_seconds']:.0f}",
                f"{run['seconds']:.0f}",
                f"{gib:.2f}",
                "met" if met else "**missed**",
            ]
        )
    columns = ["model", "rows", "processor s", "wall s", "resident GiB", "at most 600 s, 4 GiB"]
    return with_machine(table(columns, rows), "planner_scale")


def planner_degrees() -> str:
    every = [row for search in results("planner_degrees").values() for row in search["rows"]]
    rows = [
        [
            str(row["tensor_parallel"]),
            str(row["context_parallel"]),
            f"{row['pipeline']}, {row['schedule']}" if row["schedule"] else "1",
            " x ".join(map(str, row["mesh"])),
            row["levels"],
            f"{row['microbatches']} x {row['microbatch_size']}",
            f"{row['peak_bytes'] / GIB:.1f}{'' if not row['lacking'] else ' (does not fit)'}",
            f"{row['step']:.1f}",
            f"{row['rate'] / 1e3:.1f}k",
            f"{row['mfu']:.1%}",
            f"{row['shares']['inner link']:.0%}",
            f"{row['shares'].get('tensor link', 0):.0%}",
            f"{row['shares'].get('context link', 0):.0%}",
            f"{row['shares'].get('other stages', 0):.0%}",
        ]
        for row in sorted(every, key=lambda row: (row["lacking"], row["step"]))
    ]
    columns = ["TP", "CP", "PP", "data-parallel mesh", "levels", "microbatches", "GiB", "s a step"]
    columns += [
        "tokens/s",
        "MFU",
        "waits for the inner link",
        "tensor link",
        "context link",
        "other stages",
    ]
    return table(columns, rows)


def planner_quick() -> str:
    rows = []
    for model, run in results("planner_quick").items():
        gib = run["resident_bytes"] / GIB
        imports, first, whole = run["imports"], run["first"], run
        in_time = first["processor_seconds"] <= 10 and whole["processor_seconds"] <= 60
        rows.append(
            [
                model,
                f"{run['ranks']:,}",
                run["rows"],
                *(f"{each['processor_seconds']:.1f}" for each in (imports, first, whole)),
                *(f"{each['seconds']:.1f}" for each in (first, whole)),
                f"{gib:.2f}",
                "met" if in_time and gib <= 1 else "**missed**",
            ]
        )
    columns = ["model", "ranks", "rows", "processor s: imports", "first row", "plan"]
    columns += ["wall s: first row", "plan", "resident GiB", "10 s, 60 s, 1 GiB"]
    return with_machine(table(columns, rows), "planner_quick")


def checkpoints() -> str:
    found = results("checkpoint")
    rows = [[name, spread(row["seconds"], 3)] for name, row in found["ways"].items()]
    limits = [(f"{what}: {way}", base, limit) for what, way, base, limit in CHECKPOINT_TARGETS]
    limits.append(("load 2 to 4 ranks", "4 to 4 ranks", 1.3))
    targets = []
    for way, base, limit in limits:
        ratio = found["ways"][way].get(f"over {base}")
        shown = [spread(ratio), against(ratio["median"], limit)] if ratio else ["not measured", "-"]
        targets.append([f"{way} / {base}", *shown])
    disk = found["disk"]
    targets.append(["bytes on disk / bytes of tensors", f"{disk:.4f}", against(disk, 1.01)])
    plans = ", ".join(f"{ms:.0f} ms on {ranks} ranks" for ranks, ms in found["planning_ms"].items())
    return with_machine(
        table(["operation", "seconds"], rows)
        + "\n\n"
        + table(["ratio", "found", "target"], targets)
        + f"\n\nLocal plan of a save of 10,000 parameters: {plans}.",
        "checkpoint",
    )


def fp8_losses() -> str:
    rows = []
    for name, row in results("fp8_training")["held_out"].items():
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        ratio = f"{row['median']:.3f} ({row['least']:.3f}-{row['most']:.3f})"
        rows.append([name, losses, ratio, against(row["most"], 1.02)])
    columns = ["gathers", "held-out loss by seed", "x bf16: median (least-most)", "target"]
    return with_machine(table(columns, rows), "fp8_training")


def quantized_losses() -> str:
    """Held-out losses with sums of gradients in few bits."""
    goals = {"8 bits": 1.003, "4 bits": 1.01}
    rows = []
    for name, row in results("quantized_training")["held_out"].items():
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        ratio = f"{row['median']:.4f} ({row['least']:.4f}-{row['most']:.4f})"
        goal = goals.get(name.split(", ", 1)[1])
        verdict = ""
        if goal is not None:
            verdict = f"at most {goal}: {'met' if row['most'] <= goal else '**missed**'}"
        rows.append([name, losses, ratio, verdict])
    columns = ["optimizer, sums", "held-out loss by seed", "x fp32: median (least-most)", "target"]
    return with_machine(table(columns, rows), "quantized_training")


def outer_losses() -> str:
    """Held-out losses of replicas that exchange weights every so many steps."""
    rows = []
    for replicas, found in results("outer_optimizer")["replicas"].items():
        for name, row in found["held_out"].items():
            losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
            rows.append([replicas, name, losses, f"{row['median']:.3f}", f"{row['bytes']:.4f}"])
    columns = ["replicas", "exchange", "held-out loss by seed", "x each step"]
    steps = results("outer_optimizer")["steps"]
    text = table([*columns, "bytes an element and step"], rows)
    return with_machine(f"{steps} steps:\n\n{text}", "outer_optimizer")


def quantized_steps() -> str:
    """Simulated steps with sums between nodes in few bits."""
    rows = [
        [
            title,
            way,
            f"{step['seconds'] * 1e3:,.0f}",
            f"{step['seconds'] / steps['fp32']['seconds']:.2f}",
            f"{step['seconds'] / steps['bf16']['seconds']:.2f}",
            f"{step['compute'] * 1e3:,.0f}",
            f"{step['exposed'] * 1e3:,.0f}",
            f"{step['tokens_a_day'] / 1e9:.1f}",
            f"{step['peak_bytes'] / 2**30:.0f}",
        ]
        for title, steps in results("quantized_reduction_clock").items()
        for way, step in steps.items()
    ]
    columns = ["model, between nodes", "sums", "step ms", "x fp32", "x bf16", "compute ms"]
    columns += ["exposed ms", "10^9 tokens a day", "peak GiB"]
    return table(columns, rows)


def quantized_on_slow_links() -> str:
    """Steps of two gloo ranks over emulated links, with sums in few bits."""
    found = results("quantized_reduction")
    rows = [
        [
            "as it is" if gigabits == "None" else gigabits,
            way,
            spread(each["seconds"], 0, 1e3),
            spread(each["of fp32"]),
            spread(each["of bf16"]),
        ]
        for gigabits, of_ways in found["steps"].items()
        for way, each in of_ways.items()
    ]
    encoding = ", ".join(
        f"{name}: {seconds * 1e3:.1f} ms" for name, seconds in found["encoding"].items()
    )
    note = f"\n\nEncoding and decoding a million elements on one core: {encoding}."
    text = table(["Gb/s", "sums", "step ms", "x fp32", "x bf16"], rows) + note
    return with_machine(text, "quantized_reduction")


def fixed_order_bits() -> str:
    """Hashes after training with sums in a fixed order on different numbers of ranks."""
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results("fixed_order_sums")["bits"]:
        place = row["way"], f"{row['ranks']} ({row['before']} before)"
        places.setdefault(place, []).append(row)
    rows = []
    for place, runs in places.items():
        levels = [
            inner if outer == "no_shard" else f"{inner}+{outer}"
            for inner, outer in (row["levels"] for row in runs)
        ]
        cells = [
            ", ".join(sorted({row[key] for row in runs if key in row})) or "not compared"
            for key in ("weights", "state", "norms")
        ]
        rows.append([*place, ", ".join(levels), *cells])
    columns = ["optimizer", "ranks", "levels", "weights", "optimizer state", "norms"]
    return with_machine(table(columns, rows), "fixed_order_sums")


def fixed_order_times() -> str:
    """A step with sums in a fixed order beside one of the plain engine."""
    rows = [
        [
            level,
            f"{each['plain ms']:.0f}",
            f"{each['fixed ms']:.0f}",
            spread(each["ratio"]),
            f"{each['plain peak bytes'] / 1e6:.1f}",
            f"{each['fixed peak bytes'] / 1e6:.1f}",
        ]
        for level, each in results("fixed_order_sums")["times"].items()
    ]
    columns = ["level", "plain ms", "fixed order ms", "ratio (quartiles)", "plain peak MB"]
    return table([*columns, "fixed order peak MB"], rows)


def fp8_bytes() -> str:
    rows = []
    for title, run in results("fp8_training")["bytes"].items():
        for name, row in run["gathers"].items():
            matrices = row["matrices_over_bf16"]
            rows.append(
                [
                    f"{title}: {name}",
                    f"{matrices:.4f}",
                    f"{matrices + row['amaxes_over_bf16']:.4f}",
                    f"{row['all_over_bf16']:.4f}",
                    f"{row['gathers']} + {row['amax_messages']}",
                ]
            )
    columns = ["x bytes of bf16", "matrices", "with amaxes", "with amaxes and vectors"]
    return table([*columns, "collectives: gathers + amaxes"], rows)


def low_bit_losses() -> str:
    rows = []
    for name, row in results("low_bit_training")["held_out"].items():
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        ratio = f"{row['median']:.4f} ({min(row['ratios']):.4f}-{row['most']:.4f})"
        is_base = row["bytes"] == 8
        verdict = "met" if row["most"] <= 1.005 else "**missed**"
        target = "" if is_base else f"at most 1.005: {verdict}"
        rows.append([name, f"{row['bytes']:.2f}", losses, ratio, target])
    columns = ["optimizer", "bytes of state an element", "held-out loss by seed"]
    columns += ["x 32 bits: median (least-most)", "target"]
    return with_machine(table(columns, rows), "low_bit_training")


def muon_losses() -> str:
    rows = []
    for name, row in results("muon_training")["held_out"].items():
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        ratio = f"{row['median']:.4f} ({row['least']:.4f}-{row['most']:.4f})"
        verdict = "met" if row["most"] <= 1.005 else "**missed**"
        rows.append([name, losses, ratio, "" if name == "AdamW" else f"at most 1.005: {verdict}"])
    columns = ["optimizer", "held-out loss by seed", "x AdamW: median (least-most)", "target"]
    return with_machine(table(columns, rows), "muon_training")


def padding() -> str:
    found = json.loads((RESULTS / "padding.json").read_text(encoding="utf-8"))
    rows = [
        [
            target["text"],
            f"{target['num_tested'] - len(target['misses'])} of {target['num_tested']}",
        ]
        for target in found["targets"]
    ]
    prices = "; ".join(
        f"at {each['percent_per_buffer']:g} %, {each['mean_buffers_of_a_block']:.2f} and "
        f"{each['median_percent_of_a_block']:.3f} %"
        for each in found["prices"]
    )
    return (
        table(["target", "cases met"], rows)
        + "\n\nIf no row is divided, a block has this mean number of buffers and this median "
        f"padding, by the share of the unit that an extra buffer must save: {prices}."
    )


# --- docs/internals/levels.md


def planned_memory() -> str:
    models = results("planned_memory")["bytes"]

    def cell(run: dict[str, float], kind: str) -> str:
        parts = [run[f"{role} {kind}"] / MB for role in ("full", "staging")]
        return " + ".join(f"{part:.2f}" for part in parts if part)

    rows = [
        [
            name,
            *(cell(runs[name], kind) for runs in models.values() for kind in ("in use", "planned")),
        ]
        for name in next(iter(models.values()))
    ]
    columns = ["strategy, budget"]
    for model in models:
        columns += [f"{model}: at most in use", "arenas"]
    return with_machine(table(columns, rows), "planned_memory")


# --- docs/internals/pretrained.md


def loading() -> str:
    found = results("pretrained")["ways"]
    rows = []
    for name, row in found.items():
        times, over = row["seconds"], row["over the better of the others"]
        rows.append(
            [
                f"`{name}`" if "_" in name else name,
                f"{row['MiB'] - row['shard MiB']:,.0f}",
                f"{statistics.median(times):.2f}",
                f"{statistics.median(over):.2f} ({min(over):.2f}-{max(over):.2f})",
            ]
        )
    columns = ["way, ranks", "MiB beyond the shard", "s", "x the better of the other two"]
    return with_machine(table(columns, rows), "pretrained")


def families() -> str:
    rows = []
    for name, family in results("pretrained_families").items():
        names, differ = family["names"], family["tensors that differ"].values()
        equal = [
            f"{sum(each[when] == 0 for each in differ)} of {len(differ)}"
            for when in ("after loading", "after saving")
        ]
        alone = f"{names['in files alone']}, {names['in memory alone']}"
        rows.append([name, names["in files"], names["in memory"], alone, *equal])
    columns = ["family", "tensors in files", "in memory", "only in files, only in memory"]
    return with_machine(table([*columns, "loads", "saves"], rows), "pretrained_families")


# --- docs/internals/weight_stream.md


def weight_stream() -> str:
    rows = [
        [
            name,
            f"{row['assembling']:.2f}",
            f"{row['sending']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['sent MiB']:.0f}",
            f"{row['peak MiB']:.0f}",
        ]
        for name, row in results("weight_stream")["ways"].items()
    ]
    columns = ["way", "assembling, s", "sending, s", "ratio", "sent, MiB"]
    columns.append("peak beyond shard and version, MiB")
    return with_machine(table(columns, rows), "weight_stream")


# --- docs/internals/planner.md


def planner_calibrated() -> str:
    """Memory on two gloo ranks, planned for what `calibrate` measured and for a device."""
    columns = ["model", "strategy", "measured, MB", "planned for `calibrate`", "off by"]
    columns += ["of it transient", "planned for H100", "transient"]
    rows = []
    for row in results("planner_calibrated"):
        cells = [row["model"], row["level"], f"{row['measured'] / MB:.2f}"]
        cells += [f"{row['planned'] / MB:.2f}", f"{row['percent']:+.4f} %"]
        cells += [f"{row['transient'] / MB:.2f}", f"{row['on a device'] / MB:.2f}"]
        rows.append([*cells, f"{row['transient on a device'] / MB:.2f}"])
    return with_machine(table(columns, rows), "planner_calibrated")


def planner_memory() -> str:
    return _memory_of_models("planner_memory")


def planner_heldout() -> str:
    return _memory_of_models("planner_heldout")


def planner_memory_ranges() -> str:
    """Planned over measured memory, of models that were used for tuning and of others."""
    lines = []
    for name, models in (("planner_memory", "used for tuning"), ("planner_heldout", "held out")):
        percents = [row["percent"] for row in results(name)]
        lines.append(
            f"Models {models}: {len(percents)} plans, {min(percents):+.4f} % to "
            f"{max(percents):+.4f} %."
        )
    return " ".join(lines)


def _memory_of_models(file: str) -> str:
    models: dict[str, list[dict[str, Any]]] = {}
    for row in results(file):
        models.setdefault(f"{row['model']}, {row['recomputed']}", []).append(row)
    rows = []
    for name, runs in models.items():
        cells = [f"{each['planned'] / MB:.2f} / {each['measured'] / MB:.2f}" for each in runs]
        worst = max((each["percent"] for each in runs), key=abs)
        rows.append([name, *cells, f"{worst:.4f} %"])
    levels = [each["level"] for each in next(iter(models.values()))]
    columns = ["model: planned / measured, MB", *levels, "largest error"]
    return with_machine(table(columns, rows), file)


def planner_time() -> str:
    models = results("planner_time")["models"]
    rows = []
    for pair in next(iter(models.values()))["steps"]:
        row = [pair]
        for model in models.values():
            step = model["steps"][pair]
            predicted, measured = step["predicted"], step["measured"]
            ratio = predicted / measured["median"]
            row += [f"{predicted * 1e3:.0f}", spread(measured, 0, 1e3), f"{ratio:.2f}"]
        rows.append(row)
    columns = ["pair"]
    for name in models:
        columns += [f"{name}: predicted ms", "measured", "ratio"]
    lines = []
    for name, model in models.items():
        choices = "; ".join(
            f"{memory}: `{choice['chosen']}` {choice['slower'] - 1:.1%} slower than "
            f"`{choice['fastest']}`"
            for memory, choice in model["choices"].items()
        )
        lines.append(f"- {name}: rank correlation {model['rank correlation']:.2f}; {choices}.")
    return with_machine(f"{table(columns, rows)}\n\n" + "\n".join(lines), "planner_time")


def published() -> str:
    """Published speeds beside planned ones, of jobs in bf16 that are not compiled."""
    rows = []
    for row in _published(is_compiled=False):
        held_out = " (held out)" if row["held out"] else ""
        cells = [f"{row['job']}{held_out}", f"{row['ranks']} {_gpu(row)}", *_published_cells(row)]
        rows.append(cells)
    columns = ["job", "GPUs", "batch of a rank", "recomputed", "tokens/s of a GPU, published"]
    return table([*columns, "planned", "ratio", "GiB published", "planned"], rows)


def published_parallel() -> str:
    """Published speeds of compiled jobs beside planned ones, most of them with TP or CP."""
    rows = []
    for row in _published(is_compiled=True):
        source = "KempnerForge" if "KempnerForge" in row["source"] else _TITAN[row["source"]]
        cells = [f"{row['job']}, {source}", f"{row['ranks']} {_gpu(row)}", row["parallelism"]]
        rows.append([*cells, *_published_cells(row)])
    columns = ["job", "GPUs", "ranks", "batch", "recomputed", "tokens/s of a GPU, published"]
    return table([*columns, "planned", "ratio", "GiB published", "planned"], rows)


# torchtitan's reports of H100s.
_TITAN = {
    "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md": "torchtitan 2024",
    "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md": "torchtitan 2025",
}


def _published(*, is_compiled: bool) -> list[dict[str, Any]]:
    return [row for row in results("planner_published") if row["compiled"] == is_compiled]


def _published_cells(row: dict[str, Any]) -> list[str]:
    batch = f"{row['rows']} x {row['length']}"
    if row["microbatches"] > 1:
        batch = f"{row['microbatches']} times {batch}"
    return [
        batch,
        row["recomputed"],
        f"{row['published tokens/s']:,.0f}",
        f"{row['planned tokens/s']:,.0f}",
        f"{row['planned over published']:.2f}",
        "" if row["published GiB"] is None else f"{row['published GiB']:.1f}",
        f"{row['planned GiB']:.1f}",
    ]


def published_parallel_ranges() -> str:
    """Planned over published speeds of compiled jobs."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for row in _published(is_compiled=True):
        degrees = {"tensor": row["tensor parallel"], "context": row["context parallel"]}
        parallel = [name for name, degree in degrees.items() if degree > 1] or ["data"]
        ranks = f"{parallel[0]} parallel" + ", asynchronous" * row.get("asynchronous", False)
        key = (_gpu(row), "fp8" if row["fp8"] else "bf16", ranks)
        ratios.setdefault(key, []).append(row["planned over published"])
    rows = [
        [
            *key,
            str(len(each)),
            f"{min(each):.2f} to {max(each):.2f}",
            f"{statistics.median(each):.2f}",
        ]
        for key, each in ratios.items()
    ]
    return table(["GPU", "linears", "ranks", "number", "planned over published", "median"], rows)


def published_asynchronous() -> str:
    """Gains by asynchronous tensor parallelism, published and planned. A job without it is the row
    before that of the same job with it."""
    found, rows = _published(is_compiled=True), []
    for row, after in itertools.pairwise(found):
        if not after.get("asynchronous", False):
            continue
        linears = "fp8" if row["fp8"] else "bf16"
        speeds = [[each[f"{name} tokens/s"] for each in (row, after)] for name in _KINDS_OF_SPEED]
        gains = [f"{with_it / without:.2f}" for without, with_it in speeds]
        waits = [f"{each['exposed of tensor parallel']:.0%}" for each in (row, after)]
        job = f"{row['job']}, {_TITAN[row['source']]}"
        rows.append([job, linears, *(f"{each:,.0f}" for each in speeds[0]), *gains, *waits])
    columns = ["job", "linears", "tokens/s of a GPU, published", "asynchronous", "gain, published"]
    return table([*columns, "planned", "waits, planned", "asynchronous"], rows)


_KINDS_OF_SPEED = ("published", "planned")


def published_pipelines() -> str:
    """Published speeds of a pipeline beside simulated ones."""
    found = results("planner_published_pipelines")
    rows = []
    for row in found:
        speeds = [row[f"{name} tokens/s"] for name in ("published", "planned")]
        first = [found[0][f"{name} tokens/s"] for name in ("published", "planned")]
        rows.append(
            [
                row["schedule"],
                f"{row['microbatches']} times {row['rows']} x {row['length']}",
                *(f"{speed:,.0f}" for speed in speeds),
                f"{row['planned over published']:.2f}",
                *(f"{speed / of_first:.2f}" for speed, of_first in zip(speeds, first, strict=True)),
                f"{statistics.fmean(row['bubble']):.0%}",
                f"{statistics.fmean(row['exposed']):.0%}",
                f"{row['published GiB']:.1f}",
                f"{max(row['planned GiB']):.1f}",
            ]
        )
    columns = ["schedule", "microbatches", "tokens/s of a GPU, published", "simulated", "ratio"]
    columns += ["over 1F1B, published", "simulated", "bubble", "waits for other communication"]
    return table([*columns, "GiB published", "simulated"], rows)


def planner_compiled() -> str:
    """Published speeds of compiled blocks beside planned ones, without and with compiling."""
    rows = []
    for row in results("planner_compiled"):
        eager, compiled = row["eager"], row["compiled"]
        published, planned = (compiled[f"{name} tokens/s"] for name in ("published", "planned"))
        gains = [
            compiled[f"{name} tokens/s"] / eager[f"{name} tokens/s"]
            for name in ("published", "planned")
        ]
        saved = [
            eager[f"{name} GiB"] - compiled[f"{name} GiB"] for name in ("published", "planned")
        ]
        rows.append(
            [
                row["job"],
                f"{row['ranks']} {row['machine'].split()[2]}",
                *(f"{speed:,.0f}" for speed in (published, eager["planned tokens/s"], planned)),
                *(f"{each / published:.2f}" for each in (eager["planned tokens/s"], planned)),
                *(f"{each:.2f}" for each in gains),
                *(f"{each:.1f}" for each in saved),
            ]
        )
    columns = ["job", "GPUs", "tokens/s, published", "planned without compiling", "planned"]
    columns += ["ratio without", "ratio", "published gain by compiling", "planned"]
    return table([*columns, "published GiB saved by compiling", "planned"], rows)


def published_ranges() -> str:
    """Planned over published speeds."""
    rows = []
    for gpu in ("A100", "H100", "H200"):
        for is_held_out in (False, True):
            ratios = [
                row["planned over published"]
                for row in _published(is_compiled=False)
                if gpu in row["machine"] and row["held out"] == is_held_out
            ]
            if ratios:
                rows.append(
                    [
                        gpu,
                        "held out" if is_held_out else "in view",
                        str(len(ratios)),
                        f"{min(ratios):.2f} to {max(ratios):.2f}",
                        f"{statistics.median(ratios):.2f}",
                    ]
                )
    return table(["GPU", "jobs", "number", "planned over published", "median"], rows)


def time_accuracy() -> str:
    """The accuracy that plans state for their times."""
    rows = []
    for each in ACCURACIES.values():
        low, high = each.factors[0], each.factors[-1]
        took = f"{each.steps.removesuffix(',')}: {low:.2f} to {high:.2f} times the planned time"
        rows.append([each.where, took, f"`{each.mark}`", "too fast" if each.is_too_fast else ""])
    rows.append(["B200, others", "nothing", f"`{accuracy_of('B200').mark}`", ""])
    return table(["machine", "compared with", "printed after a time", "planner"], rows)


def _gpu(row: dict[str, Any]) -> str:
    """ "H100", with its memory where that is not 80 GB: "8 x A100 40 GB a node, ..."."""
    found = re.search(r"(\w\d00)(?: SXM)?(?: (\d+) GB)?", row["machine"])
    assert found is not None
    gib = found[2]
    return found[1] if gib in (None, "80") else f"{found[1]} {gib} GB"


def async_device_steps() -> str:
    """Time of a step on the asynchronous device, beside the simulated clock."""
    found = results("async_device")
    rows = []
    for way, seconds in found["times"].items():
        median = statistics.median(seconds)
        clock = found["clock"].get(way, {}).get("seconds")
        rows.append(
            (
                f"`{way}`" if clock else way,
                f"{median:.3f} ({min(seconds):.3f}-{max(seconds):.3f})",
                f"{clock:.3f}" if clock else "",
                f"{median / clock:.3f}" if clock else "",
            )
        )
    columns = ("level, or FSDP2", "s on the device", "s by the clock", "device over clock")
    return with_machine(table(columns, rows), "async_device")


def async_device_waits() -> str:
    """Host syncs and waits between streams in a steady step on the asynchronous device."""
    cases = (
        "plain",
        "clipped",
        "a parameter without gradient on all ranks",
        "a parameter without gradient on this rank alone",
    )
    counts = results("async_device")["counts"]
    by_way: dict[str, list[str]] = {}
    for each in counts:
        numbers = f"{each['host_syncs']}, {each['stream_waits']}"
        by_way.setdefault(each["way"], []).append(numbers)
    others = {"FSDP2", "DDP"}
    rows = [(way if way in others else f"`{way}`", *numbers) for way, numbers in by_way.items()]
    return table(("host syncs, stream waits", *cases), rows)


def missing_waits() -> str:
    """Waits of the lanes in a steady step, and what shows that each is needed."""
    rows = []
    for name, waits in results("missing_waits")["programs"].items():
        patterns = [each["pattern"] for each in waits if not each["implied"]]
        shown = [pattern for pattern in patterns if pattern is not None]
        rows.append(
            (
                name,
                str(len(waits)),
                str(len(waits) - len(patterns)),
                str(len(shown)),
                str(sum(pattern < 3 for pattern in shown)),
                str(len(patterns) - len(shown)),
            )
        )
    columns = (
        "program, two ranks",
        "waits of a step",
        "implied by others",
        "without it: wrong weights",
        "of these by the first patterns",
        "not shown",
    )
    return with_machine(table(columns, rows), "missing_waits")


GPU_TIMES = {
    "world 1": "one rank, 4 sequences",
    "world 1, 16 sequences": "one rank, 16 sequences",
    "world 8": "rank 0 of 8, 4 sequences",
    "world 8, 16 sequences": "rank 0 of 8, 16 sequences",
}


def _gpu_engines(section: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The engines of a section of ``gpu.py``, and milliseconds of their steps."""
    engines = results("gpu")[section]["engines"]
    return engines, {name: each["milliseconds"]["step"] for name, each in engines.items()}


def _gpu_times(section: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of step times and memory."""
    engines, steps = _gpu_engines(section)
    rows = [
        [
            name,
            spread(harness.spread(steps[name]), 1),
            *(spread(harness.ratios(steps, name, base)) for base in ("bare model", "FSDP2")),
            f"{statistics.median(each['milliseconds']['host']):.0f}",
            f"{each['peak bytes'] / GIB:.2f}",
        ]
        for name, each in engines.items()
    ]
    return ["engine", "step ms", "x bare model", "x FSDP2", "host ms", "peak GiB"], rows


def gpu_steps() -> str:
    """A table for each section of step times."""
    parts = []
    for section, title in GPU_TIMES.items():
        columns, rows = _gpu_times(section)
        parts.append(f"**{title[0].upper()}{title[1:]}**\n\n{table(columns, rows)}")
    return with_machine("\n\n".join(parts), "gpu")


def gpu_captured() -> str:
    """Steps outside of a CUDA graph, and replays of the same."""
    columns, rows = _gpu_times("world 1, captured")
    rows = [[*row[:-1], "-" if row[0].endswith("captured") else row[-1]] for row in rows]
    return with_machine(table(columns, rows), "gpu")


def _gpu_over_fsdp2() -> str:
    ratios = {}
    for section in GPU_TIMES:
        _, steps = _gpu_engines(section)
        ratios[section] = harness.ratios(steps, LEVEL_3, "FSDP2")["median"]
    small, large = (
        [value for name, value in ratios.items() if name.endswith("sequences") == is_large]
        for is_large in (False, True)
    )
    return (
        f"On one H200 it takes {min(small):.2f} to {max(small):.2f} where the host limits it, "
        f"{min(large):.2f} to {max(large):.2f} where the device limits it (1B parameters, bf16)."
    )


def gpu_sanitizer() -> str:
    rows = [
        [
            section.removeprefix("sanitizer, world "),
            case,
            text.splitlines()[0] if text else "nothing",
        ]
        for section, cases in results("gpu").items()
        if section.startswith("sanitizer")
        for case, text in cases.items()
        if isinstance(text, str)
    ]
    return with_machine(table(["ranks", "case", "reported"], rows), "gpu")


def gpu_fp8() -> str:
    """Steps with fp8 weights over those with bf16 ones."""
    rows = []
    for section in ("fp8, native", "fp8, Transformer Engine"):
        engines, steps = _gpu_engines(section)
        for name, each in engines.items():
            level, codec = name.split(", ", 1)
            if not each["bases"] or codec == "bf16" or codec.endswith("bf16 weights"):
                continue
            bases = each["bases"]
            rows.append(
                [
                    level,
                    f"{section.removeprefix('fp8, ')}, {codec.removesuffix(', fp8 weights')}",
                    f"{statistics.median(steps[name]):.1f}",
                    spread(harness.ratios(steps, name, bases[0])),
                    spread(harness.ratios(steps, name, bases[1])) if len(bases) > 1 else "-",
                    f"{each['peak bytes'] / engines[bases[0]]['peak bytes']:.2f}",
                ]
            )
    columns = [
        "level",
        "fp8 weights",
        "step ms",
        "x bf16",
        "x Transformer Engine, bf16 weights",
        "peak x bf16",
    ]
    return with_machine(table(columns, rows), "gpu")


def planner_gpu() -> str:
    rows = [
        [
            gpu,
            job,
            f"{each['planned seconds'] * 1e3:.1f}",
            f"{each['measured seconds'] * 1e3:.1f}",
            f"{each['planned seconds'] / each['measured seconds']:.2f}",
            f"{each['planned bytes'] / GIB:.2f}",
            f"{each['measured bytes'] / GIB:.2f}",
            f"{each['planned bytes'] / each['measured bytes']:.3f}",
        ]
        for gpu, jobs in results("planner_gpu").items()
        for job, each in jobs.items()
    ]
    columns = ["GPU", "job", "planned ms", "measured ms", "ratio"]
    columns += ["planned GiB", "measured GiB", "ratio"]
    return with_machine(table(columns, rows), "gpu_jobs_h100", "gpu_jobs_h200")


def coverage_of_tests() -> str:
    """The core's lines that the ordinary tests run."""
    return measure_tests.coverage_table()


def mutants_of_tests() -> str:
    """Mutants of the core that the ordinary tests catch."""
    return mutants.table(mutants.RESULTS)


def seconds_of_tests() -> str:
    """Lines, items and seconds of the ordinary tests by folder."""
    return measure_tests.times_table()


def deleted_extensions() -> str:
    """Each extension deleted from a copy of the tree, and the checks of the rest."""
    rows = []
    found = json.loads((RESULTS / "extensions.json").read_text(encoding="utf-8"))
    for name, checks in found.items():
        steps = [checks.get(step, {}) for step in ("import", "mypy", "tests")]
        seconds = [str(step["seconds"]) if step.get("passed") else "failed" for step in steps]
        passed = re.search(r"\d+ passed", steps[-1].get("last line", ""))
        rows.append(
            [
                f"`{name}`" if name != "all" else "all at once",
                str(checks["files of tests that name it"]),
                *seconds,
                passed[0].split()[0] if passed else "-",
            ]
        )
    columns = [
        "extension",
        "files of tests that name it",
        "import (s)",
        "mypy (s)",
        "tests (s)",
        "tests that passed",
    ]
    return table(columns, rows)


TABLES: tuple[Callable[[], str], ...] = (
    fixed_order_bits,
    fixed_order_times,
    outer_losses,
    quantized_losses,
    quantized_steps,
    quantized_on_slow_links,
    deleted_extensions,
    coverage_of_tests,
    mutants_of_tests,
    seconds_of_tests,
    step_time_machine,
    step_time_over_fsdp2,
    step_time_targets,
    step_times,
    host_time,
    fully_shard_calls,
    tensor_parallelism,
    unit_size_gloo,
    unit_size_peers,
    unit_size_clock,
    long_run,
    optimizer_step,
    nan_check,
    uneven_batches,
    local_checkpoints,
    host_step,
    muon_step,
    muon_shares,
    host_threads,
    offload_rates,
    offload_step,
    offload_memory,
    offload_clock,
    offload_clock_beside,
    offload_clock_speculative,
    offload_clock_everything,
    offload_activations_clock,
    modules_left_out,
    node_losses,
    modules_left_out_clock,
    expert_gathers,
    expert_gathers_clock,
    modules_left_out_clock_cpu,
    replica_kills,
    replica_healing,
    replica_costs,
    simulated_gloo,
    simulated_llama,
    simulated_budgets,
    memory_of_a_step,
    fill_and_drain,
    heap,
    resident_set,
    many_parameters,
    planner_scale,
    planner_degrees,
    planner_quick,
    checkpoints,
    fp8_losses,
    fp8_bytes,
    low_bit_losses,
    muon_losses,
    padding,
    planned_memory,
    two_versions,
    loading,
    families,
    weight_stream,
    planner_calibrated,
    planner_memory,
    planner_memory_ranges,
    planner_heldout,
    planner_time,
    published,
    published_ranges,
    published_parallel,
    published_parallel_ranges,
    published_asynchronous,
    published_pipelines,
    planner_compiled,
    time_accuracy,
    async_device_steps,
    async_device_waits,
    missing_waits,
    gpu_captured,
    gpu_steps,
    gpu_sanitizer,
    gpu_fp8,
    planner_gpu,
)
