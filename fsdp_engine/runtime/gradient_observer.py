"""A seam for extensions that check or change gradients between autograd and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.runtime.unit import Unit


class GradientObserver:
    """An object that :class:`~.reductions.Reductions` calls during each step.

    Observers are called in the order of :attr:`~.Reductions.observers`, which is equal on all
    ranks. The methods of this class do nothing; a subclass overrides those that it needs. A method
    may call a collective if it does so on all ranks.

    Attributes:
        sees_all_ranks: Whether reduced gradients include those of all ranks that train the model.
            False: the observer reduces them over further ranks.
    """

    sees_all_ranks = True

    def begin_backward(self) -> None:
        """Called when a backward begins that computes gradients of parameters. An exception stops
        the backward."""

    def check_last(self, units: Sequence[Unit]) -> None:
        """Called when the last backward of a step begins.

        Args:
            units: The units of which this backward reduces no gradients: it only accumulates them.
        """

    def before_sending(self, buffer: ParamAndGradBuffer) -> None:
        """Called each time before gradients of ``buffer`` are reduced along their first axis."""

    def issued(self) -> None:
        """Called when the last reductions of the step have been submitted."""

    def waited(self) -> None:
        """Called when compute has waited for all reductions submitted so far."""

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]] | None:
        """Called when all gradients are reduced, before ``.grad`` is set. The observer may change
        them.

        Args:
            used: For each trainable buffer and each of its parameters, whether any rank had a
                gradient.

        Returns:
            ``used`` or a replacement of it, which determines the gradients to publish. None: all
            gradients are cleared instead, after all observers were called.
        """
        return used

    def discard(self) -> None:
        """Called when the gradients of the step are cleared or dropped."""
