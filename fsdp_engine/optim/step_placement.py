"""The place of optimizer state between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.optim.chunked_step import StepChunk
from fsdp_engine.optim.shadow import StepHook


class StatePlace(StepChunk):
    """Seam: the place of the state of parameters that are stepped together.

    In this class the state stays on the device.
    """

    def on_device(self, state: Any) -> Any:
        """Returns the state with tensors on the device. Makes compute wait for the copies of
        :meth:`start_copies`."""
        return state

    def take(self, states: Sequence[Any]) -> list[Any]:
        """Start to copy the state to this place, after the step has been submitted.

        Args:
            states: The state of each parameter after the step.

        Returns:
            The states with tensors at this place.
        """
        return list(states)

    def abandon(self) -> None:
        """Free the memory on the device. The lanes must have no pending work."""


class StepPlacement:
    """Seam (:func:`.implementation`): the place of an optimizer's state between steps.

    In this class the state stays on the device.

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: The state cannot be kept at the place that the options select.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """See the class."""

    def make_place(self) -> StatePlace:
        """Returns the place for the state of a group of full tensors."""
        return StatePlace()

    def check_whole_tensors(self, name: str) -> None:
        """Check that an optimizer of class ``name`` can step full tensors with this placement.

        Raises:
            ValueError: The optimizer cannot step full tensors with this placement.
        """

    def make_hook(self, optimizer: Optimizer) -> StepHook | None:
        """Returns the hook that steps an optimizer with its state at this place.

        None: no special hook is needed.

        Raises:
            ValueError, OSError: The hook cannot be made.
        """
        return None

    @staticmethod
    def is_elsewhere(param: Tensor) -> bool:
        """Returns whether the state of ``param`` is not on the device."""
        return False

    def drain(self) -> None:
        """Wait for all copies, and ignore errors."""

    def wait(self) -> None:
        """Wait until all state is at its place."""
