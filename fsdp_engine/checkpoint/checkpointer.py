"""``Checkpointer``: saves atomic checkpoints of a run into one directory.

``Checkpointer.save`` takes these steps on all ranks:

1. Each rank validates its arguments and state, and rank 0 creates a folder with a temporary name.
   Then all ranks agree, by small collectives, that there is no error.
2. Each rank writes its slices into its own files and syncs them (``writer.py``, DCP).
3. When all ranks have finished, rank 0 writes the metadata and the manifest, and gives the folder
   the name of a checkpoint. Then it removes the oldest checkpoints.

All ranks raise an error that occurs on any rank before the rename; the folder is removed, and
earlier checkpoints remain. ``Checkpointer.save_async`` copies all entries to host memory after step
1, and executes steps 2 and 3 in a thread, over a separate process group.

[Note: The script ends]
A script may end directly after its last ``save_async``. Python then calls the functions that were
registered with ``threading._register_atexit``, in reverse order, and joins threads afterwards.
``concurrent.futures`` has registered a function that shuts down all executors, including those that
write the files. The engine's function is registered later, so it is called earlier, and waits for
the save. If the save has failed, the function prints the error, and the process exits with status
1.

[Note: Snapshot]
``save_async`` copies all tensors into one block of host memory, which the next snapshot reuses,
because allocating pages and pinning them is slow.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import is_initialized
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_engine.accelerator import is_accelerator
from fsdp_engine.buffers.published_gradients import local_part
from fsdp_engine.checkpoint.folder import RunReport, collector_paused
from fsdp_engine.checkpoint.job_directory import JobDirectory, SharedDirectory
from fsdp_engine.checkpoint.joint_optimizer import Optimizers
from fsdp_engine.checkpoint.run_folder import Run
from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.checkpoint.same_arguments import agree_on_same
from fsdp_engine.checkpoint.sharded_model import Engines
from fsdp_engine.comm import copy_lanes
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import DifferentCallsError, gather_objects
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.memory.host_memory import HostBlock

_ALIGNMENT = 64  # bytes


class HostMemory:
    """A block of host memory for one snapshot at a time.

    Args:
        device: The device of the tensors. The block is pinned if the device is an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = HostBlock(0, pinned=False)

    @property
    def num_bytes(self) -> int:
        """Number of allocated bytes, whether or not a snapshot uses them."""
        return self._block.bytes.numel()

    def snapshot(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of ``entries``, which contains only this rank's slices of sharded tensors.

        The copies are complete on return. A tensor that occurs several times is copied once. Values
        that are not tensors are copied deeply.
        """
        tensors = {id(leaf): leaf for leaf in tree_leaves(entries) if isinstance(leaf, Tensor)}
        needed = sum(_padded_bytes(tensor) for tensor in tensors.values())
        if needed > self.num_bytes:
            self._block = HostBlock(0, pinned=False)  # free the old block first
            self._block = HostBlock(needed, pinned=is_accelerator(self._device))
        copies: dict[int, Tensor] = {}
        start = 0
        for key, tensor in tensors.items():
            local = local_part(tensor).detach()
            piece = (
                self._block.bytes[start : start + local.nbytes].view(local.dtype).view(local.shape)
            )
            piece.copy_(local, non_blocking=True)
            copies[key] = _with_placement_of(tensor, piece)
            start += _padded_bytes(tensor)
        copy_lanes.finish_compute(self._device)
        copied: dict[str, Any] = tree_map(
            lambda leaf: copies[id(leaf)] if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
            entries,
        )
        return copied


def _with_placement_of(tensor: Tensor, local: Tensor) -> Tensor:
    """Returns a tensor of values ``local``, on any device, with the placement of ``tensor``."""
    if isinstance(tensor, FlatDTensor):
        return FlatDTensor.from_flat_local(local, tensor.flat_placement)
    if isinstance(tensor, DTensor):
        # DTensor.from_local would copy the values to the device of the mesh.
        return DTensor(local, tensor._spec, requires_grad=False)
    return local


def _padded_bytes(tensor: Tensor) -> int:
    return -(-local_part(tensor).nbytes // _ALIGNMENT) * _ALIGNMENT


class Checkpointer:
    """Saves a run into a directory of checkpoints, and restores it.

    All methods are collective: every rank of the engine calls them, in the same order.

    Args:
        directory: Path on storage that all ranks share; the first save creates it.
        engine: The result of ``fsdp_engine.shard``, or a dict of several engines over the same
            ranks, such as ``{"actor": actor, "critic": critic}``.
        optimizer: One optimizer, or several, over the parameters of all engines. Optimizers of
            torch and of Megatron-Core (with the loss scaler) are supported. None: only weights are
            saved.
        extra: Objects with ``state_dict()`` and ``load_state_dict()``, by name: scheduler, data
            position, averages of weights. Each rank saves the state of its own objects. If a state
            contains sharded tensors, each rank saves its slices of them.
        keep: The number of latest checkpoints to keep; None: all.
        timeout: The timeout of collectives within a save. None: 30 minutes.
        trainable_only: Neither save nor load parameters that were frozen at ``shard()``, such as a
            base model under adapters. They keep their current values. Persistent buffers are saved.
            Checkpoints with frozen parameters can also be loaded. A ``Checkpointer`` without this
            option refuses to load checkpoints without frozen parameters.

    Raises:
        TypeError, ValueError: ``engine``, ``extra`` or ``keep`` has a wrong type or value.
    """

    _directory_type: type[JobDirectory] = SharedDirectory
    _has_one_directory = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        engine: Engines,
        optimizer: Optimizers | None = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = 3,
        timeout: timedelta | None = None,
        trainable_only: bool = False,
    ) -> None:
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep: expected an int of at least 1, or None; found {keep!r}")
        self._run = Run(engine, optimizer, extra, trainable_only=trainable_only)
        self._ranks = self._run.ranks
        self._control = self._ranks.control_group
        self._keep = keep
        timeout = timeout if timeout is not None else timedelta(minutes=30)
        self._directory = self._directory_type(Path(directory), self._ranks, timeout)
        self._host_memory = HostMemory(self._ranks.device)
        self._save: _Save | None = None
        # Identifies the checkpointer on all ranks. One of two values must be equal: the path, or
        # the pair of the engine's number and the checkpointer's number among those of the engine.
        first = next(iter(engine.values())) if isinstance(engine, Mapping) else engine
        number = next(_NUMBERS.setdefault(first, itertools.count()))
        self._identity = ((first.number, number), str(directory))

    def save(self, step: int) -> None:
        """Save the current state. Returns when the checkpoint is complete.

        Args:
            step: The number of the training step, at least 0. A second checkpoint of a step
                replaces the first one when it is complete.

        Raises:
            ValueError, TypeError, RuntimeError: ``step`` is not an int of at least 0, ``step`` or
                the optimizer's class differs between ranks, a forward or backward is running, the
                optimizer does not belong to the engine, or another job saves into the directory.
                Nothing was written.
            RuntimeError: Writing failed, now or in an earlier asynchronous save; the message names
                the rank.

        All ranks raise each error. Earlier checkpoints remain.
        """
        self._save = save = self._begin(step)
        save.start()
        save.finished.wait()  # does not wait for the removal of older checkpoints
        try:
            save.raise_error()
        except RuntimeError:
            self._save = None
            raise

    def save_async(self, step: int) -> None:
        """Save the current state in the background, while training continues.

        Returns when all entries are copied to host memory; later updates do not change the
        checkpoint. One save is in flight at a time: a second one waits for the first. Arguments and
        errors are those of ``save``. The next call of any method raises an error of the background
        save, on all ranks.
        """
        save = self._begin(step)
        error: Exception | None = None
        try:
            save.entries = self._host_memory.snapshot(save.entries)
        except Exception as caught:  # no host memory left
            error = caught
        try:
            agree(f"save_async({step!r})", error, self._control, call="save_async")
        except Exception:
            save.discard()
            raise
        self._save = save
        save.start()

    def wait(self) -> None:
        """Wait until the checkpoint of ``save_async`` is complete.

        Raises:
            RuntimeError: The save failed on some rank.
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
    ) -> RunReport:
        """Restore a run that was saved with any number of ranks, strategy, mesh and granule.

        Loaded weights and optimizer state equal the saved ones bit for bit, and the next forward
        uses them. With the same number of ranks as at the save, random states and each rank's
        ``extra`` are restored. Otherwise every rank loads the ``extra`` of rank 0, with a warning
        that names the values that differed between ranks. Sharded tensors in ``extra`` are loaded
        like parameters. An ``extra`` that was not saved is not changed, with a warning. A saved
        ``extra`` that this object does not have is not loaded, with a warning. Saved optimizer
        state is not loaded if this object has no optimizer, with a warning.

        Args:
            step: The number of the step; "latest": the newest complete checkpoint.
            strict: Raise if entries are missing, unexpected or do not fit. False: load the entries
                that fit.
            verify: First read every file and compare checksums; the ranks share the work. Each read
                compares checksums in any case, but this option finds damage before anything is
                changed.
            trust: Allow objects of any class in ``extra`` and in modules' extra states, which may
                run arbitrary code of the checkpoint's author. False: only numbers, strings,
                tensors, arrays and containers of these are loaded.

        Returns:
            The step and ``extra`` that were loaded, and with ``strict=False`` the entries that did
            not fit.

        Raises:
            FileNotFoundError: There is no checkpoint of that step, or one of its files is missing.
            ValueError: Arguments or classes of optimizers differ between ranks, entries do not fit
                (all of them are listed), files are damaged, an object is of a class that could run
                code, or the format is newer than this code.
            RuntimeError: Reading failed halfway (a damaged block; the message names file and
                tensor). Weights are partly replaced, and forwards and saves raise until a
                checkpoint is loaded.
            Exception: ``load_state_dict`` of an ``extra`` raised an error. Weights are not changed,
                unless an ``extra`` contains sharded tensors; other objects may have been loaded.

        All ranks raise each error. ValueError and FileNotFoundError are raised before anything is
        changed.
        """
        self._run.await_ranks()
        self._check_called_on_all_ranks("Checkpointer.load")
        self.wait()
        same = {"step": step, "strict": strict, "verify": verify, "trust": trust}
        agree_on_same("load()", None, self._control, same)
        with collector_paused(), self._directory.open(step) as files:
            return self._run.load(
                files,
                strict=strict,
                verify=verify,
                trust=trust,
                what=f"load({step!r})",
            )

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, ascending, as rank 0 finds them."""
        self._run.await_ranks()
        self._check_called_on_all_ranks("Checkpointer.steps")
        return self._directory.steps()

    def close(self) -> None:
        """Wait for a pending save, and release all resources: threads, connections, host memory,
        and the lock of the directory. A later save acquires them again.

        Raises:
            RuntimeError: The save failed on some rank. Resources are released in this case as well.
        """
        try:
            self.wait()  # afterwards no rank uses the process group of saves
        finally:
            self._directory.release()
            self._host_memory = HostMemory(self._ranks.device)

    def _begin(self, step: int) -> _Save:
        """Validate the state of all ranks, and create the folder of a save. Collective."""
        self._run.await_ranks()
        self._check_called_on_all_ranks("Checkpointer.save")
        self.wait()
        self._directory.meet()
        entries: dict[str, Any] = {}
        staging: Path | None = None
        error: Exception | None = None
        try:
            if not isinstance(step, int) or step < 0:
                raise ValueError(f"step: expected an int of at least 0; found {step!r}")
            entries = self._run.entries()
            self._directory.belongs_to(self._run.place)
            staging = self._directory.begin()
        except Exception as caught:
            error = caught
        try:
            same = {"step": step, "optimizer": self._run.optimizer_kind}
            answers = agree_on_same(
                f"Checkpointer.save({step})",
                error,
                self._control,
                same,
                (staging, self._run.extra_digest),
                call="Checkpointer.save",
            )
            self._run.check_extra_tensors([digest for _, digest in answers])
        except Exception:
            if staging is not None:
                self._directory.discard(staging)
            raise
        created = [folder for folder, _ in answers]
        return _Save(self, entries, self._directory.staging(created), step)

    def _check_called_on_all_ranks(self, what: str) -> None:
        """Check that all ranks have called the same checkpointer. Collective. Checkpointers whose
        ranks save into different directories are not checked.

        Raises:
            ValueError: Ranks have called different checkpointers. All ranks raise.
        """
        answers = agree(what, None, self._control, self._identity)
        if not self._has_one_directory:
            return
        first_ranks: dict[str, int] = {}
        for rank, (_, directory) in enumerate(answers):
            first_ranks.setdefault(directory, rank)
        if len(first_ranks) > 1 and len({number for number, _ in answers}) > 1:
            found = ", ".join(
                f"that of {path} on rank {rank}" for path, rank in first_ranks.items()
            )
            raise ValueError(
                f"{what}: expected all ranks to call the same checkpointer; found {found}. If "
                "each rank chooses by its own value, such as a loss, all-reduce this value first"
            )

    def _write(self, save: _Save) -> None:
        """Write and publish a save. Collective over the process group of saves.

        Raises:
            RuntimeError: The default process group has been destroyed. Each rank would then write
                alone, and publish an incomplete checkpoint.
        """
        if self._control is not None and not is_initialized():
            raise RuntimeError(
                f"save({save.step}): expected the process group until the save is complete; found "
                "that it was destroyed. Call wait() before destroy_process_group()"
            )
        group = self._directory.host_group()
        write = partial(self._run.write, save.entries, save.staging, save.step, group)
        self._directory.write(write, save.staging, save.step)

    def _retire(self, step: int) -> None:
        """Remove old checkpoints. This may be slow on some file systems."""
        self._directory.retire(self._keep, step)


# Numbers for the next checkpointers of each engine.
_NUMBERS: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class _Save(threading.Thread):
    """The thread of a pending save.

    Attributes:
        entries: The entries that this rank writes.
        staging: The folder into which the checkpoint is written.
        step: The step of the checkpoint.
        finished: Event that is set when the save is complete or has failed.
    """

    def __init__(
        self, checkpointer: Checkpointer, entries: dict[str, Any], staging: Path, step: int
    ) -> None:
        super().__init__(name=f"save of step {step}")
        self._checkpointer = checkpointer
        self.entries = entries
        self.staging = staging
        self.step = step
        self.finished = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start writing. See [Note: The script ends]."""
        _UNOBSERVED.append(self)
        super().start()

    def run(self) -> None:
        """Write the checkpoint, and store an error if this fails."""
        try:
            self._checkpointer._write(self)
        except BaseException as caught:
            self._error = caught
            self.discard()
        finally:
            self.entries = {}
            self.finished.set()
        try:
            if self._error is None:
                self._checkpointer._retire(self.step)
        except OSError as error:
            warnings.warn(
                f"save({self.step}): older checkpoints in {self._checkpointer._directory.path} "
                f"could not be removed: {error}. The next save tries again",
                stacklevel=2,
            )

    def discard(self) -> None:
        """Remove the folder of the save."""
        self._checkpointer._directory.discard(self.staging)

    def raise_error(self) -> None:
        """Raise the error of the save, on all ranks. Does nothing after the first call.

        Raises:
            RuntimeError: The save failed on some rank.
        """
        if self not in _UNOBSERVED:
            return
        reason = "" if self._error is None else _reason(self._error)
        what = f"the end of Checkpointer's save of step {self.step}"
        try:
            reasons: list[Any] = gather_objects(reason, self._checkpointer._control, what)
        except DifferentCallsError as different:
            raise different from self._error
        finally:
            _UNOBSERVED.remove(self)
        reason = reason or next(filter(None, reasons), "")
        if reason:
            raise RuntimeError(f"saving step {self.step} failed: {reason}") from self._error


class _ExitHandler:
    """Waits for pending saves when the script ends. See [Note: The script ends].

    Attributes:
        has_failed: Whether a save that was pending when the script ended has failed.
    """

    def __init__(self) -> None:
        self.has_failed = False
        # Python calls finish_saves before the executors that write files are shut down.
        threading._register_atexit(self.finish_saves)  # type: ignore[attr-defined]
        atexit.register(self.set_exit_status)

    def finish_saves(self) -> None:
        """Wait for saves whose result no method has returned or raised."""
        for save in list(_UNOBSERVED):
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
        """Exit with status 1 if a save has failed."""
        if self.has_failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


# Saves whose result no method has returned or raised.
_UNOBSERVED: list[_Save] = []
_EXIT_HANDLER = _ExitHandler()


def _reason(error: BaseException) -> str:
    """Returns the type and the message of an error. The message may already name ranks."""
    return f"{type(error).__name__}: {error}"
