"""Memory that only CUDA has: NCCL's allocator, and host memory that is pinned in place.

This is the only file that names ``torch.cuda``. Other files call an accelerator by the module that
torch registers for it (``accelerator.py``).
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch


def memory_pool(allocator: Any) -> Any:
    """Returns a pool of memory that ``allocator`` allocates."""
    return torch.cuda.MemPool(allocator)


def allocating_from(pool: Any, device: torch.device) -> AbstractContextManager[None]:
    """Within it, what this thread allocates on ``device`` comes from ``pool``."""
    return torch.cuda.use_mem_pool(pool, device)


def pin(tensor: torch.Tensor, holder: object) -> str | None:
    """Pins the host memory of ``tensor``, until ``holder`` is garbage.

    Returns:
        None, or the error of CUDA, which has pinned nothing then.
    """
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    code = runtime.cudaHostRegister(address, tensor.nbytes, 0)
    if int(code) != 0:
        _forget_last_error()
        return str(code)
    release = weakref.finalize(holder, runtime.cudaHostUnregister, address)
    release.atexit = False  # CUDA may be gone by then
    return None


def _forget_last_error() -> None:
    """CUDA keeps the error of a call until it is asked for: by torch after its next kernel, which
    would be taken for what failed."""
    runtime = ctypes.CDLL(None)  # torch loads CUDA's runtime for the whole process
    name = "hipGetLastError" if torch.version.hip else "cudaGetLastError"
    if hasattr(runtime, name):
        getattr(runtime, name)()
