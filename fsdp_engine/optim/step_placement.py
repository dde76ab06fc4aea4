"""Where the state of an optimizer is between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.optim.chunked_step import StepChunk
from fsdp_engine.optim.shadow import StepHook


class StatePlace(StepChunk):
    """The place of the state of parameters that are stepped together. A seam: here it stays on the
    device."""

    def on_device(self, state: Any) -> Any:
        """Returns the state as a step reads it. Compute waits for :meth:`bring`."""
        return state

    def take(self, states: Sequence[Any]) -> list[Any]:
        """A step is submitted: begin to bring its state to this place.

        Args:
            states: of each parameter, as the step left it.

        Returns:
            The same with tensors at this place.
        """
        return list(states)

    def abandon(self) -> None:
        """As :meth:`leave`, after the lanes have ended what they were given."""


class StepPlacement:
    """Where the state of the parameters of an optimizer is between its steps. A seam
    (:func:`.implementation`): here it stays on the device.

    Args:
        optimizer: the optimizer.

    Raises:
        ValueError: the state cannot be where it should be.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """See the class."""

    def make_place(self) -> StatePlace:
        """Returns a place of the state of full tensors."""
        return StatePlace()

    def check_whole_tensors(self, name: str) -> None:
        """Check that an optimizer of class ``name`` can step whole tensors.

        Raises:
            ValueError: It cannot.
        """

    def make_hook(self, optimizer: Optimizer) -> StepHook | None:
        """Returns the hook that steps the optimizer where its state is; None: any other may.

        Raises:
            ValueError, OSError: there can be none.
        """
        return None

    @staticmethod
    def is_elsewhere(param: Tensor) -> bool:
        """Returns whether the state of ``param`` is elsewhere than on the device."""
        return False

    def drain(self) -> None:
        """End all copies, also those that fail."""

    def wait(self) -> None:
        """On return all state is at its place."""
