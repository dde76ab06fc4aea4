"""All levels on one CUDA device: step time, peak memory, and the stream sanitizer.

    python benchmarks/gpu.py [--rounds 15] [--sections "world 1" "world 8" ...]

Each section runs in its own process with a time limit (20 minutes in total, 15 without fp8), so
that a failure affects one section only; results are written after each section.

*world 1*: every level over NCCL with one rank, against the bare model and FSDP2, on a GPT of about
1B parameters (fewer on a device with less memory), bf16 with fp32 main weights and AdamW. "bare
model" is the same arithmetic without an engine: a bf16 copy that computes, fp32 weights that the
optimizer updates, and two casts between them.

*world 8*, *world 64*: the same as rank 0 of 8 or 64 ranks. The process group is fake, and
collectives are emulated by device copies of the same size on the lanes of the real ones, by the
same functions for both engines: a gather writes the other ranks' shards (copies of this rank's, so
losses are meaningless), a reduction reads all shards and sums them into one. The time of a network
is not included; memory bandwidth is shared with compute, as with real collectives.

*..., 16 sequences*: the same with a batch four times as large, whose step takes long enough on the
device that no engine waits for its host.

*..., captured*: some of the engines, each also with its whole step in a CUDA graph, which the host
launches at once. A captured engine has taken two steps before its first loss here. torch does not
count the memory of a graph's pool, so its peak is not known.

*fp8, native*, *fp8, Transformer Engine*: every level over NCCL with one rank, with fp8 weights
against bf16 ones: time, memory, and bytes gathered, by the planner's formulas, since one rank
gathers nothing. See ``_gpu_fp8.py``.

*sanitizer*: a small model takes steps at every level under ``torch.cuda._sanitizer``, which reports
kernels on two streams that access one address without an event between them. To verify that the
sanitizer tracks these streams, it also runs lanes that do not wait for each other, for which it has
to report an error.

Without a CUDA device the script runs with tiny sizes, gloo and no sanitizer, to test the script
itself; nothing is written to ``results/``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _gpu_fp8
import harness
import torch
import torch.distributed as dist
from _gpu_models import (
    BF16,
    LEVEL_3_ONE_AHEAD,
    LEVELS,
    EmulatedCommunicator,
    StepParts,
    captured,
    make_bare,
    make_engine,
    make_fsdp2,
    make_model,
    mark,
    milliseconds,
    model_config,
    on_cuda,
    start,
    synchronize,
    the_device,
)
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.comm.device_lane import DeviceLane
from gpt import GPTConfig

# name: number of ranks, time limit in seconds
SECTIONS = {
    "world 1": (1, 150),
    "world 8": (8, 100),
    "world 64": (64, 100),
    "world 1, 16 sequences": (1, 150),
    "world 8, 16 sequences": (8, 100),
    "world 1, captured": (1, 100),
    "world 8, captured": (8, 100),
    "fp8, native": (1, 120),
    "fp8, Transformer Engine": (1, 200),
    "sanitizer, world 1": (1, 55),
    "sanitizer, world 8": (8, 55),
}
BARE, FSDP2 = "bare model", "FSDP2"
CAPTURED = ", captured"


# Step time and memory.


def memory_of(make: Callable[[], StepParts]) -> tuple[StepParts, dict[str, Any]]:
    """Build an engine. Returns its first losses, and its bytes at rest and at the peak of its third
    step.

    Other engines are at rest in the meantime, so that their memory can be subtracted.
    """
    gc.collect()
    if on_cuda():
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if on_cuda() else 0
    forward_backward, update = make()
    losses = []
    for _ in range(3):
        synchronize()
        if on_cuda():
            torch.cuda.reset_peak_memory_stats()
        losses.append(forward_backward().item())
        update()
    synchronize()
    found: dict[str, Any] = {"losses": losses}
    if on_cuda():
        found["rest bytes"] = torch.cuda.memory_allocated() - before
        found["peak bytes"] = torch.cuda.max_memory_allocated() - before
    return (forward_backward, update), found


def time_steps(
    engines: dict[str, StepParts], rounds: int, failed: Callable[[str, str], None]
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by engine and part; one step of each in every round, in a random order.

    "host" is the time in which the host issues the step, without waiting for the device.
    """
    draw = random.Random(0)
    parts = ("forward+backward", "step", "host")
    times: dict[str, dict[str, list[float]]] = {name: {p: [] for p in parts} for name in engines}
    for round_number in range(2 + rounds):
        names = list(times)
        draw.shuffle(names)
        for name in names:
            forward_backward, update = engines[name]
            try:
                synchronize()
                host_start = time.perf_counter()
                begin = mark()
                forward_backward()
                middle = mark()
                update()
                end = mark()
                host = (time.perf_counter() - host_start) * 1e3
                synchronize()
            except Exception:
                failed(name, traceback.format_exc())
                del times[name]
                continue
            if round_number >= 2:
                times[name]["forward+backward"].append(milliseconds(begin, middle))
                times[name]["step"].append(milliseconds(begin, end))
                times[name]["host"].append(host)
    return times


def timing_section(num_ranks: int, rounds: int, out: Path, *, larger: bool, captures: bool) -> None:
    """Measure engines as rank 0 of ``num_ranks``.

    Args:
        num_ranks: Number of ranks, emulated if greater than 1.
        rounds: Number of measured steps of each engine.
        out: File for the results.
        larger: Use a batch four times as large.
        captures: Measure only some engines, with and without captured steps.
    """
    mesh = start(num_ranks)
    config, num_sequences = model_config()
    num_sequences *= 4 if larger else 1
    shape = (num_sequences, config.sequence_length)
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, shape, device=the_device())
    batch = (tokens, tokens.roll(-1, 1))
    makers: dict[str, Callable[[], StepParts]] = {
        BARE: lambda: make_bare(config, batch),
        FSDP2: lambda: make_fsdp2(config, batch, mesh),
    }
    names = [*LEVELS, LEVEL_3_ONE_AHEAD] if num_ranks > 1 else LEVELS
    for name in names:
        makers[name] = lambda name=name: make_engine(config, batch, mesh, name)  # type: ignore[misc]
    if captures:
        makers = {name: makers[name] for name in (BARE, FSDP2, LEVELS[2], LEVELS[3])}
        makers[BARE + CAPTURED] = lambda: captured(make_bare(config, batch, capturable=True))
        for name in (LEVELS[2], LEVELS[3]):
            makers[name + CAPTURED] = lambda name=name: captured(  # type: ignore[misc]
                make_engine(config, batch, mesh, name, capturable=True)
            )
    record: dict[str, Any] = {"config": vars(config), "sequences": num_sequences, "engines": {}}
    found = record["engines"]
    engines: dict[str, StepParts] = {}

    def failed(name: str, error: str) -> None:
        print(f"{name} failed:\n{error}", flush=True)
        found.setdefault(name, {})["error"] = error

    for name, make in makers.items():
        print(f"  building {name}", flush=True)
        try:
            engines[name], found[name] = memory_of(make)
        except Exception:
            failed(name, traceback.format_exc())
        out.write_text(json.dumps(record))
    for name, times in time_steps(engines, rounds, failed).items():
        found[name]["milliseconds"] = times
    out.write_text(json.dumps(record))
    # Checks that collectives were emulated.
    assert num_ranks == 1 or EmulatedCommunicator.num_calls, "no emulated collective was called"


# fp8.


def fp8_section(name: str, rounds: int, out: Path) -> None:
    """Measure the levels one after another, the engines of a level alternately."""
    is_native = name == "fp8, native"
    if not is_native and (reason := _gpu_fp8.why_not()):
        out.write_text(json.dumps({"skipped": reason}))
        return
    make_groups = _gpu_fp8.native_groups if is_native else _gpu_fp8.transformer_engine_groups
    config, groups = make_groups(start(1))
    record: dict[str, Any] = {"config": config, "gathering ranks": _gpu_fp8.RANKS, "engines": {}}
    found = record["engines"]

    def failed(name: str, error: str) -> None:
        print(f"{name} failed:\n{error}", flush=True)
        found.setdefault(name, {})["error"] = error

    for group in groups:
        engines: dict[str, StepParts] = {}
        for name, contender in group.items():
            print(f"  building {name}", flush=True)
            try:
                gathered = contender.gathered()
                engines[name], facts = memory_of(contender.make)
                found[name] = facts | {"gathered bytes": gathered, "bases": contender.bases}
            except Exception:
                failed(name, traceback.format_exc())
        for name, times in time_steps(engines, rounds, failed).items():
            found[name]["milliseconds"] = times
        out.write_text(json.dumps(record))


# The sanitizer.


def sanitizer_section(num_ranks: int, out: Path) -> None:
    """Run steps of a small model at every level, and write the sanitizer's reports to ``out``."""
    mesh = start(num_ranks)
    record: dict[str, str] = {}
    for level in LEVELS:
        for ahead in (None, 0):
            name = level if ahead is None else f"{level}, nothing ahead"
            record[name] = _sanitized_steps(mesh, level, ahead)
            out.write_text(json.dumps(record))
    if on_cuda():

        def wait_for_nothing(lane: DeviceLane, *tickets: Any) -> None:
            """Do nothing, so that the lane does not wait."""

        DeviceLane.wait = wait_for_nothing  # type: ignore[method-assign,assignment]
        name = "control: lanes that do not wait (must be reported)"
        record[name] = _sanitized_steps(mesh, LEVELS[3], None)
    out.write_text(json.dumps(record))


def _sanitized_steps(mesh: DeviceMesh, level: str, ahead: int | None) -> str:
    """The error of the first step that raised one, else ""."""
    config = GPTConfig(sequence_length=16, num_layers=3, width=64, num_heads=4)
    tokens = torch.randint(0, config.vocab_size, (2, 16), device=the_device())
    try:
        model = make_model(config)
        policy = fe.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        options = fe.Options(prefetch_window=ahead, staging_limit=ahead, min_unit_size=0)
        engine = fe.shard(
            model,
            mesh=mesh,
            strategy=level,
            mp_policy=policy,
            options=options,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        fe.shard_optimizer(optimizer)
        for _ in range(3):
            with engine.no_sync():
                model(tokens, tokens).loss.backward()
            model(tokens, tokens).loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:4000]
    return ""


# The parent: sections in processes, tables, results.


def run_section(name: str, rounds: int) -> dict[str, Any]:
    """Run a section in its own process. Returns its results, with "failure" if it failed."""
    num_ranks, limit = SECTIONS[name]
    if not on_cuda():
        limit *= 3  # other machines may be slow, and nothing is measured on them
    # So that Transformer Engine does not need a C compiler.
    environment = {"NVTE_TORCH_COMPILE": "0", **os.environ}
    if name.startswith("sanitizer"):
        environment["TORCH_CUDA_SANITIZER"] = "1"
        if not on_cuda():
            del environment["TORCH_CUDA_SANITIZER"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--section", name, "--out", str(out)]
        failure = ""
        try:
            code = subprocess.run(
                [*command, "--rounds", str(rounds)], env=environment, timeout=limit
            ).returncode
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"not done in {limit} s"
        found: dict[str, Any] = {"ranks": num_ranks}
        if out.exists():
            found |= json.loads(out.read_text())
    return found | ({"failure": failure} if failure else {})


def report(name: str, found: dict[str, Any]) -> None:
    """Print the table of one section."""
    label = "" if on_cuda() else "REHEARSAL on a CPU, says nothing about speed: "
    if "failure" in found:
        print(f"{label}{name}: {found['failure']}")
    if name.startswith("sanitizer"):
        rows = [
            [case, (text.strip().splitlines() or ["nothing reported"])[0][:80]]
            for case, text in found.items()
            if isinstance(text, str) and case != "failure"
        ]
        what = "torch.cuda._sanitizer" if on_cuda() else "the same steps, without a sanitizer"
        harness.print_table(f"{label}{name}: {what}", ["case", "reported"], rows)
        return
    if "skipped" in found:
        print(f"{label}{name}: skipped: {found['skipped']}")
        return
    engines = found.get("engines", {})
    if name.startswith("fp8"):
        _gpu_fp8.report(f"{label}{name}", found)
        return
    times = {n: e["milliseconds"] for n, e in engines.items() if "milliseconds" in e}
    rows = []
    for engine, facts in engines.items():
        cells = [engine, *_times(times, engine)]
        for key in ("rest bytes", "peak bytes"):
            cells.append(f"{facts[key] / 2**30:.2f}" if key in facts else "-")
        if facts.get("losses"):
            cells.append(f"{facts['losses'][-1]:.4f}")
        rows.append(cells)
    columns = ["fwd+bwd ms", "step ms", "x bare", "x FSDP2", "host ms"]
    columns += ["rest GiB", "peak GiB", "3rd loss"]
    layers = found.get("config", {}).get("num_layers", "?")
    harness.print_table(f"{label}{name}, {layers} layers", ["engine", *columns], rows)


def _times(times: dict[str, dict[str, list[float]]], engine: str) -> Sequence[str]:
    if engine not in times or not times[engine]["step"]:
        return ["failed" if engine not in times else "-"] * 5
    cells = []
    for part in ("forward+backward", "step"):
        low, middle, high = harness.quartiles(times[engine][part])
        cells.append(f"{middle:.1f} ({low:.1f}-{high:.1f})")
    steps = {name: parts["step"] for name, parts in times.items()}
    for base in (BARE, FSDP2):
        known = base in steps and len(steps[base]) == len(steps[engine])
        cells.append(harness.show_ratio(harness.ratios(steps, engine, base)) if known else "-")
    return [*cells, f"{harness.quartiles(times[engine]['host'])[1]:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15 if on_cuda() else 3)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section is not None:
        num_ranks, _ = SECTIONS[args.section]
        if args.section.startswith("fp8"):
            fp8_section(args.section, args.rounds, args.out)
        elif args.section.startswith("sanitizer"):
            sanitizer_section(num_ranks, args.out)
        else:
            larger = args.section.endswith("sequences")
            captures = args.section.endswith(CAPTURED)
            timing_section(num_ranks, args.rounds, args.out, larger=larger, captures=captures)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    results = {}
    for name in args.sections:
        print(f"{name} ...", flush=True)
        results[name] = run_section(name, args.rounds)
        report(name, results[name])
        if on_cuda():
            harness.write_results("gpu", results)
    if not on_cuda():
        print("REHEARSAL: no CUDA device here; nothing was written.")


if __name__ == "__main__":
    main()
