"""Seams: parameters that users put into the modules of a sharded model, and functions that torch
applies to all tensors of a module (``.to()``, ``.half()``)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.extension_list import implementation
from fsdp_engine.memory import allocator


class ParameterGuard:
    """Sees parameters that users put into modules. Here nothing is checked.

    Args:
        engine: the engine of the model, which has its model and units.

    Attributes:
        paused: modules hold full main weights, which users may edit.
    """

    def __init__(self, engine: Any) -> None:
        del engine
        self.paused = False

    def start(self, hooked: Iterable[nn.Module]) -> None:
        """The engine has put hooks into these modules."""

    def check(self) -> None:
        """Check the parameters of all modules. Called before each forward of the model."""

    def check_all(self) -> None:
        """The same before a save, which needs each parameter to be one of a unit."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer, which has stepped, steps sharded parameters."""

    def check_places(self) -> None:
        """Check that modules hold no parameters in places that were without one at ``shard``."""

    def check_value(self, sharded: Tensor, value: Tensor) -> None:
        """Check that a sharded parameter can take ``value`` at all of its names."""

    def remember(self, sharded: Tensor, value: Tensor) -> None:
        """A sharded parameter has taken ``value``, which optimizers must not step."""

    def full_main(self, buffer: ParamAndGradBuffer, index: int) -> Tensor | None:
        """Returns the full main weight that modules hold in place of a sharded parameter, while
        the guard is paused; None: they hold none."""
        module, attribute = buffer.records[index].holders[0]
        held = dict.get(module._parameters, attribute) if self.paused else None
        if held is None or held is buffer.sharded_params[index]:
            return None
        return None if held is buffer.full_params[index] else held.detach()


class AppliedFunctions:
    """A seam: functions that torch applies to the tensors of one model's modules, as ``.to()`` and
    ``.half()`` do. Here sharded parameters keep their dtypes and device.

    Args:
        engine: the engine of the model.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def apply(
        self, module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Takes the place of ``nn.Module._apply``; a subclass may have other arguments than torch's
        (metrics do).

        Raises:
            ValueError: see :func:`check_same`.
        """
        check_same(self._engine.buffers, list(module.modules()), fn)
        type(module)._apply(module, fn, *args, **kwargs)


def check_same(
    buffers: Sequence[ParamAndGradBuffer],
    modules: Sequence[nn.Module],
    fn: Callable[[Tensor], Tensor],
) -> None:
    """Check that ``fn`` keeps dtypes and device of the parameters of ``modules``.

    Raises:
        ValueError: it does not; names a parameter.
    """
    for buffer in buffers:
        for record in buffer.records:
            if any(module in modules for module, _ in record.holders):
                main = buffer.weights.main.tensor
                found = fn(allocator.empty(0, main.dtype, main.device))
                if (found.dtype, found.device.type) != (main.dtype, main.device.type):
                    raise ValueError(
                        f"{record.name}: expected {main.dtype} on {main.device} to stay, without "
                        f"an extension; found {found.dtype} on {found.device}. Change the model "
                        "before shard()"
                    )


class ModuleApply:
    """``_apply`` of one module of a sharded model. A copied or unpickled module has torch's.

    Args:
        module: the module.
        engine: The engine of the model.
    """

    def __init__(self, module: nn.Module, engine: Any) -> None:
        self._module = weakref.ref(module)
        self._engine = engine

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        module = self._module()
        assert module is not None
        applied = self._engine.extension(implementation(AppliedFunctions))
        applied.apply(module, fn, *args, **kwargs)
        return module

    def __reduce__(self) -> Any:
        module = self._module()
        assert module is not None
        return functools.partial, (type(module)._apply, module)
