"""References from sharded parameters to their buffer, and reads outside their unit's forward.

Outside its unit's forward a parameter is a FlatDTensor, and its values have to be gathered, as in
`loss * model.scale.exp()`. The gradient of the gathered values depends on this rank's data, and has
to be averaged over the ranks like all gradients. It is therefore accumulated into the full
parameter, together with the gradients of the forward's uses, and reduced once.

The unit's reduction has to wait for this gradient. If a read precedes forward, its backward runs
after all others, so reads whose backward is pending are counted.

[Note: Hooks on parameters]
Autograd would run users' hooks (`register_hook`, `register_post_accumulate_grad_hook`) on the
unreduced gradient of a full parameter. The engine runs them on the reduced gradient, at the same
points as torch. Hooks on gradients run on the new gradient, before it is added to earlier ones.
Hooks on parameters run when ``.grad`` is the sum. Hooks that were registered before ``shard`` are
kept in the dictionaries that their handles reference, so that ``handle.remove()`` works.

Sharded parameters register hooks in :class:`ParamHooks`. For plain parameters torch registers them,
and they are moved to :class:`ParamHooks` when the next backward begins.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec

Hooks = MutableMapping[int, Callable[..., Any]]


def forget_hooks(original: Tensor) -> None:
    """Remove the user's hooks on accumulated gradients from a parameter that ``shard`` has
    replaced. The new parameter has them: both would share one dict of hooks."""
    original._post_accumulate_grad_hooks = OrderedDict()


class ParamHooks:
    """The hooks on the parameters of one buffer.

    Args:
        names: The names of the parameters.
        originals: The parameters that were passed to ``shard``.
    """

    def __init__(self, names: Sequence[str], originals: Sequence[Tensor]) -> None:
        self._names = names
        # Hooks by index of the parameter, with one dictionary per registration or move.
        self._on_grad: dict[int, list[Hooks]] = {}
        self._on_param: dict[int, list[Hooks]] = {}
        # For plain parameters, the key of the engine's hook, which is not moved.
        self.own: dict[int, int] = {}
        for index, original in enumerate(originals):
            if original._backward_hooks:
                self._on_grad[index] = [original._backward_hooks]
            if original._post_accumulate_grad_hooks:
                self._on_param[index] = [original._post_accumulate_grad_hooks]

    def add(self, index: int, hook: Callable[..., Any], *, on_param: bool) -> RemovableHandle:
        """Add a hook to parameter ``index``: ``hook(param)`` if ``on_param``, else
        ``hook(gradient)``."""
        hooks: Hooks = OrderedDict()
        (self._on_param if on_param else self._on_grad).setdefault(index, []).append(hooks)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def adopt(self, params: Sequence[Any]) -> None:
        """Move hooks from plain parameters to this object, before autograd runs them."""
        for index, param in enumerate(params):
            if param._backward_hooks:
                self._on_grad.setdefault(index, []).append(param._backward_hooks)
                param._backward_hooks = None
            hooks = param._post_accumulate_grad_hooks
            if hooks is not None and len(hooks) > 1 and index in self.own:
                key = self.own[index]
                param._post_accumulate_grad_hooks = OrderedDict({key: hooks.pop(key)})
                self._on_param.setdefault(index, []).append(hooks)

    @property
    def hooked(self) -> Collection[int]:
        """Indices of parameters with hooks on their gradients, in ascending order."""
        return sorted(index for index, hooks in self._on_grad.items() if any(hooks))

    @torch.no_grad()
    def run_on_gradients(self, params: Sequence[Tensor]) -> None:
        """Run ``hook(gradient)`` on the new, reduced gradients.

        Raises:
            TypeError: A hook has returned neither None nor a gradient of the same shape.
        """
        for index in self.hooked:
            grad = _gradient(params[index])
            for hook in _all(self._on_grad[index]) if grad is not None else ():
                result = hook(grad)
                if result is None or result is grad:
                    continue
                if not isinstance(result, Tensor) or result.shape != grad.shape:
                    found = tuple(result.shape) if isinstance(result, Tensor) else repr(result)
                    raise TypeError(
                        f"hook of {self._names[index]}: expected None or a gradient of shape "
                        f"{tuple(grad.shape)}; found {found}"
                    )
                grad.copy_(result)

    @torch.no_grad()
    def run_on_params(self, params: Sequence[Tensor]) -> None:
        """Run ``hook(param)`` on the parameters that have a gradient."""
        for index in sorted(self._on_param):
            if _gradient(params[index]) is not None:
                for hook in _all(self._on_param[index]):
                    hook(params[index])


def _gradient(param: Tensor) -> Any:
    """Returns ``.grad`` with ``takes_slices`` set, so that hooks can apply full masks to it. These
    must be equal on all ranks."""
    grad: Any = param.grad
    if grad is not None:
        grad.takes_slices = True
    return grad


def _all(dictionaries: Sequence[Hooks]) -> list[Callable[..., Any]]:
    return [hook for hooks in dictionaries for hook in hooks.values()]


class ParameterAccess:
    """Accesses to the sharded parameters of one buffer.

    Attributes:
        full_params: The full parameters of the buffer.
        names: The names of the parameters.
        hooks: The users' hooks on the parameters.
        reduces_gradients: Whether an engine reduces gradients of the full parameters.
        num_pending_reads: Number of reads whose backward is pending and whose graph still exists.
        on_read: Function that gathers the full parameters for a function that needs them, and
            returns whether they are gathered. None: they cannot be gathered.
        on_change: Function that is called before a slice is changed in place, or None.
        on_gradient: Function that is called when a user has assigned ``.grad``, or None. Its
            argument is whether the new value is a tensor.
        requires_grad_changed: Whether a user may have changed ``requires_grad`` of a parameter.
        gradients: The users' accesses to ``.grad``.
        main_grad: Function that returns the slice of the accumulated gradient of a parameter. None:
            parameters have no ``main_grad``.
        set_main_grad: Function that copies a value into this slice.
        deleted_main_grads: Indices of parameters whose ``main_grad`` the user has deleted.
    """

    def __init__(
        self, full_params: Sequence[Tensor], names: Sequence[str], hooks: ParamHooks
    ) -> None:
        self.full_params = full_params
        self.names = names
        self.reduces_gradients = False
        self.num_pending_reads = 0
        self.hooks = hooks
        self.on_read: Callable[[], bool] | None = None
        self.on_change: Callable[[], object] | None = None
        self.on_gradient: Callable[[bool], None] | None = None
        self.requires_grad_changed = True
        self.gradients = GradientAccess()
        self.main_grad: Callable[[int], Tensor] | None = None
        self.set_main_grad: Callable[[int, Tensor], None] | None = None
        self.deleted_main_grads: set[int] = set()

    def backref(self, index: int) -> ParameterBackref:
        """Returns the reference of the sharded parameter ``index`` to this object."""
        return ParameterBackref(self, index)


class GradientAccess:
    """Users' accesses to ``.grad`` of one buffer's sharded parameters.

    Attributes:
        were_accessed: Whether a user has read a gradient and may still have a reference to it.
        in_flight: None if no reduction of the gradients is in flight. Otherwise a function that
            returns a function to wait for the reductions, or None if none is pending any longer.
    """

    __slots__ = ("in_flight", "were_accessed")

    def __init__(self) -> None:
        self.were_accessed = False
        self.in_flight: Callable[[], Callable[[], None] | None] | None = None

    def wait(self) -> None:
        """Wait for the reductions, so that only compute writes the gradients afterwards."""
        if self.in_flight is not None:
            wait = self.in_flight()
            self.in_flight = None
            if wait is not None:
                wait()


class ParameterBackref:
    """The reference of a sharded parameter to its buffer.

    Copies and pickles of the parameter do not contain it.

    Attributes:
        gradients: The users' accesses to the gradients of the buffer.
    """

    __slots__ = ("_hooks", "_index", "_reads", "gradients")

    def __init__(self, reads: ParameterAccess, index: int) -> None:
        self._hooks = reads.hooks
        self.gradients = reads.gradients
        # The reference is weak, so that a parameter does not keep the engine's memory alive.
        self._reads = weakref.ref(reads)
        self._index = index

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def name(self) -> str:
        """The fully qualified name of the parameter."""
        reads = self._reads()
        return reads.names[self._index] if reads is not None else "a parameter"

    def add_hook(self, hook: Callable[..., Any], *, on_param: bool) -> RemovableHandle:
        """See :meth:`ParamHooks.add`."""
        return self._hooks.add(self._index, hook, on_param=on_param)

    def prepare_change(self) -> None:
        """Prepare for an in-place change of the slice by the user."""
        reads = self._reads()
        if reads is not None and reads.on_change is not None:
            reads.on_change()

    def notify_grad_set(self, is_there: bool) -> None:
        """Record that the user has set ``.grad`` to a tensor (``is_there``) or to None."""
        reads = self._reads()
        if reads is not None and reads.on_gradient is not None:
            reads.on_gradient(is_there)

    def notify_attribute_set(self) -> None:
        """Record that the user may have set ``requires_grad`` or ``.grad``."""
        reads = self._reads()
        if reads is not None:
            reads.requires_grad_changed = True
            if reads.on_gradient is not None:
                reads.on_gradient(True)

    @property
    def main_grad(self) -> Tensor | None:
        """This rank's slice of the accumulated gradient. None: the attribute does not exist."""
        reads = self._reads()
        if reads is None or reads.main_grad is None or self._index in reads.deleted_main_grads:
            return None
        return reads.main_grad(self._index)

    def set_main_grad(self, value: Tensor) -> bool:
        """Copy ``value`` into the accumulated gradient. Returns False if the parameter has none."""
        reads = self._reads()
        if reads is None or reads.set_main_grad is None:
            return False
        reads.set_main_grad(self._index, value)
        reads.deleted_main_grads.discard(self._index)
        return True

    def delete_main_grad(self) -> bool:
        """Delete the parameter's ``main_grad``. Returns False if it has none."""
        reads = self._reads()
        if reads is None or reads.main_grad is None or self._index in reads.deleted_main_grads:
            return False
        reads.deleted_main_grads.add(self._index)
        return True

    @property
    def full_param(self) -> Tensor | None:
        """The full parameter, a leaf of forward's graphs. None: the engine was deleted."""
        reads = self._reads()
        return reads.full_params[self._index] if reads is not None else None

    def gathered_param(self) -> Tensor | None:
        """Returns the full parameter, which is gathered if necessary.

        Returns None if it cannot be gathered (outside the model's forward).
        """
        reads = self._reads()
        if reads is None or reads.on_read is None or not reads.on_read():
            return None
        return reads.full_params[self._index]

    def differentiable(self, values: Tensor, spread: TensorParallelSpec | None) -> Tensor | None:
        """Returns ``values`` with a graph that leads to the full parameter.

        Returns None if no engine reduces gradients of the parameter.

        Args:
            values: The full main weights.
            spread: The placement over other mesh dimensions, of a parameter that is a DTensor.
        """
        reads = self._reads()
        if reads is None or not reads.reduces_gradients:
            return None
        leaf = reads.full_params[self._index]
        if not leaf.requires_grad:
            # The user has set requires_grad of the sharded parameter after the last forward.
            leaf.requires_grad_(True)
        result: Tensor = _Read.apply(leaf, values, _Count(reads), spread)  # type: ignore[no-untyped-call]
        return result


class _Count:
    """The count of one pending read, from its construction to its backward.

    If the graph is deleted before, the read is no longer counted.
    """

    __slots__ = ("_counts", "_reads")

    def __init__(self, reads: ParameterAccess) -> None:
        self._reads = reads
        self._counts = True
        reads.num_pending_reads += 1

    def end(self) -> None:
        if self._counts:
            self._counts = False
            self._reads.num_pending_reads -= 1

    def __del__(self) -> None:
        self.end()


class _Read(torch.autograd.Function):
    """Returns ``values`` and passes their gradient to ``leaf``, of the same shape."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, values: Tensor, count: _Count, spread: TensorParallelSpec | None
    ) -> Tensor:
        ctx.count, ctx.spread = count, spread
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.count.end()
        if ctx.spread is not None:
            grad = ctx.spread.wrap(ctx.spread.shard_of(grad).contiguous())
        return grad, None, None, None
