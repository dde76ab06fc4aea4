"""The result of a simulation: times, exposed communication, memory, and a timeline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_engine.config import StagingBudget
from fsdp_engine.devices.lane import COMPUTE, name_of_wait
from fsdp_engine.simulation.clock import Exposed, Span
from fsdp_engine.simulation.machine import Machine

_WAITS = "compute waits for"


@dataclass(frozen=True)
class Simulation:
    """The last simulated training step. Times are in seconds since its start, memory in bytes.

    Attributes:
        title: strategy and ranks.
        machine: the simulated machine.
        seconds: from the end of the previous step to the end of this one.
        spans: operations of each lane.
        exposed: waits of compute for communication.
        memory: by kind, at the peak.
        sent_bytes: bytes that a rank sends, by axis ("inner", "outer").
        budget: elements in the engine's prefetch window.
        staging_budget: the engine's limit on gradients in flight.
    """

    title: str
    machine: Machine
    seconds: float
    spans: tuple[Span, ...]
    exposed: tuple[Exposed, ...]
    memory: dict[str, int]
    sent_bytes: dict[str, float]
    budget: int
    staging_budget: StagingBudget

    @property
    def compute_seconds(self) -> float:
        """Busy time of the compute lane."""
        return self._busy(COMPUTE)

    @property
    def message_seconds(self) -> dict[str, float]:
        """Busy time of each of the other lanes."""
        names = sorted({span.lane for span in self.spans} - {COMPUTE})
        return {name: self._busy(name) for name in names}

    @property
    def exposed_seconds(self) -> float:
        """Total time in which compute waited for communication."""
        return sum(each.seconds for each in self.exposed)

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        return sum(self.memory.values())

    def trace(self) -> dict[str, Any]:
        """The timeline in Chrome's trace event format: a row for each lane, and one for waits."""
        rows = [COMPUTE, _WAITS, *self.message_seconds]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": self.title}}
        ]
        for row, name in enumerate(rows):
            place: dict[str, Any] = {"ph": "M", "pid": 0, "tid": row}
            events.append({**place, "name": "thread_name", "args": {"name": name}})
            events.append({**place, "name": "thread_sort_index", "args": {"sort_index": row}})
        for span in self.spans:
            event = self._event(rows.index(span.lane), span.label, span.start, span.end)
            events.append({**event, "args": {"phase": span.phase}})
        for each in self.exposed:
            name = name_of_wait(each.lane, each.unit)
            event = self._event(rows.index(_WAITS), name, each.start, each.start + each.seconds)
            events.append({**event, "args": {"phase": each.phase}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> None:
        """Write :meth:`trace` as JSON, for Perfetto (ui.perfetto.dev)."""
        Path(path).write_text(json.dumps(self.trace()))

    def __str__(self) -> str:
        lines = [f"{self.title}, {self.machine.name}", f"step        {_ms(self.seconds)}"]
        lines.append(f"compute     {_ms(self.compute_seconds)}")
        lines += [f"{name:<12}{_ms(busy)}" for name, busy in self.message_seconds.items()]
        lines.append(f"exposed     {_ms(self.exposed_seconds)}{self._worst()}")
        kinds = ", ".join(f"{kind} {_gib(n)}" for kind, n in self.memory.items() if n)
        size = _gib(self.machine.processor.memory_bytes)
        lines.append(f"memory      {_gib(self.peak_bytes)} of {size} at most: {kinds}")
        return "\n".join(lines)

    def _worst(self) -> str:
        sums: dict[tuple[str, str, str], float] = {}
        for each in self.exposed:
            key = (each.unit, each.phase, each.lane)
            sums[key] = sums.get(key, 0.0) + each.seconds
        worst = sorted(sums.items(), key=lambda item: -item[1])[:3]
        return "".join(
            f"\n  {unit}, {phase}, {lane}: {_ms(seconds).strip()}"
            for (unit, phase, lane), seconds in worst
        )

    def _busy(self, lane: str) -> float:
        return sum(span.end - span.start for span in self.spans if span.lane == lane)

    def _event(self, row: int, name: str, start: float, end: float) -> dict[str, Any]:
        micro = 1e6
        return {
            "ph": "X",
            "pid": 0,
            "tid": row,
            "name": name,
            "ts": start * micro,
            "dur": (end - start) * micro,
        }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f} ms"
