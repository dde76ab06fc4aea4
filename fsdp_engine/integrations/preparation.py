"""Steps of a trainer around ``shard``: arguments, existing optimizers, compilation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_engine.engine import Engine
from fsdp_engine.sharding import shard as shard_model

_ARGUMENTS = frozenset(inspect.signature(shard_model).parameters) - {"model"}


def checked_arguments(shard: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns ``shard`` as a dict.

    Raises:
        TypeError: it is not a mapping.
        ValueError: a name is not an argument of ``fsdp_engine.shard``.
    """
    if shard is None:
        return {}
    if not isinstance(shard, Mapping):
        raise TypeError(
            "shard: expected arguments of fsdp_engine.shard by name, such as "
            f"dict(strategy='optim_grads_params'), or None; found {type(shard).__name__}"
        )
    unknown = sorted(map(str, set(shard) - _ARGUMENTS))
    if unknown:
        known = ", ".join(sorted(_ARGUMENTS))
        raise ValueError(
            f"shard: expected arguments of fsdp_engine.shard ({known}); found {', '.join(unknown)}"
        )
    return dict(shard)


def check_not_stepped(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that optimizers of the model's parameters have no state, so that their parameters can
    be replaced by sharded ones.

    Raises:
        ValueError: an optimizer has state.
    """
    own = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        held = (param for group in optimizer.param_groups for param in group["params"])
        if optimizer.state and any(id(param) in own for param in held):
            raise ValueError(
                "optimizer: expected one that has not stepped, or was built after its model "
                "was sharded; found one with state"
            )


@contextlib.contextmanager
def held_by_name(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Context in which optimizers hold no parameters of the model, because ``shard`` refuses a
    model with optimizers. Afterwards they hold the parameters of the same names."""
    names = {id(param): name for name, param in model.named_parameters()}
    held = [
        group
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(id(param) in names for param in group["params"])
    ]
    params = [[names.get(id(param), param) for param in group["params"]] for group in held]
    for group in held:
        group["params"] = []
    try:
        yield
    finally:
        named = dict(model.named_parameters())
        for group, each in zip(held, params, strict=True):
            group["params"] = [named[one] if isinstance(one, str) else one for one in each]


def compile_units(engine: Engine, options: dict[str, Any]) -> None:
    """Compile each module of the units, with ``options`` of ``torch.compile``."""
    options = {**options, "fullgraph": False}  # the engine's hooks break graphs
    for unit in engine.units[1:]:
        for module in unit.built.modules:
            module.compile(**options)
