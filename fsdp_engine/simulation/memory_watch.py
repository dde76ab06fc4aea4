"""What memory would be held: the engine's by its ledger, everything else as tensors come and go.

Every storage that an operation returns is watched until it goes, and has a kind:

    weights       main and compute weights, the model's own buffers, all else that is there when the
                  engine has been made
    gradients     what the engine accumulates, from a unit's first reduction until they are cleared
    optimizer     what is there when the optimizer has been made, or left by its steps
    transient     full parameters and gradients on their way, idle memory of theirs
    activations   anything else: inputs, what autograd keeps, what operations make, gradients until
                  the engine has written them into their place

Operations also return tensors over memory that the engine books, or gets without any. What is
booked as weights is made by operations and taken off from what they made; all else that is booked
lies behind storages that come and go, which are empty when they are made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fsdp_engine.runtime.measuring import KIND_OF_ROLE

KINDS = ("weights", "gradients", "optimizer", "transient", "activations")

_NEW = "activations"


class MemoryWatch:
    """Bytes by kind, and those of the moment when most were held.

    Attributes:
        peak: by kind, at the moment of the largest sum since :meth:`restart`.
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self._held: Callable[[], Mapping[str, int]] = dict
        self._sizes: dict[int, int] = {}  # of storages by their address
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._kinds: dict[int, str] = {}
        self._made = dict.fromkeys(KINDS, 0)
        self._booked_before = 0

    def watch(self, held: Callable[[], Mapping[str, int]]) -> None:
        """An engine is there, and what is there beside its weights belongs to the model.

        Args:
            held: its bytes by role.
        """
        self._held = held
        self.settle("weights")
        self._booked_before = self._booked()["weights"]
        self._made["weights"] -= self._booked_before
        self.restart()

    def made(self, tensors: Sequence[Tensor]) -> None:
        """An operation has returned these, or somebody has brought them."""
        grew = False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                size = storage.nbytes()
                self._sizes[key] = size
                self._kinds[key] = _NEW
                self._made[_NEW] += size
                grew = grew or size > 0
                # Not `finalize`, whose list of all there are would keep the watch, with it the
                # engine, and so every storage.
                self._storages[key] = weakref.ref(storage, partial(self._gone, key))
        if grew:
            self.sample()

    def known(self) -> set[int]:
        """What is there now, for :meth:`settle`."""
        return set(self._sizes)

    def settle(self, kind: str, but: Collection[int] = ()) -> None:
        """Whatever new is there now is of this kind, ``but`` what was :meth:`known` before."""
        for key, size in self._sizes.items():
            if self._kinds[key] == _NEW and key not in but:
                self._kinds[key] = kind
                self._made[_NEW] -= size
                self._made[kind] += size

    def restart(self) -> None:
        """A new peak begins."""
        self.peak = {}
        self.sample()

    def sample(self) -> None:
        """Look whether more is held than ever before."""
        now = self._booked()
        # Weights that have been booked since were made by operations, too.
        now[_NEW] -= now["weights"] - self._booked_before
        for kind, size in self._made.items():
            now[kind] += size
        if not self.peak or sum(now.values()) > sum(self.peak.values()):
            self.peak = now

    def _booked(self) -> dict[str, int]:
        now = dict.fromkeys(KINDS, 0)
        for role, count in self._held().items():
            now[KIND_OF_ROLE.get(role, "weights")] += count
        return now

    def _gone(self, key: int, _: object) -> None:
        del self._storages[key]
        self._made[self._kinds.pop(key)] -= self._sizes.pop(key)
