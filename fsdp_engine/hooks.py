"""Where calls of modules and events of autograd meet the scheduler.

    forward pre-hook    enter the unit; cast inputs; mark the boundary of its backward
    forward hook        leave the unit; listen for the gradient of its outputs
    gradient of output  the unit's backward begins
    gradient of inputs  the unit's backward is over (the boundary)
    gradient of a parameter, accumulated: written into the flat buffer, dropped at once

[Note: Boundary]
A unit's full parameters may go only when nothing in its backward still reads them, and the last
gradient of a trainable parameter does not show that: a frozen weight may still be needed for the
gradient of the input. So inputs are passed through an identity that autograd visits after
everything in the unit: a view for one input, a function of all of them for several (its backward
runs once all have come, whatever each is used for outside the unit).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from fsdp_engine.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.scheduler import Scheduler, in_backward
from fsdp_engine.trees import iter_tensors, map_tensors
from fsdp_engine.unit import Call, Unit

_frames: Any = eval_frame
_SKIP_ALL = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def not_compiled(function: Any) -> Any:
    """Keep ``torch.compile`` out of ``function``: it breaks the graph there and goes on after.

    This is what ``torch.compiler.disable`` does, without importing the compiler: a mark by which
    Dynamo does not inline the function, and a rule for its code by which neither it nor anything
    that it calls is traced when it runs.
    """
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    return function


# Weak both ways: hooks know their module, and a value that holds its key would never go.
_HOOKS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[UnitHooks]] = weakref.WeakKeyDictionary()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let ``module.name(...)`` gather the module's parameters, as its forward does.

    Args:
        module: a unit, or the root, of a sharded model.
        name: the method, such as "generate".

    Raises:
        ValueError: the module is no unit of a sharded model, or has no such method.
    """
    reference = _HOOKS.get(module)
    hooks = reference() if reference is not None else None
    if hooks is None:
        raise ValueError(
            "module: expected a unit or the root of a model given to shard(); found "
            f"{type(module).__name__}"
        )
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"name: expected a method of {type(module).__name__}; found {name!r}")

    setattr(module, name, hooks.around(method))


class _Boundary(torch.autograd.Function):
    """Identity on several tensors; tells when the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, call: Call, scheduler: Scheduler, *tensors: Tensor) -> Any:
        ctx.call, ctx.scheduler = call, scheduler
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.scheduler.leave_backward(ctx.call)
        return (None, None, *grads)


class UnitHooks:
    """The forward hooks of one unit's module.

    Args:
        scheduler: what to tell.
        unit: whose module.
        input_dtype: floating-point inputs are cast to it; None: left alone.
        output_dtype: likewise for outputs.
        engine: kept alive as long as the module, whether or not the user holds on to it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        unit: Unit,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        engine: object,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._unit = unit
        self._input_dtype = input_dtype
        self._output_dtype = output_dtype
        self._entered: list[tuple[Call | None, bool]] = []
        self.paused = False

    def register(self) -> None:
        """Put the hooks on the module: outermost, around the user's own."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.before(args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return self.after(output)

        module = self._unit.module
        _HOOKS[module] = weakref.ref(self)
        if module._compiled_call_impl is not None:
            # module.compile() was called: what is compiled is everything that a call does, hooks
            # included. Ours go around it, so that it stays one graph.
            module._compiled_call_impl = self.around(module._compiled_call_impl)
            return
        module.register_forward_pre_hook(not_compiled(before), prepend=True, with_kwargs=True)
        # Also after an exception, so that a forward that fails leaves nothing open.
        module.register_forward_hook(not_compiled(after), always_call=True)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method`` of the module, as a forward of the unit."""

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inputs = self.before(args, kwargs)
            output = None
            try:
                if inputs is not None:
                    args, kwargs = inputs
                output = method(*args, **kwargs)
            finally:
                replaced = self.after(output)
            return output if replaced is None else replaced

        return wrapper

    def reset(self) -> None:
        """Forget forwards that an exception ended."""
        self._entered.clear()

    @not_compiled
    def before(self, args: Any, kwargs: Any) -> Any:
        """The module is called."""
        if self.paused:
            _refuse_autograd(self._unit)
            return None
        unit = self._unit
        recomputes = in_backward()
        wants_call = torch.is_grad_enabled()
        if recomputes:
            self._scheduler.recompute(unit)
            # Calls of the first forward still wait for their backward, unless it ran without
            # autograd, as the first forward of a re-entrant checkpoint does.
            wants_call = wants_call and not unit.num_calls
            if not wants_call:
                return self._cast_inputs(args, kwargs)
        else:
            self._scheduler.enter_forward(unit)
        call = Call(unit) if wants_call else None
        self._entered.append((call, recomputes))
        if self._input_dtype is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        if call is not None:
            args, kwargs = self._mark_boundary(call, args, kwargs)
        return args, kwargs

    @not_compiled
    def after(self, output: Any) -> Any:
        """The module has returned."""
        if self.paused:
            return None
        recomputes = in_backward()
        if recomputes and not (self._entered and self._entered[-1][1]):
            return None
        if not self._entered:
            return None  # entering failed: there is nothing to leave
        call, _ = self._entered.pop()
        has_backward = False
        if call is not None:
            begin = None
            for tensor in iter_tensors(output):
                if tensor.requires_grad:
                    if begin is None:
                        begin = partial(_begin_backward, self._scheduler, call)
                    tensor.register_hook(begin)
                    has_backward = True
            if has_backward:
                call.count()
        if not recomputes:
            self._scheduler.leave_forward(self._unit, has_backward)
        if self._output_dtype is not None:
            return map_tensors(partial(_cast, self._output_dtype), output)
        return None

    def _cast_inputs(self, args: Any, kwargs: Any) -> Any:
        if self._input_dtype is None:
            return args, kwargs
        cast = partial(_cast, self._input_dtype)
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    def _boundary_view(self, call: Call, tensor: Tensor) -> Tensor:
        call.has_boundary = True
        view = tensor.view_as(tensor)
        view.register_hook(partial(_end_backward, self._scheduler, call))
        return view

    def _mark_boundary(self, call: Call, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # most units, most cheaply
            tensor = args[0]
            return ((self._boundary_view(call, tensor),) if tensor.requires_grad else args), kwargs
        inputs = {id(t): t for t in iter_tensors((args, kwargs)) if t.requires_grad}
        if not inputs:
            return args, kwargs
        tensors = list(inputs.values())
        if len(tensors) == 1:
            views: Any = (self._boundary_view(call, tensors[0]),)
        else:
            call.has_boundary = True
            views = _Boundary.apply(call, self._scheduler, *tensors)
        # One input given twice stays one tensor: modules compare inputs by identity.
        replaced = dict(zip(inputs, views, strict=True))

        def replace(tensor: Tensor) -> Tensor:
            return replaced.get(id(tensor), tensor)

        return map_tensors(replace, args), map_tensors(replace, kwargs)


def hook_gradients(scheduler: Scheduler, unit: Unit) -> None:
    """Write each of the unit's gradients into its place as soon as it has been accumulated."""
    for buffer in unit.trainable:
        buffer.hook_gradients(_gradient_writer(scheduler, unit, buffer))


def _gradient_writer(scheduler: Scheduler, unit: Unit, buffer: ParamAndGradBuffer) -> Any:
    grads = buffer.grads
    assert grads is not None
    count = len(buffer.records)

    @not_compiled
    def on_grad(index: int, param: Tensor) -> None:
        grad = param.grad
        if grad is None:
            return  # a function that has none for it, or computes it later
        if not unit.has_open_grads:
            scheduler.begin_gradient(unit)
        param.grad = None
        grads.write(index, grad)
        if grads.num_touched == count:
            scheduler.gradient_came(unit)

    return on_grad


def _begin_backward(scheduler: Scheduler, call: Call, grad: Tensor) -> None:
    scheduler.enter_backward(call)


def _end_backward(scheduler: Scheduler, call: Call, grad: Tensor) -> None:
    scheduler.leave_backward(call)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def _refuse_autograd(unit: Unit) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"forward of {unit.label} within engine.unsharded(): expected torch.no_grad(); found "
            "gradients enabled. Full main weights have no gradients"
        )
