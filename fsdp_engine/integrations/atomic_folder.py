"""Atomic creation of a folder by several ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_engine.checkpoint.directory import sync_folder
from fsdp_engine.devices.agreement import agree
from fsdp_engine.devices.ranks import Ranks

# Name of the temporary folder beside the checkpoints, which is not the name of a checkpoint.
SAVING = ".saving"


@contextmanager
def atomic_folder(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Context in which all ranks write into a temporary folder, which is renamed at the end.

    An existing ``folder`` is removed when the new one is complete. Temporary folders of killed jobs
    are removed by the next save beside them. Collective.

    Args:
        folder: on storage that all ranks share.
        ranks: that write.

    Yields:
        The temporary folder, ``.saving/<name>`` beside ``folder``.

    Raises:
        Exception: of any rank, on all ranks; ``folder`` is unchanged.
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
