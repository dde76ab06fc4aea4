"""Values of the model's own for what a folder does not have, where there are none yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_engine.adapters import AdapterLayers, Place
from fsdp_engine.engine import Engine


@dataclass(frozen=True)
class OwnValues:
    """What a model gives itself before a folder is read.

    Attributes:
        modules: that have tensors without values that the folder does not have; children first, as
            they were built. All their tensors get values: those of the folder are read later.
        names: of those tensors.
        kept: tensors of the same modules that have values from elsewhere, and keep them.
        adapters: of PEFT without values.
        following: adapters of which something follows from the base weights that are read.
    """

    modules: tuple[nn.Module, ...] = ()
    names: frozenset[str] = frozenset()
    kept: tuple[torch.Tensor, ...] = ()
    adapters: tuple[Place, ...] = ()
    following: tuple[Place, ...] = ()


def own_values(engine: Engine, missing: Collection[str], *, is_base: bool) -> OwnValues:
    """What a model has to give itself.

    Args:
        engine: of the model. Only what was sharded with ``initial_values="empty"`` and not loaded
            since has no values.
        missing: names of its tensors that the folder does not have.
        is_base: what is read are the weights under PEFT's adapters.
    """
    model = engine.model
    without = {name for name in missing if name in engine.missing_values}
    layers = AdapterLayers(model)
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
    return OwnValues(
        tuple(found), frozenset(without), tuple(kept), tuple(adapters), tuple(following)
    )


def give_values(model: nn.Module, own: OwnValues) -> None:
    """Let modules give themselves values: by ``reset_parameters``, and the model's
    ``_init_weights``; and adapters, as PEFT begins them.

    Values are those of a model that is not sharded, drawn from the first rank's generator.
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
        layers = AdapterLayers(model) if own.adapters else None
        for place in own.adapters:
            assert layers is not None
            layers.draw(place)


def derive_values(engine: Engine, following: Iterable[Place]) -> None:
    """Give adapters what follows from base weights. Collective; one unit at a time is whole."""
    layers, left = AdapterLayers(engine.model), list(following)
    for unit in engine.units if left else ():
        owners = {module for each in unit.buffers for r in each.records for module, _ in r.owners}
        here = [p for p in left if not owners.isdisjoint(layers.layer(p).modules())]
        if here:
            left = [place for place in left if place not in here]
            with engine.unsharded(*(layers.layer(place) for place in here)), torch.no_grad():
                for place in here:
                    layers.derive(place)


def check_values(engine: Engine, names: Collection[str]) -> None:
    """Whether tensors that the folder did not have got values. Collective.

    Raises:
        ValueError: one has not; on all ranks.
    """
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if name in names and isinstance(value, torch.Tensor) and value.isnan().any():
            raise ValueError(
                f"{name}: expected the model to give it values, since the folder has none; found "
                "that it does not"
            )
