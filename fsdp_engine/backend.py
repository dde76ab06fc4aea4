"""The backend: what an engine runs on.

:class:`Backend` is the hardware of this process: CPUs with gloo, or an accelerator. Another backend
can take its place for a block of code (:meth:`Backend.used`), whose engines then take their lanes
from it. The planner has one that advances a clock instead of running work.
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
        has_values: tensors have memory and values, and files can be written.
    """

    has_values = True

    def runs_ahead(self, device: torch.device) -> bool:
        """Returns whether the host submits work to ``device``, which runs it later."""
        return is_accelerator(device)

    def is_gloo(self, name: str) -> bool:
        """Returns whether collectives of torch's backend ``name`` are those of gloo."""
        return name == "gloo"

    def lanes(self, device: torch.device) -> Any:
        """Returns an engine's ``Lanes``. None: those of the device."""
        del device

    def other_lanes(self, names: Sequence[str]) -> Any:
        """Returns lanes of these names beside those of an engine. None: those of the device."""
        del names

    def booked_elsewhere(self, tensor: torch.Tensor, place: str) -> None:
        """Memory is booked at another place than the device, such as "host"."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which this is the backend of the process."""
        _BACKENDS.append(self)
        try:
            yield
        finally:
            _BACKENDS.remove(self)


_BACKENDS = [Backend()]


def current() -> Backend:
    """Returns the backend of this process."""
    return _BACKENDS[-1]
