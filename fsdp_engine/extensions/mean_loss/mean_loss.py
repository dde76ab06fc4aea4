"""The mean loss over the samples of all ranks and microbatches, which may have different numbers.

Backward runs on the sum of a microbatch's losses. Reduced gradients are then those of the sum over
all ranks and microbatches, divided by the number of ranks; the engine multiplies them with
``ranks / samples``. The number of samples is added over the ranks once a step, in a message of
four elements that is sent with the step's last reductions.

All losses of a step must be results of ``mean_loss()``, or none, on all ranks. If there are both,
that message says so. On a CPU all ranks raise; the host does not wait for an accelerator, where
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
    """The losses of one step, from its first microbatch until its gradients are reduced.

    Attributes:
        totals: The totals of the microbatches whose backward has begun: the sum of their losses,
            the number of their samples, their own number, and 1 if there was a backward of another
            loss, fp64; of this rank, and from ``work`` on of all.
        buffers: the trainable ones.
        divisor: backward runs on sums that are divided by this power of two: in fp16, sums would
            overflow.
        num_reached: microbatches whose backward has begun.
        is_over: gradients are reduced, or were cleared.
        work: the message that adds over the ranks.
        covers_backwards: backwards of the model belong to the loss that was reached last: they
            begin within its backward or, if none did, follow it (from cached representations).
        has_begun: one began within it.
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
        """Backward has begun with the loss of a microbatch, ``added`` to the totals.

        Raises:
            RuntimeError: gradients of an earlier step are not cleared, or this step is over.
        """
        if self.is_over:
            raise RuntimeError(
                "backward of mean_loss(): expected a result of the present step; found one of a "
                "step that is over, since its gradients are reduced, or were cleared by "
                "zero_grad_buffer() or reset(). Call mean_loss() again"
            )
        if all(buffer.published.are_cleared_or_zeroed for buffer in self.buffers):
            self.totals.zero_()  # of microbatches whose gradients the user has dropped
        elif not self.num_reached:
            raise RuntimeError(
                "backward of mean_loss(): expected cleared gradients before a step's first "
                "microbatch (optimizer.zero_grad()); found some, which would be divided by the "
                "number of samples of this step"
            )
        self.num_reached += 1
        self.totals += added
        self.covers_backwards, self.has_begun = True, False
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.covers_backwards = not self.has_begun


class MeanLoss(Tensor):
    """A result of ``mean_loss()``, alone or multiplied: no other loss can be added to it.

    The engine divides all gradients of a step, and those of a term that is added here, too.
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
        if func is Tensor.backward:  # whose `inputs` are no terms, but tensors of other classes
            with torch._C.DisableTorchFunctionSubclass():
                loss = args[0].as_subclass(Tensor)
            return func(loss, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            cls._check_terms(func, tree_leaves((args, kwargs)))
            if any(not issubclass(each, cls) for each in types):
                return NotImplemented  # for the other class to handle, as for sharded tensors
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


# Functions whose result is as it was stored.
_PLAIN = get_default_nowrap_functions()


class MeanLosses(GradientObserver):
    """See the module docstring.

    Args:
        engine: The engine of the model.

    Attributes:
        last: the mean of the last step that had one, 0-d, fp32; None before the first.
        weight: The weight of microbatches; their sums and numbers are multiplied by it.
        num_calls: how often :meth:`add` was called.
    """

    def __init__(self, engine: Engine) -> None:
        self.last: Tensor | None = None
        self.weight = 1.0
        self.num_calls = 0
        self._mesh = engine.mesh
        self._buffers = [buffer for unit in engine.units for buffer in unit.trainable]
        self._step: _StepLosses | None = None
        self._divisor: float | None = None
        self._has_others = engine.reductions.phase is Phase.ACCUMULATING
        engine.reductions.observers.append(self)

    @property
    def has_divisor(self) -> bool:
        """Whether ranks have agreed on a divisor; the first :meth:`add` is collective."""
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
            # The same on all ranks, and exact, since it is a power of two.
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
        """A backward of the model begins.

        Raises:
            RuntimeError: it is not one of a mean loss, and the step has gradients of mean losses.
        """
        step = self._step
        if step is None or not step.num_reached:
            self._has_others = True
            return
        if step.covers_backwards:
            step.has_begun = True
            self._has_others = False  # their gradients are cleared
        elif all(buffer.published.are_cleared_or_zeroed for buffer in self._buffers):
            self.discard()  # the user has dropped the gradients of the mean losses
            self._has_others = True
        else:
            raise RuntimeError(
                "backward: expected a result of mean_loss(), as before in this step, since "
                "gradients of the step are divided by its number of samples; found another loss. "
                "Add it to loss_sum, multiplied by count, or call mean_loss(loss, 1) for it alone "
                "in a step of its own"
            )

    def check_last(self, units: Sequence[Unit]) -> None:
        """Refuse a step of which gradients of some units are left accumulated.

        Raises:
            RuntimeError: there are such units; names one.
        """
        if units and self._step is not None:
            raise RuntimeError(
                "backward of mean_loss(): expected the last microbatch to reduce the gradients of "
                f"all units; found {len(units)} that do not, {units[0].label} among them "
                "(set_requires_gradient_sync). Set all, or none"
            )

    def issued(self) -> None:
        """Begin to add over the ranks."""
        if self._divisor is None:
            return  # as on all ranks
        # A rank without a microbatch takes part, and learns that others had some.
        step = self._step = self._step or self._begin_step()
        if self._has_others:
            step.totals[3] = 1
        if self._mesh.control_group is not None:
            step.work = start_all_reduce(step.totals, self._mesh.control_group, "sum")

    def reduced(self, used: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Make gradients those of the mean: zero, if there were no samples.

        Raises:
            RuntimeError: there are gradients of a rank's slice alone; names a parameter. Or, on a
                CPU, some ranks had other losses.
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
        is_mean = num_losses > 0  # else no rank has called mean_loss() in this step
        is_mixed = is_mean & (num_others > 0)
        if is_mixed.device.type == "cpu" and is_mixed:
            raise RuntimeError(
                "backward: expected results of mean_loss() on all ranks, or on none, since "
                "gradients are divided by the number of samples of all ranks; found another loss "
                "on some ranks. Call mean_loss(loss, 1) there, or mean_loss(0 * loss, 0) for a "
                "batch that does not count (after this exception, call engine.reset())"
            )
        before = torch.nan if self.last is None else self.last
        self.last = torch.where(is_mean, (total / count).float(), before)
        inverse = torch.where(count > 0, step.divisor / count, 0.0)
        inverse = torch.where(is_mixed, torch.nan, inverse)
        factors: dict[float, Tensor] = {}  # by number of ranks: one, as a rule
        for buffer in self._buffers:
            assert buffer.grads is not None
            # Experts are divided by the number of all ranks, of which theirs are some.
            ranks = buffer.grads.divisor * self._mesh.size / buffer.mesh.size
            if ranks not in factors:
                factors[ranks] = torch.where(is_mean, inverse * ranks, 1.0)
            buffer.grads.scale(factors[ranks], True)
        return used

    def discard(self) -> None:
        """The step is over."""
        if self._step is not None:
            self._step.is_over = True
        self._step = None
        self._has_others = False

    def _begin_step(self) -> _StepLosses:
        assert self._divisor is not None
        totals = allocator.zeros(4, torch.float64, self._mesh.device)
        return _StepLosses(totals, self._buffers, self._divisor)


def mean_loss(engine: Engine, loss_sum: Tensor, count: float | Tensor) -> Tensor:
    """Returns a 0-d tensor to call ``backward()`` on: reduced gradients will be those of the
    mean over the samples of all ranks and all microbatches of the step.

    The mean of the ranks' means, which backward of a mean gives, is another one where numbers
    of samples (or tokens) differ. Call it once a microbatch, on every rank, before the
    microbatch's backward; the first call is collective. The value of the tensor is no mean:
    :attr:`last_mean_loss` is. All of a microbatch's loss belongs into the sum: a term ``c``
    that is no mean over samples as ``count * c``. Microbatches whose backward does not run, or
    whose gradients are cleared, do not count. The result can be multiplied by numbers and added
    to other results. Parameters of the loss outside of this engine get gradients of sums, not
    of means.

    Args:
        engine: The engine of the model.
        loss_sum: one element that requires grad: the sum of the losses of this rank's samples
            in this microbatch.
        count: their number, a number or a tensor of one element, which is not waited for. 0: a
            batch that does not count.

    Raises:
        ValueError: other shapes, or a negative or infinite number.
        RuntimeError: within a pipeline, of which other ranks compute the loss. Of backward:
            gradients of an earlier step are not cleared, the step of the result is over,
            there is a penalty that was computed with sharded parameters, or another loss in
            the step, on this rank or on another one. Of an operation that adds another loss to
            the result.
    """
    if engine.scheduler.microbatch is not None:
        raise RuntimeError(
            "mean_loss(): expected a model whose ranks all compute a loss; found a pipeline "
            "stage. Divide by the number of samples of all microbatches in the loss function"
        )
    if not all(each.sees_all_ranks for each in engine.reductions.observers):
        raise RuntimeError(
            "mean_loss(): expected an engine with all ranks of the job; found replicas, whose "
            "numbers of samples it does not know. Return the mean of a microbatch"
        )
    losses = engine.extension(MeanLosses)
    if not losses.has_divisor:
        engine.await_ranks()
    return losses.add(loss_sum, count)


@contextmanager
def weighting_losses(engine: Engine, weight: float) -> Iterator[Callable[[], int]]:
    """Context in which :func:`mean_loss` multiplies sums and numbers by ``weight``; for
    trainers, whose users call it without knowing of batches that are repeated.

    Args:
        engine: The engine of the model.
        weight: The weight of the microbatch.

    Yields:
        A function that returns how often :func:`mean_loss` was called in the context.
    """
    losses = engine.extension(MeanLosses)
    before, losses.weight = losses.weight, weight
    num_calls = losses.num_calls
    try:
        yield lambda: losses.num_calls - num_calls
    finally:
        losses.weight = before


def _last_mean_loss(engine: Engine) -> Tensor | None:
    """The mean loss of the last step whose microbatches called :func:`mean_loss`, over the
    samples of all ranks and microbatches: 0-d, fp32, the same on all ranks; NaN without
    samples. None before the first."""
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
                f"mean_loss(): expected gradients of samples' losses; found one of {name} as users "
                "hold it, from a penalty that was computed with model.parameters() outside of the "
                "modules' forwards. It is no mean over samples. Use the optimizer's weight_decay, "
                "or add the penalty's gradient to .grad after backward"
            )
