"""Measured memory of tensors in a step: all live storages after every operation.

Independent of the engine, its ledger and the simulation. Storages are referenced weakly, and their
sizes are read each time, since the engine resizes and swaps storages. Storages created outside of
dispatch are found when an operation reads them, and by a search of all objects at the start of a
step. Memory that a kernel allocates and frees is not included.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Mode that tracks the storages that operations read and create.

    Attributes:
        peak: peak bytes since :meth:`restart`; 0 before it is called.
        where: the operation at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.where = ""
        self._is_watching = False
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, FakeTensor) for each in types):
            with _disable_current_modes():  # DTensors infer shapes, without memory
                return func(*args, **kwargs)
        if any(each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # the operations of the subclass are dispatched here again
        self._look(str(func))  # storages created outside operations
        out = func(*args, **kwargs)
        self._note(each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor))
        self._look(str(func))
        return out

    def restart(self) -> None:
        """Find all live tensors, and measure the peak from now on."""
        gc.collect()
        for each in gc.get_objects():
            if issubclass(type(each), Tensor):
                self._note([each])
        self.peak = 0
        self._is_watching = True
        self._look("restart")

    @property
    def num_bytes(self) -> int:
        """Bytes of all live storages."""
        total = 0
        for key, reference in list(self._known.items()):
            storage = reference()
            if storage is None:
                del self._known[key]
            else:
                total += _bytes_in_memory(storage)
        return total

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if local.layout is not torch.strided:
                continue  # it has no storage; such tensors may be left by an earlier test
            storage = local.untyped_storage()
            if storage.device.type == "meta":
                continue  # belongs to a fake tensor, or to a wrapper
            known = self._known.get(storage._cdata)
            if known is None or known() is not storage:
                self._known[storage._cdata] = weakref.ref(storage)

    def _look(self, where: str) -> None:
        if not self._is_watching:
            return
        now = self.num_bytes
        if now > self.peak:
            self.peak, self.where = now, where


def _bytes_in_memory(storage: torch.UntypedStorage) -> int:
    """A storage whose memory was taken away may still have a size ([Note: Unread memory] in
    ``memory/allocator.py``)."""
    try:
        return storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # builds of torch for CUDA: access is an error
        return 0
