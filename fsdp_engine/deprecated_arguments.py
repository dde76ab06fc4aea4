"""Arguments of earlier versions of ``fe.shard``, and their replacements. To be removed in 0.3."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_engine.codecs.base import CodecRules
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import (
    arguments_elsewhere,
    deprecated_arguments,
    from_deprecated,
)
from fsdp_engine.options import Options
from fsdp_engine.precision import MixedPrecisionPolicy

_REPLACEMENTS = {
    "config": "options=fe.Options(...), mp_policy=, strategy= and extensions=[...]; "
    "DistributedDataParallelConfig is for fsdp_engine.megatron",
    "granule": "options=fe.Options(granule=...)",
    "min_unit_size": "options=fe.Options(min_unit_size=...)",
    "codec_rules": "extensions=[fe.Float8(...)] or extensions=[fe.CodecRules([...])]",
    "plan": "strategy=plan",
    **deprecated_arguments(),
}

# Arguments of other libraries, each with the argument of `fe.shard` that has the same effect.
_NAMES_ELSEWHERE = {
    "level": "strategy=",
    "sharding_strategy": "strategy=",
    "zero_stage": "strategy=",
    "reshard_after_forward": 'strategy="optim_grads_params" or "optim_grads"',
    "device_mesh": "mesh=",
    "process_group": "mesh=",
    "auto_wrap_policy": "units=",
    "mixed_precision": "mp_policy=",
    "dtype": "mp_policy=fe.MixedPrecisionPolicy(param_dtype=...)",
    "param_dtype": "mp_policy=fe.MixedPrecisionPolicy(param_dtype=...)",
    **arguments_elsewhere(),
}
# Arguments of DistributedDataParallel for which `fe.shard` has no use.
_NOT_NEEDED = ("find_unused_parameters", "static_graph", "device_ids", "output_device")

NAMES = frozenset(_REPLACEMENTS)
"""Deprecated arguments of :func:`~fsdp_engine.sharding.shard`."""


def current_arguments(
    given: Mapping[str, Any], deprecated: Mapping[str, Any], what: str, *, stacklevel: int = 3
) -> dict[str, Any]:
    """Returns the arguments of :func:`~fsdp_engine.sharding.shard` that replace ``deprecated``.

    Args:
        given: The other arguments by name. A value of None, or an empty ``extensions``, means that
            the argument was not given.
        deprecated: The deprecated arguments by name.
        what: The name of the function that the user has called, for messages.
        stacklevel: Number of frames from this function to the user's call.

    Raises:
        TypeError, ValueError: An argument is unknown or invalid, or contradicts another one.
    """
    for name, value in deprecated.items():
        if name not in _REPLACEMENTS:
            hint = f"; use {_NAMES_ELSEWHERE[name]}" if name in _NAMES_ELSEWHERE else ""
            if name in _NOT_NEEDED:
                hint = "; leave it out, it is not needed"
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}{hint}")
        if not _is_default(value):
            warnings.warn(
                f"{what}: {name}= is deprecated and will be removed in 0.3; use "
                f"{_REPLACEMENTS[name]}",
                DeprecationWarning,
                stacklevel=stacklevel,
            )
    found = {**given, "extensions": [*(given.get("extensions") or ())]}
    if (config := deprecated.get("config")) is not None:
        _apply_config(found, config)
    changes = {
        name: deprecated[name]
        for name in ("granule", "min_unit_size")
        if deprecated.get(name) is not None
    }
    if changes:
        found["options"] = dataclasses.replace(found.get("options") or Options(), **changes)
    found["extensions"] = _extensions(found["extensions"], deprecated)
    if config is not None:
        kinds = _kinds(found["extensions"])
        chosen = [each for each in config.to_extensions() if type(each) not in kinds]
        found["extensions"] += chosen
    if (plan := deprecated.get("plan")) is not None:
        if given.get("strategy") != "auto":
            raise ValueError(
                f'strategy: expected "auto" beside plan=; found {given.get("strategy")!r}. plan= '
                "is deprecated: pass the plan as strategy instead"
            )
        found["strategy"] = plan
    return found


def replaced(options: Mapping[str, Any], what: str, *, stacklevel: int = 4) -> dict[str, Any]:
    """Returns arguments of :func:`~fsdp_engine.sharding.shard` in which deprecated arguments are
    replaced.

    Args:
        options: The arguments by name.
        what: The name of the function that the user has called, for messages.
        stacklevel: See :func:`current_arguments`.

    Raises:
        TypeError, ValueError: See :func:`current_arguments`. Also raised if ``config`` sets the
            size of the outer axis.
    """
    deprecated = {name: value for name, value in options.items() if name in _REPLACEMENTS}
    if not deprecated:
        return dict(options)
    given = {name: value for name, value in options.items() if name not in deprecated}
    found = current_arguments(given, deprecated, what, stacklevel=stacklevel)
    if (num_rows := num_rows_of(deprecated)) > 1:
        raise ValueError(
            f"num_distributed_optimizer_instances: expected 1; found {num_rows}. Pass the sizes "
            "(outer, inner) as mesh instead"
        )
    return found


def num_rows_of(deprecated: Mapping[str, Any]) -> int:
    """Returns the size of the outer axis that ``config`` sets; 1 without ``config``."""
    return int(getattr(deprecated.get("config"), "num_distributed_optimizer_instances", 1))


def _is_default(value: object) -> bool:
    return value is None or value is False or (isinstance(value, list | tuple) and not value)


def _apply_config(found: dict[str, Any], config: Any) -> None:
    """Set the arguments in ``found`` that the fields of ``config`` determine."""
    if not hasattr(config, "to_options"):
        raise TypeError(
            f"config: expected a DistributedDataParallelConfig or None; found {config!r}"
        )
    if found.get("options") is not None:
        raise ValueError("config: expected None beside options; found both")
    config = config.checked()
    found["options"] = config.to_options()
    policy = found.get("mp_policy")
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        found["mp_policy"] = config.applied_to(policy or MixedPrecisionPolicy())
    if not config.names_strategy:
        return
    for name, said in zip(("strategy", "outer_strategy"), config.level_names, strict=True):
        if found.get(name) not in (None, said):
            raise ValueError(
                f"{name}: expected None, or {said!r} as the config says; found {found[name]!r}"
            )
        found[name] = said


def _extensions(
    extensions: list[EngineExtension], deprecated: Mapping[str, Any]
) -> list[EngineExtension]:
    """Returns ``extensions``, and the extensions that deprecated arguments select."""
    found = list(extensions)
    rules = deprecated.get("codec_rules")
    if rules is not None and (isinstance(rules, str) or not isinstance(rules, Iterable)):
        raise TypeError(f"codec_rules: expected a sequence of rules; found {rules!r}")
    if rules := tuple(rules or ()):
        is_one = len(rules) == 1 and isinstance(rules[0], EngineExtension)
        found += rules if is_one else [CodecRules(rules)]
    for name in deprecated_arguments():
        if not _is_default(value := deprecated.get(name)):
            found += from_deprecated(name, value)
    return found


def _kinds(extensions: list[EngineExtension]) -> set[type]:
    """Returns the classes of ``extensions``, and of the rules within their ``CodecRules``."""
    rules = [each.rules for each in extensions if isinstance(each, CodecRules)]
    return {type(each) for each in (*extensions, *(rule for found in rules for rule in found))}
