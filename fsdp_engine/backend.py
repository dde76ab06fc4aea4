"""The backend, which provides the devices and the lanes of an engine.

:class:`Backend` is the hardware of this process: CPUs with gloo, or an accelerator. Another backend
can replace it within a context (:meth:`Backend.used`): engines that are built within the context
use the lanes of that backend. The planner has a backend that advances a clock instead of running
work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_engine.accelerator import is_accelerator


class Backend:
    """The hardware of this process.

    Attributes:
        has_values: Whether tensors have memory and values, and files can be written.
    """

    has_values = True

    def runs_ahead(self, device: torch.device) -> bool:
        """Returns whether ``device`` runs work after the host has submitted it."""
        return is_accelerator(device)

    def is_gloo(self, name: str) -> bool:
        """Returns whether torch's backend ``name`` has the collectives of gloo."""
        return name == "gloo"

    def lanes(self, device: torch.device) -> Any:
        """Returns the ``Lanes`` of an engine on ``device``. None: the engine makes its own."""
        del device

    def other_lanes(self, names: Sequence[str]) -> Any:
        """Returns additional lanes with these names. None: the caller makes its own lanes."""
        del names

    def booked_elsewhere(self, tensor: torch.Tensor, place: str) -> None:
        """Record that ``tensor`` is in memory other than the device's: ``place``, such as
        "host"."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """Returns a context in which this object is the backend of the process."""
        _BACKENDS.append(self)
        try:
            yield
        finally:
            _BACKENDS.remove(self)


_BACKENDS = [Backend()]


def current() -> Backend:
    """Returns the backend of this process."""
    return _BACKENDS[-1]
