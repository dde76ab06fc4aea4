"""A directory of checkpoints: which are complete, which is the latest, what a dead job left.

    step-00000100/        complete: it appeared by one rename, with everything in it on the disk
    step-00000200.1/      step 200, saved once more; takes the place of step-00000200
    .saving-7c9e6679/     being written, or left by a job that died
    .removing-step-.../   being removed, or left
    .lock                 held by the job that saves here

Nothing is ever replaced: a step that is saved once more gets a folder of the next number, and the
older folder goes once the new one is there. So there is no moment at which a step that was
complete is gone.

Only one rank of a job touches a directory (rank 0), and for saving it holds the lock: an advisory
``flock``, which the system drops when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import uuid
from pathlib import Path

from fsdp_engine.checkpoint.manifest import MANIFEST

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_SAVING, _REMOVING, _LOCK = ".saving-", ".removing-", ".lock"


class CheckpointDirectory:
    """See the module docstring.

    Args:
        path: the directory; made when something is saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def complete(self) -> dict[int, Path]:
        """Folders of complete checkpoints by step, in rising order.

        Raises:
            NotADirectoryError: the path is a file.
        """
        newest: dict[int, tuple[int, Path]] = {}
        for generation, step, folder in self._folders():
            if step not in newest or newest[step][0] < generation:
                newest[step] = (generation, folder)
        return {step: newest[step][1] for step in sorted(newest)}

    def incomplete(self, after: int = -1) -> list[Path]:
        """Folders with the name of a checkpoint of a later step than ``after``, but without a
        manifest: no save here leaves one."""
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
        """Folders that a job writes or removes at this moment, or that a job that died has left."""
        if not self.path.is_dir():
            return []
        return sorted(
            folder
            for folder in self.path.glob(".*")
            if folder.name.startswith((_SAVING, _REMOVING))
        )

    def begin(self) -> Path:
        """An empty folder to write into, which nobody takes for a checkpoint.

        Raises:
            OSError: the directory cannot be made, or is read-only.
            RuntimeError: another job saves here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self.clean()
        staging = self.path / f"{_SAVING}{uuid.uuid4().hex[:8]}"
        staging.mkdir()
        return staging

    def publish(self, staging: Path, step: int) -> Path:
        """Make what is in ``staging`` the checkpoint of ``step``; returns its folder.

        The rename is on the disk when this returns.
        """
        taken = [generation for generation, other, _ in self._folders() if other == step]
        name = f"step-{step:08d}" + (f".{max(taken) + 1}" if taken else "")
        sync_folder(staging)
        folder = staging.rename(self.path / name)
        sync_folder(self.path)
        return folder

    def discard(self, staging: Path) -> None:
        """Remove what a save that failed has written."""
        shutil.rmtree(staging, ignore_errors=True)

    def retire(self, keep: int | None) -> None:
        """Remove all but the ``keep`` latest steps (None: keep all), and folders saved over."""
        current = self.complete()
        kept = list(current)[-keep:] if keep is not None else list(current)
        for _, step, folder in list(self._folders()):
            if step not in kept or folder != current[step]:
                # First out of sight, so that nobody ever sees a part of it.
                self._remove(folder.rename(self.path / f"{_REMOVING}{folder.name}"))

    def clean(self) -> None:
        """Remove what died jobs have left; the lock must be held."""
        for folder in self.unfinished():
            self._remove(folder)

    def release(self) -> None:
        """Let other jobs save here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _folders(self) -> list[tuple[int, int, Path]]:
        """(generation, step, folder) of everything complete."""
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise NotADirectoryError(f"directory: expected a directory; found file {self.path}")
        found = []
        for folder in self.path.iterdir():
            match = _COMPLETE.fullmatch(folder.name)
            if match and (folder / MANIFEST).is_file():
                found.append((int(match[2] or 0), int(match[1]), folder))
        return found

    def _take_lock(self) -> None:
        if self._lock is not None:
            if self._is_here(self._lock):
                return
            self.release()  # the directory was removed, or made anew
        # A link is an error (ELOOP): the file that it leads to would be overwritten.
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            raise RuntimeError(
                f"directory: expected no other job to save into {self.path}; found that "
                f"{owner or 'another process'} does"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._lock = lock

    def _is_here(self, lock: int) -> bool:
        """Whether the file that is locked is the directory's."""
        try:
            found = os.stat(self.path / _LOCK, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(lock))

    def _remove(self, folder: Path) -> None:
        # A step may be a link to a folder elsewhere, which stays.
        if folder.is_symlink():
            folder.unlink()
        else:  # what cannot be removed now is tried again by the next save
            shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Bring the entries of a folder to the disk: files that were made or renamed in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
