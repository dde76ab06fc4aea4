"""Hooks on modules and tensors that call the scheduler.

    forward pre-hook          enters the units of the module, casts inputs, registers hooks on them
    forward hook              leaves the units, registers hooks on the gradients of outputs
    gradient of an output     begins the backward of the units; so does the gradient of a tensor
                              that the module has stored (``kept_tensors.py``)
    gradient of the inputs    ends the backward of the units (the boundary)
    gradient of a parameter   is written into the flat buffer and dropped (``gradient_hooks.py``)

[Note: Boundary]
Full parameters of a unit can be freed when no function of its backward reads them any longer. The
last gradient of a trainable parameter does not show this, because the gradient of the input may
still need a frozen weight. So each input is passed through a view, and autograd visits the node of
the view after all functions of the unit. The unit's backward has ended when autograd has visited
the views of all inputs that this backward reaches. The views share memory and Python attributes
with the inputs, so if the unit changes an input in place, the user's tensor is changed. If it gives
a view other memory (``x.data = ...``, ``x.set_()``), the user's tensor gets this memory after the
call. A unit must not free its inputs. If it reshapes a view in place (``x.unsqueeze_(0)``), the
user's tensor keeps its shape.

If an input is changed in place, autograd does not visit the node of its view, so the backward of
such a call counts as running until ``loss.backward()`` returns. The gradient of the changed tensor
enters the unit like the gradient of an output, and so do gradients of tensors that the unit has put
into the user's containers.

[Note: Casts of autocast]
``torch.autocast`` caches casts of weights, with their autograd nodes, until its context ends. In
the next forward, gradients of a cached cast would pass through nodes of an earlier backward, and
after an optimizer step the cast would have old values. Where parameters are sharded, the cache
would keep all full weights in memory, in the dtype of the casts. So each unit clears the cache when
its call returns.

[Note: Returned parameters]
A module can return a parameter or a view of one, such as a bias that its caller adds, or an
embedding table. The caller reads it after the unit's full parameters were freed, and so does the
caller's backward, which precedes the unit's backward. So the caller receives a copy, whose gradient
autograd accumulates into the parameter. This also applies to parameters that the module puts into
lists, dicts and dataclasses of its arguments. A parameter that it stores elsewhere (for example in
an attribute) must not be read after the call: its memory is freed, and not all kernels of torch
check this.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from fsdp_engine.extension_list import implementation
from fsdp_engine.memory.allocator import begin_together, storage_keys
from fsdp_engine.runtime.inputs import (
    Exchange,
    Inputs,
    carry_attributes,
    cast_to,
    containers_in,
    follow_views,
    is_of,
    iter_tensors,
    map_tensors,
    unknown_part,
    version_of,
)
from fsdp_engine.runtime.kept_tensors import KeptTensors, next_function
from fsdp_engine.runtime.not_compiled import not_compiled
from fsdp_engine.runtime.passes import NO_RUN, current_run
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Call, Unit
from fsdp_engine.units.assignment import reads_weights_in_backward

# Returns the base of a view; None: the argument is not a view.
_base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")

_functorch = torch._C._functorch
_TransformType = _functorch.TransformType
_inside_transform = _functorch.peek_interpreter_stack


# The dispatch modes of torch's selective checkpoints.
_SELECTING = (
    torch_checkpoint._CachingTorchDispatchMode,
    torch_checkpoint._CachedTorchDispatchMode,
)


@contextmanager
def _outside_selection() -> Iterator[None]:
    """Returns a context without the innermost dispatch modes of selective checkpoints."""
    taken = []
    while isinstance(_get_current_dispatch_mode(), _SELECTING):
        taken.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push_mode(mode)


def outside_checkpoints(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that runs ``method`` without the dispatch modes of selective checkpoints,
    which would save or replace the results of the engine's operations."""

    @functools.wraps(method)
    def hook(*args: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return method(*args)
        with _outside_selection():
            return method(*args)

    return hook


# The hooks of each module, by its ``id``, because modules may define ``==``.
_HOOKS: weakref.WeakValueDictionary[int, ModuleHooks] = weakref.WeakValueDictionary()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make calls of ``module.name(...)`` gather the module's parameters, as its forward does.

    Args:
        module: A unit, or the root, of a sharded model.
        name: The name of the method, such as "generate".

    Raises:
        ValueError: ``module`` is not a unit of a sharded model, or has no such method.
    """
    hooks = hooks_of(module)
    if hooks is None:
        raise ValueError(
            "module: expected a unit or the root of a model that was passed to shard(); found "
            f"{type(module).__name__}"
        )
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"name: expected a method of {type(module).__name__}; found {name!r}")

    setattr(module, name, hooks.around(method))


def hooks_of(module: nn.Module) -> ModuleHooks | None:
    """Returns the engine's hooks on ``module``; None: it has none."""
    hooks = _HOOKS.get(id(module))
    # The engine may keep the hooks of a deleted module, whose id another module has now.
    return hooks if hooks is not None and hooks.is_on(module) else None


class _Entered:
    """A call of a module that has not returned yet.

    Attributes:
        units: Pairs of a unit that the call has entered and must leave, and a flag: whether this
            use is part of the recorded order.
        calls: A :class:`Call` for each of these units whose backward may follow. A unit has none if
            the call repeats an earlier one whose :class:`Call` is still pending.
        repeats: Whether the call runs within backward and repeats an earlier call.
        wants_calls: Whether autograd records the call, so that a backward may follow.
        only_input: The input and its version counter, if the only input is one tensor that needs
            no cast.
        inputs: The inputs in all other cases.
        containers: The inputs that can contain tensors.
        views: For each view that the module receives, its input, the view, and whether both share
            a storage.
        began: The sequence number of the first function that autograd records in the call.
        handled_exception: The exception whose ``except`` block contains the call, or None. At the
            end of the call, another current exception means that the forward has failed.
    """

    __slots__ = (
        "began",
        "calls",
        "containers",
        "handled_exception",
        "inputs",
        "only_input",
        "repeats",
        "units",
        "views",
        "wants_calls",
    )

    def __init__(self, *, repeats: bool, wants_calls: bool) -> None:
        self.handled_exception = sys.exc_info()[1]
        self.units: list[tuple[Unit, bool]] = []
        self.calls: list[Call] = []
        self.repeats = repeats
        self.wants_calls = wants_calls
        self.only_input: tuple[Tensor, int] | None = None
        self.inputs: Inputs | None = None
        self.containers: Sequence[Any] = ()
        self.views: list[tuple[Tensor, Tensor, bool]] = []
        self.began = 0


class ModelForward(Protocol):
    """An object that the hooks of the root module call before and after forwards of the model."""

    def begins(self) -> None:
        """Called before a forward begins."""
        ...

    def implicit_uses(self) -> Iterable[Unit]:
        """Returns the units that this forward must enter, outside the recorded order of uses."""
        ...

    def ends(self) -> None:
        """Called when a forward has ended."""
        ...


class ModuleHooks:
    """The forward hooks of one module. A call of the module enters its units, and leaves them when
    it returns.

    Args:
        scheduler: The scheduler of the units.
        module: The module.
        casts: The dtypes to which floating-point inputs and outputs are cast; None: no cast.
        engine: The engine, which lives as long as the module, even if the user drops it.

    Attributes:
        model: The object to call before and after forwards, if the module is the root of the model.
        units: The units to which the module belongs.
        paused: Whether modules hold full main weights (``engine.unsharded()``).
        was_called: Whether the module has been called on all ranks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        module: nn.Module,
        casts: tuple[torch.dtype | None, torch.dtype | None],
        engine: object,
    ) -> None:
        self.units: list[Unit] = []
        self.paused = False
        self.was_called = False
        self._engine = engine
        self.model: ModelForward | None = None
        self._scheduler = scheduler
        self._input_dtype, self._output_dtype = casts
        self._reads_weights = reads_weights_in_backward(module)
        self._entered: list[_Entered] = []
        self._kept = implementation(KeptTensors)()
        self._module = weakref.ref(module)
        self._register(module)

    def is_on(self, module: nn.Module) -> bool:
        """Returns whether these are the hooks on ``module``."""
        return self._module() is module

    def _register(self, module: nn.Module) -> None:
        """Register the hooks so that they run before and after the user's present hooks."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.before(args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return self.after(output)

        _HOOKS[id(module)] = self
        if module._compiled_call_impl is not None:
            # module.compile() compiles a call with its hooks. Our hooks are called outside of the
            # compiled call, so that it remains one graph.
            module._compiled_call_impl = self.around(module._compiled_call_impl)
            return
        module.register_forward_pre_hook(not_compiled(before), prepend=True, with_kwargs=True)
        # The hook is also called after an exception, so that a failed forward leaves its units.
        module.register_forward_hook(not_compiled(after), always_call=True)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a wrapper that calls ``method`` of the module with the hooks of a forward."""

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
        """Drop the calls that an exception has ended."""
        self._entered.clear()

    def enter_now(self, unit: Unit) -> bool:
        """Enter ``unit`` with the running call of the module. Returns False if no call runs, or if
        it repeats an earlier one."""
        if not self._entered or self._entered[-1].repeats:
            return False
        self._enter(self._entered[-1], unit, is_recorded=False)
        return True

    @not_compiled
    @outside_checkpoints
    def before(self, args: Any, kwargs: Any) -> Any:
        """Enter the units of the module and prepare its inputs. The forward pre-hook."""
        if self.paused:
            _refuse_autograd(self.units[0])
            return None
        if not self._scheduler.schedule.ranks_differ:
            self.was_called = True
        repeats = current_run() != NO_RUN and not self._scheduler.is_nested_forward(
            self.units, is_model=self.model is not None
        )
        if not repeats:
            if self.model is not None and self._scheduler.is_at_rest:
                self.model.begins()
            if _inside_transform() is not None:
                _refuse_transform(self.units)
        entered = _Entered(repeats=repeats, wants_calls=torch.is_grad_enabled())
        self._entered.append(entered)
        for unit in self.units:
            self._enter(entered, unit)
        if self.model is not None and not repeats:
            for unit in self.model.implicit_uses():
                self._enter(entered, unit, is_recorded=False)
        calls = entered.calls
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            entered.containers = containers_in((*args, *kwargs.values()))
        if not calls and self._input_dtype is None:
            return args, kwargs
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # a fast path for most units
            tensor = args[0]
            if self._input_dtype is None or is_of(self._input_dtype, tensor):
                if not calls:
                    return args, kwargs
                entered.only_input = (tensor, version_of(tensor))
                if tensor.requires_grad:
                    args = (self._listen(entered, tensor),)
                entered.began = next_function()
                return args, kwargs
        inputs = entered.inputs = Inputs((args, kwargs))
        if self._input_dtype is not None:
            inputs.cast(self._input_dtype)
        if calls:
            inputs.mark(partial(self._listen, entered))
        entered.began = next_function()
        return inputs.arguments

    def _enter(self, entered: _Entered, unit: Unit, *, is_recorded: bool = True) -> None:
        wants_call = entered.wants_calls
        if entered.repeats:
            self._scheduler.repeat(unit)
            if wants_call:
                self._scheduler.note_run_again(unit)
            # If the first forward has pending calls, they observe the backward. If it ran without
            # autograd (in a re-entrant checkpoint), it has none, and this call observes it.
            wants_call = wants_call and not unit.pending_calls
            if not wants_call:
                return
        else:
            self._scheduler.enter_forward(unit, is_recorded=is_recorded)
        entered.units.append((unit, is_recorded))
        if wants_call:
            reads = self._reads_weights and unit.options.gathers_in_backward
            entered.calls.append(
                Call(
                    unit,
                    reads,
                    self._scheduler.schedule,
                    is_recorded=is_recorded,
                    microbatch=self._scheduler.microbatch,
                    outer_run=self._scheduler.outer_run,
                )
            )

    @not_compiled
    @outside_checkpoints
    def after(self, output: Any) -> Any:
        """Leave the units of the module and register hooks on its outputs. The forward hook."""
        if self.paused or not self._entered:
            return None  # the pre-hook failed, so there is no unit to leave
        entered = self._entered.pop()
        # See [Note: Casts of autocast].
        torch.clear_autocast_cache()
        inputs = entered.inputs
        problem = follow_views(entered.views)
        if inputs is not None:
            inputs.take_back()
        given = output
        units = [unit for unit, _ in entered.units]
        output = _copy_params(units or self.units, output, entered.containers)
        if not entered.units:
            return None if output is given else output
        if self.model is not None and not entered.repeats:
            self.model.ends()
        calls = entered.calls
        has_backward = False
        # torch also calls this hook, with the output None, when forward has raised an exception.
        has_failed = output is None and sys.exc_info()[1] is not entered.handled_exception
        try:
            if problem is not None and not has_failed:
                raise RuntimeError(f"forward of unit {calls[0].unit.label}: {problem}")
            if calls and not has_failed:
                entries = self._gradient_entries(entered, calls, output)
                has_backward = self._listen_for_backward(entered, calls, entries)
                if not entered.repeats:
                    if not has_backward:
                        self._note_hidden(calls, output)
                    if self._kept.needs_search(entered.began, entries):
                        has_backward |= self._listen_for_kept(entered, calls, entries)
        finally:
            if not entered.repeats:
                reads_again = has_backward and self._reads_weights
                for unit, is_recorded in reversed(entered.units):
                    again = reads_again and unit.options.gathers_in_backward
                    self._scheduler.leave_forward(unit, again, is_recorded=is_recorded)
        if self._output_dtype is not None:
            return map_tensors(partial(cast_to, self._output_dtype), output)
        return None if output is given else output

    def _listen_for_backward(
        self, entered: _Entered, calls: list[Call], tensors: Iterable[Tensor]
    ) -> bool:
        """Register hooks on ``tensors``, through which gradients enter the module. Returns whether
        any of them requires grad, so that a backward may follow."""
        begin = None
        views = [] if entered.inputs is None else [view for _, view, _ in entered.views]
        for tensor in tensors:
            # The gradient of an input that the module returns unchanged does not enter the unit.
            if tensor.requires_grad and not any(tensor is view for view in views):
                if tensor.grad_fn is None and isinstance(tensor, nn.Parameter):
                    # A parameter is a leaf that exists in every forward: hooks on it would add up.
                    continue
                if begin is None:
                    begin = _begin_backward(self._scheduler, calls, views)
                node = tensor.grad_fn
                if node is None:
                    tensor.register_hook(begin)
                else:
                    # Tensor.register_hook crashes on a view whose base was changed through
                    # another view (torch 2.13).
                    node.register_prehook(begin)
                    if tensor._is_view():
                        _listen_to_base(tensor, entered.began, begin)
        if begin is not None:
            for call in calls:
                if not call.is_pending:
                    call.await_backward()
        return begin is not None

    def _listen_for_kept(
        self, entered: _Entered, calls: list[Call], entries: Sequence[Tensor]
    ) -> bool:
        """Register hooks on tensors that the call has stored. Returns whether any of them requires
        grad."""
        module, inputs = self._module(), entered.inputs
        assert module is not None
        modules = _children_without_hooks(module)
        given = None if inputs is None else inputs.given
        found, hidden = self._kept.search(entered.began, entries, modules, given)
        if hidden is not None:
            for call in calls:
                if call.reads_weights:
                    self._scheduler.note_uncounted(call.unit)
                    call.unit.keep_unseen(
                        "expected forward to return the tensors that the loss uses, or to keep "
                        f"them in an argument or an attribute of a module; found {hidden}",
                        "Return the tensor, or keep it in an attribute",
                    )
        return self._listen_for_backward(entered, calls, found)

    def _note_hidden(self, calls: list[Call], output: Any) -> None:
        """Keep units full if the output contains an object in which the engine does not look for
        tensors. Called if no tensor that was found in the output requires grad."""
        concerned = [call.unit for call in calls if call.has_boundary or call.unit.trainable]
        hidden_in = unknown_part(output) if concerned else None
        if hidden_in is not None:
            for unit in concerned:
                self._scheduler.note_uncounted(unit)
                unit.keep_unseen(
                    "expected it to return tensors, or tuples, lists, dicts or dataclasses of "
                    f"tensors; found a {type(hidden_in).__name__}, in which the engine does not "
                    "look for tensors",
                    "Return a dataclass",
                )

    def _gradient_entries(
        self, entered: _Entered, calls: list[Call], output: Any
    ) -> Sequence[Tensor]:
        """Returns the tensors through which gradients enter the unit: outputs, inputs that were
        changed in place, and tensors that were put into the user's containers."""
        found = [output] if type(output) is Tensor else list(iter_tensors(output))
        if entered.inputs is not None:
            changed = entered.inputs.changed()
            found += entered.inputs.added()
        elif (only := entered.only_input) is not None and version_of(only[0]) != only[1]:
            changed = [only[0]]
        else:
            return found
        if changed:
            for call in calls:
                call.input_changed = True
            # Tensors that were changed only under no_grad() have no function of autograd.
            found += [tensor for tensor in changed if tensor.grad_fn is not None]
        return found

    def _listen(self, entered: _Entered, tensor: Tensor) -> Tensor:
        """Returns a view of ``tensor`` with a hook on its gradient."""
        view = tensor.view_as(tensor)
        carry_attributes(tensor, view)
        # Tensors of torch.vmap have no storage, and some subclasses have several.
        share_storage = torch._C._has_storage(view) and (
            type(view) is Tensor or begin_together(view, tensor)
        )
        entered.views.append((tensor, view, share_storage))
        for call in entered.calls:
            call.has_boundary = True
            view.register_hook(partial(_report_input_gradient, self._scheduler, call))
        return view


def _listen_to_base(tensor: Tensor, began: int, begin: Callable[[Any], None]) -> None:
    """Register ``begin`` on the function that computed the base of a view, if the call ran it.

    An in-place operation on the view replaces the view's ``grad_fn``. Gradients then pass from the
    operation to the function of the base.
    """
    base = _base_of(tensor)
    node: Any = None if base is None else base.grad_fn
    if node is not None and node._sequence_nr() >= began:
        node.register_prehook(begin)


def _children_without_hooks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and its descendants, except modules below it that have hooks of the engine,
    and the descendants of these modules."""
    yield module
    for child in module.children():
        if hooks_of(child) is None:
            yield from _children_without_hooks(child)


def _copy_params(units: Iterable[Unit], output: Any, containers: Sequence[Any]) -> Any:
    """Returns ``output``, in which tensors that share memory with parameters are replaced by
    copies, if the parameters belong to ``units`` and are freed between uses. Such tensors in
    ``containers`` are replaced in place. See [Note: Returned parameters]."""
    freed = {
        key
        for unit in units
        if unit.reshards
        for buffer in unit.buffers
        for key in buffer.weights.transient_keys
    }
    if not freed:
        return output

    def copied(tensor: Tensor) -> Tensor:
        return tensor if freed.isdisjoint(storage_keys(tensor)) else tensor.clone()

    for container in containers:
        map_tensors(copied, container, Exchange())
    return map_tensors(copied, output)


def _begin_backward(
    scheduler: Scheduler, calls: Sequence[Call], views: Sequence[Tensor]
) -> Callable[[Any], None]:
    """Returns the hook for gradients that enter ``calls``.

    Args:
        scheduler: The scheduler of the units.
        calls: The calls whose backward a gradient begins.
        views: The views that the module received in place of its inputs.
    """
    # Hooks of outputs may refer to nodes of inputs. References in the opposite direction would form
    # a cycle that keeps the graph alive.
    nodes = [view.grad_fn for view in views] if len(views) > 1 else []

    def begin(grads: Any) -> None:
        for call in calls:
            scheduler.enter_backward(call, nodes)

    return begin


def _report_input_gradient(scheduler: Scheduler, call: Call, grad: Tensor | None) -> None:
    if torch.is_grad_enabled() and grad is not None and grad.grad_fn is not None:  # create_graph
        call.unit.await_recorded(grad.grad_fn)
    scheduler.on_input_gradient(call)


def _refuse_transform(units: Sequence[Unit]) -> None:
    """Raise RuntimeError within transforms of ``torch.func`` that sharded models do not support.

    The tensors of ``grad``, ``vjp`` and ``jvp`` have no memory that collectives could send. Hooks
    on the tensors of ``vmap`` do not fire in backward, so no hook would gather sharded parameters.
    """
    found = {each.key() for each in _functorch.get_interpreter_stack() or ()}
    if found & {_TransformType.Grad, _TransformType.Jvp}:
        raise RuntimeError(
            f"forward of {units[0].label} within a transform such as torch.func.grad, vjp or jvp: "
            "expected loss.backward() or torch.autograd.grad, which sharded models support; found "
            "the transform. Use it with a model that is not sharded (engine.full_state_dict has "
            "the weights)"
        )
    if _TransformType.Vmap in found and torch.is_grad_enabled():
        for unit in units:
            if unit.reshards:
                raise RuntimeError(
                    f"forward of {unit.label} within torch.vmap: expected torch.no_grad(), or a "
                    'strategy of at most "optim_grads"; found gradients enabled and parameters '
                    "that are sharded between forward and backward"
                )


def _refuse_autograd(unit: Unit) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"forward of {unit.label} within engine.unsharded(): expected torch.no_grad(); found "
            "gradients enabled. Full main weights have no gradients"
        )
