"""The mean loss over the samples of all ranks and microbatches, which may have different numbers.

Backward runs on the sum of a microbatch's losses. Reduced gradients are then those of the sum over
all ranks and microbatches, divided by the number of ranks; the engine multiplies them with
``ranks / samples``. The number of samples is added over the ranks once a step, in a message of two
elements that is sent with the step's last reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.collectives import gather_objects, start_all_reduce
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.comm.stall_monitor import naming
from fsdp_engine.memory import allocator

_WHAT = "mean_loss()"


@dataclass
class _StepLosses:
    """The losses of one step, from its first microbatch until its gradients are reduced.

    Attributes:
        totals: the sum of the losses and the number of samples, fp64: of this rank, and from
            ``work`` on of all ranks.
        buffers: the trainable ones.
        num_losses: microbatches.
        num_reached: of these, how often backward has begun with one.
        is_over: gradients are reduced, or were cleared.
        work: the message that adds them over the ranks.
    """

    totals: Tensor
    buffers: Sequence[ParamAndGradBuffer]
    num_losses: int = 0
    num_reached: int = 0
    is_over: bool = False
    work: Any = field(default=None, repr=False)

    def reached(self, grad: Tensor) -> None:
        """Backward has begun with a loss.

        Raises:
            RuntimeError: gradients of an earlier step are not cleared, or this step is over.
        """
        if self.is_over:
            raise RuntimeError(
                "backward of mean_loss(): expected a result of the present step; found one of a "
                "step that is over, since its gradients are reduced, or were cleared by "
                "zero_grad_buffer() or reset(). Call mean_loss() again"
            )
        if not self.num_reached and not all(each.published.are_cleared for each in self.buffers):
            raise RuntimeError(
                "backward of mean_loss(): expected cleared gradients before a step's first "
                "microbatch (optimizer.zero_grad()); found some, which would be divided by the "
                "number of samples of this step"
            )
        self.num_reached += 1


class MeanLosses:
    """See the module docstring.

    Args:
        mesh: the data-parallel ranks.
        buffers: the trainable ones.

    Attributes:
        last: the mean of the last step that had one, 0-d, fp32; None before the first.
    """

    def __init__(self, mesh: DataMesh, buffers: Sequence[ParamAndGradBuffer]) -> None:
        self.last: Tensor | None = None
        self._mesh = mesh
        self._buffers = buffers
        self._step: _StepLosses | None = None
        # Backward runs on sums that are divided by this: in fp16, sums would overflow.
        self._divisor: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether there is a loss whose gradients are not reduced."""
        return self._step is not None

    def add(self, loss_sum: Tensor, count: float | Tensor) -> Tensor:
        """See :meth:`fsdp_engine.engine.Engine.mean_loss`."""
        _check(loss_sum, count)
        if self._divisor is None:
            group = self._mesh.control_group
            counts: list[Any] = gather_objects(float(count), group, _WHAT)
            # The same on all ranks, and exact, since it is a power of two.
            self._divisor = 2.0 ** round(math.log2(max(1.0, *counts)))
        if self._step is None:
            totals = allocator.zeros(2, torch.float64, self._mesh.device)
            self._step = _StepLosses(totals, self._buffers)
        step = self._step
        with torch.no_grad():
            step.totals[0] += loss_sum.detach().reshape(())
            step.totals[1] += count.reshape(()) if isinstance(count, Tensor) else count
        step.num_losses += 1
        loss = loss_sum.reshape(()) / self._divisor
        loss.register_hook(step.reached)
        return loss

    def start(self) -> None:
        """The step's last reductions are issued: begin to add over the ranks.

        Raises:
            RuntimeError: backward has not run once with each loss.
        """
        step = self._step
        if step is None:
            return
        if step.num_reached != step.num_losses:
            raise RuntimeError(
                "backward: expected to run once with the result of each mean_loss() of the step; "
                f"found {step.num_losses} results, {step.num_reached} backwards with one. Add all "
                "losses of a microbatch to one sum; call engine.reset() after an exception"
            )
        if self._mesh.control_group is not None:
            step.work = start_all_reduce(step.totals, self._mesh.control_group, "sum")

    def finish(self) -> None:
        """Gradients are reduced: make them those of the mean. Zero, if there were no samples."""
        step = self._step
        if step is None:
            return
        self.discard()
        if step.work is not None:
            assert self._mesh.control_group is not None
            with naming(_WHAT, self._mesh.control_group):
                step.work.wait()
        assert self._divisor is not None
        total, count = step.totals.unbind()
        self.last = (total / count).float()
        inverse = torch.where(count > 0, self._divisor / count, 0.0)
        for buffer in self._buffers:
            assert buffer.grads is not None
            # Experts are divided by the number of all ranks, of which theirs are some.
            ranks = buffer.grads.divisor * self._mesh.size / buffer.mesh.size
            buffer.grads.scale(inverse * ranks, True)

    def discard(self) -> None:
        """The step is over."""
        if self._step is not None:
            self._step.is_over = True
        self._step = None


def _check(loss_sum: Tensor, count: float | Tensor) -> None:
    if loss_sum.numel() != 1 or not loss_sum.requires_grad:
        raise ValueError(
            "loss_sum: expected one element that requires grad, the sum of the losses of samples; "
            f"found shape {tuple(loss_sum.shape)}, requires_grad={loss_sum.requires_grad}"
        )
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(
            f"count: expected a number of samples; found a tensor of shape {tuple(count.shape)}"
        )
    if not isinstance(count, Tensor) and not 0 <= count < math.inf:
        raise ValueError(f"count: expected a number of samples; found {count}")
