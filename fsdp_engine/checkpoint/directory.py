"""Manages a directory of checkpoints: finds, publishes and removes the folders in it.

    step-00000100/        complete: renamed after all of its content was synced
    step-00000200.1/      second checkpoint of step 200; replaces step-00000200
    .saving-7c9e6679/     being written, or left by a killed job
    .removing-step-.../   being removed, or left by a killed job
    .loading-5d1f02c9/    links to files that are being loaded, or left by a killed job
    .lock                 locked by the job that saves here
    .stage                the pipeline stage whose checkpoints are in this directory

No folder is overwritten: a second checkpoint of a step is a folder with the next number, and the
older folder is removed when the new one is complete. So a complete checkpoint of the step exists at
all times.

Only one rank of a job uses a directory: rank 0, or the first rank of each node
(``local_directory.py``). This rank holds the lock from its first save until ``release()``. The lock
is an advisory ``flock``, which the operating system releases when the process ends for any reason.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import uuid
import warnings
from pathlib import Path

from fsdp_engine.checkpoint.manifest import MANIFEST
from fsdp_engine.checkpoint.stage_place import Place, claim_folder

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_SAVING, _REMOVING, _LOADING, _LOCK = ".saving-", ".removing-", ".loading-", ".lock"


def _this_process() -> str:
    """Returns the text that identifies this process in the lock file."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def directories_below(path: Path) -> str:
    """Returns a text with the names of folders in ``path`` that are directories of checkpoints; ""
    if there are none."""
    if not path.is_dir():
        return ""
    names = sorted({each.parent.parent.name for each in path.glob(f"*/step-*/{MANIFEST}")})
    return f"; there are some in {', '.join(names[:8])} below it" if names else ""


class CheckpointDirectory:
    """A directory of checkpoints; see the module docstring.

    Args:
        path: The path of the directory, which the first save creates.

    Attributes:
        place: The pipeline stage whose model is saved here (``stage_place.py``); empty: none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place: Place = {}
        self._lock: int | None = None

    def complete(self) -> dict[int, Path]:
        """Returns the folders of complete checkpoints by step, ascending.

        Raises:
            NotADirectoryError: The path is a file, or a single checkpoint.
        """
        newest: dict[int, tuple[int, Path]] = {}
        for generation, step, folder in self.folders():
            if step not in newest or newest[step][0] < generation:
                newest[step] = (generation, folder)
        return {step: newest[step][1] for step in sorted(newest)}

    def incomplete(self, after: int = -1) -> list[Path]:
        """Returns the folders that are named like a checkpoint of a step after ``after`` but
        contain no manifest. A save never leaves such a folder."""
        if not self.path.is_dir():
            return []
        return sorted(
            folder
            for folder in self.path.iterdir()
            if (match := _COMPLETE.fullmatch(folder.name))
            and int(match[1]) > after
            and not (folder / MANIFEST).is_file()
        )

    def unfinished(self) -> list[Path]:
        """Returns the folders that a job is writing, removing or loading, or that a killed job has
        left."""
        if not self.path.is_dir():
            return []
        return sorted(
            folder
            for folder in self.path.glob(".*")
            if folder.name.startswith((_SAVING, _REMOVING, _LOADING))
        )

    def begin(self) -> Path:
        """Create an empty folder with a temporary name for a save.

        Raises:
            OSError: The directory cannot be created, is read-only, or is a single checkpoint.
            RuntimeError: Another job saves here.
            ValueError: Another stage of a pipeline has saved here.
        """
        self._check_is_no_checkpoint()
        self.path.mkdir(parents=True, exist_ok=True)
        claim_folder(self.path, self.place)
        self._take_lock()
        self.clean()
        staging = self.path / f"{_SAVING}{uuid.uuid4().hex[:8]}"
        staging.mkdir()
        return staging

    def publish(self, staging: Path, step: int) -> Path:
        """Rename ``staging`` to the checkpoint of ``step``. Returns the new path.

        The rename is synced on return.
        """
        taken = [generation for generation, other, _ in self.folders() if other == step]
        name = f"step-{step:08d}" + (f".{max(taken) + 1}" if taken else "")
        sync_folder(staging)
        folder = staging.rename(self.path / name)
        sync_folder(self.path)
        return folder

    def discard(self, staging: Path) -> None:
        """Remove the folder of a failed save."""
        shutil.rmtree(staging, ignore_errors=True)

    def retire(
        self, keep: int | None, newest: int | None = None, *, keeps_later: bool = False
    ) -> list[int]:
        """Remove all but the ``keep`` latest steps (None: keep all), and superseded folders.

        Args:
            keep: The number of latest steps to keep.
            newest: Only steps up to this one count for ``keep``. None: all steps count.
            keeps_later: Also keep the steps after ``newest``. False: remove them.

        Returns:
            The steps after ``newest`` that were kept.
        """
        current = self.complete()
        steps = [step for step in current if newest is None or step <= newest]
        later = [step for step in current if step not in steps] if keeps_later else []
        kept = (steps if keep is None else steps[-keep:]) + later
        for _, step, folder in list(self.folders()):
            if step not in kept or folder != current[step]:
                # The folder is renamed first, so that readers never find a partially removed
                # checkpoint.
                self._remove(folder.rename(self.path / f"{_REMOVING}{folder.name}"))
        return later

    def clean(self) -> None:
        """Remove folders of killed jobs. The lock must be held."""
        for folder in self.unfinished():
            self._remove(folder)

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin_load(self) -> Path:
        """Create an empty folder for files that are being loaded. :meth:`discard` removes it."""
        self.path.mkdir(parents=True, exist_ok=True)
        folder = self.path / f"{_LOADING}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        return folder

    def folders(self) -> list[tuple[int, int, Path]]:
        """Returns (generation, step, path) of each folder with a manifest."""
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise NotADirectoryError(f"directory: expected a directory; found file {self.path}")
        self._check_is_no_checkpoint()
        found = []
        for folder in self.path.iterdir():
            match = _COMPLETE.fullmatch(folder.name)
            if match and (folder / MANIFEST).is_file():
                found.append((int(match[2] or 0), int(match[1]), folder))
        return found

    def _check_is_no_checkpoint(self) -> None:
        if (self.path / MANIFEST).is_file():
            raise NotADirectoryError(
                f"directory: expected a directory of checkpoints; found {self.path}, which is one "
                f"checkpoint. Pass {self.path.parent} instead, and call load() with the step"
            )

    def _take_lock(self) -> None:
        if self._lock is not None:
            if self._is_current(self._lock):
                return
            self.release()  # the directory was removed or recreated
        # A symbolic link is an error (ELOOP), because its target would be overwritten.
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            if owner == _this_process():
                owner = "another checkpointer of this process. Close that one first"
            raise RuntimeError(
                f"directory: expected no other job to save into {self.path}; found it locked by "
                f"{owner or 'another process'}"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{_this_process()}\n".encode(), 0)
        self._lock = lock

    def _is_current(self, lock: int) -> bool:
        """Returns whether the locked file is the one in the directory."""
        try:
            found = os.stat(self.path / _LOCK, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(lock))

    def _remove(self, folder: Path) -> None:
        # A step may be a symbolic link. Its target is not removed.
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                warnings.warn(
                    f"{folder} could not be removed. The next save tries again", stacklevel=2
                )


def sync_folder(folder: Path) -> None:
    """Sync a folder itself, so that created and renamed files are found after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
