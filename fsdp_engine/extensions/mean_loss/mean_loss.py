"""Mean loss over the samples of all ranks and microbatches, whose numbers of samples may differ.

Backward runs on the sum of the losses of a microbatch. The reduced gradients are then the gradients
of the sum over all ranks and microbatches, divided by the number of ranks. The engine multiplies
them by ``ranks / samples``. One all-reduce of four elements per step, issued with the last
reductions, sums the numbers of samples of all ranks.

In a step, all losses on all ranks must be results of ``mean_loss()``, or none. The message detects
a mixture. On a CPU all ranks then raise. The host does not wait for an accelerator, so there the
reduced gradients become NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._tensor import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.activity import naming
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import start_all_reduce
from fsdp_engine.engine import Engine
from fsdp_engine.memory import allocator
from fsdp_engine.runtime.gradient_observer import GradientObserver
from fsdp_engine.runtime.reductions import Phase
from fsdp_engine.runtime.unit import Unit

_WHAT = "mean_loss()"


@dataclass
class _StepLosses:
    """Losses of one step, from its first microbatch until its gradients are reduced.

    Attributes:
        totals: Four fp64 elements, summed over the microbatches whose backward has started: losses,
            samples, microbatches, and 1 if there was a backward of another loss. They are sums of
            this rank, and sums over all ranks once ``work`` is done.
        buffers: The buffers of trainable parameters.
        divisor: Power of two by which sums are divided before backward, since sums would overflow
            in fp16.
        num_reached: Number of microbatches whose backward has started.
        is_over: Whether the gradients are reduced or were cleared.
        work: The all-reduce of ``totals``.
        covers_backwards: Whether backwards of the model belong to the loss that was reached last.
            They start within its backward or, if none did, after it (from cached representations).
        has_begun: Whether a backward of the model started within the backward of that loss.
    """

    totals: Tensor
    buffers: Sequence[ParamAndGradBuffer]
    divisor: float
    num_reached: int = 0
    is_over: bool = False
    work: Any = field(default=None, repr=False)
    covers_backwards: bool = False
    has_begun: bool = False

    def reached(self, added: Tensor, grad: Tensor) -> None:
        """Add a microbatch to the totals when the backward of its loss starts.

        Raises:
            RuntimeError: Gradients of an earlier step are not cleared, or this step is over.
        """
        if self.is_over:
            raise RuntimeError(
                "backward of mean_loss(): expected a result of the present step; found one of a "
                "step that is over, since its gradients are reduced, or were cleared by "
                "zero_grad_buffer() or reset(). Call mean_loss() again"
            )
        if all(buffer.published.are_cleared_or_zeroed for buffer in self.buffers):
            self.totals.zero_()  # The user has dropped the gradients of the earlier microbatches.
        elif not self.num_reached:
            raise RuntimeError(
                "backward of mean_loss(): expected cleared gradients before a step's first "
                "microbatch; found some, which would be divided by the number of samples of this "
                "step. Run all microbatches of a step but the last under engine.no_sync(), and "
                "optimizer.zero_grad() after each step"
            )
        self.num_reached += 1
        self.totals += added
        self.covers_backwards, self.has_begun = True, False
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.covers_backwards = not self.has_begun


class MeanLoss(Tensor):
    """A result of ``mean_loss()``, possibly multiplied. No other loss can be added to it.

    The engine divides all gradients of a step, so it would also divide those of the other loss.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:  # Its `inputs` are not terms of the loss.
            with torch._C.DisableTorchFunctionSubclass():
                loss = args[0].as_subclass(Tensor)
            return func(loss, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            cls._check_terms(func, tree_leaves((args, kwargs)))
            if any(not issubclass(each, cls) for each in types):
                return NotImplemented  # The other class handles the call, e.g. sharded tensors.
            result = func(*args, **kwargs)
            if type(result) is Tensor and result.requires_grad and func not in _PLAIN:
                return result.as_subclass(cls)
        return result

    @classmethod
    def _check_terms(cls, func: Callable[..., Any], values: Iterable[Any]) -> None:
        for each in values:
            if isinstance(each, Tensor) and not isinstance(each, cls) and each.requires_grad:
                raise RuntimeError(
                    f"{getattr(func, '__name__', func)}: expected a result of mean_loss() to be "
                    "combined with others of mean_loss() or with tensors without gradient, since "
                    "gradients are divided by the number of samples; found a tensor of shape "
                    f"{tuple(each.shape)} that requires grad. Add it to loss_sum, multiplied by "
                    "count"
                )


# Functions that return a stored tensor, such as `.grad`. Their result is returned unchanged.
_PLAIN = get_default_nowrap_functions()


class MeanLosses(GradientObserver):
    """The mean losses of one engine. See the module docstring.

    Args:
        engine: The engine of the model.

    Attributes:
        weight: Weight of microbatches, by which their loss sums and counts are multiplied.
        num_calls: Number of calls of :meth:`add`.
    """

    def __init__(self, engine: Engine) -> None:
        self.weight = 1.0
        self.num_calls = 0
        self._mesh = engine.mesh
        self._buffers = [buffer for unit in engine.units for buffer in unit.trainable]
        self._step: _StepLosses | None = None
        self._divisor: float | None = None
        self._has_others = engine.reductions.phase is Phase.ACCUMULATING
        # The result of `last`, and whether any rank had a mean loss. True: the host knows it.
        self._last: Tensor | None = None
        self._has_last: Tensor | bool = False
        engine.reductions.observers.append(self)

    @property
    def last(self) -> Tensor | None:
        """Mean loss of the last step that had one, 0-d, fp32. None before the first one. A host
        sync on a rank that had no mean loss itself."""
        self._has_last = bool(self._has_last)
        return self._last if self._has_last else None

    @property
    def has_divisor(self) -> bool:
        """Whether the ranks have agreed on a divisor. They do in the first :meth:`add`."""
        return self._divisor is not None

    def add(self, loss_sum: Tensor, count: float | Tensor) -> Tensor:
        """See :func:`mean_loss`."""
        error = _mistake(loss_sum, count)
        self.num_calls += 1
        if self.weight != 1 and error is None:
            loss_sum, count = self.weight * loss_sum, self.weight * count
        if self._divisor is None:
            number = 0.0 if error is not None else float(count)
            group = self._mesh.control_group
            largest = max(agree(_WHAT, error or _not_a_number(number), group, number))
            # Equal on all ranks. Dividing by it is exact, since it is a power of two.
            self._divisor = 2.0 ** round(math.log2(max(1.0, largest)))
        if error is not None:
            raise error
        step = self._step = self._step or self._begin_step()
        with torch.no_grad():
            added = allocator.zeros(4, torch.float64, self._mesh.device)
            added[0] += loss_sum.detach().reshape(())
            added[1] += count.reshape(()) if isinstance(count, Tensor) else count
            added[2] += 1
        loss = loss_sum.reshape(()) / step.divisor
        loss.register_hook(partial(step.reached, added))
        return loss.as_subclass(MeanLoss)

    def begin_backward(self) -> None:
        """Record that a backward of the model starts.

        Raises:
            RuntimeError: The loss is not a mean loss, but the step has gradients of mean losses.
        """
        step = self._step
        if step is None or not step.num_reached:
            self._has_others = True
            return
        if step.covers_backwards:
            step.has_begun = True
            self._has_others = False  # The gradients of other losses were cleared.
        elif all(buffer.published.are_cleared_or_zeroed for buffer in self._buffers):
            self.discard()  # The user has dropped the gradients of the mean losses.
            self._has_others = True
        else:
            raise RuntimeError(
                "backward: expected a result of mean_loss(), as before in this step, since "
                "gradients of the step are divided by its number of samples; found another loss. "
                "Add it to loss_sum, multiplied by count, or use mean_loss(loss, 1) in a separate "
                "step"
            )

    def check_last(self, units: Sequence[Unit]) -> None:
        """Check that the last backward of a step leaves no gradients unreduced.

        Raises:
            RuntimeError: Gradients of some units would stay unreduced; names a unit.
        """
        if units and self._step is not None:
            raise RuntimeError(
                "backward of mean_loss(): expected the last microbatch to reduce the gradients of "
                f"all units; found {len(units)} units without a reduction, such as "
                f"{units[0].label} (set_requires_gradient_sync). Set it for all units, or for none"
            )

    def issued(self) -> None:
        """Start to sum the totals over the ranks."""
        if self._divisor is None:
            return  # No rank has called mean_loss().
        # A rank without a microbatch takes part as well: it scales its gradients if other ranks
        # had microbatches.
        step = self._step = self._step or self._begin_step()
        if self._has_others:
            step.totals[3] = 1
        if self._mesh.control_group is not None:
            step.work = start_all_reduce(step.totals, self._mesh.control_group, "sum")

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Scale the gradients to those of the mean. They become zero if there were no samples.

        Raises:
            RuntimeError: A penalty was computed with sharded parameters; names a parameter.
                Or, on a CPU, some ranks had other losses.
        """
        step = self._step
        self.discard()
        if step is None:
            return used
        if step.work is not None:
            assert self._mesh.control_group is not None
            with naming(_WHAT, self._mesh.control_group):
                step.work.wait()
        if step.num_reached:
            _check_penalties(self._buffers)
        total, count, num_losses, num_others = step.totals.unbind()
        is_mean = num_losses > 0  # False if no rank has called mean_loss() in this step
        is_mixed = is_mean & (num_others > 0)
        if is_mixed.device.type == "cpu" and is_mixed:
            raise RuntimeError(
                "backward: expected results of mean_loss() on all ranks, or on none, since "
                "gradients are divided by the number of samples of all ranks; found another loss "
                "on some ranks. Call mean_loss(loss, 1) there, or mean_loss(0 * loss, 0) for a "
                "batch that does not count (after this exception, call engine.reset())"
            )
        before = torch.nan if self._last is None else self._last
        self._last = torch.where(is_mean, total / count, before)
        if self._has_last is not True:
            self._has_last = step.num_reached > 0 or is_mean | self._has_last
        inverse = torch.where(count > 0, step.divisor / count, 0.0)
        inverse = torch.where(is_mixed, torch.nan, inverse)
        factors: dict[float, Tensor] = {}  # by number of ranks; usually a single one
        for buffer in self._buffers:
            assert buffer.grads is not None
            # Gradients of experts are divided by the number of all ranks, not that of their mesh.
            ranks = buffer.grads.divisor * self._mesh.size / buffer.mesh.size
            if ranks not in factors:
                factors[ranks] = torch.where(is_mean, inverse * ranks, 1.0)
            buffer.grads.scale(factors[ranks], True)
        return used

    def discard(self) -> None:
        """End the step."""
        if self._step is not None:
            self._step.is_over = True
        self._step = None
        self._has_others = False

    def _begin_step(self) -> _StepLosses:
        assert self._divisor is not None
        totals = allocator.zeros(4, torch.float64, self._mesh.device)
        return _StepLosses(totals, self._buffers, self._divisor)


def mean_loss(engine: Engine, loss_sum: Tensor, count: float | Tensor) -> Tensor:
    """Returns a 0-d tensor to call ``backward()`` on. The reduced gradients will be the gradients
    of the mean loss over the samples of all ranks and all microbatches of the step.

    Backward of each rank's own mean would give the mean of means, which differs if the numbers of
    samples (or tokens) differ. Call this function once per microbatch, on every rank, before the
    backward of the microbatch, and run all backwards of a step but the last under
    ``engine.no_sync()``; the first call is collective. The value of the tensor is not the
    mean: see ``last_mean_loss``. Include the complete loss of a microbatch in the sum; multiply a
    term ``c`` that is not a mean over samples by the count (``count * c``). Microbatches whose
    backward does not run, or whose gradients are cleared, do not count. The result can be
    multiplied by numbers and added to other results. Parameters outside of this engine get
    gradients of the sum, not of the mean.

    Args:
        engine: The engine of the model.
        loss_sum: One element that requires grad: the sum of the losses of this rank's samples in
            this microbatch.
        count: Number of samples, as a number or a tensor of one element, which causes no host sync
            after the first call. 0 for a batch that does not count.

    Raises:
        ValueError: A shape is wrong, or ``count`` is negative, infinite or NaN. A ``count`` in a
            tensor is checked in the first call only.
        RuntimeError: The module is a pipeline stage, whose loss other ranks compute, or the engine
            has replicas. Raised by backward: gradients of an earlier step are not cleared; the step
            of the result is over; the step has a penalty that was computed with sharded parameters,
            or another loss on any rank. Raised by an operation that adds another loss to the
            result.
    """
    if engine.scheduler.microbatch is not None:
        raise RuntimeError(
            "mean_loss(): expected a model whose ranks all compute a loss; found a pipeline "
            "stage. Divide by the number of samples of all microbatches in the loss function"
        )
    if not all(each.sees_all_ranks for each in engine.reductions.observers):
        raise RuntimeError(
            "mean_loss(): expected an engine without extensions that reduce gradients again; "
            "found one (replicas, or sums in a fixed order). Return the mean of a microbatch"
        )
    losses = engine.extension(MeanLosses)
    if not losses.has_divisor:
        engine.await_ranks()
    return losses.add(loss_sum, count)


@contextmanager
def weighting_losses(engine: Engine, weight: float) -> Iterator[Callable[[], int]]:
    """Context in which ``mean_loss`` multiplies loss sums and counts by ``weight``.

    It is for trainers that call ``even_steps``: the code that calls ``mean_loss`` is the user's,
    and does not get the weights of batches.

    Args:
        engine: The engine of the model.
        weight: The weight of the microbatch.

    Yields:
        A function that returns the number of calls of ``mean_loss`` in the context.
    """
    losses = engine.extension(MeanLosses)
    before, losses.weight = losses.weight, weight
    num_calls = losses.num_calls
    try:
        yield lambda: losses.num_calls - num_calls
    finally:
        losses.weight = before


def _last_mean_loss(engine: Engine) -> Tensor | None:
    """The mean loss of the last step with calls of ``mean_loss``, over the samples of all ranks
    and microbatches: 0-d, fp64, equal on all ranks. NaN if there were no samples. None before the
    first such step."""
    return engine.extension(MeanLosses).last


last_mean_loss = property(_last_mean_loss)


def _mistake(loss_sum: Tensor, count: float | Tensor) -> Exception | None:
    if loss_sum.numel() != 1 or not loss_sum.requires_grad:
        return ValueError(
            "loss_sum: expected one element that requires grad, the sum of the losses of samples; "
            f"found shape {tuple(loss_sum.shape)}, requires_grad={loss_sum.requires_grad}"
        )
    if isinstance(count, Tensor):
        if count.numel() == 1:
            return None
        return ValueError(
            f"count: expected a number of samples; found a tensor of shape {tuple(count.shape)}"
        )
    return _not_a_number(count)


def _not_a_number(count: float) -> Exception | None:
    if 0 <= count < math.inf:
        return None
    return ValueError(f"count: expected a number of samples; found {count}")


def _check_penalties(buffers: Sequence[ParamAndGradBuffer]) -> None:
    for buffer in buffers:
        if (name := buffer.published.name_of_penalty) is not None:
            raise RuntimeError(
                f"mean_loss(): expected gradients of samples' losses; found a gradient of the "
                f"sharded parameter {name}, from a penalty that was computed with "
                "model.parameters() outside of the modules' forwards. Such a gradient is not a "
                "mean over samples. Use the optimizer's weight_decay, or add the penalty's "
                "gradient to .grad after backward"
            )
