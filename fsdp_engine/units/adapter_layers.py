"""Layers that initialize tensors of their submodules, as layers with adapters do.

The core knows the interface only. ``fsdp_engine/__init__.py`` registers the implementation for
PEFT, ``fsdp_engine.adapters.AdapterLayers``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from torch import nn

# Name of a layer in the model, and name of one of its adapters.
AdapterKey = tuple[str, str]


class AdapterLayers(Protocol):
    """Layers of one model that initialize the tensors of their adapters."""

    @property
    def covered(self) -> Collection[nn.Module]:
        """Modules that hold tensors of adapters. Their layer initializes these tensors."""
        ...

    def places(self, names: Iterable[str]) -> Sequence[AdapterKey]:
        """Adapters that own any of these tensors, in the order of the layers."""
        ...

    def place_of(self, name: str) -> AdapterKey | None:
        """Adapter that owns a tensor; None: no adapter owns it."""
        ...

    def draw(self, place: AdapterKey) -> None:
        """Initialize the tensors of an adapter that do not depend on base weights."""
        ...

    def follows_base(self, place: AdapterKey) -> bool:
        """Whether any tensor of an adapter is computed from base weights."""
        ...

    def derive(self, place: AdapterKey) -> None:
        """Compute the tensors of an adapter that depend on base weights."""
        ...

    def layer(self, place: AdapterKey) -> nn.Module:
        """The layer of an adapter."""
        ...


class NoAdapterLayers:
    """A model without adapters."""

    covered: Collection[nn.Module] = ()

    def __init__(self, model: nn.Module) -> None:
        del model

    def places(self, names: Iterable[str]) -> Sequence[AdapterKey]:
        """Returns nothing."""
        return ()

    def place_of(self, name: str) -> AdapterKey | None:
        """Returns None."""
        return None

    def draw(self, place: AdapterKey) -> None:
        """Is not called."""
        raise AssertionError(place)

    def follows_base(self, place: AdapterKey) -> bool:
        """Is not called."""
        raise AssertionError(place)

    def derive(self, place: AdapterKey) -> None:
        """Is not called."""
        raise AssertionError(place)

    def layer(self, place: AdapterKey) -> nn.Module:
        """Is not called."""
        raise AssertionError(place)


_factory: Callable[[nn.Module], AdapterLayers] = NoAdapterLayers


def register_adapter_layers(factory: Callable[[nn.Module], AdapterLayers]) -> None:
    """Set the factory that :func:`find_adapter_layers` calls."""
    global _factory
    _factory = factory


def find_adapter_layers(model: nn.Module) -> AdapterLayers:
    """The layers of ``model`` that initialize tensors of adapters."""
    return _factory(model)
