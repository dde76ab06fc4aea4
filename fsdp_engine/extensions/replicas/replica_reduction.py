"""Second reduction of a step's gradients, over engines that train the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fsdp_engine.engine import Engine
from fsdp_engine.runtime.gradient_observer import GradientObserver


class ReplicaReduction(Protocol):
    """A function that reduces final gradients over engines that train the same model."""

    def __call__(
        self, gradients: Sequence[torch.Tensor], used: Sequence[Sequence[Any]]
    ) -> Sequence[Sequence[Any]] | None:
        """Reduce ``gradients`` in place.

        Args:
            gradients: This rank's shard of each buffer, 1-D.
            used: For each buffer and each of its parameters, whether it got a gradient.

        Returns:
            ``used``, combined over all engines. None: the function has copied the gradients, and
            they are cleared instead of published.
        """
        ...


class ReplicaGradients(GradientObserver):
    """Observer that passes an engine's gradients to a reduction over replicas.

    Attributes:
        sees_all_ranks: Whether there are no other replicas.
    """

    def __init__(self, engine: Engine) -> None:
        self._reduction: ReplicaReduction | None = None
        self._buffers = [buffer for unit in engine.units for buffer in unit.trainable]
        engine.reductions.observers.append(self)

    def reduce_with(self, reduction: ReplicaReduction | None) -> None:
        """Reduce over replicas from the next step on. None: there are no other replicas."""
        self._reduction = reduction
        self.sees_all_ranks = reduction is None

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]] | None:
        """See the base class."""
        if self._reduction is None:
            return used
        return self._reduction([buffer.main_gradients for buffer in self._buffers], used)


def set_replica_reduction(engine: Engine, reduction: ReplicaReduction | None) -> None:
    """Reduce the gradients of each step over replicas of this engine, which other jobs train.

    Args:
        engine: The engine of this job.
        reduction: Called with this rank's shards of the reduced gradients before they are
            published. If it returns None, the gradients are cleared. None: there are no other
            replicas.
    """
    engine.extension(ReplicaGradients).reduce_with(reduction)
