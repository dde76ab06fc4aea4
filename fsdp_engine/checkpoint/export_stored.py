"""Finds the tensors of an export of a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_engine.checkpoint.averages import averages_in
from fsdp_engine.checkpoint.export_source import Part, Source, saved_parts, written_dtype
from fsdp_engine.checkpoint.extra_tensors import Reference
from fsdp_engine.checkpoint.model_state import EXTRA_STATE, EXTRA_TENSORS, MODEL, is_extra_state
from fsdp_engine.checkpoint.offline import StoredCheckpoint
from fsdp_engine.checkpoint.reader import ReadBuffer, Reader


def checkpoint_sources(
    folder: Path,
    dtype: torch.dtype | None,
    buffer_bytes: int,
    trust: bool = False,
    averages: str | None = None,
) -> list[Source]:
    """Returns the model's tensors in a checkpoint.

    With a manifest, a tied weight is one tensor with aliases. Without one, it is a tensor under
    each of its names.

    Args:
        folder: The folder of a checkpoint in DCP format with keys ``model.<name>``.
        dtype: The written dtype of floating-point tensors. None: the dtype of each tensor.
        buffer_bytes: Maximum number of bytes of a part that is read. (Averages that are not
            sharded are in memory already, and are one part.)
        trust: Allow objects of any class, which may run arbitrary code.
        averages: A name in ``extra``: tensors of the model are replaced by their averages there.

    Raises:
        FileNotFoundError, NotADirectoryError: There is no checkpoint.
        ValueError: The checkpoint contains no tensors of a model, or only the trainable ones, or is
            damaged. Or there are no averages under this name.
    """
    checkpoint = StoredCheckpoint(folder, trust)
    metadata, saved = checkpoint.metadata, checkpoint.saved
    if saved.is_trainable_only:
        raise ValueError(
            f"checkpoint {folder}: expected all parameters of a model; found only those that were "
            "trainable, since it was saved with trainable_only=True. Load it into the model, and "
            "export the model (adapters: fe.save_pretrained)"
        )
    reader = Reader(folder, metadata, buffer_bytes)
    buffer = ReadBuffer(buffer_bytes)
    found = {} if checkpoint.manifest is None else checkpoint.manifest.ties
    ties = {name: first for name, first in found.items() if f"{MODEL}.{first}" in saved.entries}
    aliases: dict[str, list[str]] = {}
    for other, first in ties.items():
        aliases.setdefault(first, []).append(other)
    averaged = {} if averages is None else averages_in(checkpoint, averages)
    sources = []
    for key in saved.below(MODEL):
        entry, path = saved.entries[key], saved.paths[key]
        name = (
            str(path[1]) if len(path) == 2 else EXTRA_STATE
        )  # longer paths are within extra states
        if isinstance(entry, TensorStorageMetadata) and not (name in ties or is_extra_state(name)):
            written = written_dtype(entry.properties.dtype, dtype)
            average = averaged.get(name)
            if isinstance(average, Reference):
                key = f"{EXTRA_TENSORS}.{average.key}"
                entry = cast(TensorStorageMetadata, saved.entries[key])
            parts: Callable[[], Iterable[Part]] = partial(saved_parts, reader, key, entry, buffer)
            if isinstance(average, Tensor):
                parts = partial(list, [(0, average.reshape(-1))])
            others = tuple(aliases.get(name, ()))
            sources.append(Source(name, tuple(entry.size), written, others, parts))
    if not sources:
        raise ValueError(
            f"checkpoint {folder}: expected tensors under {MODEL}.<name>; found only "
            f"{', '.join(list(saved.entries)[:8]) or 'nothing'}"
        )
    return sources
