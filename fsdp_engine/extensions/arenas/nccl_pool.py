"""Memory that is registered with NCCL: collectives read and write it without a copy.

[Note: Registered memory]
Buffers are allocated from a ``torch.cuda.MemPool`` over NCCL's own allocator, which is registered
with the communicators of all data-parallel groups. *Plain* registration is local to each rank.
*Window* (symmetric) registration is a collective: all ranks must register memory of the same sizes
at the same time, and torch registers growth of a registered pool as soon as it is allocated. So all
of the memory is allocated while the engine is built, in the order of units, and registered once,
group by group. At that time no step has run: a rehearsal of a step (``rehearsal.py``) computes the
length of the arenas ([Note: Arena] in ``arena.py``). Arenas keep that length. Ordinary memory is
used for storages that do not fit, and for the buffers in which the receiving rank sums with
``reduce_scatter_with_fp32_accumulation``. Arenas of the length that the first step needed would not
work, because ranks may have needed different lengths.

Where torch cannot swap data pointers (before 2.13), transient memory is taken from the pool through
torch's caching allocator if registration is plain, and is ordinary memory otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.comm.groups import backend_of
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.memory import cuda


class NcclPool:
    """Memory pool of one engine. See [Note: Registered memory].

    Args:
        mesh: The data-parallel ranks, for which :func:`check_nccl` has passed.
        symmetric: Use window instead of plain registration.

    Attributes:
        takes_more: Whether each rank may register memory by itself at any time.
    """

    def __init__(self, mesh: DataMesh, *, symmetric: bool) -> None:
        self.takes_more = not symmetric
        self._device = mesh.device
        self._symmetric = symmetric
        self._groups = _sending_groups(mesh)
        backend: Any = backend_of(mesh.device_mesh.get_group(0), mesh.device)
        self._pool = cuda.memory_pool(backend.mem_allocator)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Context within which this thread allocates device memory from the pool."""
        with cuda.allocating_from(self._pool, self._device):
            yield

    def register(self) -> None:
        """Register all memory allocated so far with the communicators. Collective."""
        for group in self._groups:
            # Windows need the communicator, which NCCL creates at its first collective.
            float(all_reduce_(torch.tensor(0.0, device=self._device), group))
            backend: Any = backend_of(group, self._device)
            if self._symmetric:
                backend.register_mem_pool(self._pool, symm=True)
            else:
                backend.register_mem_pool(self._pool)


def check_nccl(mesh: DataMesh, *, symmetric: bool) -> None:
    """Check that memory can be registered with NCCL. Changes nothing and sends nothing.

    Raises:
        ValueError: A data-parallel group does not use NCCL, NCCL allocates no memory on this
            device, or ``symmetric`` is set and this torch cannot register windows.
    """
    for group in (mesh.device_mesh.get_group(0), *_sending_groups(mesh)):
        backend: Any = backend_of(group, mesh.device)
        register = getattr(backend, "register_mem_pool", None)
        if register is None:
            found = backend.name() if backend is not None else "nothing"
            raise ValueError(
                "nccl_ub: expected data-parallel groups over NCCL on CUDA devices; found "
                f"{found} for {mesh.device.type} tensors"
            )
        if not backend.supports_tensor_alloc(mesh.device):
            raise ValueError(
                "nccl_ub: expected devices on which NCCL allocates memory (those with multicast, "
                f"as NVSwitch gives); found that it does not on {mesh.device}"
            )
        # The docstring of the binding has its signature; torch's stubs do not.
        if symmetric and "symm" not in (register.__doc__ or ""):
            raise ValueError(
                "nccl_ub: expected a torch that registers windows (symmetric memory) with NCCL; "
                f"found {torch.__version__}. Use disable_symmetric_registration=True"
            )


def _sending_groups(mesh: DataMesh) -> list[ProcessGroup]:
    """Returns the gather and reduce groups in the same order on all ranks."""
    groups = (
        group
        for axis in (mesh.inner, mesh.outer)
        for group in (axis.gather_group, axis.reduce_group)
    )
    return [group for group in groups if group is not None]
