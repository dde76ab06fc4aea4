"""``load_pretrained``: loads a Hugging Face folder into a sharded model.

The model initializes the tensors that are not in the folder and have no values yet.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.checkpoint.model_state import check_at_rest, check_shared
from fsdp_engine.checkpoint.reading_weights import Match, match, read, replace_weights, whole
from fsdp_engine.checkpoint.safetensors_folder import read_folder
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.engine import Engine, engine_of
from fsdp_engine.pretrained.adapters import (
    Place,
    adapter_layers,
    base_names,
    holds_adapter,
    match_adapter,
)
from fsdp_engine.pretrained.conversions import as_in_memory, ignored
from fsdp_engine.terminal import import_rich


@dataclass(frozen=True)
class Initialization:
    """The plan for the initialization of a model before a pretrained folder is read.

    Attributes:
        modules: Modules with tensors that have no values and are not in the folder; children first.
            All of their tensors are initialized, and the tensors in the folder are read afterwards.
        names: The names of the tensors that have no values and are not in the folder.
        kept: Tensors of the same modules that are not in the folder and already have values.
        adapters: The adapters of PEFT without values.
        following: Adapters whose tensors are computed from the base weights in the folder.
    """

    modules: tuple[nn.Module, ...] = ()
    names: frozenset[str] = frozenset()
    kept: tuple[torch.Tensor, ...] = ()
    adapters: tuple[Place, ...] = ()
    following: tuple[Place, ...] = ()


def plan_initialization(
    engine: Engine, missing: Collection[str], *, is_base: bool
) -> Initialization:
    """Plan the initialization of tensors without values.

    Args:
        engine: The engine of the model. Tensors have no values if they were sharded with
            ``initial_values="empty"`` and not loaded since.
        missing: The names of the model's tensors that are not in the folder.
        is_base: Whether the folder contains a base model, not an adapter.
    """
    model = engine.model
    without = {name for name in missing if name in engine.missing_values}
    layers = adapter_layers(model)
    found, kept = [], []
    for prefix, module in reversed(list(model.named_modules())):
        own = {
            f"{prefix}.{name}" if prefix else name: value
            for name, value in {**module._parameters, **module._buffers}.items()
            if value is not None and name not in module._non_persistent_buffers_set
        }
        if module not in layers.covered and any(name in without for name in own):
            found.append(module)
            kept += [own[name] for name in own if name in missing and name not in without]
    adapters = tuple(layers.places(without))
    following = [each for each in adapters if layers.follows_base(each)]
    if is_base:
        following += [each for each in layers.all_following() if each not in following]
    return Initialization(
        tuple(found), frozenset(without), tuple(kept), tuple(adapters), tuple(following)
    )


def initialize(model: nn.Module, own: Initialization) -> None:
    """Initialize modules with ``reset_parameters`` and the model's ``_init_weights``, and adapters
    as PEFT does.

    The values equal those of an unsharded model, drawn from the first rank's generator.
    """
    init_weights = getattr(model, "_init_weights", None)
    with torch.no_grad():
        before = [tensor.detach().clone() for tensor in own.kept]
        for module in own.modules:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            if callable(init_weights):
                init_weights(module)
        for tensor, value in zip(own.kept, before, strict=True):
            tensor.copy_(value)
        layers = adapter_layers(model) if own.adapters else None
        for place in own.adapters:
            assert layers is not None
            layers.draw(place)


@contextmanager
def _generators_of_first_rank(engine: Engine) -> Iterator[None]:
    """Context in which all ranks draw random numbers from the states of the first rank, so that
    replicas draw the same values. Collective.

    Afterwards a rank whose states differed from those of the first rank restores its own states.
    The other ranks keep the states after the draws, which are equal.
    """
    if engine.ranks.size == 1:
        yield
        return
    device = engine.mesh.device
    accelerator = module_of(device) if is_accelerator(device) else None

    def states() -> list[Tensor]:
        own = [torch.get_rng_state()]
        return own if accelerator is None else [*own, accelerator.get_rng_state(device)]

    def restore(values: list[Tensor]) -> None:
        torch.set_rng_state(values[0])
        if accelerator is not None:
            accelerator.set_rng_state(values[1], device)

    own = states()
    sent = own if engine.ranks.rank == 0 else None
    found: list[Any] = gather_objects(sent, engine.ranks.control_group)
    are_equal = all(map(torch.equal, own, found[0]))
    if not are_equal:
        restore(found[0])
    try:
        yield
    finally:
        if not are_equal:
            restore(own)


def initialize_from_base(engine: Engine, following: Iterable[Place]) -> None:
    """Compute tensors of adapters from base weights. Collective. Unshards one unit at a time."""
    layers, left = adapter_layers(engine.model), list(following)
    for unit in engine.units if left else ():
        owners = {module for each in unit.buffers for r in each.records for module, _ in r.holders}
        here = [p for p in left if not owners.isdisjoint(layers.layer(p).modules())]
        if here:
            left = [place for place in left if place not in here]
            with engine.unsharded(*(layers.layer(place) for place in here)), torch.no_grad():
                for place in here:
                    layers.derive(place)


def check_initialized(engine: Engine, names: Collection[str]) -> None:
    """Check that tensors that are not in the folder were initialized. Collective.

    Raises:
        ValueError: A tensor contains NaN. All ranks raise.
    """
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if name in names and isinstance(value, torch.Tensor) and value.isnan().any():
            raise ValueError(
                f"{name}: expected _init_weights or reset_parameters to initialize it, because the "
                "folder does not contain it; found NaN"
            )


WHAT = "load_pretrained"


@dataclass(frozen=True)
class LoadedPretrained:
    """The names that differ between a model and a folder.

    Attributes:
        missing: The tensors of the model that are not in the folder. They keep their values, or
            the model has initialized them.
        unexpected: The tensors of the folder that are not in the model.
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

    Each rank reads the bytes of its own slices, with several reads in flight, and converts them to
    the dtypes of the main weights. A rank needs about 64 MiB in addition to its shard. The model
    may have been sharded on the meta device; ``initial_values="empty"`` skips its initialization.
    Conversions of ``transformers`` between files and memory (renaming, fusing, splitting,
    transposing) are applied.

    For a model of PEFT, ``folder`` contains the base model (then pass ``strict=False``, because it
    contains no adapters), or only an adapter with ``adapter_config.json``.

    Args:
        model_or_engine: The sharded model, or its engine. Persistent buffers are also read.
        folder: Path of a folder with ``model.safetensors``, an index and its files, or
            ``adapter_model.safetensors``.
        strict: Raise if tensors are missing or unexpected. False: missing tensors (a new head,
            adapters) keep their values, or the model initializes them if they have none; the first
            rank warns of missing and unexpected tensors.
        key_mapping: Regular expressions for names in the files, and their replacements, which are
            applied before the model's conversions.
        adapter: The name that the model has for the adapter in ``folder``. None: the only adapter,
            or "default".
        progress: Show a progress bar on the first rank's stderr. None: only if stderr is a
            terminal.

    Returns:
        The names of missing and of unexpected tensors.

    Raises:
        ValueError: Tensors are missing or unexpected (with ``strict``), of another shape, or of a
            dtype that cannot be converted; the message lists all of them. Or a tied weight is
            stored twice with different values, the model is not sharded, a conversion does not fit,
            or the folder's weights are quantised.
        OSError: The folder or a file is missing.
        RuntimeError: The call is within a forward, a backward or ``engine.unsharded()``. Or reading
            failed halfway: weights are then partly replaced, and forwards and saves raise until
            weights are loaded.

    All ranks raise each error. Weights are unchanged after any error except a failed read.
    """
    engine = engine_of_model(model_or_engine)
    engine.await_ranks()
    group = engine.ranks.control_group
    found, initialization = Match(), Initialization()
    replaced: set[str] | None = None
    error: Exception | None = None
    try:
        check_at_rest(engine)
        check_shared(WHAT, engine)
        is_of_adapter = holds_adapter(Path(folder)) or adapter is not None
        if is_of_adapter:
            found, replaced = match_adapter(engine, Path(folder), adapter)
        else:
            found = _match(engine, Path(folder), key_mapping)
            if strict:
                _refuse_missing_adapters(engine.model, str(folder), found)
        found.raise_for(str(folder), strict=strict)
        found.check_copies(str(folder))
        initialization = plan_initialization(engine, found.missing, is_base=not is_of_adapter)
    except Exception as caught:  # conversions of transformers raise errors of any type
        error = caught
    agree(WHAT, error, group)
    is_first = engine.ranks.rank == 0
    shows = is_first and (_has_terminal() if progress is None else progress)
    num_bytes = sum(each.local.numel() * each.pieces.dtype.itemsize for each in found.targets)

    def fill() -> None:
        if initialization.modules or initialization.adapters:
            with _generators_of_first_rank(engine):
                initialize(engine.model, initialization)
        with _progress_bar(num_bytes, shows) as progressed:
            read(found.targets, progressed)

    def finish() -> None:
        initialize_from_base(engine, initialization.following)
        check_initialized(engine, initialization.names)

    replace_weights(WHAT, engine, fill, finish, names=replaced)
    report = LoadedPretrained(tuple(found.missing), tuple(found.unexpected))
    if is_first and (report.missing or report.unexpected):
        text = _mismatches(engine.model, str(folder), report, initialization.names)
        warnings.warn(text, stacklevel=2)
    return report


def engine_of_model(given: nn.Module | Engine) -> Engine:
    """Returns the engine of a sharded model. An engine is returned unchanged.

    Raises:
        ValueError: The model is not sharded.
    """
    if isinstance(given, Engine):
        return given
    engine = engine_of(given) if isinstance(given, nn.Module) else None
    if engine is None:
        raise ValueError(
            "model_or_engine: expected the engine that fe.shard returned, or the model that was "
            f"passed to fe.shard; found {type(given).__name__}"
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


def _adapter_names(model: nn.Module, missing: Iterable[str]) -> list[str]:
    """Returns the names in ``missing`` that do not belong to the base model."""
    base_model, names_of_base = base_names(model)
    if base_model is model:
        return []
    of_base = {name for each in names_of_base.values() for name in each}
    return [name for name in missing if name not in of_base]


def _refuse_missing_adapters(model: nn.Module, folder: str, found: Match) -> None:
    if not found.missing or found.unexpected or found.problems:
        return
    adapters = _adapter_names(model, found.missing)
    if len(adapters) == len(found.missing):
        raise ValueError(
            f"{folder}: expected the tensors of this model; found those of the base model, without "
            f"{len(adapters)} tensors of adapters such as {adapters[0]}. Pass strict=False: "
            "adapters keep their values, or get PEFT's initial ones if they have none"
        )


def _mismatches(
    model: nn.Module, folder: str, report: LoadedPretrained, initialized: Collection[str]
) -> str:
    """Describe the names that differ. ``initialized`` are the names of the tensors that this load
    has initialized."""
    parts = []
    adapters = _adapter_names(model, report.missing)
    if adapters:
        are_new = all(name in initialized for name in adapters)
        values = "got PEFT's initial values" if are_new else "keep the model's values"
        parts.append(f"found none of {len(adapters)} tensors of adapters, which {values}")
    if others := [name for name in report.missing if name not in set(adapters)]:
        parts.append(
            f"not in the folder, so initialized by the model or unchanged: {', '.join(others)}"
        )
    if report.unexpected:
        parts.append(f"in the folder, but not in the model: {', '.join(report.unexpected)}")
    return f"{WHAT}: {folder}: {'; '.join(parts)}"


def _has_terminal() -> bool:
    return sys.stderr.isatty()


@contextmanager
def _progress_bar(num_bytes: int, shows: bool) -> Iterator[Callable[[int], None]]:
    if not shows:
        yield lambda count: None
        return
    import_rich()
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda count: bar.advance(task, count)
