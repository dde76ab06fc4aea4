"""Threads of ranks that share the cores of a host.

Torch computes with as many threads as there are cores, in each process. Those of OpenMP spin at the
end of each parallel region until all have ended. With more threads than cores they take the cores
from the threads that they wait for, and steps take many times as long.
torchrun sets ``OMP_NUM_THREADS=1`` for this reason; other launchers set nothing.
"""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

# By which users set the number of threads.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Another number since is the user's.
_AT_IMPORT = torch.get_num_threads()


def machine() -> str:
    """The namespace of process numbers."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(space) if space.is_symlink() else ''}"


def _cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _key() -> str:
    """The same on ranks that share their cores, in the store of the default group."""
    return f"fsdp_engine/cores/{dist.get_world_size()}/{machine()}/{_cores()}"


def announce_rank() -> None:
    """Count this rank among those that share its cores."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    store, key = _get_default_store(), _key()
    if store.add(f"{key}/{dist.get_rank()}", 1) == 1:
        store.add(key, 1)


def share_cores() -> None:
    """Let torch use this rank's share of the cores, after all ranks have called
    :func:`announce_rank`. A number of threads in the environment, or set by
    ``torch.set_num_threads`` after this package was imported, is left as it is."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    num_ranks, num_cores = _get_default_store().add(_key(), 0), len(_cores())
    share, found = max(1, num_cores // num_ranks), torch.get_num_threads()
    is_set = found != _AT_IMPORT or any(name in os.environ for name in _VARIABLES)
    if found <= share or is_set:
        return
    torch.set_num_threads(share)
    if dist.get_rank() == 0:
        warnings.warn(
            f"torch.get_num_threads(): expected at most {share}, since {num_ranks} ranks share "
            f"{num_cores} cores; found {found}, and set {share}. Set OMP_NUM_THREADS for another "
            "number",
            stacklevel=2,
        )
