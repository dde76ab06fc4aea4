"""Tracks simulated memory: the engine's memory by its ledger, other memory by tensors' storages.

Every storage that an operation returns is tracked until it is freed, and has a kind:

    weights       main and compute weights, the model's own buffers, and other storages that exist
                  when the engine has been constructed
    gradients     accumulated gradients, from a unit's first reduction until they are cleared
    optimizer     storages allocated by the optimizer's construction or its steps, and chunks of
                  offloaded state on the device
    transient     full parameters and gradients in flight, and idle memory kept for them; if the
                  host computes, also the memory in which lanes receive other ranks' gradients
    activations   all others: inputs, saved tensors, temporaries, and gradients until the engine
                  has copied them

Memory of offloaded state on the host or a disk has no kind. It is counted by place.

Operations also return tensors over memory in the engine's ledger, which must not be counted twice.
Weights in the ledger are allocated by operations, and are subtracted from the storages of
operations. Other memory in the ledger belongs to storages that are empty when an operation creates
them, and are resized later.

[Note: Workspaces]
Some CPU kernels return workspaces that their fake versions do not return. oneDNN's LSTM, which
torch uses on CPUs, returns a workspace for backward; its fake version returns an empty one. For
training in fp32 the workspace has these parts, each rounded up to pages. They were determined from
the kernel's results for many sizes (``tests/planner/simulation/test_memory.py`` compares them):

    gates                              T x B x ld(4 H)
    states of layers, of iterations,
    and gradients of layers            3 times 2 x (T + 1) x B x ld(max(I, H))
    cells and their gradients          2 times 2 x (T + 1) x B x H
    outputs                            T x B x ld(H)

for T steps, batch size B, input size I and hidden size H. ld is the size of a row rounded up to
64 bytes, plus 64 bytes if the result is a multiple of 1,024 bytes.

Norms of half-precision inputs with weights in fp32 return their statistics in fp32; their fake
versions return them in the dtype of the input. Some losses first write the loss of each element
into the memory of their result, which stays allocated as long as the loss exists.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.kernel_interface import allocator

KINDS = ("weights", "gradients", "optimizer", "transient", "activations")

_NEW = "activations"
TRANSIENT = "transient"


class MemoryTracker:
    """Tracks the current bytes by kind, and the bytes at the peak.

    Attributes:
        peak: Bytes by kind at the time of the largest sum since :meth:`restart`.
        elsewhere: Current bytes outside of the device, by place.
        series: Times and bytes by kind, in the order of ``KINDS``, since :meth:`restart`.
        by_place: For each result of ``place``, bytes by kind at the time of the largest sum, since
            :meth:`restart`.
        now: Returns the time.
        place: Returns the current phase and module of the program (not a place of memory).
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self.series: list[tuple[float, tuple[int, ...]]] = []
        self.by_place: dict[tuple[str, str], tuple[int, ...]] = {}
        self.now: Callable[[], float] = lambda: 0.0
        self.place: Callable[[], tuple[str, str]] = lambda: ("", "")
        self.elsewhere: dict[str, int] = {}
        self._places: dict[int, str] = {}  # places of storages that are not on the device
        self._held: Callable[[], Mapping[str, int]] = dict
        self._sizes: dict[int, int] = {}  # sizes of storages by address
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._kinds: dict[int, str] = {}
        self._made = dict.fromkeys(KINDS, 0)
        self._booked_before = 0
        # Storages that were first seen at the last sample, and the record before this sample: the
        # peak, the length of the series, and the entry of `by_place` for the phase and module.
        self._newest: set[int] = set()
        self._before: tuple[dict[str, int], int, tuple[int, ...] | None] = ({}, 0, None)
        self._sampled_at = ("", "")

    def watch(self, held: Callable[[], Mapping[str, int]]) -> None:
        """Start tracking an engine. Existing storages are counted as weights.

        Args:
            held: Returns the engine's bytes by role.
        """
        self._held = held
        self.assign_kind("weights")
        self._booked_before = self._booked()["weights"]
        self._made["weights"] -= self._booked_before
        self.restart()

    def made(self, tensors: Sequence[Tensor], kind: str = _NEW) -> None:
        """Track the storages of inputs, or of tensors that an operation has returned.

        Args:
            tensors: The tensors. Storages that are already tracked are skipped.
            kind: The kind of their storages.
        """
        newest, grew = set(), False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes and not tensor.is_meta:
                size = storage.nbytes()
                self._sizes[key] = size
                self._kinds[key] = kind
                self._made[kind] += size
                newest.add(key)
                grew = grew or size > 0
                # A plain weak reference, not `finalize`: its registry would keep this object, and
                # with it the engine and every storage, alive.
                self._storages[key] = weakref.ref(storage, partial(self._gone, key))
        if grew:
            before = self.peak, len(self.series), self.by_place.get(self.place())
            self.sample()
            self._newest, self._before = newest, before

    def moved(self, tensor: Tensor, place: str) -> None:
        """Record that the memory of a tensor that was just made is at ``place``, not on the
        device."""
        key = tensor.untyped_storage()._cdata
        size = self._sizes[key]
        is_new = key in self._newest
        if is_new:
            self.peak, num_before, at_place = self._before
            del self.series[num_before:]
            if at_place is None:
                del self.by_place[self._sampled_at]
            else:
                self.by_place[self._sampled_at] = at_place
        self._made[self._kinds[key]] -= size
        self._kinds[key] = self._places[key] = place
        self.elsewhere[place] = self.elsewhere.get(place, 0) + size
        if is_new and (others := self._newest - {key}):
            before = self._before
            self.sample()  # the other new storages are still on the device
            self._newest, self._before = others, before

    def place_of(self, tensor: Tensor) -> str | None:
        """Returns the place of a tensor; None if it is on the device."""
        if not self._places:
            return None
        return self._places.get(tensor.untyped_storage()._cdata)

    @property
    def has_places(self) -> bool:
        """Whether any memory is not on the device."""
        return bool(self._places)

    def known(self) -> set[int]:
        """Returns the keys of the current storages, for :meth:`assign_kind`."""
        return set(self._sizes)

    def assign_kind(self, kind: str, but: Collection[int] = ()) -> None:
        """Assign a kind to all storages that still count as activations, except for keys in
        ``but``, the result of an earlier call of :meth:`known`."""
        for key, size in self._sizes.items():
            if self._kinds[key] == _NEW and key not in but:
                self._kinds[key] = kind
                self._made[_NEW] -= size
                self._made[kind] += size

    def restart(self) -> None:
        """Clear the record, and start it with the current memory."""
        self.peak = {}
        self.series = []
        self.by_place = {}
        self.sample()

    def sample(self, temporary: int = 0) -> None:
        """Record the current memory, and update the peaks.

        Args:
            temporary: Bytes that the current operation allocates and frees.
        """
        self._newest = set()
        now = self._booked()
        # Weights that were added to the ledger since `watch` were allocated by operations, and must
        # not be counted twice.
        now[_NEW] -= now["weights"] - self._booked_before
        for kind, size in self._made.items():
            now[kind] += size
        now[_NEW] += temporary
        if not self.peak or sum(now.values()) > sum(self.peak.values()):
            self.peak = dict(now)
        place = self._sampled_at = self.place()
        if sum(now.values()) > sum(self.by_place.get(place, (-1,))):
            self.by_place[place] = tuple(now.values())
        now[_NEW] -= temporary
        sizes = tuple(now.values())
        if not self.series or self.series[-1][1] != sizes:
            self.series.append((self.now(), sizes))

    def _booked(self) -> dict[str, int]:
        now = dict.fromkeys(KINDS, 0)
        for role, count in self._held().items():
            now[allocator.KIND_OF_ROLE.get(role, "weights")] += count
        return now

    def _gone(self, key: int, _: object) -> None:
        del self._storages[key]
        counts = self.elsewhere if self._places.pop(key, None) is not None else self._made
        counts[self._kinds.pop(key)] -= self._sizes.pop(key)


_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_layer_norm.default,
)
_LOSSES = (
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
)
_PAGE = 4096
_LINE = 16  # numbers of fp32 in 64 bytes


def as_returned(func: Any, args: Sequence[Any], out: Any) -> Any:
    """Returns the result ``out`` of a fake operation ``func(*args)`` as the kernel would return it:
    an LSTM's result has its workspace, a norm's statistics have the kernel's dtype, and the memory
    of a loss has room for the loss of each element; see [Note: Workspaces]."""
    if func in _NORMS:
        return _with_statistics_of(args, out)
    if func in _LOSSES and out.ndim == 0:
        shape = torch.broadcast_shapes(*(each.shape for each in args[:2]))
        return allocator.empty((max(math.prod(shape), 1),), out.dtype, out.device)[0]
    if func is not torch.ops.aten.mkldnn_rnn_layer.default:
        return out
    steps, hidden, keeps = args[0], args[10], args[15]
    if not keeps or steps.dtype != torch.float32:
        return out
    workspace = allocator.empty(lstm_workspace(steps, hidden), torch.uint8, steps.device)
    return (*out[:3], workspace)


def _with_statistics_of(args: Sequence[Any], out: Any) -> Any:
    """Returns the result of a norm, with mean and deviation in fp32 if the weights are in fp32."""
    has_fp32 = any(isinstance(each, Tensor) and each.dtype == torch.float32 for each in args[1:])
    if not has_fp32 or out[1].dtype == torch.float32:
        return out
    normed, *statistics = out
    wide = [allocator.empty(tuple(each.shape), torch.float32, each.device) for each in statistics]
    return (normed, *wide)


def lstm_workspace(steps: Tensor, hidden: int) -> int:
    """Returns the bytes of the workspace for an input of shape (T, B, I) and a hidden size."""
    num_steps, rows, width = steps.shape
    states = 2 * (num_steps + 1) * rows
    parts = [num_steps * rows * _padded_row(4 * hidden), num_steps * rows * _padded_row(hidden)]
    parts += 3 * [states * _padded_row(max(width, hidden))] + 2 * [states * hidden]
    return sum(-(-4 * part // _PAGE) * _PAGE for part in parts)


def _padded_row(numbers: int) -> int:
    rounded = -(-numbers // _LINE) * _LINE
    return rounded + _LINE if rounded % 256 == 0 else rounded
