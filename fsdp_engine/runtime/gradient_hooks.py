"""Hooks on the gradients of parameters.

When autograd has accumulated the gradient of a full parameter, a hook writes it into the flat
buffer and sets ``.grad`` of the full parameter to None. Autograd computes gradients of sharded
parameters, too, if the loss uses them outside the model's forward (a penalty on weights). It would
add them to ``.grad`` directly, without the scale of other gradients, so another hook sets ``.grad``
of the sharded parameter to None first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.runtime.not_compiled import not_compiled
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


class GradientHooks:
    """Hooks on the gradients of one buffer's parameters.

    Hooks refer to this object weakly. The garbage collector does not see references from autograd
    to hooks, so a hook with a reference to the buffer would keep its parameters alive forever.

    Args:
        scheduler: The scheduler to which gradients are reported.
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
        """Register hooks on the gradient accumulators of sharded parameters. Called again when the
        accumulators have been replaced, because dtypes or the current stream have changed."""
        buffer, hooks = self._buffer, weakref.ref(self)
        self._accumulators = [accumulator_of(param) for param in buffer.sharded_params]
        for index, node in enumerate(self._accumulators):
            node.register_prehook(_precede(hooks, index, is_plain=buffer.is_plain))

    def renew(self) -> None:
        """Create gradient accumulators for the current stream, after it has changed."""
        self._accumulators = []
        self.follow()

    @not_compiled
    def arrived(self, index: int, param: Tensor) -> None:
        """Write the gradient of full parameter ``index`` into the flat buffer."""
        grad = param.grad
        if grad is None:
            return  # a function returned no gradient, or will compute it later
        param.grad = None
        if grad.requires_grad:
            raise _has_graph(self._buffer.records[index].name)
        grads = self._buffer.grads  # not stored in this object: a change of dtypes replaces it
        assert grads is not None
        writer = grads.writer
        if writer is None:
            self._scheduler.begin_gradient(self._unit)
            writer = grads.writer
            assert writer is not None
        if self._to_shard is not None:
            grad = self._to_shard(index, grad)
        if writer.write(index, grad):
            self._scheduler.on_last_gradient(self._unit)

    def precede(self, index: int, grad: Tensor, *, is_plain: bool) -> None:
        """Called before autograd accumulates ``grad`` into sharded parameter ``index``."""
        published = self._buffer.published
        if grad.requires_grad and torch.is_grad_enabled():
            raise _has_graph(self._buffer.records[index].name)
        if not is_plain:
            published.check_gradient(index, grad)
        self._scheduler.begin_backward()
        if not is_plain:
            published.detach_for_autograd(index)


class StreamGradientHooks(GradientHooks):
    """Hooks on an accelerator, which write gradients on the stream of the backward."""

    @not_compiled
    def arrived(self, index: int, param: Tensor) -> None:
        """See :meth:`GradientHooks.arrived`."""
        with self._stream.entered():
            super().arrived(index, param)


def _has_graph(name: str) -> RuntimeError:
    return RuntimeError(
        f"backward with create_graph=True: expected a gradient of {name} without a graph, since it "
        "is copied and reduced; found one with a graph. Gradients of parameters that are "
        "differentiated again need a model without fe.shard(), and torch.autograd.grad(..., "
        "create_graph=True). Gradients of the model's inputs can have a graph"
    )


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
    """Register hooks that write the gradients of ``unit`` into its buffers."""
    kind = StreamGradientHooks if scheduler.reductions.stream.exists else GradientHooks
    for buffer in unit.trainable:
        buffer.gradient_hooks = kind(scheduler, unit, buffer)
        buffer.reads.reduces_gradients = True
