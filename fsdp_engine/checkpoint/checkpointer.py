"""Checkpoints of a run in one directory: saved whole or not at all, in the foreground or beside it.

What happens in :meth:`Checkpointer.save`, on all ranks:

1. Everything is checked, and all ranks agree that nothing is wrong (one small message). Rank 0 has
   made a folder that nobody takes for a checkpoint.
2. Every rank writes its slices into files of its own, synced (``writer.py``, DCP).
3. When all have, rank 0 writes the metadata and the manifest, and one rename makes the folder a
   checkpoint. Then it removes the oldest ones.

An error on any rank, up to the rename, is raised on all; the folder is removed and what was saved
before stays. :meth:`Checkpointer.save_async` copies everything to host memory after 1, and does 2
and 3 in a thread, over a process group of its own.

[Note: The script ends]
A script may end right after its last ``save_async``. Python first calls the functions that were
registered by ``threading._register_atexit``, last one first, then joins threads. Among them is that
of ``concurrent.futures``, which stops all executors, those that write the files included. The
engine's function is registered later, so it is called earlier, and waits for the save. If the save
fails, its error is printed and the process ends with status 1.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.engines import Engines
from fsdp_engine.checkpoint.folder import LoadReport, collector_paused
from fsdp_engine.checkpoint.manifest import MANIFEST
from fsdp_engine.checkpoint.run_folder import Run
from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.checkpoint.snapshot import HostMemory
from fsdp_engine.devices.agreement import agree, agree_on_same
from fsdp_engine.devices.collectives import gather_objects


class Checkpointer:
    """Saves a run into a directory, and brings it back.

    All methods are collective: every rank of the engine's mesh calls them, in one order.

    Args:
        directory: on storage that all ranks share; made when something is saved.
        engine: what :func:`~fsdp_engine.sharding.shard` returned; or several of these by name, over
            the same ranks, such as ``{"actor": actor, "critic": critic}``.
        optimizer: one over the parameters of all of them, torch's or Megatron-Core's with its
            scaler of losses; None: weights only.
        extra: objects with ``state_dict()`` and ``load_state_dict()`` by name: scheduler, data
            position. Every rank saves its own.
        keep: how many checkpoints stay, the latest ones; None: all.
        timeout: how long a rank waits for another one within a save. None: 30 minutes.
        trainable_only: parameters that were frozen at ``shard()`` (a base model under adapters) are
            neither saved nor loaded: they are what the job gave them. Persistent buffers are. A
            checkpoint that has them loads, too; one without is refused by a ``Checkpointer`` of
            all parameters.

    Raises:
        TypeError, ValueError: ``engine``, ``extra`` or ``keep`` is none of these.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        engine: Engines,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = 3,
        timeout: timedelta | None = None,
        trainable_only: bool = False,
    ) -> None:
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep: expected a number of at least 1, or None; found {keep!r}")
        self._run = Run(engine, optimizer, extra, trainable_only=trainable_only)
        self._ranks = self._run.ranks
        self._control = self._ranks.control_group
        self._keep = keep
        self._directory = CheckpointDirectory(Path(directory))
        self._host_memory = HostMemory(self._ranks.device)
        self._timeout = timeout if timeout is not None else timedelta(minutes=30)
        self._group: ProcessGroup | None = None
        self._save: _Save | None = None

    def save(self, step: int) -> None:
        """Save the run as it is now; returns when the checkpoint is complete.

        Args:
            step: number of the training step, at least 0. A step that is saved once more takes the
                place of the older one when it is complete.

        Raises:
            ValueError, TypeError, RuntimeError: nothing was written: ``step`` is no such number,
                it or the optimizer's class differs between ranks, the engine is not at rest, the
                optimizer is not the engine's, or another job saves into the directory.
            RuntimeError: writing failed, now or in the background before; names the rank.

        Each is raised on every rank if on one; earlier checkpoints stay.
        """
        self._save = save = self._begin(step)
        save.start()
        save.landed.wait()  # older checkpoints may still be on their way out
        try:
            save.raise_error()
        except RuntimeError:
            self._save = None
            raise

    def save_async(self, step: int) -> None:
        """Save the run as it is now, to the bit, while training goes on.

        Returns when everything is copied to host memory. One save is in flight at a time: a second
        one waits for the first. Arguments and errors as for :meth:`save`; what fails in the
        background is raised by the next call of any method, on every rank.
        """
        save = self._begin(step)
        error: Exception | None = None
        try:
            save.entries = self._host_memory.snapshot(save.entries)
        except Exception as caught:  # no host memory left
            error = caught
        try:
            agree(f"save_async({step!r})", error, self._control)
        except Exception:
            save.discard()
            raise
        self._save = save
        save.start()

    def wait(self) -> None:
        """Wait until what :meth:`save_async` started is complete.

        Raises:
            RuntimeError: it failed, on whatever rank.
        """
        save, self._save = self._save, None
        if save is not None:
            save.join()
            save.raise_error()

    def load(
        self,
        step: int | Literal["latest"] = "latest",
        strict: bool = True,
        verify: bool = False,
        *,
        trust: bool = False,
    ) -> LoadReport:
        """Bring back a run: any ranks, strategy, mesh and granule load what any others saved.

        Weights and optimizer state are bit by bit what was saved, and the next forward uses them.
        Random states come back, and each rank's ``extra``, if as many ranks load as have saved;
        otherwise every rank takes the ``extra`` of rank 0. An ``extra`` that was not saved stays as
        it is, with a warning.

        Args:
            step: which; "latest": the newest complete one.
            strict: refuse a checkpoint with entries that are missing, unexpected or do not fit.
                False: load what fits.
            verify: read every file first, and compare checksums; ranks share the work. Bytes that
                a rank reads are compared anyway; this finds damage before anything is changed.
            trust: whoever wrote the checkpoint may run code here: what is in ``extra`` and in
                modules' extra states may be of any class. Otherwise numbers, texts, tensors, arrays
                and containers of them are read, and anything else is refused.

        Returns:
            What was loaded, and (``strict=False``) what did not fit.

        Raises:
            FileNotFoundError: no checkpoint of that step is there, or one of its files is not.
            ValueError: arguments or classes of optimizers differ between ranks, entries do not fit
                (all of them are listed), files are damaged, an object is of a class that could run
                code, or a format is newer than this code.
            RuntimeError: reading failed half way (a damaged block; names file and tensor); weights
                are then partly replaced, and forwards and saves raise until a checkpoint is loaded.

        Each is raised on every rank if on one; all but the last before anything is changed.
        """
        self.wait()
        same = {"step": step, "strict": strict, "verify": verify, "trust": trust}
        agree_on_same("load()", None, self._control, same)
        with collector_paused():
            return self._run.load(
                self._find(step),
                strict=strict,
                verify=verify,
                trust=trust,
                what=f"load({step!r})",
            )

    def steps(self) -> list[int]:
        """Steps whose checkpoints are complete, in rising order, as rank 0 sees them."""
        found: list[int] = []
        error: Exception | None = None
        if self._ranks.rank == 0:
            try:
                found = list(self._directory.complete())
            except OSError as caught:
                error = caught
        agreed = agree("steps()", error, self._control, found)
        return list(agreed[0])

    def close(self) -> None:
        """Wait for a save that is under way, and let go of everything: threads, connections, host
        memory, and the directory, into which another job may save. A further save takes it again.

        Raises:
            RuntimeError: the save failed, on whatever rank; everything is let go of all the same.
        """
        try:
            self.wait()  # on every rank: nobody needs the group any more
        finally:
            self._directory.release()
            group, self._group = self._group, None
            self._ranks.free_host_group(group)
            self._host_memory = HostMemory(self._ranks.device)

    def _begin(self, step: int) -> _Save:
        """Check everything, and make place for a save."""
        self.wait()
        if self._group is None:
            self._group = self._ranks.make_host_group(self._timeout)
        entries: dict[str, Any] = {}
        staging: Path | None = None
        error: Exception | None = None
        try:
            if not isinstance(step, int) or step < 0:
                raise ValueError(f"step: expected a number of at least 0; found {step!r}")
            entries = self._run.entries()
            if self._ranks.rank == 0:
                staging = self._directory.begin()
        except Exception as caught:
            error = caught
        try:
            same = {"step": step, "optimizer": self._run.optimizer_kind}
            agreed = agree_on_same("save()", error, self._control, same, staging)
        except Exception:
            if staging is not None:
                self._directory.discard(staging)
            raise
        return _Save(self, entries, agreed[0], step)

    def _find(self, step: int | Literal["latest"]) -> Path:
        """The folder of a step, as rank 0 sees it."""
        folder: Path | None = None
        error: Exception | None = None
        if self._ranks.rank == 0:
            try:
                complete = self._directory.complete()
                if not complete or (step != "latest" and step not in complete):
                    found = f"those of steps {list(complete)}" if complete else "none"
                    raise FileNotFoundError(
                        f"step: expected the {step} complete checkpoint in {self._directory.path}; "
                        f"found {found}"
                    )
                folder = complete[max(complete) if step == "latest" else step]
                if step == "latest" and (newer := self._directory.incomplete(after=max(complete))):
                    warnings.warn(
                        f"load of the latest step: expected {MANIFEST} in "
                        f"{[each.name for each in newer]}; found none, so {folder.name} is loaded",
                        stacklevel=3,
                    )
            except Exception as caught:
                error = caught
        agreed = agree(f"load({step!r})", error, self._control, folder)
        assert isinstance(agreed[0], Path)
        return agreed[0]

    def _write(self, save: _Save) -> None:
        """Write what a save holds and publish it. Collective over the group of saves."""
        self._run.write(
            save.entries,
            save.staging,
            save.step,
            self._group,
            lambda: self._directory.publish(save.staging, save.step),
        )

    def _retire(self) -> None:
        """Remove old checkpoints: takes as long as the file system likes."""
        if self._ranks.rank == 0:
            self._directory.retire(self._keep)


class _Save(threading.Thread):
    """A save under way.

    Attributes:
        entries: what this rank contributes.
        staging: the folder that it is written into.
        step: whose checkpoint it becomes.
        landed: set when it is complete, or has failed.
    """

    def __init__(
        self, checkpointer: Checkpointer, entries: dict[str, Any], staging: Path, step: int
    ) -> None:
        super().__init__(name=f"save of step {step}")
        self._checkpointer = checkpointer
        self.entries = entries
        self.staging = staging
        self.step = step
        self.landed = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin to write. See [Note: The script ends]."""
        _UNSEEN.append(self)
        super().start()

    def run(self) -> None:
        """Write; keeps what goes wrong."""
        try:
            self._checkpointer._write(self)
        except BaseException as caught:
            self._error = caught
            self.discard()
        finally:
            self.entries = {}
            self.landed.set()
        if self._error is None:
            self._checkpointer._retire()

    def discard(self) -> None:
        """Remove what was written."""
        if self._checkpointer._ranks.rank == 0:
            self._checkpointer._directory.discard(self.staging)

    def raise_error(self) -> None:
        """Raise what went wrong, on every rank.

        Raises:
            RuntimeError: it did.
        """
        if self in _UNSEEN:
            _UNSEEN.remove(self)
        reason = "" if self._error is None else _reason(self._error)
        reasons: list[Any] = gather_objects(reason, self._checkpointer._control)
        reason = reason or next(filter(None, reasons), "")
        if reason:
            raise RuntimeError(f"saving step {self.step} failed: {reason}") from self._error


class _Ending:
    """See [Note: The script ends].

    Attributes:
        has_failed: a save that was under way as the script ended has failed.
    """

    def __init__(self) -> None:
        self.has_failed = False
        # Before the threads of executors are told to end, which the writing of files needs.
        threading._register_atexit(self.finish_saves)  # type: ignore[attr-defined]
        atexit.register(self.set_exit_status)

    def finish_saves(self) -> None:
        """Wait for saves whose outcome no method has returned or raised."""
        for save in list(_UNSEEN):
            save.join()
            if save._error is not None:
                self.has_failed = True
                print(
                    f"fsdp_engine: saving step {save.step} into "
                    f"{save._checkpointer._directory.path}, begun before the script ended, failed: "
                    f"{_reason(save._error)}. Call wait() at the end of the script, and before "
                    "destroy_process_group()",
                    file=sys.stderr,
                )

    def set_exit_status(self) -> None:
        """End with status 1 if a save has failed."""
        if self.has_failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


# Saves whose outcome no method has returned or raised.
_UNSEEN: list[_Save] = []
_ENDING = _Ending()


def _reason(error: BaseException) -> str:
    """What went wrong, and on which ranks, in a line or two."""
    return f"{type(error).__name__}: {error}"
