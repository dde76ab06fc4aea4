"""Checks of gradients before reduction: NaN, Inf, and unusually large norms.

Results stay on the device until the reductions of the step are done. The host reads them once per
step rather than once per buffer, so backward never waits for the device. There is one byte for each
parameter, set if its gradient is not finite. An all-reduce, issued with the last gradients, takes
the maximum over all ranks. On a CPU, one pass over a buffer finds its least and largest element,
and parameters are checked one by one only if one of these is not finite
(``benchmarks/nan_check.py``).
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.activity import naming
from fsdp_engine.comm.collectives import gather_objects, start_all_reduce
from fsdp_engine.comm.lanes import SideStream
from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.flat_dtensor.full_reductions import slice_norms
from fsdp_engine.memory import allocator
from fsdp_engine.runtime.gradient_observer import GradientObserver

# A norm is large if it exceeds LARGE_FACTOR times the largest of the last LARGE_HISTORY steps.
LARGE_FACTOR = 10.0
LARGE_HISTORY = 100
_MOST_NAMED = 8


@dataclass(frozen=True)
class GradientChecks(EngineExtension):
    """Checks the gradients of each step before they are reduced.

    Attributes:
        nan: Check for NaN and Inf. On failure ``finish_grad_sync``, which the last backward calls,
            raises a RuntimeError on all ranks that names parameters and ranks.
        large: Warn if a buffer's gradient norm exceeds ten times the largest of the last 100 steps.
    """

    nan: bool = True
    large: bool = False

    def start(self, engine: Engine) -> None:
        """Add the checks to the gradient observers of ``engine``."""
        engine.reductions.observers.append(_Checks(engine, self))


class _Checks(GradientObserver):
    """Checks of the gradients of one engine.

    Args:
        engine: The engine to check.
        asked: The checks to make.
    """

    def __init__(self, engine: Engine, asked: GradientChecks) -> None:
        buffers = [buffer for unit in engine.units for buffer in unit.trainable]
        device = engine.mesh.device
        self._reductions = engine.reductions
        self._group = engine.ranks.control_group
        self._message_group = engine.ranks.message_group
        self._stream = SideStream(device)
        self._work: Any = None
        self.looks_for_nan = asked.nan
        self.looks_for_large = asked.large
        self._labels = [buffer.label for buffer in buffers]
        self._place: dict[int, tuple[int, int, int]] = {}  # (buffer, first flag, number of flags)
        self._names: list[str] = []
        for number, buffer in enumerate(buffers):
            names = [record.name for record in buffer.records]
            self._place[id(buffer)] = (number, len(self._names), len(names))
            self._names += names
        self._flags = self._found = allocator.zeros(len(self._names), torch.uint8, device)
        self._norms = allocator.zeros(len(buffers), torch.float32, device)
        self._history: list[deque[float]] = [deque(maxlen=LARGE_HISTORY) for _ in buffers]

    def before_sending(self, buffer: ParamAndGradBuffer) -> None:
        """See the base class."""
        assert buffer.grads is not None
        number, first, count = self._place[id(buffer)]
        written = buffer.grads.written()
        views = list(map(_in_parts, written.views))
        flat = _in_parts(written.buffer.tensor)
        if self.looks_for_nan and not _is_seen_to_be_finite(flat):
            # The largest magnitude is NaN or Inf if any element is, in any dtype.
            peaks = _largest(views)
            self._flags[first : first + count] |= (~torch.isfinite(peaks)).to(torch.uint8)
        if self.looks_for_large:
            norms = slice_norms([view for view in views if view.numel()], 2.0)
            if norms:
                norm = torch.linalg.vector_norm(torch.stack(norms)).float()
                # Microbatches may be reduced one by one: keep the largest norm of the step.
                self._norms[number] = torch.maximum(self._norms[number], norm)

    def issued(self) -> None:
        """See the base class."""
        if self.looks_for_nan and self._message_group is not None:
            self._stream.wait_for_compute()
            with self._stream.entered():
                self._found = self._flags.clone()
                self._work = start_all_reduce(self._found, self._message_group, "max")

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """See the base class.

        Raises:
            RuntimeError: A gradient is not finite on some rank. Raised on all ranks.
        """
        problem = None
        if self.looks_for_nan and any(self._read()):
            problem = self._describe(self._flags.tolist())
        if self.looks_for_large:
            self._warn_of_large(self._norms.tolist())
        if problem is not None:
            self._reductions.clear(zero=False)
            raise RuntimeError(problem)
        self.discard()
        return used

    def discard(self) -> None:
        """See the base class."""
        self._work = None
        self._flags.zero_()
        self._norms.zero_()

    def _read(self) -> list[int]:
        """Returns the flags: for each parameter, the maximum over all ranks."""
        if self._message_group is None:
            return self._flags.tolist()
        with naming("checks of gradients", self._message_group), self._stream.entered():
            self._work.wait()
            return self._found.tolist()

    def _describe(self, mine: Sequence[int]) -> str:
        names = [name for name, flag in zip(self._names, mine, strict=True) if flag]
        by_name: dict[str, list[int]] = {}
        for rank, theirs in enumerate(gather_objects(names, self._group)):
            assert isinstance(theirs, list)
            for name in theirs:
                by_name.setdefault(name, []).append(rank)
        shown = [
            f"{name} (data-parallel rank {', '.join(map(str, ranks))})"
            for name, ranks in list(by_name.items())[:_MOST_NAMED]
        ]
        more = len(by_name) - len(shown)
        return (
            "check_for_nan_in_grad: expected finite gradients; found NaN or Inf, before any "
            f"reduction, in {'; '.join(shown)}{f'; and {more} more' if more else ''}"
        )

    def _warn_of_large(self, norms: Sequence[float]) -> None:
        for label, norm, history in zip(self._labels, norms, self._history, strict=True):
            largest = max(history, default=0.0)
            # Gradients may be zero in the first steps. No norm counts as large relative to zero.
            if largest > 0.0 and norm > LARGE_FACTOR * largest:
                warnings.warn(
                    f"check_for_large_grads: gradients of {label} have norm {norm:.3g} on this "
                    f"rank, more than {LARGE_FACTOR:g} times the largest of the last "
                    f"{len(history)} steps, {largest:.3g}",
                    stacklevel=2,
                )
            if math.isfinite(norm):  # With infinity in the history, no later norm would be large.
                history.append(norm)


def _is_seen_to_be_finite(flat: Tensor) -> bool:
    """Returns whether all elements are known to be finite. False on a device, to avoid a sync."""
    if flat.device.type != "cpu":
        return False
    # Minimum and maximum are NaN if any element is. Unlike a sum, they do not overflow.
    return all(math.isfinite(peak) for peak in torch.aminmax(flat)) if flat.numel() else True


def _largest(views: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitude of each tensor in fp32; 0 for empty tensors."""
    # The maximum of an empty tensor is undefined, so a single zero replaces it.
    nothing = allocator.zeros(1, torch.float32, views[0].device)
    nonempty = [view if view.numel() else nothing for view in views]
    return torch.stack([norm.float() for norm in torch._foreach_norm(nonempty, math.inf)])


def _in_parts(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as real and imaginary parts, since its magnitude may overflow."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
