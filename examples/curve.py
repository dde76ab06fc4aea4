"""What a run measures: loss, memory and speed by step, and the loss on held-out text."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; the loss is a mean over all ranks, in nats a byte."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    memory_bytes: int


@dataclass(frozen=True)
class HeldOutRecord:
    """The loss on held-out text after ``step`` steps, in nats a byte."""

    step: int
    loss: float


@dataclass
class Curve:
    """The records of a run since its first step. Checkpoints contain them, for resumed runs."""

    steps: list[StepRecord] = field(default_factory=list)
    held_out: list[HeldOutRecord] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON and for a checkpoint."""
        return dataclasses.asdict(self)

    def load_state_dict(self, records: dict[str, Any]) -> None:
        """Replace the records with those of a :meth:`state_dict`."""
        self.steps = [StepRecord(**record) for record in records["steps"]]
        self.held_out = [HeldOutRecord(**record) for record in records["held_out"]]

    def write_json(self, path: Path, **facts: Any) -> None:
        """Write ``facts`` and all records to ``path``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({**facts, **self.state_dict()}, indent=1) + "\n", encoding="utf-8"
        )


def memory_in_use(device: torch.device) -> int:
    """Bytes of memory: on CUDA the peak of this process's tensors, else its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Without /proc only the peak is known: in bytes on macOS, in KiB on other systems.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
