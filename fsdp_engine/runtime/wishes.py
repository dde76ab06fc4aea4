"""What users ask of one unit, beside what its engine's timing says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdp_engine.codecs.phase import BACKWARD


class Numbered(Protocol):
    """A unit, as far as wishes know it."""

    @property
    def index(self) -> int:
        """Its number among the units of its engine."""
        ...

    @property
    def reshards(self) -> bool:
        """Whether its full parameters come and go."""
        ...


@dataclass
class Wishes:
    """Looked at where they matter, so they may change between forwards and backwards; they must be
    the same on all ranks.

    Attributes:
        stays_after_forward: its full parameters stay until its backward is over.
        stays_after_backward: they stay until another forward is.
        syncs: a backward that may be the step's last one reduces its gradients along all axes.
            False: as within ``no_sync``.
        gathers_in_backward: backward reads its weights, as far as is known.
        ahead_in_forward: units to be gathered ahead when a forward enters it. None: those that are
            expected to come.
        ahead_in_backward: likewise in backward.
    """

    stays_after_forward: bool = False
    stays_after_backward: bool = False
    syncs: bool = True
    gathers_in_backward: bool = True
    ahead_in_forward: Sequence[Numbered] | None = None
    ahead_in_backward: Sequence[Numbered] | None = None

    def ahead(self, phase: int) -> Sequence[Numbered] | None:
        """Units to be gathered ahead at a use of ``phase``; None: nobody has said so."""
        return self.ahead_in_backward if phase & BACKWARD else self.ahead_in_forward
