"""The gradients of one buffer, from where autograd leaves them to the optimizer's range.

    full --reduce--> main_grad[GRAD] --reduce, on the last microbatch--> main_grad[OPTIM]

Each gradient is written once, scaled and cast on the way, into its place in a flat buffer:

- GRAD full (depth 0): straight into the buffer that accumulates, which later microbatches add to
  and the last one reduces in place;
- GRAD cut: into a transient *staging* buffer in the wire's dtype, which every microbatch reduces
  along the axes that cut gradients, into the shard that accumulates; the other axes wait for the
  last.

[Note: When gradients are held] in ``gradient_memory.py`` says when there is memory for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp_engine.buffers.gradient_memory import GradientMemory
from fsdp_engine.buffers.gradient_scale import gradient_scale
from fsdp_engine.buffers.redistribute import Machinery
from fsdp_engine.buffers.reducing_again import keep_owned, kept_factor
from fsdp_engine.buffers.reduction_chains import ReductionChains, make_chains
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices import memory
from fsdp_engine.devices.lane import Ticket
from fsdp_engine.strategies import AXIS_BELOW_DEPTH


class Gradients:
    """See the module docstring.

    Args:
        spec, machinery: of the buffer.
        config: says how gradients are divided.

    Attributes:
        touched: per parameter, 1: a gradient came in this backward.
        num_touched: how many of them.
        writes_to_staging: whether gradients are cut, so that full ones are transient.
        rounds_again: what is reduced cannot be reduced again without loss.
    """

    def __init__(
        self, spec: BufferSpec, machinery: Machinery, config: DistributedDataParallelConfig
    ) -> None:
        self._spec = spec
        self._machinery = machinery
        ladder, dtypes = machinery.ladder, spec.kind.dtypes
        self._config = config
        self._scale = gradient_scale(spec, config, ladder.mesh.size, machinery.memory.device)
        self.writes_to_staging = spec.grad_depth > 0
        self.touched = bytearray(len(spec.layout.slots))
        self.num_touched = 0
        # Nothing is accumulated: the next gradients overwrite. And those of which that is so
        # though others are kept.
        self._is_fresh = True
        self._cleared: set[int] = set()
        # Axes that are reduced on the last microbatch only, innermost first.
        axes = AXIS_BELOW_DEPTH[spec.grad_depth :]
        self._last_axes = [axis for axis in axes if ladder.comms[axis].reduce is not None]
        has_wire = dtypes.comm != dtypes.main_grad and bool(self._last_axes)
        # [Note: Reducing again]
        self.rounds_again = has_wire or dtypes.optim_grad != dtypes.main_grad
        self._memory = GradientMemory(spec, machinery, has_wire=has_wire)
        self._chains: ReductionChains | None = None
        # See [Note: When gradients are held].
        self._is_given_out = machinery.memory.has_pool or config.fsdp_double_buffer
        if machinery.memory.has_pool:
            self.main_grads()

    @property
    def awaits_last_microbatch(self) -> bool:
        """Whether axes of several ranks are left for the last microbatch to be reduced over."""
        return bool(self._last_axes)

    @property
    def num_staged_elements(self) -> int:
        """Elements of transient memory that writing gradients takes."""
        return self._spec.layout.numel if self.writes_to_staging else 0

    @property
    def rest_bytes(self) -> int:
        """Bytes of what accumulates, while it is there."""
        return self._memory.rest_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes of the staging buffer and of the copy in the wire's dtype, while they are there."""
        return self._memory.transient_bytes

    @property
    def optim_grads(self) -> Tensor | None:
        """This rank's part of the reduced gradients, 1-D, padding included; None: there is none."""
        if not self._memory.filled:
            return None
        if self._memory.handed is not None:
            return self._memory.handed.tensor
        accum = self._memory.accum
        return None if accum is None else accum.narrow(self._spec.optim_depth)

    @property
    def optim_depth(self) -> int:
        """The depth of what the optimizer gets."""
        return self._spec.optim_depth

    def for_optimizer(self) -> ShardedBuffer:
        """The buffer whose part at the depth of OPTIM the optimizer gets."""
        main = self.main_grads()
        return self._memory.handed if self._memory.handed is not None else main

    @property
    def divisor(self) -> float:
        """What sums over the ranks are divided by."""
        return self._scale.num_ranks

    def divide_by(self, divisor: float) -> None:
        """What comes from now on is divided by ``divisor`` instead of the number of ranks.

        Raises:
            RuntimeError: gradients travel in fp16, and have come: [Note: fp16 on the wire].
        """
        spec = self._spec
        scale = gradient_scale(spec, self._config, divisor, self._machinery.memory.device)
        if self._chains is not None and scale.boost != self._scale.boost:
            raise RuntimeError(
                f"gradient divisor of {spec.label}: expected it to be set before the first "
                "backward, since gradients travel in fp16; found a backward behind"
            )
        self._scale = scale

    def main_grads(self) -> ShardedBuffer:
        """What accumulates, with memory: zeros, if it had none."""
        accum = self._made()
        self._memory.fill(zero=True)
        return accum

    def give_out(self) -> ShardedBuffer:
        """The same; from now on it stays for good."""
        self._is_given_out = True
        return self.main_grads()

    def free(self) -> None:
        """All is cleared: the memory goes, also where it was given out."""
        self._memory.free()

    def restore(self) -> None:
        """What was given out has memory again."""
        if self._is_given_out:
            self.main_grads()

    def accumulated(self, index: int) -> Tensor | None:
        """This rank's part of parameter ``index`` in what is accumulated, 1-D; None: there is no
        memory."""
        accum = self._memory.accum
        if accum is None or not self._memory.filled:
            return None
        return accum.local(index, self._spec.optim_depth)

    def no_gradient(self, local: Tensor) -> Tensor:
        """Zeros of a slice, as the optimizer would get them."""
        return memory.zeros(local.numel(), self._spec.kind.dtypes.optim_grad, local.device)

    def scratch(self, dtype: torch.dtype) -> Tensor | None:
        """The memory of whole gradients as a line of ``dtype``; None if it is too small. Whoever
        uses it leaves zeros."""
        if self.writes_to_staging or self._spec.kind.dtypes.main_grad.itemsize < dtype.itemsize:
            return None
        self._made()
        self._memory.fill()
        return self._memory.scratch(dtype)

    def begin(self) -> None:
        """The first gradient of a backward is about to be written."""
        self._made()
        if self.writes_to_staging:
            self._memory.fill_staging()
        else:
            self._memory.fill()
        self._machinery.lanes.compute.access(writes=(self.written_flat,))

    def resume(self) -> None:
        """What is reduced is to be added to: see [Note: Reducing again]."""
        accum = self.main_grads()
        self._machinery.lanes.compute.access(writes=(accum.tensor,))
        ladder, spec = self._machinery.ladder, self._spec
        factor = kept_factor(ladder, self._last_axes, spec, self._scale)
        keep_owned(accum, spec.optim_depth, factor)

    def write(self, index: int, grad: Tensor) -> None:
        """Put the gradient of parameter ``index`` into its place: scaled and cast in one pass."""
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        view, scale = self._memory.views[index], self._scale
        is_second = self.touched[index]
        if is_second or self._keeps(index):
            if isinstance(scale.factor, float):
                view.add_(grad, alpha=scale.factor)
            else:
                view.add_(grad.to(view.dtype), alpha=scale.alpha)
        elif isinstance(scale.factor, float):
            torch.mul(grad, scale.factor, out=view)
        else:
            torch.mul(grad.reshape(-1), scale.factor, out=view.view(-1))
        if not is_second:
            self.touched[index] = 1
            self.num_touched += 1

    def finish_writing(self) -> None:
        """No more gradients come in this backward; those that did not come are zeros."""
        if self.num_touched < len(self.touched):
            missing = [index for index in zeros_in(self.touched) if not self._keeps(index)]
            if missing:
                torch._foreach_zero_([self._memory.views[index] for index in missing])
        if self.writes_to_staging:
            self._memory.zero_gaps()
        else:
            self._accumulated()

    def written(self) -> Sequence[Tensor]:
        """Where gradients lie that have not travelled yet, one tensor for each parameter."""
        return self._memory.views

    @property
    def written_flat(self) -> Tensor:
        """The same memory as one tensor; zeros between parameters."""
        assert self._memory.line is not None
        return self._memory.line.tensor

    def zero_fresh(self) -> None:
        """What no backward has written since gradients were cleared becomes zero."""
        accum = self.main_grads()
        if self._is_fresh:
            accum.tensor.zero_()
        self._zero_cleared(accum)
        self._accumulated()

    def zero(self) -> None:
        """All gradients become zero, padding included."""
        accum = self._memory.accum
        if accum is not None and self._memory.filled:
            self._machinery.lanes.compute.access(writes=(accum.tensor,))
            accum.tensor.zero_()

    def scale(self, factor: float | Tensor, is_reduced: bool) -> None:
        """Multiply what is accumulated, or (``is_reduced``) the part that the optimizer gets."""
        accum = self._memory.accum
        if accum is None or not self._memory.filled:
            return
        part = self.optim_grads if is_reduced else accum.tensor
        assert part is not None
        part.mul_(factor.to(part.dtype) if isinstance(factor, Tensor) else factor)

    def reduce(self, *, microbatch: bool, last: bool) -> Ticket | None:
        """Submit what is to be reduced now; returns a ticket, None if there is nothing.

        Args:
            microbatch: a backward has just written its gradients.
            last: it was the last one of the step.
        """
        accum, chains, compute = self._made(), self._chains, self._machinery.lanes.compute
        assert chains is not None
        ticket: Ticket | None = None
        if self._scale.later != 1.0 and (microbatch if self.writes_to_staging else last):
            self.written_flat.mul_(self._scale.later)
        if self.writes_to_staging and microbatch:
            self._memory.fill()
            self._zero_cleared(accum)
            chain = chains.overwriting if self._is_fresh else chains.adding
            ticket = chain.run((compute.record(),))
            self._accumulated()
        if last and chains.last:
            has_come = self._memory.fill_wire()
            after = [] if ticket is None else [ticket]
            if has_come or ticket is None:
                after.append(compute.record())
            ticket = chains.last.run(after)
        self._forget_backward()
        return ticket

    def release(self) -> None:
        """The reduction is done (compute has waited for it): hand transient memory back."""
        self._memory.drain()

    def clear(self, index: int) -> None:
        """What is accumulated of parameter ``index`` counts no more."""
        if not self._is_fresh:
            self._cleared.add(index)
            self._is_fresh = len(self._cleared) == len(self.touched)

    def keep(self, index: int) -> None:
        """What lies in the place of parameter ``index`` counts, from now on."""
        if self._is_fresh:
            self._cleared = set(range(len(self.touched)))
            self._is_fresh = False
        self._cleared.discard(index)

    def clear_all(self) -> None:
        """What is accumulated counts no more."""
        self._is_fresh = True
        self._cleared.clear()

    def discard(self) -> None:
        """Forget whatever was accumulated, and this backward."""
        self._forget_backward()
        self.clear_all()

    def leave(self) -> None:
        """Of no use any more: what was accumulated is left to whoever holds it."""
        self._memory.leave()

    @property
    def num_uses(self) -> int:
        """Holds on what accumulates: grows with each tensor over it that somebody keeps."""
        return self._memory.num_uses

    @property
    def may_go(self) -> bool:
        """Whether what accumulates has memory, which is not given out for good."""
        return not self._is_given_out and self._memory.filled

    def let_go(self, *, are_held: bool) -> None:
        """All is cleared: see [Note: When gradients are held].

        Args:
            are_held: somebody holds what was accumulated: it is left to him.
        """
        if are_held:
            self._memory.leave()
        elif self._spec.optim_depth > 0:
            self._memory.free()

    def _made(self) -> ShardedBuffer:
        """What accumulates, with the tensors over it; perhaps without memory."""
        if self._memory.accum is None:
            with self._memory.made() as accum:
                self._chains = make_chains(
                    self._spec, self._machinery, self._scale, self._last_axes, self._memory, accum
                )
            return accum
        return self._memory.accum

    def _keeps(self, index: int) -> bool:
        """Whether the next gradient of parameter ``index`` is added where it is written."""
        return not (self.writes_to_staging or self._is_fresh or index in self._cleared)

    def _zero_cleared(self, accum: ShardedBuffer) -> None:
        """What counts no more, beside what does, becomes zero."""
        if self._cleared and not self._is_fresh:
            depth = self._spec.grad_depth
            torch._foreach_zero_([accum.local(index, depth) for index in sorted(self._cleared)])

    def _accumulated(self) -> None:
        self._is_fresh = False
        self._cleared.clear()

    def _forget_backward(self) -> None:
        self.touched[:] = bytes(len(self.touched))
        self.num_touched = 0


def zeros_in(flags: bytearray | bytes) -> Iterator[int]:
    """Places of the bytes that are 0; costs what there are of them."""
    place = flags.find(0)
    while place >= 0:
        yield place
        place = flags.find(0, place + 1)
