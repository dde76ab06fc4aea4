"""Saves and restores the state of a run besides model and optimizer: random states, schedulers,
data position.

Each rank saves its own state. If another number of ranks loads it, each rank loads the extra state
of rank 0 and keeps its current random state, because no saved random state corresponds to the rank.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.callers import user_stacklevel
from fsdp_engine.checkpoint.inert_pickle import read_object, refused_names
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.memory.allocator import as_bytes


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved in addition to model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the saved state."""
        ...


def check_extra(extra: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """Returns ``extra`` as a dict.

    Raises:
        TypeError: ``extra`` is not a mapping from names, or a value is not :class:`Stateful`.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra: expected a mapping by name; found {type(extra).__name__}")
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, Stateful):
            raise TypeError(
                f"extra[{name!r}]: expected a str as name, and an object with state_dict() and "
                f"load_state_dict(); found a {type(name).__name__} and a {type(value).__name__}. "
                "A subclass of dict with these methods can hold plain values"
            )
    return dict(extra)


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of the random number generators of torch, Python, NumPy and the device."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if is_accelerator(device):
        state[device.type] = module_of(device).get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of generators. Generators whose states were not saved are not changed."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if is_accelerator(device) and device.type in state:
        module_of(device).set_rng_state(state[device.type], device)


class RandomUse:
    """Records whether a run has drawn from the global generators.

    A run that draws only from generators that it seeds itself does not depend on the states of the
    global generators.

    Args:
        device: The device. Its generator is observed in addition to those of the CPU.
        was_used: Whether the run may have drawn before.
    """

    def __init__(self, device: torch.device, *, was_used: bool = False) -> None:
        self._device = device
        self._was_used = was_used
        self._before = self._digests(random_state(device))

    def is_used(self, state: Mapping[str, Any]) -> bool:
        """Returns whether the run has drawn from a global generator, in this job or before the
        checkpoint that this job has loaded.

        Args:
            state: The current random state.
        """
        now = self._digests(state)
        # A generator that has not drawn since it was seeded does not count as used.
        seeded = torch.Generator().manual_seed(torch.initial_seed()).get_state()
        if _digest(seeded) == now["torch"]:
            del now["torch"]
        common = self._before.keys() & now.keys()
        return self._was_used or any(self._before[name] != now[name] for name in common)

    def restart(self, *, was_used: bool) -> None:
        """Compare later states with the current states. Loads call this method.

        Args:
            was_used: Whether the run has already drawn.
        """
        self._was_used = was_used
        self._before = self._digests(random_state(self._device))

    def _digests(self, state: Mapping[str, Any]) -> dict[str, str]:
        return {name: _digest(each) for name, each in state.items()}


def digests(value: Any) -> dict[str, str]:
    """Returns a digest of each value within nested containers, by the path of the value. A load
    compares the digests of the saved ranks."""
    return {path: _digest(each) for path, each in _plain_values(value)}


def _plain_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each item of nested containers."""
    if isinstance(value, Mapping):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), each) for index, each in enumerate(value)]
    else:
        yield path, value
        return
    for key, each in items:
        yield from _plain_values(each, f"{path}.{key}" if path else key)


def warn_of_refused(packed: bytes, extra: Mapping[str, Any]) -> None:
    """Warn if a load of ``packed``, which contains the states ``extra``, will be refused without
    ``trust=True``."""
    if not (names := refused_names(packed)):
        return
    refused = (path for path, each in _plain_values(extra) if not _is_allowed(each))
    warnings.warn(
        f"{next(refused, 'extra')} in extra: expected numbers, strings, tensors and containers; "
        f"found {', '.join(names)}. It is saved, and a load refuses it without trust=True, since "
        "it could run code. Let state_dict() return plain values",
        stacklevel=user_stacklevel(),
    )


def _is_allowed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or not refused_names(pack(value))


def _digest(value: Any) -> str:
    if isinstance(value, FlatDTensor):
        return "sharded"
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    try:
        if isinstance(value, torch.Tensor):
            content = as_bytes(value.cpu()).numpy()
            return f"{value.dtype} {tuple(value.shape)} {zlib.crc32(content.data)}"
        return f"{type(value).__name__} {zlib.crc32(pickle.dumps(value))}"
    except Exception:  # an object that cannot be pickled
        return repr(value)


def pack(value: Any) -> bytes:
    """Serialize a value to one opaque entry. DCP would flatten a dict, and lose empty containers
    and the types of keys."""
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def unpack(packed: Any, where: str, trust: bool = False) -> Any:
    """Deserialize an entry of :func:`pack`, with tensors on the CPU. Returns an empty dict if
    ``packed`` is not bytes.

    Raises:
        ValueError: The object is damaged, or needs a class that is not allowed.
    """
    if not isinstance(packed, bytes):
        return {}
    return read_object(io.BytesIO(packed), where, trust)
