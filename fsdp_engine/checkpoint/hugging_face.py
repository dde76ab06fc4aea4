"""Reads and writes folders of safetensors in the layout of Hugging Face libraries.

Nothing is gathered, and no tensor is sent between ranks. Each rank computes from names, shapes and
dtypes which bytes of which file its slices are (``safetensors_folder.py``), and writes or reads
them through one buffer. Steps of an export:

1. All ranks compute the same plan, and agree on it. Rank 0 creates the files, with headers and
    final
   sizes, in a folder whose name is not that of a model.
2. Each rank writes its slices. If several ranks hold the same elements, one of them writes.
3. When all ranks have finished, rank 0 renames the files into place, the index last
   (``safetensors_folder.py``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from fsdp_engine.checkpoint.export_source import (
    Source,
    checkpoint_sources,
    engine_sources,
)
from fsdp_engine.checkpoint.model_state import (
    check_at_rest,
    check_shared,
)
from fsdp_engine.checkpoint.reader import ReadBuffer
from fsdp_engine.checkpoint.reading_weights import Target, match, read, replace_weights, whole
from fsdp_engine.checkpoint.safetensors_folder import (
    STEM,
    ExportFolder,
    NamedFile,
    TensorInFile,
    dtype_name,
    file_name,
    parse_size,
    plan_file,
    read_folder,
    split,
    tensor_bytes,
    write_elements,
)
from fsdp_engine.checkpoint.sharded_model import EngineLike, ShardedModel
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.groups import Ranks

# Memory that a rank uses in addition to its slices while it reads or writes.
BUFFER_BYTES = 16 << 20


# Maps a name in a file to a name in the model; None: the tensor is not read.
Rename = Callable[[str], str | None] | Mapping[str, str | None]


def export_safetensors(
    engine_or_path: EngineLike | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    progress: Callable[[int], None] = lambda num_bytes: None,
    trust: bool = False,
) -> None:
    """Write weights as safetensors, in the layout of ``save_pretrained``.

    Main weights and persistent buffers (those of rank 0) are written under the model's names. A
    tied weight is written once, under its first name in the order of modules; the file's header
    contains its other names. (Checkpoints do not contain ties: an export from a checkpoint writes a
    tied weight under each name.) Extra states of modules are omitted.

    Args:
        engine_or_path: result of :func:`~fsdp_engine.sharding.shard`; collective over its ranks.
            Or the folder of a checkpoint in the format of ``torch.distributed.checkpoint``, with
            keys ``model.<name>``; called by one process, without a process group.
        directory: on storage that all ranks share; created if it does not exist. Model files of an
            earlier export are replaced, other files (``config.json``) are not changed.
        dtype: for floating-point tensors; None: that of the main weights.
        max_shard_size: maximum bytes of tensors in one file, or a text such as "5GB" (10**9 bytes
            each). A larger tensor is written into a separate file.
        progress: called with the number of bytes that this rank has written, before a cast.
        trust: allow objects of any class in the checkpoint, which may run arbitrary code.

    Raises:
        ValueError, TypeError: an argument is not legal or differs between ranks, the format does
            not support the dtype of a tensor, or the checkpoint is damaged.
        RuntimeError: within a forward, a backward or ``engine.unsharded()``, or after a load that
            failed half way.
        OSError: ``directory`` cannot be written, or there is no checkpoint.

    Each error is raised on all ranks. Files of the new export are removed, unless renaming them
    failed half way.
    """
    buffer_bytes = BUFFER_BYTES
    engine: EngineLike | None = None
    if isinstance(engine_or_path, str | os.PathLike):
        buffer_bytes //= 4  # three buffers: to read through, to read into, and to convert in
        path = Path(engine_or_path)

        def sources() -> list[Source]:
            return checkpoint_sources(path, dtype, buffer_bytes, trust)

    else:
        engine = engine_or_path
        if not hasattr(engine, "mesh"):
            raise TypeError(
                "engine_or_path: expected an Engine or the path of a checkpoint; found "
                f"{type(engine_or_path).__name__}"
            )
        engine.await_ranks()
        sources = partial(engine_sources, engine, dtype)
    export_sources(
        "export_safetensors",
        sources,
        Path(directory),
        dtype,
        max_shard_size,
        ranks=engine.ranks if engine is not None else None,
        buffer_bytes=buffer_bytes,
        progress=progress,
    )


def export_sources(
    what: str,
    make_sources: Callable[[], list[Source]],
    directory: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    *,
    ranks: Ranks | None,
    buffer_bytes: int = BUFFER_BYTES,
    progress: Callable[[int], None] = lambda num_bytes: None,
    stem: str = STEM,
) -> None:
    """Write tensors into a folder; see :func:`export_safetensors`.

    Args:
        what: name of the operation, for messages.
        make_sources: returns the tensors to write; the same names, shapes and dtypes on all ranks.
        ranks: that write together; None: this process alone.
        buffer_bytes: size of the buffer for conversions.
        directory, dtype, max_shard_size, progress: see :func:`export_safetensors`.
        stem: The stem of the file names.
    """
    group, rank = (None, 0) if ranks is None else (ranks.control_group, ranks.rank)
    folder: ExportFolder | None = None
    sources: list[Source] = []
    files: list[NamedFile] = []
    staging: Path | None = None
    error: Exception | None = None
    try:
        max_bytes = parse_size(max_shard_size)
        if dtype is not None:
            _check_dtype(dtype)
        sources = make_sources()
        files = _plan(sources, max_bytes, stem)
        if rank == 0:
            folder = ExportFolder(directory, stem)
            staging = folder.begin(files)
    except Exception as caught:
        error = caught
    try:
        digest = hashlib.sha256(b"".join(file.plan.head for file in files)).hexdigest()
        agreed = agree(what, error, group, (staging, digest))
        if any(other != agreed[0][1] for _, other in agreed):
            raise ValueError(
                "dtype, max_shard_size: expected the same on all ranks; found different plans"
            )
        try:
            _write(agreed[0][0], files, sources, ReadBuffer(buffer_bytes), progress)
        except Exception as caught:
            error = caught
        agree(what, error, group)
        if folder is not None:
            folder.publish(files, sum(map(tensor_bytes, sources)))
    except Exception as caught:
        error = caught
    finally:
        if folder is not None:
            folder.discard()
    # All ranks return or raise after the folder has its final content.
    agree(what, error, group)


def load_safetensors(
    engine: ShardedModel, directory: str | os.PathLike[str], rename: Rename | None = None
) -> None:
    """Read weights that ``save_pretrained`` or :func:`export_safetensors` wrote. Collective.

    Each rank reads the bytes of its own slices, so that ranks with different slices together read
    every file about once. Values are converted to the main weights' dtypes, and the next forward
    uses them. The model may have been built on the meta device.

    Args:
        engine: the engine whose weights and persistent buffers are replaced.
        directory: contains ``model.safetensors``, or the files that
            ``model.safetensors.index.json`` names; or the same of ``diffusion_pytorch_model``; or
            any other files ``*.safetensors``.
        rename: maps a name in the files to the model's name, or to None to ignore the tensor: a
            function, or a mapping of the names that change. None: names are the model's.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, or of a dtype that cannot be
            converted (all of them are listed; a tied weight may be stored under any of its names),
            or a file is damaged.
        TypeError: ``rename`` or its result has a wrong type.
        OSError: the folder or a file is missing.
        RuntimeError: within a forward, a backward or ``engine.unsharded()``; or reading failed
            half way. Weights are then partly replaced, and forwards and saves raise until weights
            are loaded.

    Each error is raised on all ranks; all but the last before anything is changed.
    """
    what = "load_safetensors"
    engine.await_ranks()
    group = engine.ranks.control_group
    targets: list[Target] = []
    error: Exception | None = None
    try:
        check_at_rest(engine)
        check_shared("load_safetensors", engine)
        stored = _stored(Path(directory), rename)
        found = match(engine, {name: list(map(whole, each)) for name, each in stored.items()})
        found.raise_for(str(directory), strict=True)
        targets = found.targets
    except Exception as caught:
        error = caught
    agree(what, error, group)
    replace_weights(what, engine, lambda: read(targets))


# --- Writing ---


def _check_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype or None; found {dtype!r}")
    dtype_name("dtype", dtype)


def _plan(sources: Sequence[Source], max_bytes: int, stem: str) -> list[NamedFile]:
    """Assign tensors to files, and to positions in them."""
    groups = split(sources, max_bytes)
    files = []
    for number, members in enumerate(groups):
        # As huggingface_hub records weights that share memory: omitted name, and name in the file.
        aliases = {alias: source.name for source in members for alias in source.aliases}
        plan = plan_file(
            [(source.name, source.dtype, source.shape) for source in members],
            {"format": "pt", **aliases},
        )
        names = tuple(source.name for source in members)
        files.append(NamedFile(file_name(number, len(groups), stem), plan, names))
    return files


def _write(
    staging: Path,
    files: Sequence[NamedFile],
    sources: Sequence[Source],
    buffer: ReadBuffer,
    progress: Callable[[int], None],
) -> None:
    """Write this rank's parts, and sync the files."""
    by_name = {source.name: source for source in sources}
    for file in files:
        descriptor: int | None = None  # opened only if this rank has a part of the file
        try:
            for name in file.tensors:
                source = by_name[name]
                for first, tensor in source.parts():
                    if descriptor is None:
                        descriptor = os.open(staging / file.name, os.O_WRONLY)
                    start = file.plan.starts[name] + first * source.dtype.itemsize
                    write_elements(descriptor, start, tensor, source.dtype, buffer)
                    progress(tensor.nbytes)
            if descriptor is not None:
                os.fsync(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)


# --- Names ---


def _stored(directory: Path, rename: Rename | None) -> dict[str, list[TensorInFile]]:
    """Stored tensors by their names in the model."""
    found: dict[str, list[TensorInFile]] = {}
    for each in read_folder(directory):
        name = _renamed(each.name, rename)
        if name is not None:
            found.setdefault(name, []).append(each)
    return found


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if isinstance(rename, Mapping):
        new = rename.get(name, name)
    elif callable(rename):
        new = rename(name)
    else:
        raise TypeError(f"rename: expected a function or a mapping; found {rename!r}")
    if not isinstance(new, str | None):
        raise TypeError(f"rename: expected a name or None for {name}; found {new!r}")
    return new
