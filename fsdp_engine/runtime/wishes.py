"""What users ask of one unit, beside what its engine's timing says."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdp_engine.codecs.phase import BACKWARD
from fsdp_engine.strategies import Role, Strategy


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


def stays_after_forward(asked: object, size: int, levels: Strategy) -> bool:
    """Whether full parameters stay after forward, by FSDP2's argument ``reshard_after_forward``.

    Args:
        asked: the argument: True, False, a number of ranks, or None, which is True.
        size: ranks that share a parameter.
        levels: those of the engine.

    Raises:
        ValueError: ``asked`` is none of these, no divisor of ``size``, or True where parameters
            are not sharded.
    """
    if asked is None or isinstance(asked, bool):
        if asked is True and levels.depth(Role.PARAM) == 0:
            raise ValueError(
                f"reshard_after_forward: expected None or False, since {levels} keeps parameters "
                "full; found True"
            )
        return asked is False
    if not isinstance(asked, int):
        raise ValueError(
            f"reshard_after_forward: expected a bool, a number of ranks or None; found {asked!r}"
        )
    if asked < 1 or size % asked:
        raise ValueError(
            f"reshard_after_forward: expected a divisor of the {size} ranks that share a "
            f"parameter; found {asked}"
        )
    if asked not in (1, size):
        warnings.warn(
            f"reshard_after_forward={asked}: parameters are resharded to all {size} ranks and "
            "gathered from them in backward: results are the same, less memory is held, more is "
            "sent. To hold parameters within a node only, give a 2-D mesh (HSDP)",
            stacklevel=3,
        )
    return asked == 1
