"""Places where optimizer state, main weights and gradients are stored between their uses.

``fe.Offload`` of the extension ``offload`` selects places other than the device. The planner and
simulations read the attributes that it shares with :class:`StatePlaces`. They use
:class:`StatePlaces` if there is no offload, also if the package lacks this extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeGuard

from fsdp_engine.kernel_interface import Engine, EngineExtension, allocator, find_module

DISK = "disk"
# For each role of an offload, the kind of memory that it moves off the device.
KIND_OF_OFFLOADED = {
    "optimizer_state": "optimizer",
    "main_weights": "weights",
    "gradients": "gradients",
}


class StatePlaces(EngineExtension):
    """Places of state if nothing is offloaded: all state is on the device. ``fe.Offload`` documents
    the attributes."""

    optimizer_state = main_weights = gradients = step_on = allocator.DEVICE
    overlap_forward = False
    places: Mapping[str, str] = MappingProxyType({})

    def check_plan(self, plan: Any, axis_plans: Any, device: Any) -> None:
        """Accept all levels and codecs of a plan, since everything is on the device."""

    def main_leaves(self, strategy: Any, codec: Any) -> bool:
        """Returns whether main weights are stored outside of the device."""
        return False

    def is_cast_by_host(self, strategy: Any, codec: Any) -> bool:
        """Returns whether the host casts main weights to compute weights in host memory."""
        return False


def make_offload(**fields: Any) -> StatePlaces:
    """Returns an ``fe.Offload`` with the given fields.

    Raises:
        ValueError: The package lacks the extension ``offload``, or a field is invalid.
    """
    made: StatePlaces = find_module("offload", "offload").Offload(**fields)
    return made


def offload_module(name: str) -> Any:
    """Returns a module of the extension ``offload``, which must be part of the package."""
    return find_module(f"offload.{name}", "offload")


def is_offload(value: object) -> TypeGuard[StatePlaces]:
    """Returns whether ``value`` is an ``fe.Offload``."""
    module = find_module("offload")
    return module is not None and isinstance(value, module.Offload)


def places_among(extensions: Iterable[object]) -> StatePlaces:
    """Returns the ``fe.Offload`` among ``extensions``, or a :class:`StatePlaces` if there is
    none."""
    return next(filter(is_offload, extensions), StatePlaces())


def offload_of(engine: Engine) -> StatePlaces:
    """Returns the places of an engine's state."""
    found: StatePlaces = getattr(engine, "offload", StatePlaces())
    return found


@cache
def offloads_to_host() -> tuple[StatePlaces, ...]:
    """Returns two offloads to host memory: one of optimizer state, and one of optimizer state, main
    weights and gradients. Empty if the package lacks the extension ``offload``."""
    if find_module("offload") is None:
        return ()
    every = dict.fromkeys(KIND_OF_OFFLOADED, allocator.HOST)
    return make_offload(optimizer_state=allocator.HOST), make_offload(**every)
