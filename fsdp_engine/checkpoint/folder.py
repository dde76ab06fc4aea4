"""Saves and loads single checkpoints, independent of ranks, strategy and mesh.

A checkpoint is a folder in the format of ``torch.distributed.checkpoint`` (DCP). Each rank writes
and reads its own slices; nothing is gathered. Entries have the same names as in unsharded code:

    ========================================  ====================================================
    key                                       value
    ========================================  ====================================================
    ``model.<name>``                          ``model.state_dict()``: main weights, buffers (those
                                              of data-parallel rank 0), extra states; a tied weight
                                              under each of its names
    ``optimizer.state.<parameter>.<state>``   state tensors of the parameter's shape as slices,
                                              others (step counters) as they are
    ``optimizer.param_groups.<n>.<key>``      hyperparameters, and ``params``: names
    ``optimizer.kind``                        the optimizer's class
    ``extra``                                 the user's ``extra``, in the format of ``torch.save``
    ``ranks.<rank>``                          random states and extra of one rank (``Checkpointer``)
    ``extra_tensors.<name>``                  sharded tensors within ``extra``
    ``trainable_only``                        marks checkpoints without frozen parameters
    ``stage``                                 the pipeline stage of the model (``stage_place.py``)
    ========================================  ====================================================

Unsharded code can load the weights with
``dcp.load({"model": model.state_dict()}, checkpoint_id=path)``, and checkpoints that it saves with
``dcp.save({"model": model.state_dict()}, ...)`` can be loaded here. If they also contain
``"optimizer": get_optimizer_state_dict(model, optimizer)`` of
``torch.distributed.checkpoint.state_dict``, as those of FSDP2 programs do, the optimizer can also
be loaded.

If :func:`save_checkpoint` overwrites an older checkpoint, it renames the new metadata into place as
the last step, so that the older checkpoint remains intact if the job is killed during the save.

Checkpoints contain pickles. Unless ``trust`` is set, they are read without running code: see
``inert_pickle.py``.
"""

from __future__ import annotations

import gc
import io
import json
import os
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_engine.checkpoint.dcp_metadata import METADATA, check_files, read_metadata
from fsdp_engine.checkpoint.export_source import parts_of
from fsdp_engine.checkpoint.extra_tensors import (
    ExtraTargets,
    ExtraTensors,
    check_same_tensors,
    digest_of,
)
from fsdp_engine.checkpoint.files import CheckpointFiles
from fsdp_engine.checkpoint.inert_pickle import read_object
from fsdp_engine.checkpoint.joint_optimizer import Optimizers, torch_optimizer
from fsdp_engine.checkpoint.manifest import FileRow
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    EXTRA_TENSORS,
    MODEL,
    OPTIMIZER,
    RANKS,
    STAGE,
    TRAINABLE_ONLY,
    Saved,
    Targets,
    check_at_rest,
    match_model,
    model_entries,
    set_extra_states,
)
from fsdp_engine.checkpoint.optimizer_state import (
    OptimizerMatch,
    group_targets,
    optimizer_entries,
    optimizer_kind,
)
from fsdp_engine.checkpoint.reader import Reader
from fsdp_engine.checkpoint.reading_weights import are_same, listed, untied_text
from fsdp_engine.checkpoint.run_state import unpack, warn_of_refused
from fsdp_engine.checkpoint.same_arguments import agree_on_same
from fsdp_engine.checkpoint.sharded_model import (
    Engines,
    ShardedModel,
    join_engines,
    saved_params,
)
from fsdp_engine.checkpoint.stage_place import claim_folder, differences, place_of, read_place
from fsdp_engine.checkpoint.writer import PREFIX, SUFFIX, SavePlanner, Writer
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.rendezvous import ERROR_KINDS
from fsdp_engine.memory.allocator import empty_like


@contextmanager
def convert_dcp_errors(what: str) -> Iterator[None]:
    """Context that converts ``CheckpointException`` to an ``Exception`` of one class on all ranks.

    ``CheckpointException`` is a ``BaseException``, which ``except Exception`` does not catch.

    Args:
        what: The name of the operation in the message.

    Raises:
        Exception: The operation failed. Its class is the class in ``ERROR_KINDS`` that comes first
            in the MRO of the first failed rank's exception, or RuntimeError if there is none.
        BaseException: The exception of the first failed rank is not an ``Exception``.
    """
    try:
        yield
    except CheckpointException as caught:
        causes = {rank: cause[0] for rank, cause in sorted(caught.failures.items())}
        first = next(iter(causes.values()))
        if not isinstance(first, Exception):
            raise first from caught  # an interrupt or an exit
        kind = next((each for each in type(first).__mro__ if each.__name__ in ERROR_KINDS), None)
        found = "; ".join(
            f"on data-parallel rank {rank}: {type(cause).__name__}: {cause}"
            for rank, cause in causes.items()
        )
        made = RuntimeError if kind is None else ERROR_KINDS[kind.__name__]
        raise made(f"{what} failed {found}") from first


@dataclass(frozen=True)
class LoadReport:
    """The result of a load.

    Attributes:
        step: The training step that was saved; None if the checkpoint does not contain it.
        problems: A line for each entry that is missing, unexpected or does not fit.
        extra: The loaded ``extra``, with tensors on the CPU.
        of_rank_0: Names of the values of ``extra`` that differed between ranks at a save with
            another number of ranks. All ranks have loaded the values of rank 0.
    """

    step: int | None = None
    problems: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict, repr=False)  # may be large
    of_rank_0: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunReport(LoadReport):
    """The result of ``Checkpointer.load``, whose checkpoints always contain the step."""

    step: int = 0


def save_checkpoint(
    path: str | os.PathLike[str],
    engine: Engines,
    optimizer: Optimizers | None = None,
    extra: dict[str, Any] | None = None,
    *,
    trainable_only: bool = False,
) -> None:
    """Write weights, optimizer state and ``extra`` to a folder. Collective.

    Args:
        path: Path of the folder, on storage that all ranks share; it is created if it does not
            exist. An older checkpoint in it is replaced; other files are not changed.
        engine: The result of ``fsdp_engine.shard``, or a dict of several engines over the same
            ranks. Entries then begin with the engine's name: ``model.actor.head.weight``.
        optimizer: One optimizer, or several, over the parameters of all engines, of torch or
            Megatron-Core. State tensors without the parameter's shape must be equal on all ranks.
        extra: Additional values that ``torch.save`` accepts: step, LR scheduler, data position. The
            values of data-parallel rank 0 are saved. Each rank saves its slice of a sharded tensor
            in ``extra``, so all ranks must pass such tensors.
        trainable_only: Omit parameters that were frozen at ``shard()``, such as a base model under
            adapters. Persistent buffers are saved.

    Raises:
        NotADirectoryError: ``path`` is a file.
        RuntimeError: The call is within a forward, a backward or ``engine.unsharded()``.
        ValueError, TypeError: The optimizer does not belong to the engine or has state that is
            neither tensor nor number, or ``extra`` is not a dict.
        RuntimeError, OSError: Writing failed on some rank. An older checkpoint is unchanged, and
            the new files are removed.

    All ranks raise each error. All errors but the last are raised before any entry is written.
    """
    folder, model = Path(path), join_engines(engine)
    model.await_ranks()
    group = model.ranks.control_group
    entries: dict[str, Any] = {}
    signature: list[str] = []
    error: Exception | None = None
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"path: expected a folder; found the file {folder}")
        if not isinstance(extra, dict | None):
            raise TypeError(f"extra: expected a dict or None; found {type(extra).__name__}")
        entries = training_entries(model, optimizer, trainable_only=trainable_only)
        tensors = ExtraTensors(model)
        packed = tensors.pack(extra or {}, extra or {})
        signature = tensors.signature
        if model.ranks.rank == 0:
            entries[EXTRA] = packed
            warn_of_refused(packed, extra or {})
        entries |= tensors.section
        if model.ranks.rank == 0:
            claim_folder(folder, place_of(model.ranks, model.model_part))
    except Exception as caught:
        error = caught
    same = {"optimizer": optimizer_kind(optimizer), "trainable_only": trainable_only}
    digests = agree_on_same("save_checkpoint()", error, group, same, digest_of(signature))
    check_same_tensors(digests, signature, group)

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
    optimizer: Optimizers | None = None,
    *,
    trust: bool = False,
    trainable_only: bool | None = False,
) -> dict[str, Any]:
    """Load a checkpoint of ``save_checkpoint`` or ``torch.distributed.checkpoint``. Collective.

    Loaded weights equal the saved ones bit for bit, for any strategy, mesh and number of ranks of
    the save, and the next forward uses them. The same holds for the optimizer's state and
    hyperparameters, which are matched by the names of parameters, not by their order. The state is
    created if the optimizer has not stepped yet.

    Args:
        path: Path of the folder.
        engine: The engine whose weights and buffers are replaced, or a dict of engines as at the
            save.
        optimizer: The optimizer whose state and hyperparameters are replaced. None: only weights
            are loaded.
        trust: Allow objects of any class, which may run arbitrary code of the checkpoint's author.
        trainable_only: Do not change parameters that were frozen at ``shard()``, whether the
            checkpoint contains them or not. False: refuse a checkpoint that was saved with this
            option. None: use the option of the save.

    Returns:
        The ``extra`` of the save, with tensors on the CPU; empty if there was none. Sharded tensors
        in it have the placements of the corresponding parameters.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``.
        NotADirectoryError: ``path`` is a file.
        ValueError: Entries are missing, unexpected, of another shape, or of a dtype that would
            be rounded (all of them are listed); or the optimizer is of another class, has other
            parameters, or groups them so that a group would have two values of one
            hyperparameter; or files are damaged, or an object is of a class that could run code.
        RuntimeError, TypeError: As for ``save_checkpoint``.
        RuntimeError: Reading failed halfway. Weights are partly replaced, and forwards and saves
            raise until a checkpoint is loaded.

    All ranks raise each error. All errors but the last are raised before anything is changed.
    """
    model = join_engines(engine)
    model.await_ranks()

    def make() -> FolderMatch:
        files = CheckpointFiles(Path(path), model.ranks)
        return FolderMatch(files, model, optimizer, trust=trust, trainable_only=trainable_only)

    with collector_paused():
        match = load_matching(
            "load_checkpoint()", model.ranks.control_group, make, check=check_extra_slices
        )
    extra: dict[str, Any] = match.targets.get(EXTRA, {})
    return extra


def load_matching(
    what: str,
    group: ProcessGroup | None,
    make: Callable[[], FolderMatch],
    *,
    strict: bool = True,
    check: Callable[[FolderMatch], object],
    before_load: Callable[[FolderMatch], object] = lambda match: None,
) -> FolderMatch:
    """Match a folder on all ranks, then load the entries that fit. Collective.

    Args:
        what: The name of the operation in messages.
        group: The process group of all ranks; None: there is one rank.
        make: Function that creates the match on this rank.
        strict: Raise if entries are missing, unexpected or do not fit.
        check: Function that raises if the objects that were read do not fit. It is called before
            anything is changed.
        before_load: Function that is called when all ranks have passed ``check``, before weights
            are changed.

    Raises:
        Exception: An error of ``make``, ``check``, ``before_load`` or :func:`load_checkpoint`. All
            ranks raise.
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
    match.fetch()
    match.read_objects(what, group, check)
    try:
        before_load(match)
    except Exception as caught:
        error = caught
    agree(what, error, group)
    match.load(what, group)
    return match


def check_extra_slices(match: FolderMatch) -> None:
    """Check that ``extra`` contains no slices of other ranks.

    Raises:
        ValueError: ``extra`` contains such slices; the message names them.
    """
    if found := match.foreign_slices(EXTRA, match.targets.get(EXTRA, {})):
        raise ValueError(foreign_slices_text(EXTRA, found))


def foreign_slices_text(where: str, found: list[str]) -> str:
    """Returns the error message for slices of other ranks in an older checkpoint."""
    return (
        f"{where}: expected full tensors, or this rank's slices; found slices of other ranks, as "
        f"older versions saved them: {'; '.join(found[:4])}. Load the checkpoint with the number "
        "of ranks, the mesh and the levels of the save, and save it again"
    )


def training_entries(
    engine: ShardedModel,
    optimizer: Optimizers | None,
    *,
    trainable_only: bool = False,
) -> dict[str, Any]:
    """Returns the entries of weights and optimizer state that this rank saves.

    Raises:
        RuntimeError, ValueError, TypeError: Errors of :func:`save_checkpoint`.
    """
    check_at_rest(engine)
    engine.missing_values.check()
    entries: dict[str, Any] = {MODEL: model_entries(engine, trainable_only=trainable_only)}
    if trainable_only and engine.ranks.rank == 0:
        entries[TRAINABLE_ONLY] = True
    place = place_of(engine.ranks, engine.model_part)
    if place and engine.ranks.rank == 0:
        entries[STAGE] = json.dumps(place)
    if optimizer is not None:
        entries[OPTIMIZER] = optimizer_entries(engine, torch_optimizer(optimizer))
    return entries


def write_entries(entries: dict[str, Any], writer: Writer, group: ProcessGroup | None) -> None:
    """Write the entries of all ranks. Collective. All ranks raise an error of any rank."""
    with _ignore_single_rank_warning(), convert_dcp_errors("writing"):
        dcp.save(
            entries,
            storage_writer=writer,
            planner=SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


class FolderMatch:
    """Match of a checkpoint with an engine and an optimizer. The constructor is not collective.

    Args:
        files: The files of the checkpoint.
        engine: The engine whose weights are replaced.
        optimizer: The optimizer whose state is replaced. None: only weights are loaded.
        others: Keys of objects in the format of ``torch.save`` that are also read if they exist.
        trust: Allow objects of any class, which may run arbitrary code.
        examined: Function that returns the keys of further such objects, which are read one at a
            time and not kept.
        examine: Function that is called with each of these further objects.
        trainable_only: Do not change frozen parameters. None: use the option of the save.
        is_same_job: Whether the number of ranks is the same as at the save.
        ties: The first name of each tied weight of the saved model, by each of its further names.
            Tied weights of this model that were not tied at the save must have equal values.

    Attributes:
        problems: A line for each entry that does not fit. Such entries are not in ``targets``.
        targets: The entries to read; after :meth:`load`, the values that were read.

    Raises:
        FileNotFoundError, NotADirectoryError, RuntimeError, TypeError, ValueError: Errors of
            :func:`load_checkpoint`.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        engine: ShardedModel,
        optimizer: Optimizers | None,
        others: tuple[str, ...] = (EXTRA,),
        trust: bool = False,
        *,
        examined: Callable[[Saved], Sequence[str]] = lambda saved: (),
        examine: Callable[[Any], object] = lambda value: None,
        trainable_only: bool | None = False,
        is_same_job: bool = False,
        ties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._files = files
        folder = files.folder
        self._engine = engine
        self._trust = trust
        self._given_optimizer = optimizer
        self._metadata = read_metadata(folder, trust)
        check_files(folder, self._metadata, files.to_check)
        self._saved = Saved(self._metadata)
        if trainable_only is None:
            trainable_only = self._saved.is_trainable_only
        self._trainable_only = trainable_only
        check_at_rest(engine)
        if self._saved.is_trainable_only and not trainable_only:
            raise ValueError(
                f"checkpoint {folder}: expected all parameters; found only those that were "
                "trainable, since it was saved with trainable_only=True. Load frozen parameters "
                "from their source, and this checkpoint with trainable_only=True"
            )
        found = match_model(engine, self._saved, trainable_only=trainable_only)
        self.targets, self.problems = found.targets, found.problems
        self._extra_states = found.extra_states
        # The entries of tied weights that must be compared, with the entries that are loaded.
        self._copies = {
            key: first
            for key, first in found.copies.items()
            if _first_name(key, ties) != _first_name(first, ties)
        }
        self._check_stage(trust)
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
                self._optimizer = None  # state of another class of optimizer cannot be loaded
        self._others = [key for key in others if key in self._saved.entries]
        self.targets |= dict.fromkeys(self._others)
        self._examined, self._examine = list(examined(self._saved)), examine
        params = list(saved_params(engine).values())
        self._extra = ExtraTargets(self._saved, params, is_same_job=is_same_job)
        self._tensors: Targets = {}

    @property
    def _folder(self) -> Path:
        return self._files.folder

    @property
    def identity(self) -> dict[str, object]:
        """Values that must be equal on all ranks of a load. A checksum identifies the folder,
        because its path may differ between ranks."""
        return {
            "checkpoint": f"checksum {zlib.crc32((self._folder / METADATA).read_bytes()):08x}",
            "optimizer": optimizer_kind(self._given_optimizer),
            "trust": self._trust,
            "trainable_only": self._trainable_only,
        }

    def _check_stage(self, trust: bool) -> None:
        if STAGE not in self._saved.entries:
            return
        objects: Targets = {STAGE: None}
        read_entries(self._folder, self._metadata, objects, trust=trust)
        own = place_of(self._engine.ranks, self._engine.model_part)
        if text := differences(read_place(objects[STAGE]), own):
            self.problems.append(f"{STAGE}: {text}. Each stage has a folder of its own")

    def raise_problems(self) -> None:
        """Raise an error if there are problems.

        Raises:
            ValueError: Entries do not fit; all of them are listed.
        """
        if self.problems:
            raise ValueError(
                f"checkpoint {self._folder}: expected the entries of this {self._what}; found "
                f"{len(self.problems)} that differ{listed(self.problems)}"
            )

    def fetch(self) -> None:
        """Copy those target files into the folder that only other nodes have. Collective."""
        targets = self.targets | dict.fromkeys(self._examined)
        targets |= {key: self.targets[first] for key, first in self._copies.items()}
        self._files.fetch(lambda: files_of(targets, self._metadata))

    @property
    def has_sharded_objects(self) -> bool:
        """Whether objects that were read contain sharded tensors. :meth:`load` reads the values of
        these tensors."""
        return bool(self._extra.targets)

    @property
    def ignores_optimizer_state(self) -> bool:
        """Whether the checkpoint has optimizer state and this object was made without optimizer."""
        return self._given_optimizer is None and bool(self._saved.below(OPTIMIZER))

    def read_objects(
        self, what: str, group: ProcessGroup | None, check: Callable[[FolderMatch], object]
    ) -> None:
        """Read the targets that are objects. Changes nothing. Collective.

        Args:
            what: The name of the operation in messages.
            group: The group of all ranks; None: there is one rank.
            check: Function that raises if the objects do not fit.

        Raises:
            Exception: An object cannot be read, is refused or does not fit. All ranks raise.
        """
        tensors = {key: value for key, value in self.targets.items() if value is not None}
        objects = {key: value for key, value in self.targets.items() if value is None}
        error: Exception | None = None
        try:
            self._check_copies()
            read_entries(self._folder, self._metadata, objects, trust=self._trust)
            with self._extra.reading():
                for key in self._others:
                    objects[key] = self._unpack(key, objects[key])
                for key in self._examined:
                    examined: Targets = {key: None}
                    read_entries(self._folder, self._metadata, examined, trust=self._trust)
                    self._examine(self._unpack(key, examined.pop(key)))
            self.targets |= objects
            check(self)
        except Exception as caught:
            error = caught
        agree(what, error, group)
        self._tensors = tensors | self._extra.targets
        if self._saved.below(EXTRA_TENSORS):
            self._files.fetch(lambda: files_of(self._tensors, self._metadata))

    def _check_copies(self) -> None:
        """Check that the entries of each tied weight are equal. Reads this rank's slices."""
        different = []
        for key, first in self._copies.items():
            target = self.targets[first]
            values = [empty_like(target, target.device) for _ in range(2)]
            read: Targets = dict(zip((first, key), values, strict=True))
            read_entries(self._folder, self._metadata, read)
            if any(
                not are_same(one, other)
                for (_, one), (_, other) in zip(*map(parts_of, values), strict=True)
            ):
                different.append((first, key))
        if different:
            raise ValueError(f"checkpoint {self._folder}: {untied_text(different)}")

    def _unpack(self, key: str, packed: Any) -> Any:
        return unpack(packed, f"{self._folder}: {key}", self._trust)

    def foreign_slices(self, key: str, value: Any) -> list[str]:
        """Describe the slices of other ranks in a value of the object at ``key``. See
        :meth:`.ExtraTargets.foreign_slices`."""
        is_own = key.startswith(f"{RANKS}.")
        return self._extra.foreign_slices(value, self._engine, is_own=is_own)

    def load(self, what: str, group: ProcessGroup | None) -> None:
        """Read the targets that are tensors, in place, and load all targets into engine and
        optimizer. Collective.

        Args:
            what: The name of the operation in messages.
            group: The group of all ranks; None: there is one rank.

        Raises:
            RuntimeError: Reading tensors failed on some rank. The engine then has missing values.
        """
        tensors = self._tensors
        error: Exception | None = None
        with self._engine.missing_values.replacing(map(_missing_key, tensors)):
            try:
                read_entries(self._folder, self._metadata, tensors, group, alone=group is None)
                self.targets |= tensors
                set_extra_states(self._engine, self._saved, self._extra_states, self.targets)
                if self._optimizer is not None:
                    self._optimizer.apply(self.targets)
            except Exception as caught:
                error = RuntimeError(
                    f"reading failed halfway: {caught}. Weights are partly replaced; load a "
                    "checkpoint again"
                )
                error.__cause__ = caught
            self._engine.weights_changed()
            agree(what, error, group)


def _first_name(key: str, ties: Mapping[str, str]) -> str:
    """Returns the first name of the weight in the entry ``key`` at the save."""
    name = key.removeprefix(f"{MODEL}.")
    return ties.get(name, name)


def _missing_key(key: str) -> Hashable:
    """Returns the key of an entry in ``engine.missing_values``: a tensor's name in the model; for
    any other entry a key that no tensor of the model has."""
    name = key.removeprefix(f"{MODEL}.")
    return name if name != key else (key,)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Planner that reads objects without running code, unless ``trust`` is set."""

    def __init__(self, folder: Path, trust: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder
        self._trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store an object that was read."""
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
    """Read entries of a checkpoint.

    Args:
        folder: The folder of the checkpoint.
        metadata: The metadata of the checkpoint.
        targets: The entries to read, by key. Tensors are filled in place, and None is replaced by
            the object.
        group: The process group of the ranks that read together.
        alone: Whether this rank reads alone; the call is then not collective.
        trust: Allow objects of any class, which may run arbitrary code.

    Raises:
        Exception: Reading failed on some rank. All ranks that read together raise the same class.
    """
    with _ignore_single_rank_warning(), convert_dcp_errors("reading"):
        dcp.load(
            targets,
            storage_reader=Reader(folder, metadata),
            planner=_LoadPlanner(folder, trust),
            process_group=group,
            no_dist=alone,
        )


def files_of(targets: Targets, metadata: Metadata) -> set[str]:
    """Returns the names of the files that :func:`read_entries` reads for ``targets``."""
    planner = _LoadPlanner(Path(), trust=False)
    planner.set_up_planner(targets, metadata, is_coordinator=False)
    return {
        metadata.storage_data[item.storage_index].relative_path
        for item in planner.create_local_plan().items
    }


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context without garbage collection. DCP's plans consist of so many objects that creating them
    would trigger a full collection on some rank, for which all other ranks would wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _ignore_single_rank_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
