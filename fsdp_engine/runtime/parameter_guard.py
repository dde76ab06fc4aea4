"""Two seams: checks of parameters that users put into modules of a sharded model, and calls such as
``.to()`` and ``.half()``, which apply a function to all tensors of a module."""

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
    """Checks parameters that users put into modules. This class checks nothing.

    Args:
        engine: The engine, whose model and units are set already.

    Attributes:
        paused: Whether modules hold full main weights, which users may edit.
    """

    def __init__(self, engine: Any) -> None:
        del engine
        self.paused = False

    def start(self, hooked: Iterable[nn.Module]) -> None:
        """Called once, with the modules on which the engine has registered hooks."""

    def check(self) -> None:
        """Check the parameters of all modules. Called before each forward of the model."""

    def check_all(self) -> None:
        """Check the parameters of all modules before a save, for which each parameter must belong
        to a unit."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer steps sharded parameters, and not tensors that were copied into
        them. Called after each step of an optimizer."""

    def check_places(self) -> None:
        """Check that no parameters were added to modules since ``shard``."""

    def check_value(self, sharded: Tensor, value: Tensor) -> None:
        """Check that ``value`` can be copied into a sharded parameter. If the parameter is tied,
        the caller assigns ``value`` to all of its names."""

    def remember(self, sharded: Tensor, value: Tensor) -> None:
        """Record that ``value`` was copied into a sharded parameter. Optimizers must not step
        ``value`` itself."""

    def full_main(self, buffer: ParamAndGradBuffer, index: int) -> Tensor | None:
        """Returns the full main weight that modules hold in place of a sharded parameter; None:
        they hold none. Modules hold full main weights only while the guard is paused."""
        module, attribute = buffer.records[index].holders[0]
        held = dict.get(module._parameters, attribute) if self.paused else None
        if held is None or held is buffer.sharded_params[index]:
            return None
        return None if held is buffer.full_params[index] else held.detach()


class AppliedFunctions:
    """Applies functions to the tensors of a module, for calls such as ``.to()`` and ``.half()``.

    This class is a seam. It does not allow functions that change the dtype or the type of device of
    sharded parameters.

    Args:
        engine: The engine of the model.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def apply(
        self, module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Apply ``fn`` to the tensors of ``module``, in place of ``nn.Module._apply``.

        Args:
            module: The module.
            fn: The function.
            args, kwargs: Further arguments of ``_apply``. Subclasses of ``nn.Module``, such as
                metrics, may define other arguments than torch does.

        Raises:
            ValueError: See :func:`check_same`.
        """
        check_same(self._engine.buffers, list(module.modules()), fn)
        type(module)._apply(module, fn, *args, **kwargs)


def check_same(
    buffers: Sequence[ParamAndGradBuffer],
    modules: Sequence[nn.Module],
    fn: Callable[[Tensor], Tensor],
) -> None:
    """Check that ``fn`` keeps the dtypes and the devices of the parameters of ``modules``.

    Raises:
        ValueError: ``fn`` changes a dtype or the device. The message names a parameter.
    """
    ids = set(map(id, modules))
    for buffer in buffers:
        for record in buffer.records:
            if any(id(module) in ids for module, _ in record.holders):
                main = buffer.weights.main.tensor
                found = fn(allocator.empty(0, main.dtype, main.device))
                if (found.dtype, found.device) != (main.dtype, main.device):
                    raise ValueError(
                        f"{record.name}: expected {main.dtype} on {main.device}, as at shard(); "
                        f"found {found.dtype} on {found.device}. Convert or move the model before "
                        "shard(), since no installed extension does it afterwards"
                    )


class ModuleApply:
    """The attribute ``_apply`` of one module of a sharded model. A copied or unpickled module has
    torch's method instead.

    Args:
        module: The module.
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
