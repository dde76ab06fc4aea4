"""Peaks of memory during a measurement."""

from __future__ import annotations

from collections import Counter

import torch

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.memory.allocator import Ledger


class Peak:
    """Records the peak of a ledger's bytes since this object was created. Several of these objects
    may watch the same ledger.

    Attributes:
        held: Bytes by role at the moment of the peak.
        total: Sum of these bytes.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.held = Counter(ledger.held)
        self.total = ledger.total

    def __call__(self, ledger: Ledger) -> None:
        """Update the peak after a change of the ledger."""
        if ledger.total > self.total:
            self.held = Counter(ledger.held)
            self.total = ledger.total


def begin_device_peak(device: torch.device) -> None:
    """Reset torch's peak of memory allocated on ``device``. Does nothing on a CPU."""
    if is_accelerator(device):
        module_of(device).reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> int | None:
    """Returns the most bytes that torch had allocated on ``device`` since
    :func:`begin_device_peak`. None on a CPU, where torch does not count them."""
    if not is_accelerator(device):
        return None
    return int(module_of(device).max_memory_allocated(device))
