"""Finds averages of a model's tensors, such as those of ``fe.EMA``, in a checkpoint's ``extra``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_engine.checkpoint.extra_tensors import Reference
from fsdp_engine.checkpoint.model_state import EXTRA, MODEL
from fsdp_engine.checkpoint.offline import StoredCheckpoint


def averages_in(checkpoint: StoredCheckpoint, name: str) -> dict[str, Tensor | Reference]:
    """Returns the tensors in ``extra[name]`` that have the names of tensors of the model.

    Args:
        checkpoint: The checkpoint. ``extra`` of rank 0 is read.
        name: The name of the averages in ``extra``. They are a mapping, or nested mappings, from
            the names of parameters and buffers to tensors: a state dict of ``fe.EMA``, for example.

    Returns:
        The averages by the model's names. A sharded tensor is a reference to its entry.

    Raises:
        ValueError: ``extra`` has no such name or no such tensors, or a tensor has another shape. Or
            the checkpoint has no manifest, so that tied weights are not known.
    """
    if checkpoint.manifest is None:
        raise ValueError(
            f"averages: expected a checkpoint of fe.Checkpointer; found {checkpoint.folder} "
            "without a manifest, which lists tied weights"
        )
    where = f"averages: expected a name in extra of {checkpoint.folder}"
    extra = checkpoint.read_value(EXTRA) if EXTRA in checkpoint.saved.entries else {}
    if not isinstance(extra, Mapping) or name not in extra:
        names = ", ".join(map(repr, extra)) if isinstance(extra, Mapping) else ""
        raise ValueError(f"{where}; found {name!r}, and the names there: {names or 'none'}")
    found: dict[str, Tensor | Reference] = {}
    for key, value in _tensors(extra[name]):
        entry = checkpoint.saved.entries.get(f"{MODEL}.{key}")
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if tuple(value.shape) != tuple(entry.size):
            raise ValueError(
                f"averages: expected shape {tuple(entry.size)} for {key}, as in the model; found "
                f"{tuple(value.shape)} in {name!r}"
            )
        found[key] = value
    if not found:
        raise ValueError(
            f"{where} with tensors under the names of the model's tensors; found none in {name!r}"
        )
    return found


def _tensors(value: Any) -> Iterator[tuple[str, Tensor | Reference]]:
    """Yield the tensors in nested mappings with their keys in the innermost one."""
    if not isinstance(value, Mapping):
        return
    for key, each in value.items():
        if isinstance(each, Tensor | Reference):
            yield str(key), each
        else:
            yield from _tensors(each)
