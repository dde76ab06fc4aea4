"""Hooks on the gradients of parameters.

A gradient of a full parameter is written into its place in the flat buffer as soon as autograd has
accumulated it, and ``.grad`` of the full parameter is dropped. Before autograd accumulates into a
sharded parameter by itself, its ``.grad`` is taken away, since autograd would add to it in place,
unscaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.runtime.not_compiled import not_compiled
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


class GradientHooks:
    """Autograd's hooks on one buffer's parameters.

    The garbage collector does not see that autograd holds a hook: a hook that held the buffer, and
    so the parameter, would keep all of them for ever. So hooks hold this object weakly.

    Args:
        scheduler: The scheduler, which is told of gradients.
        unit: The unit of the buffer.
        buffer: The buffer whose parameters get hooks.
    """

    def __init__(self, scheduler: Scheduler, unit: Unit, buffer: ParamAndGradBuffer) -> None:
        self._scheduler = scheduler
        self._unit = unit
        self._buffer = buffer
        self._to_shard = buffer.gradient_to_shard()
        self._stream = scheduler.reductions.stream
        self.follow()
        own = weakref.ref(self)
        for index, param in enumerate(buffer.full_params):
            handle = param.register_post_accumulate_grad_hook(_listen(own, index))
            if buffer.is_plain:
                buffer.hooks.own[index] = handle.id

    def follow(self) -> None:
        """Put hooks on the accumulators of sharded parameters: the first time, and when they have
        become others, since dtypes have changed or another stream is current."""
        buffer, hooks = self._buffer, weakref.ref(self)
        self._accumulators = [accumulator_of(param) for param in buffer.sharded_params]
        for index, node in enumerate(self._accumulators):
            node.register_prehook(_precede(hooks, index, is_plain=buffer.is_plain))

    def renew(self) -> None:
        """Another stream is current: the accumulators become new ones of that stream."""
        self._accumulators = []
        self.follow()

    @not_compiled
    def arrived(self, index: int, param: Tensor) -> None:
        """Full parameter ``index`` has a ``.grad``."""
        grad = param.grad
        if grad is None:
            return  # a function that returned None, or computes it later
        param.grad = None
        grads = self._buffer.grads  # other ones, if dtypes have changed
        assert grads is not None
        writer = grads.writer
        if writer is None:
            self._scheduler.begin_gradient(self._unit)
            writer = grads.writer
            assert writer is not None
        if self._to_shard is not None:
            grad = self._to_shard(index, grad)
        if writer.write(index, grad):
            self._scheduler.gradient_came(self._unit)

    def precede(self, index: int, grad: Tensor, *, is_plain: bool) -> None:
        """Autograd is about to accumulate ``grad`` into sharded parameter ``index``."""
        published = self._buffer.published
        if not is_plain:
            published.check_gradient(index, grad)
        self._scheduler.begin_backward()
        if not is_plain:
            published.detach_for_autograd(index)


class StreamGradientHooks(GradientHooks):
    """Hooks on an accelerator: gradients are written on the stream of the backward."""

    @not_compiled
    def arrived(self, index: int, param: Tensor) -> None:
        """See :class:`GradientHooks`."""
        with self._stream.entered():
            super().arrived(index, param)


def _listen(hooks: weakref.ref[GradientHooks], index: int) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        listening = hooks()
        if listening is not None:
            listening.arrived(index, param)

    return hook


def _precede(
    hooks: weakref.ref[GradientHooks], index: int, *, is_plain: bool
) -> Callable[[tuple[Tensor | None, ...]], None]:
    def hook(grads: tuple[Tensor | None, ...]) -> None:
        preceding = hooks()
        if preceding is not None and grads[0] is not None:
            preceding.precede(index, grads[0], is_plain=is_plain)

    return hook


def hook_gradients(scheduler: Scheduler, unit: Unit) -> None:
    """Write each gradient of the unit into its flat buffer as soon as autograd accumulated it."""
    kind = StreamGradientHooks if scheduler.reductions.stream.exists else GradientHooks
    for buffer in unit.trainable:
        buffer.gradient_hooks = kind(scheduler, unit, buffer)
        buffer.reads.reduces_gradients = True
