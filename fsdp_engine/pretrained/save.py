"""``save_pretrained``: saves a sharded model in a folder for ``from_pretrained``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_engine.checkpoint.export_source import Source, engine_sources
from fsdp_engine.checkpoint.hugging_face import export_sources
from fsdp_engine.checkpoint.pieces import Pieces
from fsdp_engine.checkpoint.safetensors_folder import DIFFUSERS_STEM, STEM
from fsdp_engine.checkpoint.writing_pieces import source_of
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.pretrained.adapters import adapters_only, save_adapters
from fsdp_engine.pretrained.conversions import as_on_disk
from fsdp_engine.pretrained.load import engine_of_model

WHAT = "save_pretrained"
CONFIG = "config.json"
# The file name of an older model's config while a save replaces the model.
BEFORE = "config.json.before"


def save_pretrained(
    model_or_engine: nn.Module | Engine,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    tokenizer: Any = None,
) -> None:
    """Write a model of ``transformers`` or ``diffusers`` as its own ``save_pretrained`` would.
    Collective.

    All ranks write their slices, with the names and layout of pretrained files: conversions that
    were applied in memory (fusing, splitting, transposing) are reverted. A tied weight is written
    once, under its first name. ``config.json`` is written last, so that a killed job does not leave
    a folder that looks like a complete model. During a save the config of an older model is kept as
    ``config.json.before``.

    For a model of PEFT only the adapters are written, as its ``save_pretrained`` would:
    ``adapter_config.json`` and ``adapter_model.safetensors``. The first rank gathers and writes
    them.

    Args:
        model_or_engine: The sharded model, or its engine.
        folder: Path on storage that all ranks share; the folder is created if it does not exist.
        dtype: The dtype of floating-point tensors. None: the dtype of the main weights.
        max_shard_size: Maximum bytes of tensors in one file, or a string such as "5GB". Adapters
            are always one file.
        tokenizer: A tokenizer or processor, whose ``save_pretrained(folder)`` the first rank calls.

    Raises:
        ValueError, TypeError: An argument is not legal or differs between ranks, the model is not
            sharded, it belongs to neither library, or one of its conversions is not a reindexing.
        RuntimeError: The call is within a forward, a backward or ``engine.unsharded()``, or weights
            are not loaded yet.
        OSError: The folder cannot be written.

    All ranks raise each error.
    """
    engine = engine_of_model(model_or_engine)
    model: Any = engine.model
    directory = Path(folder)
    engine.await_ranks()
    if adapters_only(model):
        save_adapters(engine, directory, dtype, tokenizer)
        return
    group, is_first = engine.ranks.control_group, engine.ranks.rank == 0
    error: Exception | None = None
    hidden = False
    is_diffusers = _is_of_diffusers(model)
    try:
        if not is_diffusers and not hasattr(getattr(model, "config", None), "save_pretrained"):
            raise TypeError(
                "model_or_engine: expected a model of transformers or diffusers; found "
                f"{type(model).__name__} (fe.export_safetensors writes the weights of any model)"
            )
        if is_first and (directory / CONFIG).is_file():
            os.replace(directory / CONFIG, directory / BEFORE)
            hidden = True
    except Exception as caught:
        error = caught
    agree(WHAT, error, group)
    try:
        sources = partial(_sources, engine, dtype)
        ranks = engine.ranks
        stem = DIFFUSERS_STEM if is_diffusers else STEM
        export_sources(WHAT, sources, directory, dtype, max_shard_size, ranks=ranks, stem=stem)
    except Exception as caught:  # raised on all ranks
        error = caught
        try:
            if hidden:
                os.replace(directory / BEFORE, directory / CONFIG)
        except OSError as failed:
            error = OSError(
                f"{caught}; the older {CONFIG} in {directory} is still named {BEFORE}: {failed}"
            )
            error.__cause__ = caught
    else:
        try:
            if is_first:
                _write_others(model, directory, dtype, tokenizer)
                (directory / BEFORE).unlink(missing_ok=True)
        except Exception as caught:
            error = caught
    # No rank returns or raises before the folder has its final content.
    agree(WHAT, error, group)


def _sources(engine: Engine, dtype: torch.dtype | None) -> list[Source]:
    held = {each.name: each for each in engine_sources(engine, dtype)}
    whole = {name: Pieces.of(name, each.shape, each.dtype) for name, each in held.items()}
    stored = as_on_disk(engine.model, whole)
    return [
        held[name] if pieces is whole.get(name) else source_of(name, pieces, held)
        for name, pieces in stored.items()
    ]


def _is_of_diffusers(model: Any) -> bool:
    """Returns whether the model writes its config itself, as models of ``diffusers`` do."""
    return callable(getattr(model, "save_config", None)) and hasattr(model, "config_name")


def _write_others(model: Any, directory: Path, dtype: torch.dtype | None, tokenizer: Any) -> None:
    """Write all files except the weights. The config is written last."""
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
    if getattr(model, "can_generate", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(str(directory))
    save_config = model.save_config if _is_of_diffusers(model) else _config_of(model, dtype)
    with tempfile.TemporaryDirectory(dir=directory) as made:
        save_config(made)
        with open(Path(made) / CONFIG, "rb") as file:
            os.fsync(file.fileno())
        os.replace(Path(made) / CONFIG, directory / CONFIG)


def _config_of(model: Any, dtype: torch.dtype | None) -> Callable[[str], None]:
    """Returns a function that writes the config of a model of ``transformers`` into a folder."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    save: Callable[[str], None] = config.save_pretrained
    return save
