"""Weight gradients that modules compute after backward, when they are told to.

A module may give backward the gradient of its input only, and compute its weights' gradients in
``backward_dw()``, whenever the schedule has time for it (Transformer Engine's modules with
``delay_wgrad_compute=True`` do). Such a module

- marks the parameters: ``skip_backward_post_hook = True``;
- takes callbacks by ``register_wgrad_accumulation_and_reduce_hooks(callback)`` and calls them,
  without arguments, once ``.grad`` of its parameters is there.

Until then the unit's reduction waits, the full parameters stay in their modules (without memory,
where they are cut: the gradient has to have somewhere to go), and reductions behind it in the
canonical order wait with it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.trees import iter_tensors
from fsdp_engine.runtime.unit import Unit

_REGISTER = "register_wgrad_accumulation_and_reduce_hooks"


def hook_delayed_gradients(scheduler: Scheduler, unit: Unit) -> None:
    """Await the weight gradients that modules of ``unit`` put off.

    Raises:
        ValueError: a parameter is marked, but none of its modules takes callbacks.
    """
    for buffer in unit.trainable:
        for index, param in enumerate(buffer.full_params):
            if not getattr(param, "skip_backward_post_hook", False):
                continue
            record = buffer.records[index]
            modules = [module for module, _ in record.owners if hasattr(module, _REGISTER)]
            if not modules:
                raise ValueError(
                    f"{record.name}: expected a module with {_REGISTER}, since the parameter is "
                    f"marked skip_backward_post_hook; found {type(record.owners[0][0]).__name__}"
                )
            awaited = _Awaited(scheduler, unit, buffer, index)
            for module in modules:
                module.register_forward_hook(awaited.listen)
                getattr(module, _REGISTER)(awaited.came)


class _Awaited:
    """One parameter whose gradient comes late.

    Attributes:
        is_due: autograd has passed its module since the gradient last came.
    """

    def __init__(
        self, scheduler: Scheduler, unit: Unit, buffer: ParamAndGradBuffer, index: int
    ) -> None:
        self._scheduler = scheduler
        self._unit = unit
        self._buffer = buffer
        self._index = index
        self.is_due = False

    def listen(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module was called: see when its backward begins."""
        for tensor in iter_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._due)
                return

    def _due(self, grad: Tensor) -> None:
        if not self.is_due:
            self.is_due = True
            self._unit.num_late += 1
            self._scheduler.begin_gradient(self._unit)

    def came(self) -> None:
        """The module has computed the gradient."""
        param = self._buffer.full_params[self._index]
        grad, param.grad = param.grad, None
        if not self.is_due or grad is None:
            raise RuntimeError(
                f"backward_dw: expected a gradient of {self._buffer.records[self._index].name} "
                f"that backward has put off; found {'one' if self.is_due else 'none put off'} "
                f"and .grad {'None' if grad is None else 'set'}"
            )
        self.is_due = False
        grads = self._buffer.grads
        assert grads is not None
        assert grads.writer is not None
        grads.writer.write(self._index, self._buffer.shard_of_gradient(self._index, grad))
        self._unit.num_late -= 1
        if not self._unit.num_late:
            self._scheduler.late_gradient_came(self._unit)
