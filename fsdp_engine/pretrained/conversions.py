"""Applies conversions of ``transformers`` between tensors in files and a model's parameters.

The classes of ``transformers`` declare which tensors are renamed, fused, split and transposed
between files and memory (its ``conversion_mapping.py``, since version 5). This module applies them
to :class:`~fsdp_engine.checkpoint.pieces.Pieces` instead of tensors, which yields names and
locations of elements and reads nothing. A new model in ``transformers`` needs no code here, as long
as its conversions are reindexing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fsdp_engine.checkpoint.pieces import Pieces
from fsdp_engine.pretrained.adapters import base_names

Stored = dict[str, list[Pieces]]


def as_in_memory(
    model: nn.Module, stored: Mapping[str, Pieces], key_mapping: Mapping[str, str] | None
) -> Stored:
    """Convert the tensors of files to tensors of the model, by name. Unknown names are kept.

    Modules of PEFT are ignored, because the files contain the base model.

    Args:
        model: A model of transformers, a module that contains one, or any other module; sharded or
            not.
        stored: The tensors by their names in the files.
        key_mapping: Regular expressions for names in the files, and their replacements.

    Raises:
        ValueError: A conversion does not fit the stored tensors or is not a reindexing, or the
            weights are quantised.
    """
    base, places = base_names(model)
    inner, prefix = _of_transformers(base)
    if inner is None:
        found = _renamed(stored, _by_patterns(key_mapping or {}))
    else:
        _check_not_quantised(inner)
        state = model.state_dict(keep_vars=True)
        names = {
            name.removeprefix(prefix): state[own[0]]
            for name, own in places.items()
            if name.startswith(prefix)
        }
        found = {
            prefix + name if name in names else name: pieces
            for name, pieces in _Conversion(inner, names, key_mapping).run(stored).items()
        }
    return {own: pieces for name, pieces in found.items() for own in places.get(name, (name,))}


def as_on_disk(model: nn.Module, held: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """Convert the tensors of a model to tensors of files, by name.

    Args:
        model: The model; sharded or not.
        held: The tensors by their names in the model.

    Raises:
        ValueError: A conversion does not fit the tensors or is not a reindexing.
    """
    inner, prefix = _of_transformers(model)
    if inner is None or prefix:
        return dict(held)
    from transformers.core_model_loading import revert_weight_conversion

    try:
        tensors: Any = dict(held)
        found: dict[str, Pieces] = revert_weight_conversion(inner, tensors)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(inner).__name__}: expected conversions of transformers that are reindexing; "
            f"found {type(error).__name__}: {error}"
        ) from error
    return found


def ignored(model: nn.Module) -> Callable[[str], bool]:
    """Returns a function that returns whether the model's class ignores a name in the files. For
    example, classes ignore buffers that older versions saved."""
    inner, _ = _of_transformers(base_names(model)[0])
    patterns = list(getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ())
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


class _Conversion:
    """The conversions of one model.

    Args:
        model: The model of transformers.
        names: The model's tensors, by name.
        key_mapping: Replacements of names; see :func:`as_in_memory`.
    """

    def __init__(
        self, model: Any, names: Mapping[str, Any], key_mapping: Mapping[str, str] | None
    ) -> None:
        from transformers import conversion_mapping, core_model_loading

        self._model = model
        self._names = names
        self._rename = core_model_loading.rename_source_key
        self._plain = core_model_loading.WeightRenaming
        self._in_order = core_model_loading.dot_natural_key
        rules = conversion_mapping.get_model_conversion_mapping(
            model, dict(key_mapping) if key_mapping is not None else None
        )
        converter = core_model_loading.WeightConverter
        self._renamings = [each for each in rules if not isinstance(each, converter)]
        self._converters = [each for each in rules if isinstance(each, converter)]

    def run(self, stored: Mapping[str, Pieces]) -> Stored:
        """Apply the conversions to pieces, as transformers does to tensors."""
        by_pattern = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        running: dict[str, Any] = {}
        found: Stored = {}
        for key in sorted(stored, key=self._in_order):
            name, pattern = self._name(key, self._renamings, self._converters)
            if name not in self._names and key in self._names:
                name, pattern = self._name(key, [], [])
            if pattern is None or name not in self._names:
                found.setdefault(name, []).append(stored[key])
                continue
            if name not in running:
                running[name] = copy.deepcopy(by_pattern[pattern])
            running[name].add_tensor(name, key, pattern, stored[key])
        for name, converter in running.items():
            for target, pieces in self._converted(name, converter).items():
                found.setdefault(target, []).append(pieces)
        return found

    def _name(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, Any]:
        name, pattern = self._rename(
            key, renamings, converters, self._model.base_model_prefix, dict(self._names)
        )
        return name, pattern

    def _converted(self, name: str, converter: Any) -> dict[str, Pieces]:
        sources = [each for tensors in converter.collected_tensors.values() for each in tensors]
        try:
            made = converter.convert(name, model=self._model, config=self._model.config)
        except (NotImplementedError, ValueError, RuntimeError, TypeError) as error:
            kinds = ", ".join(type(each).__name__ for each in converter.operations)
            boxes = [box for each in sources for box in each.boxes]
            first = boxes[0].stored.name if boxes else "nothing"
            raise ValueError(
                f"{name}: expected {kinds} of transformers to fit {len(sources)} tensors of the "
                f"files ({first}, ...); found {type(error).__name__}: {error}"
            ) from error
        return {
            target: pieces[0] if isinstance(pieces, list) else pieces
            for target, pieces in made.items()
        }


def _of_transformers(model: nn.Module) -> tuple[Any, str]:
    """Find the outermost model of transformers in ``model``, and the prefix of its names."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return None, ""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return module, f"{name}." if name else ""
    return None, ""


def _check_not_quantised(model: Any) -> None:
    kind = getattr(model.config, "quantization_config", None)
    if kind is not None:
        raise ValueError(f"folder: expected weights that are not quantised; found {kind}")


def _by_patterns(key_mapping: Mapping[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for pattern, replacement in key_mapping.items():
            name = re.sub(pattern, replacement, name)
        return name

    return rename


def _renamed(stored: Mapping[str, Pieces], rename: Callable[[str], str]) -> Stored:
    found: Stored = {}
    for name, pieces in stored.items():
        found.setdefault(rename(name), []).append(pieces)
    return found
