"""Saves and loads the state of a run in one folder: weights, optimizer, random states, extra.

:class:`~fsdp_engine.checkpoint.checkpointer.Checkpointer` manages a directory of such folders; the
integration of Ray Train writes them into Ray's storage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_engine.checkpoint.dcp_metadata import METADATA
from fsdp_engine.checkpoint.files import CheckpointFiles
from fsdp_engine.checkpoint.folder import (
    FolderMatch,
    LoadReport,
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
from fsdp_engine.checkpoint.model_state import EXTRA, RANKS
from fsdp_engine.checkpoint.optimizer_state import optimizer_kind
from fsdp_engine.checkpoint.reader import check_sizes, verify_files
from fsdp_engine.checkpoint.run_state import (
    Stateful,
    check_extra,
    pack,
    random_state,
    set_random_state,
)
from fsdp_engine.checkpoint.sharded_model import Engines, axis_sizes, join_engines, level_names
from fsdp_engine.checkpoint.writer import Writer
from fsdp_engine.comm.agreement import agree


class Run:
    """The state of a run that is saved and loaded.

    Args:
        engine: an engine, or a dict of several.
        optimizer: over the parameters of all engines; None: weights only.
        extra: objects with a state, by name. Each rank saves its own.
        trainable_only: see :class:`~fsdp_engine.checkpoint.checkpointer.Checkpointer`.

    Attributes:
        ranks: those of the engine.

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

    def await_ranks(self) -> None:
        """See :meth:`Engine.await_ranks`."""
        self._engine.await_ranks()

    @property
    def optimizer_kind(self) -> str | None:
        """See :func:`~fsdp_engine.checkpoint.optimizer_state.optimizer_kind`."""
        return optimizer_kind(self._optimizer)

    def entries(self) -> dict[str, Any]:
        """Entries that this rank saves: views of the current tensors, not copies.

        Raises:
            RuntimeError, ValueError, TypeError: see :meth:`Checkpointer.save`.
        """
        entries = training_entries(
            self._engine, self._optimizer, trainable_only=self._trainable_only
        )
        extra = {name: value.state_dict() for name, value in self._extra.items()}
        own = {"random": random_state(self.ranks.device), "extra": extra}
        entries[RANKS] = {str(self.ranks.rank): pack(own)}
        if self.ranks.rank == 0:
            entries[EXTRA] = pack(extra)
        return entries

    def write(
        self,
        entries: dict[str, Any],
        folder: Path,
        step: int,
        group: ProcessGroup | None,
        publish: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the entries of all ranks. Collective; an error on one rank is raised on all.

        Args:
            entries: of this rank, or copies of them.
            folder: of this rank's files; that of rank 0 also contains metadata and manifest.
            step: of training.
            group: process group of the collectives.
            publish: called on rank 0 when all files are complete.
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
            )
            manifest.write(folder)
            publish()

        write_entries(entries, Writer(folder, finish), group)

    def load(
        self, files: CheckpointFiles, *, strict: bool, verify: bool, trust: bool, what: str
    ) -> LoadReport:
        """Load a checkpoint with the files of all ranks. Collective.

        Warnings have the location of the call of the caller.

        Args:
            files: of the checkpoint.
            strict, verify, trust: see :meth:`Checkpointer.load`.
            what: name of the operation, for messages.

        Raises:
            FileNotFoundError, ValueError, RuntimeError: see :meth:`Checkpointer.load`.
        """
        ranks_key = f"{RANKS}.{self.ranks.rank}"
        manifest = self._check_files(files, verify)

        def make() -> FolderMatch:
            return FolderMatch(
                files,
                self._engine,
                self._optimizer,
                (EXTRA, ranks_key),
                trust,
                trainable_only=self._trainable_only,
            )

        match = load_matching(what, self.ranks.control_group, make, strict=strict)
        extra = match.targets.get(EXTRA, {})
        own = match.targets.get(ranks_key)
        if own is not None and manifest.world_size == self.ranks.size:
            set_random_state(own["random"], self.ranks.device)
            extra = own["extra"]
        problems = list(match.problems)
        for name, value in self._extra.items():
            if name in extra:
                value.load_state_dict(extra[name])
                continue
            # The entry is read after weights were replaced, so this can only be a warning.
            problems.append(f"missing {EXTRA}.{name}: expected its state; found nothing")
            warnings.warn(
                f"load of {files.folder}: {problems[-1]}; it stays as it is", stacklevel=3
            )
        return LoadReport(manifest.step, problems, extra)

    def _check_files(self, files: CheckpointFiles, verify: bool) -> Manifest:
        """Check the files of a checkpoint, and return its manifest. The ranks share the work."""
        folder = files.folder
        manifest: Manifest | None = None
        error: Exception | None = None
        try:
            manifest = Manifest.read(folder)
            names = files.to_check(manifest.files)
            check_sizes(folder, manifest, names)
            # The metadata is small; its checksum is verified in any case.
            verify_files(folder, manifest, names if verify else {METADATA} & {*names})
        except Exception as caught:
            error = caught
        agree(f"load of {folder}", error, self.ranks.control_group)
        assert manifest is not None
        return manifest
