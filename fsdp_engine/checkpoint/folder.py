"""One checkpoint, one folder: any ranks, strategy and mesh load what any others saved.

A checkpoint is a folder in the format of ``torch.distributed.checkpoint`` (DCP). Every rank writes
its slices and reads what it holds; nothing is gathered. Entries have the names that unsharded code
uses for them:

    ========================================  ====================================================
    key                                       what
    ========================================  ====================================================
    ``model.<name>``                          ``model.state_dict()``: main weights, buffers (those
                                              of data-parallel rank 0), extra states; a tied weight
                                              under each of its names
    ``optimizer.state.<parameter>.<state>``   state tensors of the parameter's shape as slices,
                                              others (step counters) as they are
    ``optimizer.param_groups.<n>.<key>``      hyperparameters, and ``params``: names
    ``optimizer.kind``                        the optimizer's class
    ``extra``                                 what the user adds, through ``torch.save``
    ``ranks.<rank>``                          random states and extra of one rank (``Checkpointer``)
    ``trainable_only``                        only where frozen parameters were left out
    ========================================  ====================================================

So unsharded code reads the weights with ``dcp.load({"model": model.state_dict()},
checkpoint_id=path)``, and what it wrote with ``dcp.save({"model": model.state_dict()}, ...)`` loads
here. With ``"optimizer": get_optimizer_state_dict(model, optimizer)`` of
``torch.distributed.checkpoint.state_dict`` beside it, as FSDP2 users write it, the optimizer loads
too.

A checkpoint that :func:`save_checkpoint` writes over an older one replaces it at the very end, when
its metadata is renamed into place: a job that is killed while it saves leaves the older one whole.

Checkpoints hold pickles, which are read so that they cannot run code: see ``objects.py``.
"""

from __future__ import annotations

import gc
import io
import os
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_engine.checkpoint.dcp_metadata import METADATA, check_files, read_metadata
from fsdp_engine.checkpoint.engines import Engines, as_one
from fsdp_engine.checkpoint.manifest import FileRow
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    TRAINABLE_ONLY,
    Saved,
    Targets,
    check_at_rest,
    match_model,
    model_entries,
    set_extra_states,
)
from fsdp_engine.checkpoint.objects import read_object
from fsdp_engine.checkpoint.optimizer_state import (
    OptimizerMatch,
    group_targets,
    optimizer_entries,
    optimizer_kind,
)
from fsdp_engine.checkpoint.plain_errors import plain_errors
from fsdp_engine.checkpoint.reader import Reader
from fsdp_engine.checkpoint.run_state import pack, unpack
from fsdp_engine.checkpoint.sharded_model import ShardedModel
from fsdp_engine.checkpoint.wrapped_optimizer import torch_optimizer
from fsdp_engine.checkpoint.writer import PREFIX, SUFFIX, SavePlanner, Writer
from fsdp_engine.devices.agreement import agree, agree_on_same


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint did not fit, and what was in it.

    Attributes:
        step: the training step that was saved; None where the checkpoint does not say.
        problems: a line for each entry that is missing, unexpected or does not fit.
        extra: the ``extra`` of data-parallel rank 0, tensors on the CPU.
    """

    step: int | None = None
    problems: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    path: str | os.PathLike[str],
    engine: Engines,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    *,
    trainable_only: bool = False,
) -> None:
    """Write weights, optimizer state and ``extra`` to a folder. Collective.

    Args:
        path: the folder, on storage that all ranks share; made if need be. An older checkpoint in
            it is replaced, other files are left alone.
        engine: what :func:`~fsdp_engine.sharding.shard` returned; or several of these by name, over
            the same ranks. Entries then begin with the name: ``model.actor.head.weight``.
        optimizer: one over the parameters of all of them, torch's or Megatron-Core's. State tensors
            that have not the parameter's shape must be the same on all ranks.
        extra: anything else, as ``torch.save`` takes it: step, LR scheduler, data position. That of
            data-parallel rank 0 is kept.
        trainable_only: leave out parameters that were frozen at ``shard()``: a base model under
            adapters, say. Persistent buffers are saved.

    Raises:
        NotADirectoryError: ``path`` is a file.
        RuntimeError: within a forward, a backward or ``engine.unsharded()``.
        ValueError, TypeError: the optimizer does not belong to the engine, or has state that is
            neither tensor nor number; ``extra`` is no dict.
        RuntimeError, OSError: writing failed on some rank; an older checkpoint is as it was, and
            what was written is removed.

    Each is raised on every rank if on one; all but the last before anything is written.
    """
    folder, model = Path(path), as_one(engine)
    group = model.ranks.control_group
    entries: dict[str, Any] = {}
    error: Exception | None = None
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"path: expected a folder; found the file {folder}")
        if not isinstance(extra, dict | None):
            raise TypeError(f"extra: expected a dict or None; found {type(extra).__name__}")
        entries = training_entries(model, optimizer, trainable_only=trainable_only)
        packed = pack(extra or {})
        if model.ranks.rank == 0:
            entries[EXTRA] = packed
    except Exception as caught:
        error = caught
    same = {"optimizer": optimizer_kind(optimizer), "trainable_only": trainable_only}
    agree_on_same("save_checkpoint()", error, group, same)

    def remove_older(metadata: Metadata, rows: dict[str, FileRow]) -> None:
        for file in folder.glob(f"{PREFIX}*{SUFFIX}"):
            if file.name not in rows:
                file.unlink(missing_ok=True)

    writer = Writer(folder, remove_older)
    try:
        write_entries(entries, writer, group)
    except Exception:
        writer.discard()
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    engine: Engines,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    trust: bool = False,
    trainable_only: bool = False,
) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` or ``torch.distributed.checkpoint`` wrote. Collective.

    Weights are bit by bit what was saved, whatever strategy, mesh and number of ranks saved them,
    and the next forward uses them; so are the optimizer's state and hyperparameters, which are
    matched by parameters' names, not by their order. An optimizer's state is made anew, so that
    the optimizer need not have stepped.

    Args:
        path: the folder.
        engine: whose weights and buffers are replaced; or several by name, as they were saved.
        optimizer: whose state and hyperparameters are replaced; None: only weights are loaded.
        trust: whoever wrote the checkpoint may run code here: objects in it may be of any class.
        trainable_only: leave parameters that were frozen at ``shard()`` as they are, whether the
            checkpoint has them or not. One that was saved so is refused otherwise.

    Returns:
        ``extra`` as it was saved, tensors on the CPU; empty if there was none.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.
        NotADirectoryError: ``path`` is a file.
        ValueError: entries are missing, unexpected, or of another shape or of a dtype that would
            be rounded (all of them are listed), or the optimizer is of another kind, has other
            parameters, or groups them so that one group would have two values of one
            hyperparameter. Or files are damaged, or an object is of a class that could run code.
        RuntimeError, TypeError: as for :func:`save_checkpoint`.
        RuntimeError: reading failed half way; weights are then partly replaced, and forwards and
            saves raise until a checkpoint is loaded.

    Each is raised on every rank if on one; all but the last before anything is changed.
    """
    model = as_one(engine)

    def make() -> FolderMatch:
        return FolderMatch(Path(path), model, optimizer, trust=trust, trainable_only=trainable_only)

    with collector_paused():
        match = load_matching("load_checkpoint()", model.ranks.control_group, make)
    extra: dict[str, Any] = match.targets.get(EXTRA, {})
    return extra


def load_matching(
    what: str, group: ProcessGroup | None, make: Callable[[], FolderMatch], *, strict: bool = True
) -> FolderMatch:
    """Match a folder on all ranks, then load what fits. Collective.

    Args:
        what: is being done, for messages.
        group: the ranks.
        make: matches it on this rank.
        strict: entries that are missing, unexpected or do not fit are an error.

    Raises:
        Exception: of ``make``; or see :func:`load_checkpoint`. On every rank if on one.
    """
    match: FolderMatch | None = None
    error: Exception | None = None
    same: dict[str, object] = {}
    try:
        match = make()
        same = match.identity
        if strict:
            match.raise_problems()
    except Exception as caught:
        error = caught
    agree_on_same(what, error, group, same)
    assert match is not None
    match.load(what, group)
    return match


def training_entries(
    engine: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    *,
    trainable_only: bool = False,
) -> dict[str, Any]:
    """What this rank contributes of weights and optimizer state.

    Raises:
        RuntimeError, ValueError, TypeError: see :func:`save_checkpoint`.
    """
    check_at_rest(engine)
    engine.missing_values.check()
    entries: dict[str, Any] = {MODEL: model_entries(engine, trainable_only=trainable_only)}
    if trainable_only and engine.ranks.rank == 0:
        entries[TRAINABLE_ONLY] = True
    if optimizer is not None:
        entries[OPTIMIZER] = optimizer_entries(engine, torch_optimizer(optimizer))
    return entries


def write_entries(entries: dict[str, Any], writer: Writer, group: ProcessGroup | None) -> None:
    """Write what all ranks contribute. Collective; an error on one rank is raised on all."""
    with _without_the_warning_of_one_rank(), plain_errors("writing"):
        dcp.save(
            entries,
            storage_writer=writer,
            planner=SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


class FolderMatch:
    """How a checkpoint fits an engine and an optimizer. Sends nothing until :meth:`load`.

    Args:
        folder: the checkpoint.
        engine: whose weights it may replace.
        optimizer: likewise; None: only weights are loaded.
        others: keys to read besides, packed objects.
        trust: whoever wrote it may run code here.
        trainable_only: leave frozen parameters as they are.

    Attributes:
        problems: a line for each entry that does not fit; those are left out of ``targets``.
        targets: what to read; after :meth:`load`, what was read.

    Raises:
        FileNotFoundError, NotADirectoryError, RuntimeError, TypeError, ValueError: see
            :func:`load_checkpoint`.
    """

    def __init__(
        self,
        folder: Path,
        engine: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        others: tuple[str, ...] = (EXTRA,),
        trust: bool = False,
        *,
        trainable_only: bool = False,
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._trust = trust
        self._trainable_only = trainable_only
        self._given_optimizer = optimizer
        self._metadata = read_metadata(folder, trust)
        check_files(folder, self._metadata, engine.ranks.rank, engine.ranks.size)
        self._saved = Saved(self._metadata)
        check_at_rest(engine)
        if self._saved.is_trainable_only and not trainable_only:
            raise ValueError(
                f"checkpoint {folder}: expected all parameters; found those alone that were "
                "trainable, since it was saved with trainable_only=True. Load the frozen ones from "
                "where they come from, and this with trainable_only=True"
            )
        self.targets, self.problems, self._extra_states = match_model(
            engine, self._saved, trainable_only=trainable_only
        )
        self._what = "model" if optimizer is None else "model and optimizer"
        self._optimizer: OptimizerMatch | None = None
        if optimizer is not None:
            groups = group_targets(self._saved)
            read_entries(folder, self._metadata, groups, trust=trust)
            taken = torch_optimizer(optimizer)
            self._optimizer = OptimizerMatch(engine, taken, self._saved, groups)
            self.problems += self._optimizer.problems
            if self._optimizer.is_same_kind:
                self.targets |= self._optimizer.targets
            else:
                self._optimizer = None  # nothing of another kind's state is of use
        self._others = [key for key in others if key in self._saved.entries]
        self.targets |= dict.fromkeys(self._others)

    @property
    def identity(self) -> dict[str, object]:
        """What must be equal on all ranks that load together; the folder by its content, since
        ranks may see it at different paths."""
        return {
            "checkpoint": f"checksum {zlib.crc32((self._folder / METADATA).read_bytes()):08x}",
            "optimizer": optimizer_kind(self._given_optimizer),
            "trust": self._trust,
            "trainable_only": self._trainable_only,
        }

    def raise_problems(self) -> None:
        """Refuse what does not fit as a whole.

        Raises:
            ValueError: something does not; all of it is listed.
        """
        if self.problems:
            lines = "\n  ".join(self.problems)
            raise ValueError(
                f"checkpoint {self._folder}: expected the entries of this {self._what}; found "
                f"{len(self.problems)} that differ\n  {lines}"
            )

    def load(self, what: str, group: ProcessGroup | None) -> None:
        """Read, and give engine and optimizer what was read. Collective.

        First objects, which may be refused and change nothing; then tensors, into their places.

        Args:
            what: is being done, for messages.
            group: of all ranks; None: there is one.

        Raises:
            RuntimeError: reading tensors failed on some rank; the engine then refuses to go on.
            Exception: what else went wrong; nothing was changed.
        """
        objects = {key: value for key, value in self.targets.items() if value is None}
        tensors = {key: value for key, value in self.targets.items() if value is not None}
        error: Exception | None = None
        try:
            read_entries(self._folder, self._metadata, objects, trust=self._trust)
            for key in self._others:
                where = f"{self._folder}: {key}"
                objects[key] = unpack(objects[key], where, self._trust)
        except Exception as caught:
            error = caught
        agree(what, error, group)
        self.targets |= objects
        with self._engine.missing_values.replacing(map(_missing_key, tensors)):
            try:
                read_entries(self._folder, self._metadata, tensors, group, alone=group is None)
                self.targets |= tensors
                set_extra_states(self._engine, self._saved, self._extra_states, self.targets)
                if self._optimizer is not None:
                    self._optimizer.apply(self.targets)
            except Exception as caught:
                error = RuntimeError(
                    f"failed half way, weights are partly replaced, load again: {caught}"
                )
                error.__cause__ = caught
            self._engine.weights_changed()
            agree(what, error, group)


def _missing_key(key: str) -> Hashable:
    """An entry in ``engine.missing_values``: a tensor of the model by its name there, any other
    entry by a key that no tensor of the model has."""
    name = key.removeprefix(f"{MODEL}.")
    return name if name != key else (key,)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads objects without running code."""

    def __init__(self, folder: Path, trust: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder
        self._trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an object."""
        key = read_item.dest_index.fqn
        self.state_dict[key] = read_object(value, f"{self._folder}: {key}", self._trust)


def read_entries(
    folder: Path,
    metadata: Metadata,
    targets: Targets,
    group: ProcessGroup | None = None,
    *,
    alone: bool = True,
    trust: bool = False,
) -> None:
    """Fill ``targets``; ``alone``: without the other ranks.

    Raises:
        Exception: what went wrong on this rank; of the same kind on others.
    """
    with _without_the_warning_of_one_rank(), plain_errors("reading"):
        dcp.load(
            targets,
            storage_reader=Reader(folder, metadata),
            planner=_LoadPlanner(folder, trust),
            process_group=group,
            no_dist=alone,
        )


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of garbage meanwhile: plans are so many objects that it would start one of the
    whole heap, on some rank, for which all others wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _without_the_warning_of_one_rank() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
