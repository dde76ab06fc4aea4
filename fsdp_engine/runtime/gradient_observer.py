"""A seam: what else happens to a step's gradients between autograd and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.runtime.unit import Unit


class GradientObserver:
    """Called by :class:`~.reductions.Reductions` in the order of :attr:`~.Reductions.observers`, on
    all ranks in the same order. Each method does nothing here; a subclass overrides those that it
    needs. A method may send messages if it does so on all ranks.

    Attributes:
        sees_all_ranks: reduced gradients are those of all ranks that train the model, as far as the
            observer knows.
    """

    sees_all_ranks = True

    def begin_backward(self) -> None:
        """A backward begins that brings gradients of parameters. An exception prevents it."""

    def check_last(self, units: Sequence[Unit]) -> None:
        """The last backward of a step begins, which leaves gradients of ``units`` accumulated."""

    def before_sending(self, buffer: ParamAndGradBuffer) -> None:
        """Gradients of ``buffer`` are about to be reduced for the first time."""

    def issued(self) -> None:
        """The last reductions of the step are submitted."""

    def waited(self) -> None:
        """Compute has waited for the reductions submitted so far."""

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]] | None:
        """Gradients are reduced, and not yet published: they can be changed.

        Args:
            used: for each trainable buffer, which of its parameters got a gradient.

        Returns:
            The same, to be published. None: nothing is published, and gradients are cleared.
        """
        return used

    def discard(self) -> None:
        """The step is over, or its gradients were dropped."""
