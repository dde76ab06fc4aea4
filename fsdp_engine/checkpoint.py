"""Checkpoints through ``torch.distributed.checkpoint``: any ranks, strategy and mesh load them.

A checkpoint is a folder in DCP's own format. Every rank writes its slices and reads what it holds;
nothing is gathered. Entries have the names that unsharded code uses for them:

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
    ========================================  ====================================================

So unsharded code reads the weights with ``dcp.load({"model": model.state_dict()},
checkpoint_id=path)``, and what it wrote with ``dcp.save({"model": model.state_dict()}, ...)`` loads
here. With ``"optimizer": get_optimizer_state_dict(model, optimizer)`` of
``torch.distributed.checkpoint.state_dict`` beside it, as FSDP2 users write it, the optimizer loads
too.

A checkpoint that is saved over an older one replaces it at the very end, when its metadata is
renamed into place: a job that is killed while it saves leaves the older one whole.

Checkpoints hold pickles. Load only what you trust.
"""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from fsdp_engine.checkpoint_optimizer import OptimizerMatch, group_targets, optimizer_entries
from fsdp_engine.checkpoint_state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    Saved,
    ShardedModel,
    Targets,
    check_at_rest,
    match_model,
    model_entries,
    set_extra_states,
)
from fsdp_engine.collectives import gather_objects

# Before the first underscore after it stand eight digits of the save, then the rank.
_PREFIX = "__shards_"
_SUFFIX = ".distcp"
_METADATA = ".metadata"


def save_checkpoint(
    path: str | os.PathLike[str],
    engine: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write weights, optimizer state and ``extra`` to a folder. Collective.

    Args:
        path: the folder, on storage that all ranks share; made if need be. An older checkpoint in
            it is replaced, other files are left alone.
        engine: what :func:`~fsdp_engine.engine.shard` returned.
        optimizer: one over the engine's parameters. State tensors that have not the parameter's
            shape must be the same on all ranks.
        extra: anything else, as ``torch.save`` takes it: step, LR scheduler, data position. That of
            data-parallel rank 0 is kept.

    Raises:
        NotADirectoryError: ``path`` is a file.
        RuntimeError: within a forward, a backward or ``engine.unsharded()``.
        ValueError, TypeError: the optimizer does not belong to the engine, or has state that is
            neither tensor nor number; ``extra`` is no dict.

        All before anything is written, and on every rank if on one.
    """
    folder = Path(path)
    group = engine.mesh.control_group
    entries: dict[str, Any] = {}
    error: Exception | None = None
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"path: expected a folder; found the file {folder}")
        check_at_rest(engine)
        entries[MODEL] = model_entries(engine)
        if optimizer is not None:
            entries[OPTIMIZER] = optimizer_entries(engine, optimizer)
        packed = _pack(extra)
        if engine.mesh.rank == 0:
            entries[EXTRA] = packed
    except Exception as caught:
        error = caught
    _raise_together("save_checkpoint", error, group)
    with _without_the_warning_of_one_rank():
        dcp.save(
            entries,
            storage_writer=_Writer(folder),
            process_group=group,
            no_dist=group is None,
        )


def load_checkpoint(
    path: str | os.PathLike[str],
    engine: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` or ``torch.distributed.checkpoint`` wrote. Collective.

    Weights are bit by bit what was saved, whatever strategy, mesh and number of ranks saved them,
    and the next forward uses them; so are the optimizer's state and hyperparameters, which are
    matched by parameters' names, not by their order. An optimizer's state is made anew, so that
    the optimizer need not have stepped.

    Args:
        path: the folder.
        engine: whose weights and buffers are replaced.
        optimizer: whose state and hyperparameters are replaced; None: only weights are loaded.

    Returns:
        ``extra`` as it was saved, tensors on the CPU; empty if there was none.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.
        NotADirectoryError: ``path`` is a file.
        ValueError: entries are missing, unexpected, or of another shape or of a dtype that would
            be rounded (all of them are listed), or the optimizer is of another kind, has other
            parameters, or groups them so that one group would have two values of one
            hyperparameter.
        RuntimeError, TypeError: as for :func:`save_checkpoint`.
        torch.distributed.checkpoint.CheckpointException: reading failed half way; weights are then
            partly replaced.

        All but the last before anything is changed, and on every rank if on one.
    """
    folder = Path(path)
    group = engine.mesh.control_group
    match: OptimizerMatch | None = None
    error: Exception | None = None
    targets: Targets = {}
    try:
        saved = Saved(_read_metadata(folder))
        check_at_rest(engine)
        targets, problems, extra_states = match_model(engine, saved)
        if optimizer is not None:
            groups = group_targets(saved)
            _read(folder, groups, None)
            match = OptimizerMatch(engine, optimizer, saved, groups)
            problems += match.problems
            targets |= match.targets
        if problems:
            lines = "\n  ".join(problems)
            raise ValueError(
                f"checkpoint {folder}: expected the entries of this model"
                f"{' and optimizer' if match else ''}; found {len(problems)} that differ\n  {lines}"
            )
        targets |= {key: None for key in saved.below(EXTRA) if key == EXTRA}
    except Exception as caught:
        error = caught
    _raise_together("load_checkpoint", error, group)
    _read(folder, targets, group, alone=group is None)
    set_extra_states(engine, saved, extra_states, targets)
    if match is not None:
        match.apply(targets)
    engine.weights_changed()
    return _unpack(targets.get(EXTRA))


class _Writer(dcp.FileSystemWriter):
    """Writes files with names of their own, and removes those of the checkpoint it replaces.

    Torch's own would write over the files that the older metadata still points to.
    """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Without the warning that a checkpoint is there."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: names for all ranks' files."""
        save = uuid.uuid4().hex[:8]
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{_PREFIX}{save}_{rank}_"
                ),
            )
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On the coordinator, when all ranks have written."""
        super().finish(metadata, results)
        current = {write.storage_data.relative_path for writes in results for write in writes}
        for file in Path(self.path).glob(f"{_PREFIX}*{_SUFFIX}"):
            if file.name not in current:
                file.unlink(missing_ok=True)


def _read_metadata(folder: Path) -> Metadata:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"path: expected the folder of a checkpoint; found file {folder}")
    if not (folder / _METADATA).is_file():
        found = f"a folder without {_METADATA}" if folder.exists() else "nothing"
        raise FileNotFoundError(f"path: expected a checkpoint at {folder}; found {found}")
    return dcp.FileSystemReader(folder).read_metadata()


def _read(folder: Path, targets: Targets, group: ProcessGroup | None, alone: bool = True) -> None:
    """Fill ``targets``; ``alone``: without the other ranks."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _without_the_warning_of_one_rank():
        dcp.load(
            targets,
            storage_reader=dcp.FileSystemReader(folder),
            planner=planner,
            process_group=group,
            no_dist=alone,
        )


def _pack(extra: dict[str, Any] | None) -> bytes:
    """One opaque entry: DCP would take a dict apart and lose its empty parts and its key types."""
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra: expected a dict or None; found {type(extra).__name__}")
    packed = io.BytesIO()
    torch.save(extra or {}, packed)
    return packed.getvalue()


def _unpack(packed: Any) -> dict[str, Any]:
    if not isinstance(packed, bytes):
        return {}
    extra: dict[str, Any] = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
    return extra


def _raise_together(what: str, error: Exception | None, group: ProcessGroup | None) -> None:
    """Raise this rank's error, or another rank's, so that nobody waits for somebody who left."""
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    texts = gather_objects(text, group)
    if error is not None:
        raise error
    for rank, other in enumerate(texts):
        if other:
            raise ValueError(f"{what}() failed on data-parallel rank {rank}: {other}")


@contextmanager
def _without_the_warning_of_one_rank() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
