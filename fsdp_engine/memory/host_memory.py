"""Host memory for asynchronous copies to and from an accelerator."""

from __future__ import annotations

import warnings

import torch

from fsdp_engine import backend
from fsdp_engine.accelerator import current_accelerator
from fsdp_engine.memory import allocator, cuda


class HostBlock:
    """Uninitialised bytes of host memory, which no ledger counts.

    On CUDA, pinned memory is allocated by this class instead of torch's allocator of pinned memory,
    which allocates powers of two and does not free them. It has exactly ``num_bytes``, and is freed
    with this object. On other accelerators, torch's allocator is used.

    Args:
        num_bytes: Size of the memory.
        pinned: Pin the memory, so that an accelerator can copy to and from it asynchronously.

    Attributes:
        bytes: The memory, a 1-D uint8 tensor.
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
