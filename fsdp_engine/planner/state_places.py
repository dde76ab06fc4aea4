"""Places of optimizer state, main weights and gradients between their uses.

``fe.Offload`` of the extension ``offload`` names other places than the device. The planner and
simulations read the attributes that it shares with :class:`StatePlaces`, and plan without it where
the package has no such extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeGuard

from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import find_name, require_module
from fsdp_engine.memory.allocator import DEVICE, HOST

DISK = "disk"
# Kinds of memory that are taken off the device, by role of an offload.
KIND_OF_OFFLOADED = {
    "optimizer_state": "optimizer",
    "main_weights": "weights",
    "gradients": "gradients",
}


class StatePlaces(EngineExtension):
    """All state is on the device. ``fe.Offload`` documents the attributes."""

    optimizer_state = main_weights = gradients = step_on = DEVICE
    overlap_forward = False
    places: Mapping[str, str] = MappingProxyType({})

    def check_levels(self, *, shards_gradients: bool) -> None:
        """Check that the levels of an engine allow these places."""

    def check_pair(self) -> None:
        """Check that an accelerator's parameters and their gradients are on one device."""


def make_offload(**fields: Any) -> StatePlaces:
    """Returns an ``fe.Offload`` with these fields.

    Raises:
        ValueError: The package has no such extension, or a field is invalid.
    """
    made: StatePlaces = require_module("offload").Offload(**fields)
    return made


def is_offload(value: object) -> TypeGuard[StatePlaces]:
    """Returns whether ``value`` is an ``fe.Offload``."""
    return isinstance(value, find_name("Offload") or ())


def places_among(extensions: Iterable[object]) -> StatePlaces:
    """Returns the ``fe.Offload`` among ``extensions``; if there is none, :class:`StatePlaces`."""
    return next(filter(is_offload, extensions), StatePlaces())


def offload_of(engine: Engine) -> StatePlaces:
    """Returns the places of the state of an engine."""
    found: StatePlaces = getattr(engine, "offload", StatePlaces())
    return found


@cache
def offloads_to_host() -> tuple[StatePlaces, ...]:
    """Returns offloads of optimizer state, and of everything, to host memory; () if the package has
    no such extension."""
    if find_name("Offload") is None:
        return ()
    every = dict.fromkeys(KIND_OF_OFFLOADED, HOST)
    return make_offload(optimizer_state=HOST), make_offload(**every)
