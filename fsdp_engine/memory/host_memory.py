"""Host memory for asynchronous copies from and to an accelerator."""

from __future__ import annotations

import warnings

import torch

from fsdp_engine import backend
from fsdp_engine.accelerator import current_accelerator
from fsdp_engine.memory import allocator, cuda


class HostBlock:
    """Uninitialised bytes of host memory, not booked, from which and to which an accelerator
    copies asynchronously (``pinned``).

    On CUDA exactly as many as asked for, freed with this object: torch's own allocator of pinned
    memory allocates powers of two, and never frees. Other accelerators have only that one.

    Attributes:
        bytes: the memory, 1-D.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        pinned = pinned and backend.current().has_values
        device = current_accelerator()
        is_torchs = pinned and device is not None and device.type != "cuda"
        self.bytes = allocator.empty(num_bytes, torch.uint8, "cpu", pinned=is_torchs)
        if pinned and not is_torchs and num_bytes:
            error = cuda.pin(self.bytes, self)
            if error is not None:
                warnings.warn(
                    f"{num_bytes} bytes of host memory: expected to pin them; found that CUDA "
                    f"cannot ({error}; see `ulimit -l`). Copies to them take longer",
                    stacklevel=2,
                )
