"""Loads and saves adapters of PEFT through the extension ``adapters``, if it exists.

Each function calls the extension. Without the extension, models have no adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_engine.engine import Engine
from fsdp_engine.extension_list import find_module

# The name of a layer in the model, and the name of one of its adapters.
Place = tuple[str, str]

_NAMES, _FOLDER = "adapters.peft_names", "adapters.adapter_folder"


class _NoLayers:
    covered: Collection[nn.Module] = ()

    def places(self, names: Iterable[str]) -> list[Place]:
        return []

    def all_following(self) -> list[Place]:
        return []


def adapter_layers(model: nn.Module) -> Any:
    """Returns the layers of ``model`` with adapters, as an object that initializes the adapters."""
    names = find_module(_NAMES)
    return _NoLayers() if names is None else names.AdapterLayers(model)


def base_names(model: nn.Module) -> tuple[nn.Module, dict[str, tuple[str, ...]]]:
    """Returns the base model, and a map from the name of each of its tensors to the names of the
    tensor in ``model``."""
    if (names := find_module(_NAMES)) is None:
        return model, {name: (name,) for name in model.state_dict(keep_vars=True)}
    found: tuple[nn.Module, dict[str, tuple[str, ...]]] = names.base_names(model)
    return found


def adapters_only(model: nn.Module) -> bool:
    """Returns whether a save of ``model`` writes only its adapters."""
    names = find_module(_NAMES)
    return names is not None and names.peft_model(model)[0] is model


def holds_adapter(folder: Path) -> bool:
    """Returns whether a folder contains an adapter and no model."""
    found = find_module(_FOLDER)
    return found is not None and bool(found.holds_adapter(folder))


def match_adapter(engine: Engine, folder: Path, adapter: str | None) -> Any:
    """Match the tensors of an adapter's folder with those of a model.

    Raises:
        ValueError: The adapter does not fit the model, or the extension does not exist.
    """
    return find_module(_FOLDER, needed_by="adapter").match_adapter(engine, folder, adapter)


def save_adapters(engine: Engine, folder: Path, dtype: Any, tokenizer: Any) -> None:
    """Write all adapters of a model for which :func:`adapters_only` is true. Collective."""
    find_module(_FOLDER).save_adapters(engine, folder, dtype, tokenizer)
