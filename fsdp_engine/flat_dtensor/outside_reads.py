"""Parameters that are read outside their unit's forward: `loss * model.scale.exp()`, say.

There a parameter is a FlatDTensor, and its values have to be gathered. Their gradient is no matter
of slices: it comes out of this rank's data, like all others, and has to be averaged over the ranks
like all others. So it is led to the full parameter, where autograd adds it to what the forward's
uses bring, and the sum takes the usual way: one gradient, one reduction.

The unit's reduction has to wait for it. What was read before forward has its backward after
everything else; so reads whose backward is to come are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp_engine.flat_dtensor.param_hooks import ParamHooks
from fsdp_engine.flat_dtensor.spread import Spread


class OutsideReads:
    """Of the parameters of one buffer.

    Attributes:
        hooks: that users put on the parameters.
        reduces_gradients: an engine reduces gradients of the full parameters.
        num_open: reads whose backward is to come and whose graph still lives.
        on_read: makes the full parameters be there, for a function that needs them, and tells
            whether they are; None: they cannot be.
        on_gradient: called when a user has assigned a gradient: whether there is one now.
        requires_grad_changed: a user has frozen or thawed some parameter, perhaps.
        gradients: whether users look at gradients.
        main_grad: what is accumulated of a parameter; None: parameters have no ``main_grad``.
        set_main_grad: copies a value into that.
        deleted_main_grads: parameters whose ``main_grad`` the user has deleted.
    """

    def __init__(
        self, full_params: Sequence[Tensor], names: Sequence[str], hooks: ParamHooks
    ) -> None:
        self.full_params = full_params
        self.names = names
        self.reduces_gradients = False
        self.num_open = 0
        self.hooks = hooks
        self.on_read: Callable[[], bool] | None = None
        self.on_gradient: Callable[[bool], None] | None = None
        self.requires_grad_changed = True
        self.gradients = GradientReads()
        self.main_grad: Callable[[int], Tensor] | None = None
        self.set_main_grad: Callable[[int, Tensor], None] | None = None
        self.deleted_main_grads: set[int] = set()

    def home(self, index: int) -> Home:
        """What the sharded parameter ``index`` has to know of this."""
        return Home(self, index)


class GradientReads:
    """Whether users look at ``.grad`` of one buffer's sharded parameters.

    Attributes:
        were_asked: somebody has got one, and may hold it.
        in_flight: leads to what waits for those that are still being reduced; None: none are.
    """

    __slots__ = ("in_flight", "were_asked")

    def __init__(self) -> None:
        self.were_asked = False
        self.in_flight: Callable[[], Callable[[], None] | None] | None = None

    def wait(self) -> None:
        """On return nothing writes them but compute."""
        if self.in_flight is not None:
            wait = self.in_flight()
            self.in_flight = None
            if wait is not None:
                wait()


class Home:
    """Where a sharded parameter belongs. It goes neither into copies nor into pickles of it.

    Attributes:
        gradients: of its buffer.
    """

    __slots__ = ("_hooks", "_index", "_reads", "gradients")

    def __init__(self, reads: OutsideReads, index: int) -> None:
        self._hooks = reads.hooks
        self.gradients = reads.gradients
        # Weak: who holds on to a parameter does not hold on to the engine's memory.
        self._reads = weakref.ref(reads)
        self._index = index

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def name(self) -> str:
        """The parameter's fully qualified name."""
        reads = self._reads()
        return reads.names[self._index] if reads is not None else "a parameter"

    def add_hook(self, hook: Callable[..., Any], *, on_param: bool) -> RemovableHandle:
        """See :meth:`ParamHooks.add`."""
        return self._hooks.add(self._index, hook, on_param=on_param)

    def gradient_was_set(self, is_there: bool) -> None:
        """The user has made its gradient None, or (``is_there``) another one."""
        reads = self._reads()
        if reads is not None and reads.on_gradient is not None:
            reads.on_gradient(is_there)

    def was_set(self) -> None:
        """The user has frozen or thawed it, perhaps, or made its gradient another one."""
        reads = self._reads()
        if reads is not None:
            reads.requires_grad_changed = True
            if reads.on_gradient is not None:
                reads.on_gradient(True)

    @property
    def main_grad(self) -> Tensor | None:
        """What is accumulated, as far as this rank has it; None: it has no such attribute."""
        reads = self._reads()
        if reads is None or reads.main_grad is None or self._index in reads.deleted_main_grads:
            return None
        return reads.main_grad(self._index)

    def set_main_grad(self, value: Tensor) -> bool:
        """Copy ``value`` into what is accumulated; False: the parameter has no ``main_grad``."""
        reads = self._reads()
        if reads is None or reads.set_main_grad is None:
            return False
        reads.set_main_grad(self._index, value)
        reads.deleted_main_grads.discard(self._index)
        return True

    def delete_main_grad(self) -> bool:
        """Let the parameter have no ``main_grad``; False: it has none."""
        reads = self._reads()
        if reads is None or reads.main_grad is None or self._index in reads.deleted_main_grads:
            return False
        reads.deleted_main_grads.add(self._index)
        return True

    @property
    def full_param(self) -> Tensor | None:
        """The leaf that graphs of the model's forward lead to; None: the engine has gone."""
        reads = self._reads()
        return reads.full_params[self._index] if reads is not None else None

    def brought(self) -> Tensor | None:
        """The full parameter, if it can be made to be there: within the model's forward."""
        reads = self._reads()
        if reads is None or reads.on_read is None or not reads.on_read():
            return None
        return reads.full_params[self._index]

    def followed(self, values: Tensor, spread: Spread | None) -> Tensor | None:
        """``values``, the whole main weights, as autograd is to follow them; None: there is no
        engine, not yet or no longer.

        Args:
            spread: of a parameter that is a DTensor.
        """
        reads = self._reads()
        if reads is None or not reads.reduces_gradients:
            return None
        leaf = reads.full_params[self._index]
        if not leaf.requires_grad:
            leaf.requires_grad_(True)  # thawed since the last forward
        result: Tensor = _Read.apply(leaf, values, _Count(reads), spread)  # type: ignore[no-untyped-call]
        return result


class _Count:
    """One read: counts from its making until its backward, or until its graph goes."""

    __slots__ = ("_counts", "_reads")

    def __init__(self, reads: OutsideReads) -> None:
        self._reads = reads
        self._counts = True
        reads.num_open += 1

    def end(self) -> None:
        if self._counts:
            self._counts = False
            self._reads.num_open -= 1

    def __del__(self) -> None:
        self.end()


class _Read(torch.autograd.Function):
    """Values of a parameter, whose gradient goes to another tensor of its shape."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, values: Tensor, count: _Count, spread: Spread | None
    ) -> Tensor:
        ctx.count, ctx.spread = count, spread
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.count.end()
        if ctx.spread is not None:
            grad = ctx.spread.wrap(ctx.spread.shard_of(grad).contiguous())
        return grad, None, None, None


def check_leads_to_slices(outputs: Sequence[Any], homes: Sequence[Home]) -> None:
    """``torch.autograd.grad`` is about to differentiate with respect to sharded parameters.

    Raises:
        ValueError: the graph leads to the full parameter of one of them, whose gradient would have
            to be reduced.
    """
    names = {id(home.full_param): home.name for home in homes if home.full_param is not None}
    waiting = [getattr(output, "grad_fn", None) for output in outputs] if names else []
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise ValueError(
                f"autograd.grad: expected inputs that are no parameters of a sharded model; found "
                f"{name}, whose gradient is reduced over the ranks by backward() only. Call "
                "backward() and read .grad, or shard at level no_shard without mixed precision"
            )
        waiting += [following for following, _ in node.next_functions]
