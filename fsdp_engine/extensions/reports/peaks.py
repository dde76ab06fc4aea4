"""Peaks of memory within a measurement."""

from __future__ import annotations

from collections import Counter

import torch

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.memory.allocator import Ledger


class Peak:
    """The moment with most bytes held since this was made, whatever other peaks are reset.

    Attributes:
        held: bytes by role at that moment.
        total: their sum.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.held = Counter(ledger.held)
        self.total = ledger.total

    def __call__(self, ledger: Ledger) -> None:
        """The ledger has changed."""
        if ledger.total > self.total:
            self.held = Counter(ledger.held)
            self.total = ledger.total


def begin_device_peak(device: torch.device) -> None:
    """Torch's own peak of memory allocated on ``device`` starts anew; nothing on a CPU."""
    if is_accelerator(device):
        module_of(device).reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> int | None:
    """Most bytes that torch had allocated on ``device`` since :func:`begin_device_peak`; None on a
    CPU, where they are not counted."""
    if not is_accelerator(device):
        return None
    return int(module_of(device).max_memory_allocated(device))
