"""Pages of host memory: fresh ones are costly, and freed ones stay.

[Note: Huge pages]
The kernel gives memory out as it is first touched, a page at a time, and zeroes each. In pages of
4 KiB that takes several times as long as to write what is to be there. In huge ones (2 MiB) it does
not. Linux usually gives those to who asks (``transparent_hugepage`` is ``madvise``), so large
blocks ask. Only for whole huge pages within the block: it takes no more memory than without.

[Note: Freed pages]
Small allocations that last (of gloo's threads, of whoever logs) settle between large tensors that
autograd frees, so on CPU glibc's heap has ever more holes, and the resident set grows to about
twice its size over a thousand steps though nothing leaks. ``malloc_trim`` hands the pages of all
holes back to the system. It takes milliseconds, and what it gave back is taken again in the next
step, so every so many backwards it costs next to nothing. Settings of malloc do not do as well:
with a larger ``M_TOP_PAD`` (or any other of them) glibc no longer learns how large tensors are, and
where the heap has no hole for one above 128 KiB it maps and unmaps it (``benchmarks/long_run.py``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

# See [Note: Freed pages].
BACKWARDS_PER_TRIM = 100
# What is smaller asks for nothing: most of it lies in pages that have been used before.
LEAST_BYTES = 4 << 20
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE = 14  # the same on all of Linux's architectures with huge pages but Alpha


def ask_for_huge_pages(storage: torch.UntypedStorage) -> None:
    """Let fresh memory of the host come in huge pages, before it is first touched.

    Nothing happens to less than ``LEAST_BYTES``, or where the system has no such pages.
    """
    num_bytes = storage.nbytes()
    if num_bytes < LEAST_BYTES:
        return
    size, madvise = _huge_pages()
    if madvise is None:
        return
    begin = -(-storage.data_ptr() // size) * size
    end = (storage.data_ptr() + num_bytes) // size * size
    if end > begin:
        # Advice: where it is refused, pages are of the usual size.
        madvise(begin, end - begin, _MADV_HUGEPAGE)


def find_malloc_trim() -> Callable[[int], int] | None:
    """glibc's function of that name; None with another C library."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


@cache
def _huge_pages() -> tuple[int, Callable[[int, int, int], int] | None]:
    """Bytes of one, and the system's function to ask for them; None if it has none."""
    if sys.platform != "linux" or not _SIZE_FILE.is_file():
        return 1, None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(_SIZE_FILE.read_text()), madvise
