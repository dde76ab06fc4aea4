"""Saves and loads the state of a run in one folder: weights, optimizer, random states, extra.

``Checkpointer`` manages a directory of such folders. The integration of Ray Train writes them into
Ray's storage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_engine.checkpoint.dcp_metadata import METADATA
from fsdp_engine.checkpoint.extra_tensors import (
    ExtraTensors,
    check_same_tensors,
    digest_of,
)
from fsdp_engine.checkpoint.files import CheckpointFiles
from fsdp_engine.checkpoint.folder import (
    FolderMatch,
    RunReport,
    foreign_slices_text,
    load_matching,
    training_entries,
    write_entries,
)
from fsdp_engine.checkpoint.joint_optimizer import Optimizers
from fsdp_engine.checkpoint.manifest import (
    FileRow,
    Manifest,
    library_versions,
    tensor_rows,
)
from fsdp_engine.checkpoint.model_state import EXTRA, RANKS, Saved, ties
from fsdp_engine.checkpoint.optimizer_state import optimizer_kind
from fsdp_engine.checkpoint.reader import check_sizes, verify_files
from fsdp_engine.checkpoint.run_state import (
    RandomUse,
    Stateful,
    check_extra,
    digests,
    random_state,
    set_random_state,
    warn_of_refused,
)
from fsdp_engine.checkpoint.sharded_model import Engines, axis_sizes, join_engines, level_names
from fsdp_engine.checkpoint.stage_place import Place, place_of
from fsdp_engine.checkpoint.writer import Writer
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.terminal import counted


class Run:
    """The state of a run that is saved and loaded.

    Args:
        engine: An engine, or a dict of several engines.
        optimizer: The optimizer over the parameters of all engines. None: only weights.
        extra: Objects with a state, by name. Each rank saves the state of its own objects.
        trainable_only: Neither save nor load frozen parameters; see ``Checkpointer``.

    Attributes:
        ranks: The ranks of the engine.

    Raises:
        TypeError, ValueError: ``engine`` or ``extra`` has a wrong type or value.
    """

    def __init__(
        self,
        engine: Engines,
        optimizer: Optimizers | None,
        extra: Mapping[str, Stateful] | None,
        *,
        trainable_only: bool = False,
    ) -> None:
        self._extra = check_extra(extra)
        self._engine = join_engines(engine)
        self._levels = level_names(engine)
        self._optimizer = optimizer
        self._trainable_only = trainable_only
        self.ranks = self._engine.ranks
        self._random_use = RandomUse(self.ranks.device, was_used=self._engine.has_trained)
        self._signature: list[str] = []
        self._ties: dict[str, str] = {}

    def await_ranks(self) -> None:
        """Take part in the gathers of other ranks; see ``Engine.await_ranks``."""
        self._engine.await_ranks()

    @property
    def optimizer_kind(self) -> str | None:
        """The names of the optimizers' classes; None without an optimizer."""
        return optimizer_kind(self._optimizer)

    @property
    def place(self) -> Place:
        """The place of the model among the models of the job; see :func:`.place_of`."""
        return place_of(self._engine.ranks, self._engine.model_part)

    def entries(self) -> dict[str, Any]:
        """Returns the entries that this rank saves: views of the current tensors, not copies.

        Raises:
            RuntimeError, ValueError, TypeError: Errors of ``Checkpointer.save``.
        """
        entries = training_entries(
            self._engine, self._optimizer, trainable_only=self._trainable_only
        )
        extra = {name: value.state_dict() for name, value in self._extra.items()}
        random = random_state(self.ranks.device)
        own = {"random": random, "draws": self._random_use.is_used(random), "extra": extra}
        tensors = ExtraTensors(self._engine)
        entries[RANKS] = {str(self.ranks.rank): tensors.pack(own, extra)}
        if self.ranks.rank == 0:
            entries[EXTRA] = tensors.pack(extra, extra)
            warn_of_refused(entries[EXTRA], extra)
        entries |= tensors.section
        self._signature = tensors.signature
        self._ties = ties(self._engine)
        return entries

    @property
    def extra_digest(self) -> int:
        """A digest of the sharded tensors in the ``extra`` of :meth:`entries`."""
        return digest_of(self._signature)

    def check_extra_tensors(self, digests_of_ranks: Sequence[int]) -> None:
        """Check that all ranks save the same sharded tensors in ``extra``, by the ``extra_digest``
        of all ranks. See :func:`.check_same_tensors`."""
        check_same_tensors(digests_of_ranks, self._signature, self.ranks.control_group)

    def write(
        self,
        entries: dict[str, Any],
        folder: Path,
        step: int,
        group: ProcessGroup | None,
        publish: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the entries of all ranks. Collective. All ranks raise an error of any rank.

        Args:
            entries: The entries of this rank, or copies of them.
            folder: The folder of this rank's files. The folder of rank 0 also gets the metadata and
                the manifest.
            step: The step of training.
            group: The process group of the collectives.
            publish: Function that rank 0 calls when all files are complete.
        """

        def finish(saved: Metadata, files: dict[str, FileRow]) -> None:
            manifest = Manifest(
                step=step,
                world_size=self.ranks.size,
                mesh=axis_sizes(self._engine),
                strategy=self._levels,
                tensors=tensor_rows(saved),
                files=files,
                libraries=library_versions(),
                trainable_only=self._trainable_only,
                stage=self.place,
                ties=self._ties,
            )
            manifest.write(folder)
            publish()

        write_entries(entries, Writer(folder, finish), group)

    def load(
        self, files: CheckpointFiles, *, strict: bool, verify: bool, trust: bool, what: str
    ) -> RunReport:
        """Load a checkpoint. Collective.

        Warnings name the line that has called the caller of this method.

        Args:
            files: The files of the checkpoint.
            strict, verify, trust: The arguments of ``Checkpointer.load``.
            what: The name of the operation in messages.

        Raises:
            FileNotFoundError, ValueError, RuntimeError: Errors of ``Checkpointer.load``.
        """
        ranks_key = f"{RANKS}.{self.ranks.rank}"
        manifest = self._check_files(files, verify)
        is_same_job = manifest.world_size == self.ranks.size
        found: dict[str, Any] = {}
        foreign: list[str] = []
        rows: list[dict[str, str]] = []
        draws: list[bool] = []  # whether saved ranks have drawn from global generators

        def others(saved: Saved) -> Sequence[str]:
            # The loading ranks share the comparison of the extras of the saved ranks.
            by_rank = sorted(saved.below(RANKS), key=lambda key: (len(key), key))
            return () if is_same_job else by_rank[self.ranks.rank :: self.ranks.size]

        def examine(own: dict[str, Any]) -> None:
            draws.append(own.get("draws", True))
            extra = own["extra"]
            rows.append(digests({name: extra[name] for name in self._extra if name in extra}))

        def make() -> FolderMatch:
            return FolderMatch(
                files,
                self._engine,
                self._optimizer,
                (ranks_key if is_same_job else EXTRA,),
                trust,
                examined=others,
                examine=examine,
                trainable_only=self._trainable_only,
                is_same_job=is_same_job,
                ties=manifest.ties,
            )

        def check(match: FolderMatch) -> None:
            key = ranks_key if is_same_job else EXTRA
            read = match.targets.get(key, {})
            extra = read.get("extra", {}) if is_same_job else read
            for name in list(extra):
                lines = match.foreign_slices(key, extra[name])
                if name in self._extra and lines:
                    text = foreign_slices_text(f"{EXTRA}[{name!r}]", lines)
                    if strict:
                        raise ValueError(text)
                    foreign.append(text)
                    del extra[name]
            found.update(extra)

        def before_load(match: FolderMatch) -> None:
            if not match.has_sharded_objects:
                # Weights are loaded afterwards, so they are unchanged if an object raises an error.
                self._load_extra(found)

        match = load_matching(
            what,
            self.ranks.control_group,
            make,
            strict=strict,
            check=check,
            before_load=before_load,
        )

        warned: list[str] = []
        of_rank_0: list[str] = []
        if is_same_job and ranks_key in match.targets:
            own = match.targets[ranks_key]
            set_random_state(own["random"], self.ranks.device)
            self._random_use.restart(was_used=own.get("draws", True))
        elif not is_same_job:
            of_rank_0, was_used = self._of_other_ranks(rows, draws)
            self._random_use.restart(was_used=was_used)
            at_save = counted(manifest.world_size, "rank")
            other = f"found {at_save} at the save, {self.ranks.size} at this load. "
            if was_used:
                warned.append(
                    f"{other}Random states stay as they are. The run has drawn from the global "
                    "generators of torch, Python or NumPy: what depends on them (batches, dropout, "
                    "augmentation) repeats the start of the run. Call torch.manual_seed(seed + "
                    "step * ranks + rank) now, or seed each step by its number and the rank. "
                    "Ignore this if a DistributedSampler chooses the batches and nothing else is "
                    "random: iter(DataLoader) also draws"
                )
            if of_rank_0:
                more = f" and {len(of_rank_0) - 8} more" if len(of_rank_0) > 8 else ""
                warned.append(
                    f"{other}The saved ranks had different values of "
                    f"{', '.join(of_rank_0[:8])}{more}; every rank has loaded those of rank 0"
                )
        problems = [*match.problems, *foreign]
        error: Exception | None = None
        try:
            if match.has_sharded_objects:
                self._load_extra(found)
        except Exception as caught:
            error = caught
        agree(what, error, self.ranks.control_group)
        if match.ignores_optimizer_state:
            warned.append(
                "optimizer: expected one for the saved optimizer state; found None, so only "
                "weights are loaded. To continue training, pass the optimizer to the checkpointer"
            )
        if unused := [name for name in found if name not in self._extra]:
            warned.append(
                f"expected an object in extra for each saved state; found none for "
                f"{', '.join(unused)}, whose state is not loaded. Pass "
                f"extra={{{unused[0]!r}: ...}}, or read it from the result's extra"
            )
        for name in self._extra:
            if name in found:
                continue
            # This is a warning, not an error, because weights are already replaced.
            problems.append(f"missing {EXTRA}.{name}: expected its state; found nothing")
            warned.append(f"{problems[-1]}; it keeps the state from before the load")
        if self.ranks.is_first:  # after the last collective, since warnings may be errors
            for text in warned:
                warnings.warn(f"load of {files.folder}: {text}", stacklevel=3)
        return RunReport(manifest.step, problems, found, of_rank_0)

    def _load_extra(self, found: Mapping[str, Any]) -> None:
        for name, value in self._extra.items():
            if name in found:
                value.load_state_dict(found[name])

    def _of_other_ranks(
        self, rows: list[dict[str, str]], draws: list[bool]
    ) -> tuple[list[str], bool]:
        """Returns the paths of the values that differ between the saved ranks, and whether a saved
        rank has drawn from global generators. Collective.

        Args:
            rows: For each saved rank whose ``extra`` this rank has read: digests by path.
            draws: For each of these ranks, whether it has drawn.
        """
        control = self.ranks.control_group
        firsts: list[Any] = gather_objects(
            rows[0] if self.ranks.is_first and rows else {}, control, "a load of extra"
        )
        first: dict[str, str] = firsts[0]
        mine = {path for row in rows for path in first | row if row.get(path) != first.get(path)}
        every: list[Any] = gather_objects((sorted(mine), any(draws)), control, "a load of extra")
        return sorted(set().union(*(paths for paths, _ in every))), any(used for _, used in every)

    def _check_files(self, files: CheckpointFiles, verify: bool) -> Manifest:
        """Check the files of a checkpoint, and return its manifest. The ranks share the work.
        Collective."""
        folder = files.folder
        manifest: Manifest | None = None
        error: Exception | None = None
        try:
            manifest = Manifest.read(folder)
            names = files.to_check(manifest.files)
            check_sizes(folder, manifest, names)
            # The checksum of the metadata is verified in any case, since the file is small.
            verify_files(folder, manifest, names if verify else {METADATA} & {*names})
        except Exception as caught:
            error = caught
        agree(f"load of {folder}", error, self.ranks.control_group, call="a load")
        assert manifest is not None
        return manifest
