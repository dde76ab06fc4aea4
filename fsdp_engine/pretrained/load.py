"""``load_pretrained``: a Hugging Face folder into a sharded model, each rank its own bytes."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fsdp_engine.checkpoint.hugging_face_folder import read_folder
from fsdp_engine.checkpoint.model_state import check_at_rest, check_shared
from fsdp_engine.checkpoint.reading_weights import Match, match, read, replace_weights, whole
from fsdp_engine.devices.agreement import agree
from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.extras import naming_extra
from fsdp_engine.pretrained.adapter_folder import holds_adapter, match_adapter
from fsdp_engine.pretrained.conversions import as_in_memory, ignored
from fsdp_engine.pretrained.own_values import (
    OwnValues,
    check_values,
    derive_values,
    give_values,
    own_values,
)

WHAT = "load_pretrained"


@dataclass(frozen=True)
class LoadedPretrained:
    """What a folder did not say, or said in vain.

    Attributes:
        missing: the model's tensors that are not in the folder, and have the model's own values.
        unexpected: tensors of the folder that the model has no use for.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_pretrained(
    model_or_engine: nn.Module | Engine,
    folder: str | os.PathLike[str],
    strict: bool = True,
    key_mapping: Mapping[str, str] | None = None,
    *,
    adapter: str | None = None,
    progress: bool | None = None,
) -> LoadedPretrained:
    """Read the weights of a Hugging Face folder into a sharded model. Collective.

    Each rank reads the bytes of its own slices, a few reads at a time, and converts them to the
    main weights' dtypes on the way: besides its shard a rank takes some 64 MiB. A model that was
    sharded on the meta device takes them as any other does; with ``initial_values="empty"`` it is
    not given values first. What ``transformers`` renames, fuses,
    splits or transposes between files and memory is so here, too.

    Into a model of PEFT goes a base model's folder (its adapters are missing there, so with
    ``strict=False``), or an adapter's: that has ``adapter_config.json`` and no base model, and all
    else is left alone.

    Args:
        model_or_engine: the sharded model, or its engine; its persistent buffers are read, too.
        folder: has ``model.safetensors``, or an index and its files; or
            ``adapter_model.safetensors``.
        strict: raise if tensors are missing or unexpected. False: missing ones (a new head,
            adapters) keep the values that they have, or get those that the model gives them; the
            first rank warns of both.
        key_mapping: regular expressions of names in the files, and what replaces them, tried
            before the model's own rules.
        adapter: of an adapter's folder, the name that it has in the model; None: the only one, or
            "default".
        progress: a bar on the first rank's stderr. None: if that is a terminal and rich is
            installed.

    Returns:
        What was missing, and what was unexpected.

    Raises:
        ValueError: tensors are missing or unexpected (with ``strict``), of another shape, or of a
            dtype that does not convert; all of them are listed. Or the model is not sharded, or a
            rule does not fit, or the folder's weights are quantised.
        OSError: the folder or a file is missing.
        RuntimeError: within a forward, a backward or ``engine.unsharded()``; or reading failed
            half way, and weights are partly replaced: forwards and saves raise until weights are
            loaded.

    Each is raised on every rank if on one; all but the last before anything is changed.
    """
    engine = engine_of_model(model_or_engine)
    group = engine.ranks.control_group
    found, own = Match(), OwnValues()
    replaced: set[str] | None = None
    error: Exception | None = None
    try:
        if progress:
            with naming_extra():
                import rich.progress  # noqa: F401 - a missing package raises on all ranks
        check_at_rest(engine)
        check_shared(WHAT, engine)
        is_of_adapter = holds_adapter(Path(folder)) or adapter is not None
        if is_of_adapter:
            found, replaced = match_adapter(engine, Path(folder), adapter)
        else:
            found = _match(engine, Path(folder), key_mapping)
        found.raise_for(str(folder), strict=strict)
        own = own_values(engine, found.missing, is_base=not is_of_adapter)
    except Exception as caught:  # rules of transformers raise anything
        error = caught
    agree(WHAT, error, group)
    is_first = engine.ranks.rank == 0
    shows = is_first and (_has_terminal() if progress is None else progress)
    num_bytes = sum(each.local.numel() * each.pieces.dtype.itemsize for each in found.targets)

    def fill() -> None:
        give_values(engine.model, own)
        with _bar(num_bytes, shows) as told:
            read(found.targets, told)

    def finish() -> None:
        derive_values(engine, own.following)
        check_values(engine, own.names)

    replace_weights(WHAT, engine, fill, finish, names=replaced)
    report = LoadedPretrained(tuple(found.missing), tuple(found.unexpected))
    if is_first and (report.missing or report.unexpected):
        warnings.warn(_told(str(folder), report), stacklevel=2)
    return report


def engine_of_model(given: nn.Module | Engine) -> Engine:
    """The engine that is given, or that of the model that is given.

    Raises:
        ValueError: it is not sharded.
    """
    if isinstance(given, Engine):
        return given
    engine = engine_of(given) if isinstance(given, nn.Module) else None
    if engine is None:
        raise ValueError(
            "model_or_engine: expected what fe.shard returned, or the model that it was given; "
            f"found {type(given).__name__}"
        )
    return engine


def _match(engine: Engine, folder: Path, key_mapping: Mapping[str, str] | None) -> Match:
    stored = {each.name: whole(each) for each in read_folder(folder)}
    found = match(engine, as_in_memory(engine.model, stored, key_mapping))
    is_ignored = ignored(engine.model)
    found.unexpected = {
        name: what for name, what in found.unexpected.items() if not is_ignored(name)
    }
    return found


def _told(folder: str, report: LoadedPretrained) -> str:
    parts = []
    if report.missing:
        parts.append(f"not there, and as the model made them: {', '.join(report.missing)}")
    if report.unexpected:
        parts.append(f"there, and not in the model: {', '.join(report.unexpected)}")
    return f"{WHAT}: {folder}: {'; '.join(parts)}"


def _has_terminal() -> bool:
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


@contextmanager
def _bar(num_bytes: int, shows: bool) -> Iterator[Callable[[int], None]]:
    if not shows:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda count: bar.advance(task, count)
