"""A run in one folder: weights, optimizer state, and all else that it needs to go on.

What :class:`~fsdp_engine.checkpoint.checkpointer.Checkpointer` keeps in a directory of its own, and
what others (Ray Train) keep where they like: they write a folder, and load one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_engine.checkpoint.dcp_metadata import METADATA
from fsdp_engine.checkpoint.engines import Engines, as_one, axis_sizes, level_names
from fsdp_engine.checkpoint.folder import (
    FolderMatch,
    LoadReport,
    load_matching,
    training_entries,
    write_entries,
)
from fsdp_engine.checkpoint.manifest import (
    FileRow,
    Manifest,
    library_versions,
    tensor_rows,
)
from fsdp_engine.checkpoint.model_state import EXTRA, RANKS
from fsdp_engine.checkpoint.optimizer_state import optimizer_kind
from fsdp_engine.checkpoint.run_state import (
    Stateful,
    check_extra,
    pack,
    random_state,
    set_random_state,
)
from fsdp_engine.checkpoint.verification import check_sizes, verify_files
from fsdp_engine.checkpoint.writer import Writer
from fsdp_engine.devices.agreement import agree


class Run:
    """What is saved of a run, and takes up what was saved.

    Args:
        engine: an engine, or several by name.
        optimizer: over the parameters of all of them; None: weights only.
        extra: objects with a state, by name. Every rank saves its own.
        trainable_only: see :class:`~fsdp_engine.checkpoint.checkpointer.Checkpointer`.

    Attributes:
        ranks: those of the engine.

    Raises:
        TypeError, ValueError: ``engine`` or ``extra`` is none of these.
    """

    def __init__(
        self,
        engine: Engines,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Stateful] | None,
        *,
        trainable_only: bool = False,
    ) -> None:
        self._extra = check_extra(extra)
        self._engine = as_one(engine)
        self._levels = level_names(engine)
        self._optimizer = optimizer
        self._trainable_only = trainable_only
        self.ranks = self._engine.ranks

    @property
    def optimizer_kind(self) -> str | None:
        """See :func:`~fsdp_engine.checkpoint.optimizer_state.optimizer_kind`."""
        return optimizer_kind(self._optimizer)

    def entries(self) -> dict[str, Any]:
        """What this rank contributes: views of what lives, not copies.

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
        """Write what all ranks contribute. Collective; an error on one rank is raised on all.

        Args:
            entries: of this rank, or copies of them.
            folder: where this rank's files go; rank 0's gets the metadata and the manifest, too.
            step: of training.
            group: to do it over.
            publish: called on rank 0 when everything is there.
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
        self, folder: Path, *, strict: bool, verify: bool, trust: bool, what: str
    ) -> LoadReport:
        """Take up what is in ``folder``, the files of all ranks. Collective. For methods that users
        call: a warning names the line that called the caller.

        Args:
            folder: one that all ranks see; or copies of it with one content.
            strict, verify, trust: see :meth:`Checkpointer.load`.
            what: is being done, for messages.

        Raises:
            FileNotFoundError, ValueError, RuntimeError: see :meth:`Checkpointer.load`.
        """
        ranks_key = f"{RANKS}.{self.ranks.rank}"
        manifest = self._check_files(folder, verify)

        def make() -> FolderMatch:
            return FolderMatch(
                folder,
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
            # Known only now that the entry has been read: too late to refuse, too bad to hide.
            problems.append(f"missing {EXTRA}.{name}: expected its state; found nothing")
            warnings.warn(f"load of {folder}: {problems[-1]}; it stays as it is", stacklevel=3)
        return LoadReport(manifest.step, problems, extra)

    def _check_files(self, folder: Path, verify: bool) -> Manifest:
        """The manifest of a checkpoint whose files are there. Ranks share the work."""
        manifest: Manifest | None = None
        error: Exception | None = None
        try:
            manifest = Manifest.read(folder)
            names = sorted(manifest.files)[self.ranks.rank :: self.ranks.size]
            check_sizes(folder, manifest, names)
            # Small, and read anyhow: is it this save's?
            verify_files(folder, manifest, names if verify else {METADATA} & {*names})
        except Exception as caught:
            error = caught
        agree(f"load of {folder}", error, self.ranks.control_group)
        assert manifest is not None
        return manifest
