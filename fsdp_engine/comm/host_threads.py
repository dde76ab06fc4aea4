"""Limits the threads of ranks that share the cores of a host.

Each process of torch computes with as many threads as there are cores. OpenMP's threads spin at the
end of each parallel region until all of them have finished. If there are more threads than cores,
spinning threads occupy the cores that the others need, and steps take many times as long.
torchrun sets ``OMP_NUM_THREADS=1`` for this reason; other launchers do not.
"""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

# Environment variables with which users set the number of threads.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# The number of threads at import. If it is different later, the user has changed it.
_AT_IMPORT = torch.get_num_threads()


def machine() -> str:
    """Returns a name of this host, or of this container: host name and process-id namespace."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(space) if space.is_symlink() else ''}"


def _cores() -> list[int]:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _key() -> str:
    """Returns the key in the default group's store that ranks with the same cores share."""
    return f"fsdp_engine/cores/{dist.get_world_size()}/{machine()}/{_cores()}"


def announce_rank() -> None:
    """Count this rank as one of the ranks that share its cores."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    store, key = _get_default_store(), _key()
    if store.add(f"{key}/{dist.get_rank()}", 1) == 1:
        store.add(key, 1)


def share_cores() -> None:
    """Set the number of torch's threads to this rank's share of the cores.

    All ranks must have called :func:`announce_rank` before. A number of threads that is set in the
    environment, or with ``torch.set_num_threads`` after the import of this package, is not changed.
    """
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
            f"{num_cores} cores; found {found}, and reduced it to {share}. Set OMP_NUM_THREADS for "
            "another number",
            stacklevel=2,
        )
