"""A folder that several ranks fill is there as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_engine.checkpoint.directory import sync_folder
from fsdp_engine.devices.agreement import agree
from fsdp_engine.devices.ranks import Ranks

# Beside the folders, under a name that nobody takes for a checkpoint.
SAVING = ".saving"


@contextmanager
def atomic_folder(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Within it, all ranks write into an empty folder; at its end that becomes ``folder``.

    What was ``folder`` before goes, once the new one is complete. What a job that died has left is
    removed by the next one that saves beside it. Collective.

    Args:
        folder: on storage that all ranks share.
        ranks: those that write.

    Yields:
        Where to write: the folder ``.saving/<name>`` beside ``folder``.

    Raises:
        Exception: an error on one rank, on all; ``folder`` is as it was.
    """
    what, group, is_first = f"saving {folder}", ranks.control_group, ranks.rank == 0
    staging = folder.parent / SAVING / folder.name
    error: Exception | None = None
    try:
        if is_first:
            shutil.rmtree(staging.parent, ignore_errors=True)
            staging.mkdir(parents=True)
    except OSError as caught:
        error = caught
    agree(what, error, group)
    try:
        yield staging
    except Exception as caught:
        error = caught
    try:
        agree(what, error, group)
        if is_first:
            _publish(staging, folder)
    except Exception as caught:
        error = caught
    if is_first:
        shutil.rmtree(staging.parent, ignore_errors=True)
    agree(what, error, group)


def _publish(staging: Path, folder: Path) -> None:
    for path in [*staging.rglob("*"), staging]:
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        folder.rename(staging.parent / f"before-{folder.name}")
    staging.rename(folder)
    sync_folder(folder.parent)
