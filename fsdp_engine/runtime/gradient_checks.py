"""Checks of gradients before they are reduced: NaN and Inf, and unusually large norms.

Whatever is found stays on the device until the step's reductions are done: one read per step, not
one per buffer, so that nothing in backward waits for the device. On CPU reading costs nothing:
there one pass takes the least and the largest element of a buffer, and only where one of them is
not finite each parameter is looked at (``benchmarks/nan_check.py``).
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.flat_dtensor.full_reductions import slice_norms
from fsdp_engine.memory import allocator

# A norm is large beyond so many times the largest of so many steps.
LARGE_FACTOR = 10.0
LARGE_HISTORY = 100
_MOST_NAMED = 8


class GradientChecks:
    """What the config asks for, over all trainable buffers of an engine.

    Args:
        buffers: the trainable buffers, in one order on all ranks.
        config: says what to look for.
        group: all data-parallel ranks; None for one.
        device: of the gradients.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        config: DistributedDataParallelConfig,
        group: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group = group
        self.looks_for_nan = config.check_for_nan_in_grad
        self.looks_for_large = config.check_for_large_grads
        self._labels = [buffer.label for buffer in buffers]
        self._place: dict[int, tuple[int, int, int]] = {}  # (buffer, first flag, number of flags)
        self._names: list[str] = []
        for number, buffer in enumerate(buffers):
            names = [record.name for record in buffer.records]
            self._place[id(buffer)] = (number, len(self._names), len(names))
            self._names += names
        self.flags = allocator.zeros(len(self._names), torch.uint8, device)
        self._norms = allocator.zeros(len(buffers), torch.float32, device)
        self._history: list[deque[float]] = [deque(maxlen=LARGE_HISTORY) for _ in buffers]

    def look(self, buffer: ParamAndGradBuffer) -> None:
        """Look at gradients of ``buffer`` that are about to be reduced for the first time."""
        assert buffer.grads is not None
        number, first, count = self._place[id(buffer)]
        written = buffer.grads.written()
        views = list(map(_in_parts, written.views))
        flat = _in_parts(written.buffer.tensor)
        if self.looks_for_nan and not _is_seen_to_be_finite(flat):
            # The largest magnitude is NaN or Inf if any element is, in whatever dtype.
            peaks = _largest(views)
            self.flags[first : first + count] |= (~torch.isfinite(peaks)).to(torch.uint8)
        if self.looks_for_large:
            norms = slice_norms([view for view in views if view.numel()], 2.0)
            if norms:
                norm = torch.linalg.vector_norm(torch.stack(norms)).float()
                # Of several microbatches that are reduced one by one, the largest counts.
                self._norms[number] = torch.maximum(self._norms[number], norm)

    def conclude(self, found: Sequence[int]) -> str | None:
        """Warn of large norms; return the problem, the same on all ranks, or None.

        Collective where ``found`` has any flag set.

        Args:
            found: the flags' maximum over all ranks.
        """
        problem = None
        if self.looks_for_nan and any(found):
            problem = self._describe(self.flags.tolist())
        if self.looks_for_large:
            self._warn_of_large(self._norms.tolist())
        self.forget()
        return problem

    def forget(self) -> None:
        """Nothing was seen."""
        self.flags.zero_()
        self._norms.zero_()

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
            # Gradients may well be zero at first: nothing is large beside that.
            if largest > 0.0 and norm > LARGE_FACTOR * largest:
                warnings.warn(
                    f"check_for_large_grads: gradients of {label} have norm {norm:.3g} on this "
                    f"rank, more than {LARGE_FACTOR:g} times the largest of the last "
                    f"{len(history)} steps, {largest:.3g}",
                    stacklevel=2,
                )
            if math.isfinite(norm):  # beside infinity nothing would be large any more
                history.append(norm)


def _is_seen_to_be_finite(flat: Tensor) -> bool:
    """Whether all elements are finite; False also where finding out would wait for a device."""
    if flat.device.type != "cpu":
        return False
    # Both are NaN if any element is; unlike a sum, neither overflows.
    return all(math.isfinite(peak) for peak in torch.aminmax(flat)) if flat.numel() else True


def _largest(views: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor, fp32; 0 for empty ones."""
    # That of nothing is not defined; that of one zero is 0.
    nothing = allocator.zeros(1, torch.float32, views[0].device)
    nonempty = [view if view.numel() else nothing for view in views]
    return torch.stack([norm.float() for norm in torch._foreach_norm(nonempty, math.inf)])


def _in_parts(tensor: Tensor) -> Tensor:
    """Of complex numbers both parts: their magnitude overflows where they do not."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
