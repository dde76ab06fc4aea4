"""Finds the files of one checkpoint that a rank checks and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fsdp_engine.comm.groups import Ranks


class CheckpointFiles:
    """The files of a checkpoint in a folder that all ranks share or of which each rank has a copy.

    Attributes:
        folder: The folder of the checkpoint.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self._ranks = ranks

    def to_check(self, names: Iterable[str]) -> list[str]:
        """Returns the files among ``names`` that this rank checks. The ranks share the work."""
        return sorted(names)[self._ranks.rank :: self._ranks.size]

    def fetch(self, names_to_read: Callable[[], Iterable[str]]) -> None:
        """Copy files that this rank will read, but that only other nodes have, into the folder.
        Collective. In this class the folder contains all files, so nothing is copied.

        Args:
            names_to_read: Function that returns the names of the files that this rank reads.
        """
