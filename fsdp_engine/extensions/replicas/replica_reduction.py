"""Reduced gradients of a step are reduced once more, over engines that train the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fsdp_engine.engine import Engine
from fsdp_engine.runtime.gradient_observer import GradientObserver


class ReplicaReduction(Protocol):
    """Reduces final gradients over engines that train the same model."""

    def __call__(
        self, gradients: Sequence[torch.Tensor], used: Sequence[Sequence[Any]]
    ) -> Sequence[Sequence[Any]] | None:
        """Reduce ``gradients`` in place.

        Args:
            gradients: this rank's parts of the buffers, 1-D.
            used: for each buffer, which of its parameters got a gradient.

        Returns:
            The same as ``used``, of all engines. None: the gradients were copied, and are cleared
            instead of published.
        """
        ...


class ReplicaGradients(GradientObserver):
    """Passes an engine's gradients to a reduction over replicas.

    Attributes:
        sees_all_ranks: there are no other replicas.
    """

    def __init__(self, engine: Engine) -> None:
        self._reduction: ReplicaReduction | None = None
        self._buffers = [buffer for unit in engine.units for buffer in unit.trainable]
        engine.reductions.observers.append(self)

    def reduce_with(self, reduction: ReplicaReduction | None) -> None:
        """Reduce over replicas from the next step on; None: there are no others."""
        self._reduction = reduction
        self.sees_all_ranks = reduction is None

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]] | None:
        """See the base class."""
        if self._reduction is None:
            return used
        return self._reduction([buffer.main_gradients for buffer in self._buffers], used)


def set_replica_reduction(engine: Engine, reduction: ReplicaReduction | None) -> None:
    """Reduce the step's gradients over replicas of this engine, which other jobs train.

    Args:
        engine: The engine of this job.
        reduction: called with this rank's parts of the reduced gradients before they are published;
            None: there are no other replicas. Where it returns None, the gradients are cleared.
    """
    engine.extension(ReplicaGradients).reduce_with(reduction)
