"""Memory that NCCL has allocated and knows: collectives read and write it without a copy.

[Note: Registered memory]
Buffers come from a ``torch.cuda.MemPool`` over NCCL's own allocator, and the pool is registered
with the communicators of all data-parallel groups. *Plain* registration is a matter of each rank;
*window* (symmetric) registration is a collective: all ranks must register memory of the same sizes
at the same moments, and torch registers what a registered pool grows by as soon as it is allocated.
So all of it is allocated while the engine is made, in the order of units, and registered once,
group by group. No step has run then: how long arenas ([Note: Arena] in ``arena.py``) must be
follows from a rehearsal of one (``rehearsal.py``). Arenas keep that length, and storages for which
they have no room get ordinary memory. So does what the receiving rank sums
``reduce_scatter_with_fp32_accumulation`` in. Arenas of the length that the first
step needed are no alternative: ranks may have needed different ones.

Where torch cannot swap data pointers (before 2.13), transient memory comes from the pool by way of
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
    """A pool of memory for one engine. See [Note: Registered memory].

    Args:
        mesh: the data-parallel ranks, for which :func:`check_nccl` has passed.
        symmetric: window instead of plain registration.

    Attributes:
        takes_more: each rank by itself registers memory that is allocated later.
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
        """Within it, what this thread allocates on the device comes from the pool."""
        with cuda.allocating_from(self._pool, self._device):
            yield

    def register(self) -> None:
        """Make all that was allocated so far known to the communicators. Collective."""
        for group in self._groups:
            # A communicator comes into being with its first collective; windows need it before.
            float(all_reduce_(torch.tensor(0.0, device=self._device), group))
            backend: Any = backend_of(group, self._device)
            if self._symmetric:
                backend.register_mem_pool(self._pool, symm=True)
            else:
                backend.register_mem_pool(self._pool)


def check_nccl(mesh: DataMesh, *, symmetric: bool) -> None:
    """Changes nothing, sends nothing.

    Raises:
        ValueError: a data-parallel group does not run over NCCL, NCCL allocates no memory on this
            device, or this torch cannot register windows and ``symmetric`` asks for them.
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
        # The binding's own signature; stubs do not tell.
        if symmetric and "symm" not in (register.__doc__ or ""):
            raise ValueError(
                "nccl_ub: expected a torch that registers windows (symmetric memory) with NCCL; "
                f"found {torch.__version__}. Use disable_symmetric_registration=True"
            )


def _sending_groups(mesh: DataMesh) -> list[ProcessGroup]:
    """The groups that gather and reduce, each once, in the same order on all ranks."""
    groups = (
        group
        for axis in (mesh.inner, mesh.outer)
        for group in (axis.gather_group, axis.reduce_group)
    )
    return [group for group in groups if group is not None]
