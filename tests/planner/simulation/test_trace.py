"""The trace of a simulated step: memory over time, and the modules whose operations run."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.lanes import COMPUTE
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from tests.models import Mlp
from tests.planner.simulation.memory_runs import HOST

WIDTH = 256
PRODUCTS = ("mm", "addmm")


class Model(nn.Module):
    """Blocks in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(WIDTH, 3 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).exp().sum()


@cache
def simulated(checkpointing: bool | str = False, *, on_host: bool = False) -> fe.Simulation:
    return fe.simulate(
        Model,
        2,
        batch=torch.zeros(64, WIDTH),
        machine=HOST if on_host else fe.H100,
        strategy="optim_grads_params",
        checkpointing=checkpointing,
        options=fe.Options(min_unit_size=0),
    )


def products(phase: str) -> list[str]:
    """Modules of the matrix products of a phase."""
    spans = (s for s in simulated().spans if (s.lane, s.phase) == (COMPUTE, phase))
    return [s.module for s in spans if s.label in PRODUCTS]


FORWARD = [*(f"blocks.{n}.{part}" for n in range(3) for part in ("up", "down")), "head"]


def test_operations_have_their_modules_in_forward_and_in_backward() -> None:
    assert products("forward") == FORWARD
    # A product for the input and one for the weight, but the first has no input to train.
    backward = [name for name in reversed(FORWARD) for _ in range(2)][:-1]
    assert products("backward") == backward
    spans = simulated(False).spans
    by_label = {(s.label, s.phase): s.module for s in spans if s.module.startswith("blocks.1")}
    assert by_label["tanh", "forward"] == by_label["tanh_backward", "backward"] == "blocks.1"
    assert {s.module for s in spans if s.phase == "step"} == {""}
    assert {s.module for s in spans if s.lane != COMPUTE} == {""}


@pytest.mark.parametrize(
    ("checkpointing", "on_host"), [(False, False), (True, True), ("offload", False)]
)
def test_memory_over_time_has_the_peak(checkpointing: bool | str, on_host: bool) -> None:
    found = simulated(checkpointing, on_host=on_host)
    series = found.memory_series
    assert all(a[0] <= b[0] for a, b in pairwise(series))
    assert 0 <= series[0][0] <= series[-1][0] == found.seconds
    sums = [sum(sizes) for _, sizes in series]
    assert max(sums) == found.peak_bytes
    assert dict(zip(KINDS, series[sums.index(max(sums))][1], strict=True)) == found.memory
    # Between steps there are neither activations, but for the batch, nor full weights.
    last = dict(zip(KINDS, series[-1][1], strict=True))
    assert last["transient"] == 0
    assert last["activations"] < 0.5 * found.memory["activations"]


def test_the_trace_has_a_counter_and_rows_of_lanes_and_modules(tmp_path: Path) -> None:
    found = simulated(False)
    found.save_trace(tmp_path / "trace.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory (bytes)"}
    assert [[*event["args"]] for event in counters] == [[*KINDS]] * len(counters)
    assert max(sum(event["args"].values()) for event in counters) == found.peak_bytes
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in rows.values()}
    for event in events:
        if event["ph"] == "X":
            spans[rows[event["tid"]]].append(event)
            assert 0 <= event["ts"] <= found.seconds * 1e6
    assert spans.keys() >= {"compute", "compute waits for", "inner gather", "inner reduce"}
    busy = sum(event["dur"] for event in spans["compute"])
    assert busy == pytest.approx(found.compute_seconds * 1e6)
    modules = spans["modules"]
    assert {e["name"] for e in modules} == {*FORWARD, "blocks.0", "blocks.1", "blocks.2"}
    for name in ("blocks.1", "blocks.1.up"):
        phases = [e["args"]["phase"] for e in modules if e["name"] == name]
        assert phases == ["forward", "backward"]
    for row, slices in spans.items():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            start, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            # Slices are one after the other. Those of modules may be within each other.
            assert not open_until or (row == "modules" and end <= open_until[-1] + 1e-6), row
            open_until.append(end)
    named = [e["args"].get("module") for e in spans["compute"] if e["name"] in PRODUCTS]
    assert named[: len(FORWARD)] == FORWARD
