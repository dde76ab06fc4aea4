"""The places of an engine's state between its uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fsdp_engine import backend
from fsdp_engine.memory.allocator import DEVICE as DEVICE
from fsdp_engine.memory.allocator import HOST as HOST

DISK = "disk"
PLACES = (DEVICE, HOST, DISK)
# The fields of `OffloadPlaces` that are places.
ROLES = ("optimizer_state", "main_weights", "gradients")


@dataclass(frozen=True)
class OffloadPlaces:
    """The arguments of :class:`~fsdp_engine.Offload`, which documents them.

    Raises:
        ValueError: A place is unknown, or arguments contradict each other.
    """

    optimizer_state: str = DEVICE
    folder: str | Path | None = None
    main_weights: str = field(default=DEVICE, kw_only=True)
    gradients: str = field(default=DEVICE, kw_only=True)
    step_on: str = field(default=DEVICE, kw_only=True)
    pin_memory: bool = field(default=True, kw_only=True)
    overlap_forward: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for role in ROLES:
            if (place := getattr(self, role)) not in PLACES:
                raise ValueError(f"offload.{role}: expected one of {PLACES}; found {place!r}")
        if DISK in self.places.values() and self.folder is None:
            raise ValueError("offload.folder: expected a folder for state on 'disk'; found None")
        if self.step_on not in (DEVICE, HOST):
            raise ValueError(
                f"offload.step_on: expected one of {(DEVICE, HOST)}; found {self.step_on!r}"
            )
        homes = "since the host could read weights and gradients before a step has ended"
        beside = {"optimizer_state": HOST, "main_weights": DEVICE, "gradients": DEVICE}
        for applies, expected, why in (
            (self.overlap_forward, beside, f" with overlap_forward, {homes}"),
            (
                self.step_on == HOST,
                dict.fromkeys(ROLES, HOST),
                ", since optimizers step there (step_on)",
            ),
        ):
            for role, place in expected.items() if applies else ():
                if (found := getattr(self, role)) != place:
                    raise ValueError(f"offload.{role}: expected {place!r}{why}; found {found!r}")

    @property
    def places(self) -> dict[str, str]:
        """The places other than the device, by role."""
        found = {role: getattr(self, role) for role in ROLES}
        return {role: place for role, place in found.items() if place != DEVICE}

    def check_folder(self) -> None:
        """Check that files can be created in the folder, if a place is "disk".

        Raises:
            ValueError: The folder cannot be written.
        """
        if DISK not in self.places.values() or not backend.current().has_values:
            return
        assert self.folder is not None
        if not (os.path.isdir(self.folder) and os.access(self.folder, os.W_OK | os.X_OK)):
            raise ValueError(
                f"offload.folder: expected a folder that can be written; found {self.folder}"
            )

    def check_levels(self, *, shards_gradients: bool) -> None:
        """Check that the inner level allows these places.

        Args:
            shards_gradients: Whether the inner level shards gradients.

        Raises:
            ValueError: Gradients are offloaded but not sharded.
        """
        if self.gradients != DEVICE and not shards_gradients:
            raise ValueError(
                "offload.gradients: expected 'device', or the inner level optim_grads or "
                f"optim_grads_params; found {self.gradients!r} with gradients that are not sharded"
            )

    def check_pair(self) -> None:
        """Check, for an accelerator, that weights and gradients are stored on the same device.

        Raises:
            ValueError: Only one of them is offloaded.
        """
        if (self.main_weights == DEVICE) != (self.gradients == DEVICE):
            raise ValueError(
                f"offload.gradients: expected {self.main_weights!r}, the place of main_weights, "
                "since a parameter and its .grad must be on one device; found "
                f"{self.gradients!r}"
            )

    def moves(self, role: str, device: torch.device) -> bool:
        """Returns whether ``role`` is stored outside of the memory of ``device``."""
        place = getattr(self, role)
        return place == DISK or (place == HOST and computes_elsewhere(device))


def computes_elsewhere(device: torch.device) -> bool:
    """Returns whether ``device`` computes in memory other than host memory."""
    return backend.current().runs_ahead(device)
