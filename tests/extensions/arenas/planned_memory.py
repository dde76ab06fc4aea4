"""Models and counts for tests of planned memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

from fsdp_engine.extensions.arenas.arena import Arena
from fsdp_engine.extensions.arenas.arena_memory import ArenaMemory
from fsdp_engine.memory.allocator import Memory
from tests.models import DIM, Chain, Mlp, Regression


def uneven_model() -> Regression:
    """Six units of three sizes."""
    return Chain(*(Mlp(hidden=hidden) for hidden in (5, 40, 17, 3, 29, 11)))


class Order(Regression):
    """Blocks in an order of one's own, which may change, with a layer of the root's before."""

    def __init__(self, *order: int, num_blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Mlp(hidden=3 + 4 * i) for i in range(num_blocks)])
        self.order = order

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x


def arenas_of(engine: Any) -> dict[str, Arena]:
    """The arenas of an engine by role; one with plain memory has none."""
    memory = engine.memory
    return memory.arenas if isinstance(memory, ArenaMemory) else {}


@contextmanager
def counting_fills(engine: Any) -> Iterator[list[int]]:
    """Within it, the bytes of every fill that ordinary memory serves are noted."""
    found: list[int] = []
    fill = Memory.fill

    def noting(memory: Memory, storage: Any, num_bytes: int, role: str) -> None:
        if num_bytes and memory is engine.memory:
            found.append(num_bytes)
        fill(memory, storage, num_bytes, role)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "fill", noting)
        yield found
