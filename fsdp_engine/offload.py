"""Where an engine's state lies while it is not used."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from fsdp_engine.accelerator import is_accelerator, is_simulated, simulates_device

DEVICE, HOST, DISK = "device", "host", "disk"
PLACES = (DEVICE, HOST, DISK)


@dataclass(frozen=True)
class Offload:
    """Places of state between its uses. See ``docs/offload.md``.

    Attributes:
        optimizer_state: of :func:`~fsdp_engine.shard_optimizer`'s optimizers: "device", or "host":
            pinned memory, from which each unit's state comes to the device for its step and
            returns; or "disk": a file. On a CPU "host" is where state is anyway.
        folder: of a local disk, for "disk". Files in it have no names, and are gone with the
            process.

    Raises:
        ValueError: a place is unknown, or "disk" lacks a folder.
    """

    optimizer_state: str = DEVICE
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        if self.optimizer_state not in PLACES:
            raise ValueError(
                f"offload.optimizer_state: expected one of {PLACES}; found {self.optimizer_state!r}"
            )
        if self.optimizer_state == DISK and self.folder is None:
            raise ValueError("offload.folder: expected one for 'disk'; found None")

    def check(self, device: torch.device) -> None:
        """Whether it can be had on ``device``.

        Raises:
            ValueError: no file can be made in the folder, or an accelerator's state would go to a
                disk.
        """
        if self.optimizer_state != DISK:
            return
        if _computes_elsewhere(device):
            name = "an accelerator" if simulates_device() else device.type
            raise ValueError(
                f"offload.optimizer_state: expected 'host' for state of {name}; found "
                "'disk', which is for training on a CPU"
            )
        if is_simulated():  # of another machine
            return
        assert self.folder is not None
        if not (os.path.isdir(self.folder) and os.access(self.folder, os.W_OK | os.X_OK)):
            raise ValueError(
                f"offload.folder: expected a folder that can be written; found {self.folder}"
            )

    def moves_optimizer_state(self, device: torch.device) -> bool:
        """Whether optimizer state lies elsewhere than where ``device`` computes."""
        place = self.optimizer_state
        return place == DISK or (place == HOST and _computes_elsewhere(device))

    @property
    def places(self) -> dict[str, str]:
        """Places that are not the device, by the name of the attribute."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: place for name, place in named.items() if place in (HOST, DISK)}


def _computes_elsewhere(device: torch.device) -> bool:
    """Whether ``device`` does not compute in host memory."""
    return is_accelerator(device) or simulates_device()
