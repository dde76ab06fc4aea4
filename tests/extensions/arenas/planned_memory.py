"""Models and counts for tests of planned memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from fsdp_engine.extensions.arenas.arena import Arena
from fsdp_engine.extensions.arenas.arena_memory import ArenaMemory
from fsdp_engine.memory.allocator import Memory
from tests.models import Chain, Mlp, Regression, Small


def uneven_model() -> Regression:
    """Six units of three sizes."""
    return Chain(*(Mlp(hidden=hidden) for hidden in (5, 40, 17, 3, 29, 11)))


class Order(Small):
    """Five blocks of different sizes, called in ``order``, which may change."""

    def __init__(self, *order: int) -> None:
        super().__init__(5)
        self.blocks = nn.ModuleList([Mlp(hidden=3 + 4 * i) for i in range(5)])
        self.order = list(order)


def arenas_of(engine: Any) -> dict[str, Arena]:
    """The arenas of an engine by role; one with plain memory has none."""
    memory = engine.memory
    return memory.arenas if isinstance(memory, ArenaMemory) else {}


@contextmanager
def counting_fills(engine: Any) -> Iterator[list[int]]:
    """Yields a list that records the bytes of every fill that ordinary memory serves."""
    found: list[int] = []
    fill = Memory.fill

    def noting(memory: Memory, storage: Any, num_bytes: int, role: str) -> None:
        if num_bytes and memory is engine.memory:
            found.append(num_bytes)
        fill(memory, storage, num_bytes, role)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "fill", noting)
        yield found
