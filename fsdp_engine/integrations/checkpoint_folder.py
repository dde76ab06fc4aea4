"""Saves and loads the checkpoint of a trainer in one folder, under the name that the trainer
chooses.

The folder has the format of ``fsdp_engine.save_checkpoint``: it can be loaded at any level and on
any number of ranks, and the command line of ``fsdp_engine.checkpoint`` can read it. There are these
differences:

- A new folder is written as ``.saving-<name>`` and renamed when it is complete. An older checkpoint
  of that name is replaced when the new metadata is renamed into place.
- One folder can contain several engines and several optimizers.
- ``extra`` contains the trainer's state (loops, callbacks, schedulers).
- The folder contains random states of the ranks, which are restored on the same number of ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from fsdp_engine.checkpoint.dcp_metadata import read_metadata
from fsdp_engine.checkpoint.directory import sync_folder
from fsdp_engine.checkpoint.extra_tensors import (
    ExtraTargets,
    ExtraTensors,
    check_same_tensors,
    digest_of,
)
from fsdp_engine.checkpoint.files import CheckpointFiles
from fsdp_engine.checkpoint.folder import (
    FolderMatch,
    check_extra_slices,
    collector_paused,
    load_matching,
    read_entries,
    training_entries,
    write_entries,
)
from fsdp_engine.checkpoint.joint_optimizer import join_optimizers
from fsdp_engine.checkpoint.manifest import FileRow
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    RANKS,
    Saved,
    nested,
)
from fsdp_engine.checkpoint.run_state import pack, random_state, set_random_state, unpack
from fsdp_engine.checkpoint.sharded_model import Engines, join_engines
from fsdp_engine.checkpoint.writer import PREFIX, SUFFIX, Writer
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine

# Name of the folder that contains temporary folders, beside the checkpoints.
SAVING = ".saving"
# Prefix of the name, within ``SAVING``, of an older checkpoint that is being replaced.
_BEFORE = "before-"


@contextmanager
def atomic_folder(folder: Path, engine: Engine) -> Iterator[Path]:
    """Context in which all ranks write into a temporary folder, which is renamed at the end.

    An existing ``folder`` is removed when the new one is complete. The next save into the same
    parent removes temporary folders of killed jobs. If a job was killed while it replaced a folder,
    that save restores the older folder first. Collective.

    Args:
        folder: The path of the folder, on storage that all ranks share.
        engine: An engine over the ranks that write.

    Yields:
        The temporary folder, ``.saving/<name>`` beside ``folder``.

    Raises:
        Exception: An error of any rank. All ranks raise, and ``folder`` is unchanged.
    """
    engine.await_ranks()
    group, is_first = engine.ranks.control_group, engine.ranks.rank == 0

    def check(error: Exception | None) -> None:
        agree(f"saving {folder}", error, group, call="a save into a folder")

    staging = folder.parent / SAVING / folder.name
    error: Exception | None = None
    try:
        if is_first:
            _clear(staging.parent)
            staging.mkdir(parents=True)
    except OSError as caught:
        error = caught
    check(error)
    try:
        yield staging
    except Exception as caught:
        error = caught
    try:
        check(error)
        if is_first:
            _publish(staging, folder)
    except Exception as caught:
        error = caught
    try:
        if is_first:
            _clear(staging.parent)
    except OSError as caught:
        error = error or caught
    check(error)


def _publish(staging: Path, folder: Path) -> None:
    for path in [*staging.rglob("*"), staging]:
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        folder.rename(staging.parent / f"{_BEFORE}{folder.name}")
    staging.rename(folder)
    sync_folder(folder.parent)


def _clear(saving: Path) -> None:
    """Remove temporary folders. If a save has ended between the two renames of :func:`_publish`,
    rename the older folder back first."""
    for before in saving.glob(f"{_BEFORE}*"):
        name = before.name.removeprefix(_BEFORE)
        if (saving / name).exists() and not (saving.parent / name).exists():
            before.rename(saving.parent / name)
    shutil.rmtree(saving, ignore_errors=True)


_SAVING, _REMOVING = ".saving-", ".removing-"
# Entries of ``extra``: the trainer's state, and the number of param groups of each optimizer.
_STATE, _NUM_GROUPS = "state", "num_groups"

Keeps = Callable[[str, Any], bool]


def save_folder(
    path: Path,
    engines: Engines,
    optimizers: Sequence[Optimizer],
    extra: dict[str, Any],
    *,
    keeps: Keeps | None = None,
) -> None:
    """Write the checkpoint of a trainer. Collective.

    Args:
        path: The path of the folder, which is the same on all ranks.
        engines: An engine, or a dict of several engines.
        optimizers: The optimizers over the engines' parameters. No two have the same parameter.
        extra: The trainer's state. The state of rank 0 is saved. Each rank saves its slices of
            sharded tensors in it.
        keeps: Function that is called with the name and the value of an entry of the models, and
            returns whether to save it. None: all entries are saved.

    Raises:
        Exception: An error of ``fsdp_engine.save_checkpoint``. All ranks raise.
    """
    model = join_engines(engines)
    model.await_ranks()
    group, rank = model.ranks.control_group, model.ranks.rank
    entries: dict[str, Any] = {}
    staging: Path | None = None
    signature: list[str] = []
    error: Exception | None = None
    try:
        entries = training_entries(model, join_optimizers(optimizers))
        if keeps is not None:
            kept = {name: value for name, value in entries[MODEL].items() if keeps(name, value)}
            entries[MODEL] = kept
        own = {"random": random_state(model.ranks.device), "num_ranks": model.ranks.size}
        entries[RANKS] = {str(rank): pack(own)}
        num_groups = [len(each.param_groups) for each in optimizers]
        tensors = ExtraTensors(model)
        packed = tensors.pack({_STATE: extra, _NUM_GROUPS: num_groups}, extra)
        entries |= tensors.section
        signature = tensors.signature
        if rank == 0:
            entries[EXTRA] = packed
            staging = _begin(path)
    except Exception as caught:
        error = caught

    def discard() -> None:
        if rank == 0 and staging not in (None, path):
            shutil.rmtree(staging, ignore_errors=True)

    try:
        answers = agree("save_checkpoint()", error, group, (staging, digest_of(signature)))
        check_same_tensors([digest for _, digest in answers], signature, group)
    except Exception:
        discard()
        raise
    staging = answers[0][0]
    assert staging is not None

    def publish(metadata: Metadata, rows: dict[str, FileRow]) -> None:
        if staging == path:
            for file in path.glob(f"{PREFIX}*{SUFFIX}"):
                if file.name not in rows:
                    file.unlink(missing_ok=True)
            return
        if path.is_symlink():
            path.unlink()
        sync_folder(staging)
        staging.rename(path)
        sync_folder(path.parent)

    writer = Writer(staging, publish)
    try:
        write_entries(entries, writer, group)
    except Exception:
        writer.discard()
        discard()
        raise


def load_folder(
    path: Path,
    engines: Engines,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool = True,
    trust: bool = False,
) -> dict[str, Any]:
    """Load a folder of :func:`save_folder`. Returns its ``extra``. Collective.

    Args:
        path: The path of the folder.
        engines: The engine, or a dict of engines, whose weights are replaced.
        optimizers: The optimizers whose state is replaced. Empty: only weights are loaded.
        strict: Raise if entries are missing, unexpected or do not fit. False: load the entries that
            fit.
        trust: Allow objects of any class, which may run arbitrary code.

    Raises:
        Exception: An error of ``fsdp_engine.load_checkpoint``. All ranks raise.
    """
    model = join_engines(engines)
    model.await_ranks()
    group = model.ranks.control_group
    own_key = f"{RANKS}.{model.ranks.rank}"

    def make() -> FolderMatch:
        optimizer = join_optimizers(optimizers)
        files = CheckpointFiles(path, model.ranks)
        return FolderMatch(files, model, optimizer, (EXTRA, own_key), trust)

    with collector_paused():
        match = load_matching(
            "load_checkpoint()", group, make, strict=strict, check=check_extra_slices
        )
    own = match.targets.get(own_key)
    if own is not None and own.get("num_ranks") == model.ranks.size:
        set_random_state(own["random"], model.ranks.device)
    return _extra_of(match.targets.get(EXTRA, {}))


def read_file(path: Path, engine: Engine, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint file of another strategy of the trainer, memory-mapped. Collective.

    Raises:
        Exception: The file cannot be read. All ranks raise.
    """
    found: dict[str, Any] = {}
    error: Exception | None = None
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
    except Exception as caught:
        error = caught
    agree("load_checkpoint()", error, engine.ranks.control_group)
    return found


def read_extra(path: Path, trust: bool = False) -> dict[str, Any]:
    """Read the ``extra`` of a checkpoint. Not collective.

    Raises:
        FileNotFoundError, NotADirectoryError: There is no checkpoint.
        ValueError: The checkpoint is damaged, or contains a class that could run code.
    """
    metadata = read_metadata(path, trust)
    return _extra_of(_read_objects(path, metadata, trust))


def read_whole(path: Path, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint of one model as plain tensors on the CPU, without a process group.

    Returns:
        The ``extra``, with ``state_dict`` and, if there are optimizers, ``optimizer_states``: the
        state of each optimizer in the format of ``torch.optim``, with parameters as indices.

    Raises:
        Exception: An error of :func:`read_extra`.
    """
    metadata = read_metadata(path, trust)
    saved = Saved(metadata)
    targets = {key: saved.empty(key) for top in (MODEL, OPTIMIZER) for key in saved.below(top)}
    read_entries(path, metadata, targets, trust=trust)
    packed = _read_objects(path, metadata, trust)
    by_path = {saved.paths[key]: value for key, value in targets.items()}
    weights = {
        ".".join(map(str, parts[1:])): value
        for parts, value in by_path.items()
        if parts[0] == MODEL
    }
    whole = {**_extra_of(packed), "state_dict": weights}
    optimizer = {parts[1:]: value for parts, value in by_path.items() if parts[0] == OPTIMIZER}
    if optimizer:
        whole["optimizer_states"] = _split(nested(optimizer), packed.get(_NUM_GROUPS, []))
    return whole


def remove_folder(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that readers never find a partial checkpoint."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        hidden = path.with_name(f"{_REMOVING}{path.name}")
        if hidden.exists():  # left by a killed job
            shutil.rmtree(hidden)
        shutil.rmtree(path.rename(hidden))


def _begin(path: Path) -> Path:
    """Returns the folder to write into: ``path`` if it is already a folder, else a temporary
    one."""
    if path.is_file():
        raise NotADirectoryError(f"path: expected a folder, or nothing; found the file {path}")
    if path.is_dir() and not path.is_symlink():
        return path
    staging = path.with_name(f"{_SAVING}{path.name}")
    if staging.exists():  # left by a killed job
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def _read_objects(path: Path, metadata: Metadata, trust: bool) -> dict[str, Any]:
    if EXTRA not in metadata.state_dict_metadata:
        return {}
    objects: dict[str, Any] = {EXTRA: None}
    read_entries(path, metadata, objects, trust=trust)
    full = ExtraTargets(Saved(metadata))
    with full.reading():
        found: dict[str, Any] = unpack(objects[EXTRA], f"{path}: {EXTRA}", trust)
    read_entries(path, metadata, full.targets)
    return found


def _extra_of(packed: dict[str, Any]) -> dict[str, Any]:
    """Returns the trainer's state. For a checkpoint of ``fsdp_engine.save_checkpoint``, this is all
    of ``extra``."""
    extra: dict[str, Any] = packed[_STATE] if _NUM_GROUPS in packed else packed
    return extra


def _split(optimizer: dict[str, Any], num_groups: Sequence[int]) -> list[dict[str, Any]]:
    """Split the joint state, by parameter names, into a state by parameter indices for each
    optimizer."""
    states, groups = optimizer.get("state", {}), list(optimizer["param_groups"])
    found = []
    for count in num_groups or [len(groups)]:
        names: list[str] = []
        packed = []
        for group in groups[:count]:
            first = len(names)
            names += group["params"]
            packed.append({**group, "params": list(range(first, len(names)))})
        state = {number: states[name] for number, name in enumerate(names) if name in states}
        found.append({"state": state, "param_groups": packed})
        groups = groups[count:]
    return found


def load_whole(
    weights: dict[str, Any],
    states: Sequence[dict[str, Any]],
    engine: Engine,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool = True,
) -> None:
    """Load unsharded tensors into a sharded model and its optimizers. Each rank keeps its slices.

    Args:
        weights: An unsharded ``state_dict``.
        states: The state of each optimizer, by parameter indices. Empty: only weights are loaded.
        engine: The engine whose weights are replaced.
        optimizers: The optimizers over its parameters.
        strict: Raise if names are missing or unexpected.

    Raises:
        RuntimeError: Weights do not fit.
        ValueError: The numbers of optimizers and states differ.
    """
    engine.model.load_state_dict(weights, strict=strict)
    engine.weights_changed()
    if states and len(states) != len(optimizers):
        raise ValueError(
            f"optimizer_states: expected {len(optimizers)} of them, one for each optimizer; "
            f"found {len(states)}"
        )
    for optimizer, packed in zip(optimizers, states, strict=False):
        load_whole_state(optimizer, packed)


def load_whole_state(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Load the state of an optimizer over unsharded parameters into an optimizer over sharded ones.

    Args:
        optimizer: The optimizer over the sharded parameters, in the same order.
        packed: The ``state_dict`` of the other optimizer, with unsharded tensors.
    """
    numbered = [param for group in optimizer.param_groups for param in group["params"]]
    sliced = {
        number: {key: _like(numbered[number], value) for key, value in state.items()}
        for number, state in packed["state"].items()
    }
    optimizer.load_state_dict({**packed, "state": sliced})


def _like(param: torch.Tensor, value: Any) -> Any:
    """Shard a state like its parameter, if it has the parameter's shape and is not 0-d."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not value.ndim:
        return value
    return torch.clone(param.detach()).to(value.dtype).copy_(value)
