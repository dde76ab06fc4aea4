"""Reads and writes folders of safetensors in the layout of Hugging Face libraries.

Nothing is gathered, and no tensor is sent between ranks. Each rank computes from names, shapes and
dtypes at which bytes of which files its slices are (``safetensors_folder.py``), and writes or reads
them through one buffer. An export has three steps:

1. All ranks compute the same plan, and compare it. Rank 0 creates the files, with headers and
   final sizes, in a temporary folder.
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

from fsdp_engine.checkpoint.export_source import Source, engine_sources
from fsdp_engine.checkpoint.export_stored import checkpoint_sources
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

# Bytes of memory that a rank uses in addition to its slices while it reads or writes.
BUFFER_BYTES = 16 << 20


# Maps a name in a file to a name in the model, or to None if the tensor is not read.
Rename = Callable[[str], str | None] | Mapping[str, str | None]


def export_safetensors(
    engine_or_path: EngineLike | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    averages: str | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    trust: bool = False,
) -> None:
    """Write weights as safetensors, in the layout of ``save_pretrained``.

    Main weights and the persistent buffers of rank 0 are written under the model's names. A tied
    weight is written once, under its first name in the order of modules; the file's header contains
    its other names. (A checkpoint without a manifest has no information about ties: from it, a tied
    weight is written under each name.) Extra states of modules are omitted.

    Args:
        engine_or_path: The result of ``fsdp_engine.shard``; the call is then collective over its
            ranks. Or the folder of a checkpoint in the format of ``torch.distributed.checkpoint``,
            with keys ``model.<name>``; one process calls it then, without a process group.
        directory: Path on storage that all ranks share; the directory is created if it does not
            exist. Model files of an earlier export are replaced; other files (``config.json``) are
            not changed.
        dtype: The dtype of floating-point tensors. None: the dtype of the main weights.
        max_shard_size: Maximum bytes of tensors in one file, or a string such as "5GB" (1 GB is
            10**9 bytes). A larger tensor is written into a separate file.
        averages: For a checkpoint: a name in its ``extra``, such as that of an ``fe.EMA``. Tensors
            of the model that have an average there are written with the values of the average.
        progress: Function that is called with the bytes of each part that this rank has written,
            counted in the dtype before a cast.
        trust: Allow objects of any class in the checkpoint, which may run arbitrary code.

    Raises:
        ValueError, TypeError: An argument is not legal or differs between ranks, the format does
            not support the dtype of a tensor, or the checkpoint is damaged.
        RuntimeError: The call is within a forward, a backward or ``engine.unsharded()``, or a load
            failed halfway.
        OSError: ``directory`` cannot be written, or there is no checkpoint.

    All ranks raise each error. Files of the new export are removed, unless renaming them failed
    halfway.
    """
    buffer_bytes = BUFFER_BYTES
    engine: EngineLike | None = None
    if isinstance(engine_or_path, str | os.PathLike):
        # Three buffers of this size exist at once: to read through, to read into, to convert in.
        buffer_bytes //= 4
        path = Path(engine_or_path)

        def sources() -> list[Source]:
            return checkpoint_sources(path, dtype, buffer_bytes, trust, averages)

    else:
        engine = engine_or_path
        if not hasattr(engine, "mesh"):
            raise TypeError(
                "engine_or_path: expected an Engine or the path of a checkpoint; found "
                f"{type(engine_or_path).__name__}"
            )
        if averages is not None:
            raise ValueError(
                "averages: expected None for an engine; found "
                f"{averages!r}. Within ema.swapped() the engine has the averages"
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
    """Write tensors into a folder, as :func:`export_safetensors` does.

    Args:
        what: The name of the operation in messages.
        make_sources: Function that returns the tensors to write, with the same names, shapes and
            dtypes on all ranks.
        directory, dtype, max_shard_size, progress: See :func:`export_safetensors`.
        ranks: The ranks that write together. None: this process writes all tensors.
        buffer_bytes: Number of bytes of the buffer for conversions.
        stem: The stem of the file names.

    Raises:
        Exception: An error of ``make_sources`` or :func:`export_safetensors`. All ranks raise.
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
        differing = [index for index, (_, other) in enumerate(agreed) if other != agreed[0][1]]
        if differing:
            raise ValueError(
                "dtype, max_shard_size: expected the same on all ranks; found that ranks "
                f"{differing[:8]} would write other files than rank 0"
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
    # No rank returns or raises before the folder has its final content.
    agree(what, error, group)


def load_safetensors(
    engine: ShardedModel, directory: str | os.PathLike[str], rename: Rename | None = None
) -> None:
    """Read weights that ``save_pretrained`` or ``export_safetensors`` wrote. Collective.

    Each rank reads the bytes of its own slices, so that ranks with different slices together read
    every file about once. Values are converted to the main weights' dtypes, and the next forward
    uses them. The model may have been built on the meta device.

    Args:
        engine: The engine whose weights and persistent buffers are replaced.
        directory: Path of a folder that contains ``model.safetensors``, or the files that
            ``model.safetensors.index.json`` lists, or the same with the stem
            ``diffusion_pytorch_model``, or any other files ``*.safetensors``.
        rename: Function that maps a name in the files to the model's name, or to None to ignore the
            tensor. Or a mapping of the names that differ. None: the names are equal.

    Raises:
        ValueError: Tensors are missing, unexpected, of another shape, or of a dtype that cannot be
            converted (all of them are listed; a tied weight may be stored under any of its names),
            or a tied weight is stored twice with different values, or a file is damaged.
        TypeError: ``rename`` or its result has a wrong type.
        OSError: The folder or a file is missing.
        RuntimeError: The call is within a forward, a backward or ``engine.unsharded()``. Or reading
            failed halfway: weights are then partly replaced, and forwards and saves raise until
            weights are loaded.

    All ranks raise each error. Weights are unchanged after any error except a failed read.
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
        found.check_copies(str(directory))
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
    """Assign tensors to files and to offsets in the files."""
    groups = split(sources, max_bytes)
    files = []
    for number, members in enumerate(groups):
        # The header maps each omitted name of a tied weight to its name in the file, as in
        # huggingface_hub.
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
    """Write this rank's parts of the tensors, and sync the files."""
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
    """Returns the stored tensors by their names in the model."""
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
