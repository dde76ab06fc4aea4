"""Finds averages of a model's tensors, such as those of ``fe.EMA``, in a checkpoint's ``extra``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_engine.checkpoint.extra_tensors import Reference
from fsdp_engine.checkpoint.model_state import EXTRA, EXTRA_TENSORS, MODEL, RANKS, describe_tensor
from fsdp_engine.checkpoint.offline import StoredCheckpoint

Average = Tensor | Reference

_NUMBER = re.compile(r"\d+")


def names_of_averages(checkpoint: StoredCheckpoint) -> list[str]:
    """Returns the names in ``extra`` for which :func:`averages_in` finds averages. Empty if
    ``extra`` cannot be read."""
    found = []
    with suppress(ValueError):
        extra = _extra(checkpoint)
        for name in extra:
            with suppress(ValueError):
                _averages_at(name, extra, checkpoint)
                found.append(name)
    return found


def averages_in(checkpoint: StoredCheckpoint, name: str) -> dict[str, Average]:
    """Returns the tensors in ``extra[name]``, by the names of the model's tensors.

    Args:
        checkpoint: The checkpoint. ``extra`` of rank 0 is read.
        name: The name of the averages in ``extra``, or a path of keys, such as "ema.shadow". The
            value is a mapping, or nested mappings, from names of parameters and buffers to tensors.
            Other values, such as counts, are ignored.

    Returns:
        The averages by the name under which the model's tensor is stored. A sharded tensor is a
        reference to its entry.

    Raises:
        ValueError: ``extra`` has no such name, or a tensor there has a name that the model does not
            have, a name that another one has, or another shape. Ranks have averages of other
            experts. Or the checkpoint has no manifest, which lists tied weights.
    """
    return _averages_at(name, _extra(checkpoint), checkpoint)


def _averages_at(
    name: str, extra: Mapping[str, Any], checkpoint: StoredCheckpoint
) -> dict[str, Average]:
    if checkpoint.manifest is None:
        raise ValueError(
            "averages: expected a checkpoint of fe.Checkpointer, whose manifest lists tied weights;"
            f" found {checkpoint.folder}. Load it, and call fe.save_pretrained or "
            "fe.export_safetensors within ema.swapped()"
        )
    value = _value_at(extra, name)
    where = f"averages: expected tensors of the model in extra of {checkpoint.folder}"
    if value is None:
        names = ", ".join(map(repr, extra)) or "none"
        raise ValueError(f"{where}; found {name!r}, and the names there: {names}")
    found: dict[str, Average] = {}
    paths: dict[str, str] = {}
    for path, key, average in _tensors(value, name):
        first = checkpoint.manifest.ties.get(key, key)
        entry = checkpoint.saved.entries.get(f"{MODEL}.{first}")
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{where}; found {path}, and no tensor {key} of the model")
        if first in found:
            raise ValueError(
                f"{where}, one for each; found {paths[first]} and {path} for {first}. Name the "
                "mapping that has the averages, such as ema.shadow"
            )
        dtype = average.dtype if isinstance(average, Tensor) else _dtype(checkpoint, average)
        expected = tuple(entry.size), entry.properties.dtype
        if tuple(average.shape) != expected[0] or not torch.can_cast(dtype, expected[1]):
            raise ValueError(
                f"averages: expected {describe_tensor(*expected)} for {key}, as in the model; "
                f"found {describe_tensor(tuple(average.shape), dtype)} at {path}"
            )
        found[first], paths[first] = average, path
    if not found:
        raise ValueError(f"{where}; found no tensors at {name!r}")
    _check_experts(checkpoint, name, found)
    return found


def _extra(checkpoint: StoredCheckpoint) -> Mapping[str, Any]:
    value = checkpoint.read_value(EXTRA) if EXTRA in checkpoint.saved.entries else None
    return value if isinstance(value, Mapping) else {}


def _dtype(checkpoint: StoredCheckpoint, average: Reference) -> torch.dtype:
    entry = checkpoint.saved.entries[f"{EXTRA_TENSORS}.{average.key}"]
    assert isinstance(entry, TensorStorageMetadata), average.key
    return entry.properties.dtype


def _value_at(extra: Any, path: str) -> Any:
    """Returns the value at a path of keys, which may contain dots; None: there is none."""
    if not isinstance(extra, Mapping):
        return None
    if path in extra:
        return extra[path]
    heads = (key for key in extra if isinstance(key, str) and path.startswith(f"{key}."))
    below = (_value_at(extra[key], path[len(key) + 1 :]) for key in heads)
    return next((value for value in below if value is not None), None)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, str, Average]]:
    """Yield path, key in the innermost mapping, and tensor, of all tensors in nested mappings."""
    if not isinstance(value, Mapping):
        return
    for key, each in value.items():
        if isinstance(each, Tensor | Reference):
            yield f"{path}.{key}", str(key), each
        else:
            yield from _tensors(each, f"{path}.{key}")


def _check_experts(
    checkpoint: StoredCheckpoint, name: str, averages: Mapping[str, Average]
) -> None:
    """Check that rank 0 has the averages of all experts.

    Experts that are not sharded have plain averages on their ranks, under the names that their
    modules have there. They differ between ranks, and the model has similar names without average.

    Raises:
        ValueError: Another rank has averages of other experts.
    """
    plain = {key: each for key, each in averages.items() if isinstance(each, Tensor)}
    kinds = {_NUMBER.sub("*", key): key for key in plain}
    stored = [checkpoint.saved.paths[key] for key in checkpoint.saved.below(MODEL)]
    names = [str(path[1]) for path in stored if len(path) == 2]
    missing = [each for each in names if each not in averages]
    similar = {kinds[kind]: key for key in missing if (kind := _NUMBER.sub("*", key)) in kinds}
    if not similar:
        return
    for rank in checkpoint.saved.below(RANKS):
        own = _value_at(checkpoint.read_value(rank).get(EXTRA), name)
        for path, key, each in _tensors(own, name):
            if key in similar and isinstance(each, Tensor) and not torch.equal(each, plain[key]):
                raise ValueError(
                    f"averages: expected the same averages on all ranks; found another {path} in "
                    f"{rank}, and none of {similar[key]}: each rank has those of its own experts. "
                    "Load the checkpoint, and export within ema.swapped()"
                )
