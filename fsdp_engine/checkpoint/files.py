"""The files of one checkpoint, as a rank finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fsdp_engine.comm.groups import Ranks


class CheckpointFiles:
    """Files of a checkpoint in a folder that all ranks share, or of which each has a full copy.

    Attributes:
        folder: The folder of the checkpoint.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self._ranks = ranks

    def to_check(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that this rank checks. The ranks share the work."""
        return sorted(names)[self._ranks.rank :: self._ranks.size]

    def fetch(self, names_to_read: Callable[[], Iterable[str]]) -> None:
        """Bring the files that this rank reads into the folder, if they can be elsewhere.
        Collective."""
