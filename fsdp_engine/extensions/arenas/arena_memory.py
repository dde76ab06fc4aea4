"""Memory manager that fills transient storages from arenas, optionally registered with NCCL.

[Note: Sources of a fill]
With ``fsdp_double_buffer``, transient storages are filled from an arena ([Note: Arena] in
``arena.py``) that is as long as previous steps required, so steady steps allocate nothing. If the
arena has no room, memory is taken from the pool of idle memory or by ``resize_``. The storage
object is the same in each case. The bytes of an arena are booked under its role when it is
allocated; storages that are filled from it book nothing.

There are no arenas where torch cannot swap data pointers (before 2.13), or under
``FakeTensorMode``, which has no memory. Then memory is allocated from NCCL's pool if there is one
that can grow at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.arenas import nccl_pool
from fsdp_engine.extensions.arenas.arena import Arena
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import Memory, TransientStorage
from fsdp_engine.runtime.rehearsal import Rehearsal
from fsdp_engine.units.assignment import expect
from fsdp_engine.units.build import EngineSetup

ROLES = ("full", "staging")


class Pool(Protocol):
    """Source of memory for communication buffers, in place of the usual allocator.

    Attributes:
        takes_more: Whether a rank may allocate from the pool at any time, even after registration.
    """

    takes_more: bool

    def allocating(self) -> AbstractContextManager[None]:
        """Context within which this thread allocates device memory from the pool."""
        ...

    def register(self) -> None:
        """Register all memory allocated so far with the communicators. Collective."""
        ...


class ArenaMemory(Memory):
    """Memory manager with arenas. See the module docstring and the base class.

    Args:
        device: The device of the memory.
        pool: Pool for arenas and for persistent tensors that are communicated. None: the usual
            allocator.

    Attributes:
        arenas: The arenas by role.
    """

    is_steady = True

    def __init__(self, device: torch.device, pool: Pool | None = None) -> None:
        super().__init__(device)
        self._pool = pool
        self.is_fixed = pool is not None
        self.arenas: dict[str, Arena] = {}
        is_real = type(allocator.empty(0, torch.uint8, device)) is torch.Tensor
        if allocator.CAN_SWAP and is_real:
            for role in ROLES:
                self.arenas[role] = Arena(self._allocate_arena, partial(self.ledger.add, role))
        self._fills_from_pool = pool is not None and pool.takes_more and not self.arenas

    def persistent(
        self, numel: int, dtype: torch.dtype, role: str, *, sent: bool = False
    ) -> torch.Tensor:
        """See the base class."""
        with self._allocating(sent):
            return super().persistent(numel, dtype, role, sent=sent)

    def transient(
        self, numel: int, dtype: torch.dtype, role: str, *, read_error: str | None = None
    ) -> TransientStorage:
        """See the base class."""
        storage = super().transient(numel, dtype, role, read_error=read_error)
        if storage.num_bytes and role in self.arenas:
            self.arenas[role].add(storage.num_bytes)
        return storage

    def begin_unit(self) -> None:
        """See the base class."""
        for arena in self.arenas.values():
            arena.begin_unit()

    def expect(self, moments: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Allocate the arenas before the first step, from the pool, and register the pool.

        Args:
            moments: Moments by role; see :meth:`.Arena.expect`.
        """
        for role, arena in self.arenas.items():
            arena.expect(moments[role])
        if self._pool is not None:
            self._pool.register()

    def end_backward(self, *, step_is_over: bool = False) -> None:
        """See the base class. Arenas that were too short are reallocated at a later fill."""
        super().end_backward(step_is_over=step_is_over)
        for arena in self.arenas.values():
            arena.end_step()

    def fill(self, storage: torch.UntypedStorage, num_bytes: int, role: str) -> None:
        """See the base class."""
        arena = self.arenas.get(role) if num_bytes else None
        if arena is None or not arena.fill(storage, num_bytes):
            super().fill(storage, num_bytes, role)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """See the base class."""
        with self._allocating(self._fills_from_pool):
            super().resize(storage, num_bytes)

    def free(self, storage: torch.UntypedStorage, num_bytes: int, role: str) -> None:
        """See the base class."""
        arena = self.arenas.get(role) if num_bytes else None
        if arena is None or not arena.free(storage):
            super().free(storage, num_bytes, role)

    def _allocating(self, sent: bool) -> AbstractContextManager[None]:
        return self._pool.allocating() if self._pool is not None and sent else nullcontext()

    def _allocate_arena(self, num_bytes: int) -> torch.Tensor:
        # The arena replaces the idle memory, which served the same storages.
        self.release_idle()
        self._most_in_use = self._in_use
        with self._allocating(sent=True):
            return allocator.empty(num_bytes, torch.uint8, self.device)


@dataclass(frozen=True)
class Arenas(EngineExtension):
    """Extension that fills transient storages from arenas.

    Attributes:
        registered: Whether arenas are in memory that is registered with NCCL.
        symmetric: Whether registration uses windows (symmetric memory).
    """

    registered: bool = False
    symmetric: bool = True

    def check(self, setup: EngineSetup) -> None:
        """See the base class and ``check_nccl`` of ``nccl_pool.py``."""
        if self.registered:
            nccl_pool.check_nccl(setup.data, symmetric=self.symmetric)

    def memory(self, setup: EngineSetup) -> Memory:
        """See the base class."""
        pool = None
        if self.registered:
            pool = nccl_pool.NcclPool(setup.data, symmetric=self.symmetric)
        return ArenaMemory(setup.data.device, pool)

    def start(self, engine: Engine) -> None:
        """See the base class."""
        memory, units = engine.memory, engine.units
        if self.registered:
            assert isinstance(memory, ArenaMemory)
            rehearsal = Rehearsal(
                expect(engine.model, [unit.modules for unit in units]),
                [unit.num_elements if unit.reshards else 0 for unit in units],
                [unit.num_staged for unit in units],
                engine.budget,
                engine.staging_budget,
            )
            # In the first forward, units with loose modules ([Note: Default units]) stay gathered.
            loose = [unit.index for unit in units if unit.loose]
            full = [list(dict.fromkeys((*loose, *moment))) for moment in rehearsal.full()]
            memory.expect({"full": full, "staging": list(rehearsal.staging())})
