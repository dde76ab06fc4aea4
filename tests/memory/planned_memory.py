"""Models and counts for tests of planned memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

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


@contextmanager
def counting_fills(engine: Any) -> Iterator[list[int]]:
    """Within it, the bytes of every fill that ordinary memory serves are noted."""
    memory, found = engine._memory, list[int]()
    fill = memory.fill

    def noting(storage: Any, num_bytes: int) -> None:
        if num_bytes:
            found.append(num_bytes)
        fill(storage, num_bytes)

    memory.fill = noting
    try:
        yield found
    finally:
        del memory.fill
