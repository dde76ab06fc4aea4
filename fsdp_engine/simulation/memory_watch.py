"""What memory would be held: the engine's by its ledger, everything else as tensors come and go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

KINDS = ("weights", "gradients", "optimizer", "transient", "activations")

# Roles of the engine's ledger that are no weights.
_ROLES = {"grad": "gradients", "full": "transient", "staging": "transient"}


class MemoryWatch:
    """Bytes by kind, and those of the moment when most were held.

    Operations allocate the engine's weights, too, which it books: that much is taken off. All else
    that it books is memory behind storages that come and go.

    Attributes:
        peak: by kind, at the moment of the largest sum since :meth:`restart`.
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self._held: Callable[[], Mapping[str, int]] = dict
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._made = 0
        self._booked_before = 0
        self._buffers = 0
        self._optimizer = 0

    def watch(self, held: Callable[[], Mapping[str, int]], others: int) -> None:
        """An engine is there; what is made from now on counts.

        Args:
            held: its bytes by role.
            others: bytes of the model's own buffers.
        """
        self._held = held
        self._buffers = others
        self._sizes = dict.fromkeys(self._sizes, 0)
        self._made = 0
        self._booked_before = self._by_kind()["weights"]
        self.restart()

    def made(self, tensors: Sequence[Tensor]) -> None:
        """An operation has returned these."""
        grew = False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                size = storage.nbytes()
                self._sizes[key] = size
                self._made += size
                grew = grew or size > 0
                # Not `finalize`, whose list of all there are would keep the watch, with it the
                # engine, and so every storage.
                self._storages[key] = weakref.ref(storage, partial(self._gone, key))
        if grew:
            self.sample()

    def optimizer_stepped(self) -> None:
        """What is new and stays is its state."""
        self._optimizer = 0
        self._optimizer = self._bytes()["activations"]

    def restart(self) -> None:
        """A new peak begins."""
        self.peak = {}
        self.sample()

    def sample(self) -> None:
        """Look whether more is held than ever before."""
        now = self._bytes()
        if not self.peak or sum(now.values()) > sum(self.peak.values()):
            self.peak = now

    def _bytes(self) -> dict[str, int]:
        now = self._by_kind()
        others = self._made - (now["weights"] - self._booked_before)
        now["optimizer"] = min(self._optimizer, max(others, 0))
        now["activations"] = max(others - now["optimizer"], 0)
        now["weights"] += self._buffers
        return now

    def _by_kind(self) -> dict[str, int]:
        now = dict.fromkeys(KINDS, 0)
        for role, count in self._held().items():
            now[_ROLES.get(role, "weights")] += count
        return now

    def _gone(self, key: int, _: object) -> None:
        del self._storages[key]
        self._made -= self._sizes.pop(key)
