"""The gradients of one buffer, from autograd to the optimizer's shard.

    full --reduce--> accumulation[GRAD] --reduce, on the last microbatch--> accumulation[OPTIM]

Each gradient is written once, scaled and cast in the same pass, into its place in a flat buffer:

- If GRAD is not sharded (depth 0), into the accumulation buffer. Later microbatches add to it, and
  the last microbatch reduces it in place.
- If GRAD is sharded, into a transient *staging* buffer in the communication dtype. Every microbatch
  reduces the staging buffer into the accumulation buffer, along the axes over which gradients are
  sharded. The last microbatch reduces the accumulation buffer along the other axes.

There are two objects, because state has two lifetimes. A :class:`GradientWriter` is created for the
first gradient of a backward, and dropped when the reduction of these gradients is submitted.
:class:`StepGradients` are created for the first gradient after gradients were cleared, and dropped
when all gradients are cleared. [Note: When gradients are held] in ``gradient_memory.py`` describes
their memory.

    staging       full gradients of one microbatch, where gradients are sharded
    accumulation  sums over microbatches, at the depth of GRAD
    comm          a copy of the accumulation buffer in the communication dtype, if that differs
    optim         the optimizer's shard in its own dtype, if that differs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import or_

import torch
from torch import Tensor

from fsdp_engine.buffers.gradient_memory import (
    GradientMemory,
    GradientTensors,
    SubmittedReduction,
    WriteBuffer,
)
from fsdp_engine.buffers.gradient_scale import (
    GradientScale,
    gradient_scale,
    keep_owned,
    kept_factor,
)
from fsdp_engine.buffers.placement import GradientShard
from fsdp_engine.buffers.sharded_buffer import (
    BufferContext,
    ShardedBuffer,
)
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.comm.pending_steps import PendingStep
from fsdp_engine.memory import allocator
from fsdp_engine.options import Options
from fsdp_engine.strategies import AXIS_BELOW_DEPTH

_STRIDED = torch.strided


class GradientWriter:
    """Writes the gradients of one backward.

    Args:
        target: The buffer that gradients are written into.
        scale: The factors of the gradients.
        adds: One byte for each parameter. 1: the next gradient is added. 0: it overwrites. The
            writer changes these bytes, so they must not be shared.

    Attributes:
        target: See the argument.
        arrived: One byte for each parameter. 1: its gradient was written.
        num_missing: Number of parameters whose gradient was not written yet.
    """

    __slots__ = ("_adds", "_alpha", "_factor", "_views", "arrived", "num_missing", "target")

    def __init__(self, target: WriteBuffer, scale: GradientScale, adds: bytearray) -> None:
        self.target = target
        self._views = target.views
        self._alpha = scale.alpha
        self._factor = scale.factor
        self._adds = adds
        self.arrived = bytearray(len(adds))
        self.num_missing = len(adds)

    def write(self, index: int, grad: Tensor) -> bool:
        """Write the gradient of parameter ``index``, scaled and cast in one pass.

        Returns:
            Whether the gradients of all parameters were written.
        """
        if grad.layout is not _STRIDED:
            grad = grad.to_dense()
        view = self._views[index]
        if self._adds[index]:
            view.add_(grad, alpha=self._alpha)
        elif grad.ndim:
            torch.mul(grad, self._factor, out=view)
        else:
            # The factor may be a 1-D tensor, which would give a 0-d gradient a 1-D product.
            torch.mul(grad.reshape(1), self._factor, out=view.view(1))
        if not self.arrived[index]:
            self.arrived[index] = self._adds[index] = 1
            self.num_missing -= 1
        return not self.num_missing


@dataclass(slots=True)
class StepGradients:
    """One buffer's gradients from the first one until all of them are cleared.

    Attributes:
        sums: One byte for each parameter. 1: the accumulation buffer holds a valid sum of its
            gradients. 0: the next gradient overwrites its elements.
        used: One byte for each parameter. 1: this rank had a gradient of it.
        tensors: The tensors over the accumulation buffer; None: not needed yet.
        is_published: Whether ``.grad`` of the parameters are the accumulated sums. False: sums are
            incomplete and not visible to the user.
        num_published: Number of published gradients that the user has not set to None.
        earlier: Reduced gradients that are added when the next reduction is done, by index of the
            parameter. See [Note: Gradients between backwards] in ``published_gradients.py``.
        penalties: Gradients that autograd has accumulated into sharded parameters, by index of the
            parameter. They are added when the next reduction is done.
        versions: Version counters of the published gradients when they were published between
            microbatches; empty: sums are reduced.
        full_values: Full gradients, if every rank has gathered them; None: not gathered.
    """

    sums: bytearray
    used: bytearray
    tensors: GradientTensors | None = None
    is_published: bool = True
    num_published: int = 0
    earlier: dict[int, Tensor] = field(default_factory=dict)
    penalties: dict[int, Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    full_values: Sequence[Tensor] | None = None

    @property
    def holds_any(self) -> bool:
        """Whether there are earlier gradients or penalties."""
        return bool(self.earlier or self.penalties)


class Gradients:
    """The gradients of one buffer. See the module docstring.

    Args:
        spec: The layout, the dtypes and the depths of the buffer.
        context: The communicators, the lanes and the memory of the engine.
        options: The options of the engine, which determine how gradients are scaled.
        pending: The pending optimizer step of the buffer, which may read the gradients.

    Attributes:
        step: The gradients of the current step; None: gradients are cleared.
        writer: The writer of the current backward; None: no gradient was written yet, or the
            reduction of the written gradients is submitted.
        optim_depth: The depth of the optimizer's shard.
        writes_to_staging: Whether gradients are sharded, so that full gradients are written into a
            staging buffer.
        is_inexact: Whether reducing gradients again would round them.
    """

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        options: Options,
        pending: PendingStep,
    ) -> None:
        self._pending = pending
        self._spec = spec
        self._context = context
        mesh_communicators, dtypes = context.mesh_communicators, spec.kind.dtypes
        self._options = options
        self._scale = gradient_scale(
            spec, options, mesh_communicators.mesh.size, context.memory.device
        )
        self._num_params = len(spec.layout.slots)
        self.optim_depth = spec.optim_depth
        self.writes_to_staging = spec.grad_depth > 0
        # Axes that are reduced on the last microbatch only, innermost first.
        axes = AXIS_BELOW_DEPTH[spec.grad_depth :]
        self._last_axes = [
            axis for axis in axes if mesh_communicators.comms[axis].reduce is not None
        ]
        self._memory = GradientMemory(
            spec, context, self._last_axes, pending, is_resident=context.memory.is_steady
        )
        # See [Note: Reducing again].
        has_comm = self._memory.has_comm_buffer
        self.is_inexact = has_comm or dtypes.optim_grad != dtypes.main_grad
        self.step: StepGradients | None = None
        self.writer: GradientWriter | None = None
        if context.memory.is_fixed:
            self._memory.take(self._scale)

    @property
    def shard(self) -> GradientShard:
        """The gradient shard that contains the gradients for the optimizer."""
        return self._memory.shard

    @property
    def awaits_last_microbatch(self) -> bool:
        """Whether an axis of several ranks is reduced on the last microbatch only."""
        return bool(self._last_axes)

    @property
    def num_staged_elements(self) -> int:
        """Number of elements of the staging buffer; 0 where gradients are not sharded."""
        return self._spec.layout.numel if self.writes_to_staging else 0

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulation buffer, and of the optimizer's shard if it has a dtype of its
        own."""
        return self._memory.rest_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes that are allocated for reductions, such as the staging buffer."""
        return self._memory.transient_bytes

    @property
    def optim_grads(self) -> Tensor | None:
        """This rank's shard of the gradients, 1-D, with padding; None: gradients are cleared."""
        self._pending.finish()
        tensors = self.step.tensors if self.step is not None else None
        return None if tensors is None else tensors.for_optimizer.narrow(self.optim_depth)

    @property
    def divisor(self) -> float:
        """The number by which sums over the ranks are divided."""
        return self._scale.num_ranks

    def divide_by(self, divisor: float) -> None:
        """Divide sums over the ranks by ``divisor`` from the next gradient on. Has no effect with
        the option ``average_in_collective``.

        Raises:
            RuntimeError: Gradients are sent in fp16, and a backward has run with another divisor.
                See [Note: Gradients in fp16].
        """
        spec = self._spec
        scale = gradient_scale(spec, self._options, divisor, self._context.memory.device)
        if self._memory.tensors is not None and scale.boost != self._scale.boost:
            raise RuntimeError(
                f"gradient divisor of {spec.label}: expected it to be set before the first "
                "backward, since gradients are sent in fp16; found that a backward has run"
            )
        self._scale = scale

    def make_step(self) -> StepGradients:
        """Returns the gradients of the current step, and begins a step if gradients are cleared."""
        if self.step is None:
            self.step = StepGradients(bytearray(self._num_params), bytearray(self._num_params))
        return self.step

    def accumulation(self, *, zero: bool = True) -> GradientTensors:
        """Returns the step's tensors, and allocates their memory unless it is allocated.

        Args:
            zero: Zero memory that this call allocates.
        """
        return self._tensors(zero=zero)

    def main_grads(self) -> ShardedBuffer:
        """Returns the accumulation buffer. If this call allocates its memory, it holds zeros."""
        return self.accumulation().accum

    def for_optimizer(self) -> ShardedBuffer:
        """Returns the buffer that contains the shard at the depth of OPTIM, which the optimizer
        reads."""
        return self.accumulation().for_optimizer

    def give_out(self) -> GradientTensors:
        """Returns tensors that stay valid, because their memory is no longer freed. If this call
        allocates the memory, it holds zeros."""
        self._pending.finish()
        self._memory.is_resident = True
        return self._memory.take(self._scale, zero=True)

    def free(self) -> None:
        """Free the memory of gradients, even if it is resident. Gradients must be cleared."""
        self._memory.free()

    def restore(self) -> None:
        """Allocate resident memory again after :meth:`free`. It holds zeros."""
        if self._memory.is_resident:
            self._pending.finish()
            self._memory.take(self._scale, zero=True)

    def accumulated(self, index: int) -> Tensor | None:
        """Returns this rank's slice of parameter ``index`` in the accumulation buffer, 1-D; None:
        no gradients are accumulated."""
        self._pending.finish()
        tensors = self.step.tensors if self.step is not None else None
        return None if tensors is None else tensors.accum.local(index, self.optim_depth)

    def no_gradient(self, local: Tensor) -> Tensor:
        """Returns zeros with the size of the slice ``local``, in the dtype of the optimizer's
        gradients."""
        return allocator.zeros(local.numel(), self._spec.kind.dtypes.optim_grad, local.device)

    def begin(self) -> None:
        """Create the writer of a backward, before its first gradient is written."""
        step = self.make_step()
        step.is_published = False
        if self.writes_to_staging:
            target, adds = self._memory.stage(), bytearray(self._num_params)
        else:
            target, adds = self._tensors().written, bytearray(step.sums)
        self._context.lanes.compute.access(writes=(target.buffer.tensor,))
        self.writer = GradientWriter(target, self._scale, adds)

    def resume(self) -> None:
        """Prepare the accumulation buffer, which holds reduced gradients, so that new gradients can
        be added and reduced with them: see [Note: Reducing again]."""
        accum = self.main_grads()
        self._context.lanes.compute.access(writes=(accum.tensor,))
        mesh_communicators, spec = self._context.mesh_communicators, self._spec
        factor = kept_factor(mesh_communicators, self._last_axes, spec, self._scale)
        keep_owned(accum, spec.optim_depth, factor)

    def end_writing(self) -> None:
        """End the writing of this backward. Gradients that were not written become zeros, unless
        the accumulation buffer has a sum for their parameter."""
        step, writer = self.step, self.writer
        assert step is not None
        assert writer is not None
        arrived = writer.arrived
        if not writer.num_missing:
            step.used[:] = arrived
        elif writer.num_missing < self._num_params:
            step.used[:] = bytes(map(or_, step.used, arrived))
        keeps = not self.writes_to_staging
        if writer.num_missing:
            missing = [each for each in zeros_in(arrived) if not (keeps and step.sums[each])]
            if missing:
                torch._foreach_zero_([writer.target.views[index] for index in missing])
        if keeps:
            _set_all(step.sums)
        else:
            writer.target.zero_padding()

    def written(self) -> WriteBuffer:
        """Returns the buffer that contains this backward's gradients before any reduction. Where
        gradients are not sharded, this can also be called between backwards, and returns the
        accumulation buffer."""
        return self._tensors().written if self.writer is None else self.writer.target

    def zero_missing(self) -> None:
        """Zero the sums of parameters that got no gradient since gradients were cleared."""
        accum, step = self.main_grads(), self.make_step()
        step.is_published = False
        if 1 not in step.sums:
            accum.tensor.zero_()
        self._zero_cleared(step, accum)

    def scale(self, factor: float | Tensor, is_reduced: bool) -> None:
        """Multiply gradients by ``factor``: the optimizer's shard if they are reduced
        (``is_reduced``), else the accumulation buffer."""
        if self.step is None or self.step.tensors is None:
            return
        self._pending.finish()
        part = self.optim_grads if is_reduced else self.step.tensors.accum.tensor
        assert part is not None
        scale_(part, factor)

    def reduce(self, *, last: bool) -> SubmittedReduction | None:
        """Submit the reductions that this microbatch needs, and drop the backward's writer.

        Args:
            last: This is the last microbatch of the step.

        Returns:
            The tickets of the reductions; None: no reduction is needed.
        """
        step, writer, compute = self.step, self.writer, self._context.lanes.compute
        assert step is not None, "reduce() was called before gradients were written or zeroed"
        self.writer = None
        ticket: Ticket | None = None
        if self.writes_to_staging and writer is not None:
            if self._scale.later != 1.0:
                writer.target.buffer.tensor.mul_(self._scale.later)
            tensors = self._tensors()
            is_first = 1 not in step.sums
            self._zero_cleared(step, tensors.accum)
            chain = tensors.chains.overwriting if is_first else tensors.chains.adding
            self._memory.allocate_working()
            ticket = chain.run((compute.record(),))
        else:
            tensors = self._tensors()
            if last and self._scale.later != 1.0 and not self.writes_to_staging:
                tensors.accum.tensor.mul_(self._scale.later)
        if not (last and tensors.chains.last):
            return None if ticket is None else SubmittedReduction(ticket, ticket)
        uses_comm = self._memory.allocate_comm()
        uses_comm = self._memory.allocate_working() or uses_comm
        after = [] if ticket is None else [ticket]
        if uses_comm or ticket is None:
            after.append(compute.record())
        done = tensors.chains.last.run(after)
        # The axes that only the last microbatch reduces can be slow ones, such as that between
        # nodes. The staging buffer can be freed before these reductions are done.
        return SubmittedReduction(done if uses_comm or ticket is None else ticket, done)

    def release(self) -> None:
        """Free the memory of reductions. Compute must have waited until they no longer read it."""
        self._memory.free_transient()

    def drop_step(self, *, check_resident: bool = False) -> bool:
        """Drop the step, whose gradients are all cleared. Returns whether the user holds some of
        its tensors although the next step will write them. Compute must no longer use them.

        Args:
            check_resident: See :meth:`.GradientMemory.release`.
        """
        step, self.step = self.step, None
        if step is None or step.tensors is None:
            return False
        return self._memory.release(step.tensors, check_resident=check_resident)

    def begin_zeroed(self) -> bool:
        """Drop the step, and begin the next one with the same memory. The memory is zeroed.

        Returns:
            Whether the gradients have memory. False: nothing was changed.
        """
        self._pending.finish()
        tensors = self._memory.tensors
        if tensors is None or not tensors.has_memory:
            return False
        self._context.lanes.compute.access(writes=(tensors.accum.tensor,))
        tensors.accum.tensor.zero_()
        tensors.forget_zeroed()
        self.step = None
        self.make_step().tensors = tensors
        return True

    def abandon(self) -> None:
        """Leave the memory to the user's references. This object must not be used afterwards."""
        self.step = self.writer = None
        self._memory.abandon()

    def _tensors(self, *, zero: bool = False) -> GradientTensors:
        """Returns the step's tensors, and allocates their memory unless it is allocated."""
        if self._pending.tickets:
            self._pending.finish()
        step = self.step
        if step is None:
            step = self.make_step()
        tensors = step.tensors
        if tensors is None:
            tensors = step.tensors = self._memory.take(self._scale, zero=zero)
        return tensors

    def _zero_cleared(self, step: StepGradients, accum: ShardedBuffer) -> None:
        """Zero the elements of parameters without a sum, if other parameters have one: the next
        reduction adds to all of them."""
        if 1 in step.sums and 0 in step.sums:
            depth = self._spec.grad_depth
            torch._foreach_zero_([accum.local(index, depth) for index in zeros_in(step.sums)])
        _set_all(step.sums)


def _set_all(flags: bytearray) -> None:
    flags[:] = b"\1" * len(flags)


def scale_(grad: Tensor, factor: float | Tensor) -> None:
    """Multiply ``grad`` by ``factor`` in place. If ``factor`` is a tensor of one element, it is not
    rounded to the dtype of ``grad``."""
    if isinstance(factor, Tensor):
        # A 1-D tensor takes part in type promotion, a 0-d one does not.
        wide = torch.promote_types(grad.dtype, torch.float32)
        torch.mul(grad, factor.reshape(1).to(grad.device, wide), out=grad)
    else:
        grad.mul_(factor)


def zeros_in(flags: bytearray | bytes) -> Iterator[int]:
    """Yield the indices of zero bytes. Python code runs only for these, not for other bytes."""
    place = flags.find(0)
    while place >= 0:
        yield place
        place = flags.find(0, place + 1)
