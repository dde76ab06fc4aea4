"""A model whose blocks draw random numbers and count their runs, and its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import reference
from tests.models import VOCABULARY, Block
from tests.scenario import Scenario

WIDTH = 12
BLOCKS = 4


class Dropping(nn.Module):
    """A block with dropout, an argument passed by name, and a count of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(WIDTH)
        self.runs = 0

    def forward(self, x: Tensor, *, debug: float = 1.0) -> Tensor:
        self.runs += 1
        return x + F.dropout(self.inner(x), 0.3, self.training) * debug


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Dropping() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, debug=0.5)  # torch's checkpoint has an argument of this name
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def made() -> Any:
    torch.manual_seed(1)
    return Model()


def scenario_at(level: str, **options: Any) -> Scenario:
    """Random numbers of a step are the same in every run."""
    return Scenario(
        model=Model,
        pair=(level, "no_shard"),
        options={"min_unit_size": 0, **options},
        optimizer=reference.adamw,
        before_step=lambda model, step: torch.manual_seed(step),
    )
