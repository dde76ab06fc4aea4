"""Kinds of memory that only CUDA has: pools of NCCL's allocator, and host memory pinned in place.

This is the only file that uses ``torch.cuda``. Other files use the module that torch registers for
an accelerator (``accelerator.py``).
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch


def memory_pool(allocator: Any) -> Any:
    """Returns a memory pool whose memory ``allocator`` allocates."""
    return torch.cuda.MemPool(allocator)


def allocating_from(pool: Any, device: torch.device) -> AbstractContextManager[None]:
    """Returns a context in which this thread allocates memory on ``device`` from ``pool``."""
    return torch.cuda.use_mem_pool(pool, device)


def pin(tensor: torch.Tensor, holder: object) -> str | None:
    """Pin the host memory of ``tensor`` until ``holder`` is deleted.

    Returns:
        None, or CUDA's error if the memory could not be pinned.
    """
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    code = runtime.cudaHostRegister(address, tensor.nbytes, 0)
    if int(code) != 0:
        _forget_last_error()
        return str(code)
    release = weakref.finalize(holder, runtime.cudaHostUnregister, address)
    release.atexit = False  # CUDA may be shut down before the handlers of atexit run
    return None


def _forget_last_error() -> None:
    """Clear the last error of CUDA.

    Otherwise torch would read it after its next kernel, and report that this kernel has failed.
    """
    runtime = ctypes.CDLL(None)  # torch has loaded CUDA's runtime into this process
    name = "hipGetLastError" if torch.version.hip else "cudaGetLastError"
    if hasattr(runtime, name):
        getattr(runtime, name)()
