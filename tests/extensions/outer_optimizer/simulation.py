"""DiLoCo in one process, with plain torch: replicas are trained one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests import reference
from tests.models import Chain, OddBlock, vector_batch

NUM_BLOCKS = 4
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
Weights = dict[str, Tensor]


def make_model() -> nn.Module:
    """Four blocks, each of which is a unit."""
    torch.manual_seed(1)
    return Chain(*(OddBlock() for _ in range(NUM_BLOCKS)))


def batch_of(step: int, replica: int, inner: int) -> tuple[Tensor, Tensor]:
    """The batch of one rank."""
    return vector_batch(2, 1000 * step + 10 * replica + inner, 7)


@dataclass(kw_only=True)
class Simulation:
    """A run.

    Attributes:
        num_replicas, num_inner: Sizes of the mesh.
        every, num_fragments, delay, alpha, outer: As the arguments of the extension.
        make_inner: Makes the inner optimizer of a replica.
        max_norm: Gradients of a replica are clipped to it.
        models: The replicas.
        shared: The outer weights.
    """

    num_replicas: int
    num_inner: int = 1
    every: int = 3
    num_fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    outer: Callable[[Any], torch.optim.Optimizer] = OUTER
    make_inner: Callable[[Any], torch.optim.Optimizer] = reference.adamw
    max_norm: float = 0.5
    count: int = 0
    pending: dict[int, tuple[int, list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = make_model()
        self.models = [copy.deepcopy(first) for _ in range(self.num_replicas)]
        self.inner = [self.make_inner(model.parameters()) for model in self.models]
        self.shared = {
            name: nn.Parameter(p.detach().clone()) for name, p in first.named_parameters()
        }
        self.outer_optimizers = [
            self.outer([self.shared[name] for name in self.names(number)])
            for number in range(self.num_fragments)
        ]

    def names(self, fragment: int) -> list[str]:
        """The parameters of a fragment: those of every ``num_fragments``-th block."""
        return [
            name for name in self.shared if int(name.split(".")[1]) % self.num_fragments == fragment
        ]

    def run(self, steps: int) -> list[Weights]:
        """Train, and return the weights of each replica."""
        for _ in range(steps):
            for replica, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
                for inner in range(self.num_inner):
                    (model(*batch_of(self.count, replica, inner)) / self.num_inner).backward()
                nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            self.count += 1
            self._exchange()
        return self.weights()

    def weights(self) -> list[Weights]:
        """The weights of each replica."""
        return [
            {name: p.detach().clone() for name, p in model.named_parameters()}
            for model in self.models
        ]

    def synchronize(self) -> None:
        """Give the outer weights to all replicas, after a last exchange."""
        for fragment in list(self.pending):
            self._finish(fragment)
        for fragment in range(self.num_fragments):
            if self.count % self.every != self._offset(fragment):
                self._send(fragment)
                self._finish(fragment)
        for model in self.models:
            for name, p in model.named_parameters():
                p.data.copy_(self.shared[name].data)

    def _offset(self, fragment: int) -> int:
        return round((fragment + 1) / self.num_fragments * self.every - 0.499) % self.every

    def _exchange(self) -> None:
        for fragment in range(self.num_fragments):
            if fragment in self.pending and self.pending[fragment][0] == self.count:
                self._finish(fragment)
        for fragment in range(self.num_fragments):
            if self.count % self.every == self._offset(fragment):
                self._send(fragment)
                if not self.delay:
                    self._finish(fragment)

    def _send(self, fragment: int) -> None:
        owns = [dict(model.named_parameters()) for model in self.models]
        means = [
            torch.stack([self.shared[name].data - own[name].data for own in owns]).mean(0)
            for name in self.names(fragment)
        ]
        self.pending[fragment] = (self.count + self.delay, means)

    def _finish(self, fragment: int) -> None:
        _, means = self.pending.pop(fragment)
        names = self.names(fragment)
        for name, mean in zip(names, means, strict=True):
            self.shared[name].grad = mean
        self.outer_optimizers[fragment].step()
        for model in self.models:
            own = dict(model.named_parameters())
            for name in names:
                mixed = self.alpha * own[name].data + (1 - self.alpha) * self.shared[name].data
                own[name].data.copy_(mixed)
