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

from fsdp_engine.kernel_interface import Engine, EngineExtension, allocator, find_module

DISK = "disk"
# Kinds of memory that are taken off the device, by role of an offload.
KIND_OF_OFFLOADED = {
    "optimizer_state": "optimizer",
    "main_weights": "weights",
    "gradients": "gradients",
}


class StatePlaces(EngineExtension):
    """All state is on the device. ``fe.Offload`` documents the attributes."""

    optimizer_state = main_weights = gradients = step_on = allocator.DEVICE
    overlap_forward = False
    places: Mapping[str, str] = MappingProxyType({})

    def check_plan(self, plan: Any, axis_plans: Any, device: Any) -> None:
        """Check that the levels and the codecs of a plan allow these places."""

    def main_leaves(self, strategy: Any, codec: Any) -> bool:
        """Returns whether main weights are not on the device."""
        return False

    def is_cast_by_host(self, strategy: Any, codec: Any) -> bool:
        """Returns whether the host casts main weights to compute weights in host memory."""
        return False


def make_offload(**fields: Any) -> StatePlaces:
    """Returns an ``fe.Offload`` with these fields.

    Raises:
        ValueError: The package has no such extension, or a field is invalid.
    """
    made: StatePlaces = find_module("offload", "offload").Offload(**fields)
    return made


def offload_module(name: str) -> Any:
    """Returns a module of the extension of an offload that exists."""
    return find_module(f"offload.{name}", "offload")


def is_offload(value: object) -> TypeGuard[StatePlaces]:
    """Returns whether ``value`` is an ``fe.Offload``."""
    module = find_module("offload")
    return module is not None and isinstance(value, module.Offload)


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
    if find_module("offload") is None:
        return ()
    every = dict.fromkeys(KIND_OF_OFFLOADED, allocator.HOST)
    return make_offload(optimizer_state=allocator.HOST), make_offload(**every)
