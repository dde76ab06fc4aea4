"""What a run is besides weights and optimizer: random states, schedulers, the place in the data.

Every rank has its own and saves its own. They are meant for as many ranks as saved them: loaded by
another number, each rank takes the extra states of rank 0 and keeps the random state that it has,
because nobody could say whose it should take.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from fsdp_engine.checkpoint.objects import read_object
from fsdp_engine.devices.accelerator import is_accelerator, module_of


@runtime_checkable
class Stateful(Protocol):
    """What can be put into a checkpoint beside model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it needs to go on."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from there."""
        ...


def check_extra(extra: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """``extra`` as a dict.

    Raises:
        TypeError: it is no mapping from names, or a value has no state to save or to load.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra: expected a mapping by name; found {type(extra).__name__}")
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, Stateful):
            raise TypeError(
                f"extra[{name!r}]: expected a str and an object with state_dict() and "
                f"load_state_dict(); found a {type(value).__name__}"
            )
    return dict(extra)


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators that a training loop draws from."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if is_accelerator(device):
        state[device.type] = module_of(device).get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Draw on from ``state``. Generators that were not saved are left alone."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if is_accelerator(device) and device.type in state:
        module_of(device).set_rng_state(state[device.type], device)


def pack(value: Any) -> bytes:
    """One opaque entry: DCP would take a dict apart and lose its empty parts and its key types."""
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def unpack(packed: Any, where: str, trust: bool = False) -> Any:
    """What :func:`pack` was given, tensors on the CPU; an empty dict where there is nothing.

    Raises:
        ValueError: see :func:`~fsdp_engine.checkpoint.objects.read_object`.
    """
    if not isinstance(packed, bytes):
        return {}
    return read_object(io.BytesIO(packed), where, trust)
