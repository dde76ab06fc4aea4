"""Converts FlatDTensors to slices and back, with autograd, and makes errors for other functions.

[Note: Not through DTensor's dispatch]
DTensor would propagate ``Shard(0)``, but a flat slice is not a shard along a dim: the result would
be wrong for ``mean`` and for every function along a dim, 0-d tensors would raise, and the host time
would be several times the compute time of a small parameter. Therefore torch functions run on the
slices. For autograd, ``_Unwrap`` and ``_Wrap`` surround plain operations. Only operations of the
autograd engine itself (the sum of two gradients of one tensor) use DTensor's dispatch.

The tensor class is the argument ``cls`` of functions. Its instances have ``_local_tensor`` (the
slice, 1-D) and ``_flat`` (a :class:`~fsdp_engine.flat_dtensor.flat_placement.FlatPlacement`), and
``cls._wrap(local, flat)`` makes an instance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_MARK = "_refuses_slices"
# Function of the tensor class, a torch function and its arguments. Returns the function's result.
Handler = Callable[[Any, Function, Args, Kwargs], Any]

_INPLACE_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__imod__"}
_INPLACE_OPERATORS |= {"__ifloordiv__", "__ipow__", "__ilshift__", "__irshift__"}
_INPLACE_OPERATORS |= {"__iand__", "__ior__", "__ixor__", "__setitem__"}


def words(text: str) -> frozenset[str]:
    """Returns the names in a text that lists functions."""
    return frozenset(text.split())


# In-place random functions.
DRAWS = words(
    """
    normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_
    kaiming_uniform_
    """
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Like torch's decorator of this name. The error for a second derivative names the parameter,
    whose placement is ``ctx.flat``."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        if not any(grad is not None and grad.requires_grad for grad in grads):
            return found
        message = (
            "backward: expected only first derivatives of "
            f"{ctx.flat.name or 'a sharded tensor'}; found a derivative of its gradient, which was "
            "computed with create_graph=True. Train a model that needs second derivatives of "
            "parameters without fe.shard(). Gradients of the model's inputs can be differentiated "
            "again"
        )
        outputs = found if isinstance(found, tuple) else (found,)
        inputs = [None if each is None else each.detach().requires_grad_() for each in outputs]
        fail: Any = torch._C._functions.DelayedError(message.encode(), len(inputs))
        return fail(*inputs)

    return wrapper


class _Unwrap(torch.autograd.Function):
    """Converts a FlatDTensor to its slice, a differentiable plain tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.cls, ctx.flat = type(tensor), tensor._flat
        ctx.set_materialize_grads(False)
        local: Tensor = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None if grad is None else as_gradient(ctx.cls._wrap(compact(grad), ctx.flat))


class _Wrap(torch.autograd.Function):
    """Converts a slice to a differentiable FlatDTensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, cls: Any, flat: FlatPlacement) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cls, ctx.flat = cls, flat
        return cls._wrap(local.detach(), flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        check_gradient(ctx.cls, grad, ctx.flat)
        return grad._local_tensor, None, None


def as_gradient(tensor: Any) -> Any:
    """Mark a FlatDTensor as the gradient of a slice, and return it."""
    tensor.is_gradient = True
    return tensor


# Before 2.13, torch does not call `__torch_dispatch__` of subclasses of DTensor. Sums and casts
# that autograd itself computes are then DTensors without the mark of gradients, so gradients cannot
# be distinguished from other slices.
MARKS_SUMS = TorchVersion(torch.__version__) >= "2.13"


def check_gradient(cls: Any, grad: Tensor, flat: FlatPlacement) -> None:
    """Check that the gradient of a sharded tensor was computed from gradients of slices.

    Raises:
        RuntimeError: An ``autograd.Function`` computed it from this rank's values.
    """
    if isinstance(grad, cls) and grad.is_gradient:
        return
    if isinstance(grad, DTensor) and not MARKS_SUMS:
        return
    name = flat.name or "a sharded tensor"
    raise RuntimeError(
        f"backward: expected functions of sharded tensors to compute the gradient of {name}, since "
        f"this gradient is not reduced over the ranks; found one of shape {tuple(grad.shape)} that "
        "an autograd.Function computed from this rank's own values, which differ between ranks. "
        "Call the function within the forward of the parameter's module, or pass "
        f"{flat.name or 'the tensor'}.full_tensor() to it, whose gradient is reduced"
    )


def compact(local: Tensor) -> Tensor:
    """Returns a slice with stride 1. (torch considers one element with any stride contiguous.)"""
    return local if local.stride() == (1,) else local.clone(memory_format=torch.contiguous_format)


def unwrap(tensor: Any) -> Tensor:
    """Returns the slice. It is differentiable if ``tensor`` requires grad, in grad mode."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        differentiable: Tensor = _Unwrap.apply(tensor)  # type: ignore[no-untyped-call]
        return differentiable
    local: Tensor = tensor._local_tensor
    return local


def rewrap(cls: Any, result: Any, flat: FlatPlacement) -> Any:
    """Returns the FlatDTensor of a slice, or of each slice in a list or tuple."""
    if isinstance(result, Tensor):
        return _Wrap.apply(result, cls, flat) if result.requires_grad else cls._wrap(result, flat)  # type: ignore[no-untyped-call]
    if isinstance(result, list | tuple):
        return type(result)(rewrap(cls, value, flat) for value in result)
    return result


def name_of(func: Function) -> str:
    """Returns the public name of a torch function or of a tensor's property."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in {"__get__", "__set__"} else name  # type: ignore[attr-defined]


def refusal(
    cls: Any, func: Function, found: Any, why: str = "not defined for a slice"
) -> ValueError:
    """Returns the error for a function that is not defined for slices.

    The error is marked for :func:`refuses`: no tensor was modified, and the call may succeed with
    full parameters. It is not a TypeError, because Python's operators replace a TypeError by one
    that says "unsupported operand".

    Args:
        cls: The class of sharded tensors.
        func: The function.
        found: The arguments of the function, or the placement of one of them.
        why: The reason, for the message.
    """
    flat = _first_flat(cls, found)
    described, within = "a FlatDTensor", ""
    if flat is not None:
        named = f"{flat.name}, " if flat.name else ""
        described = (
            f"{named}a FlatDTensor of shape {tuple(flat.shape)}, elements {_range(flat)} here"
        )
        if flat.name and name_of(func) not in ("numpy", "__array__"):
            within = (
                f". Modules hold the full {flat.name} only during the model's forward: call the "
                "model, for another method than forward call fe.register_forward_method(module, "
                "name) after shard(), or work within engine.unsharded(module). "
                "engine.full_state_dict() and fe.export_safetensors() save full weights. Change "
                "shapes before shard()"
            )
    name = name_of(func)
    if name in ("storage", "untyped_storage"):
        error = storage_refusal(name, described)
    else:
        error = ValueError(
            f"{name}: {why}; expected an elementwise function of FlatDTensors of one slice and of "
            f"scalars, or a full reduction; found {described}{within}. Call .full_tensor() for "
            "the full tensor, .to_local() for the slice"
        )
    return _marked(error)


def slices_differ(func: Function, one: FlatPlacement, other: FlatPlacement) -> ValueError:
    """Returns the error for a function of two tensors with different slices. The error is marked
    like that of :func:`refusal`."""
    where = "; slices of other ranks differ" if one == other else ""
    return _marked(
        ValueError(
            f"{name_of(func)}: mixes two different slices; expected tensors with the same slice on "
            f"each rank; found {_named(one)} and {_named(other)}{where}. Call .full_tensor() of "
            "one of them, on all ranks. Parameters of two models have the same slices if each "
            "model is sharded by its own fe.shard(), with the same arguments and with equal "
            "requires_grad: freeze parameters afterwards. Saved state has the same slices with "
            "the same ranks and levels only; use fe.save_checkpoint for others"
        )
    )


def _named(flat: FlatPlacement) -> str:
    return f"{flat.name} ({flat})" if flat.name else str(flat)


def _marked(error: ValueError) -> ValueError:
    setattr(error, _MARK, True)
    return error


def storage_refusal(name: str, found: str) -> ValueError:
    """Returns the error for a function that reads the storage of a sharded tensor.

    A model's own ``save_pretrained`` calls such functions, to find tied weights.

    Args:
        name: The name of the function.
        found: A description of the tensor.
    """
    return ValueError(
        f"{name}: expected a full tensor, which .full_tensor() returns; found {found}. To save "
        "weights call fe.save_pretrained(engine, folder) or fe.export_safetensors(engine, folder) "
        "on all ranks, not model.save_pretrained(folder)"
    )


def refuses(error: ValueError) -> bool:
    """Returns whether :func:`refusal` or :func:`slices_differ` has made the error."""
    return hasattr(error, _MARK)


def refuse(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Raise the ValueError for a function that is not defined for slices."""
    raise refusal(cls, func, (args, kwargs))


def with_full_parameters(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Returns the arguments with full parameters instead of sharded ones.

    Parameters are gathered if necessary. Returns None for in-place functions, and if parameters
    cannot be gathered (outside the model's forward; see ``runtime/model_hooks.py``).
    """
    if is_inplace(func):
        return None
    found = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
    full = {id(value): value.backref.gathered_param() if value.backref else None for value in found}
    if None in full.values():
        return None
    return tree_map_only(cls, lambda value: full[id(value)], (args, kwargs))


def mark_mixed(name: str, gathered: Iterable[Any], operands: Any) -> None:
    """Record, at the functions of autograd that gather tensors, that ``name`` combines the full
    tensors with plain ones. Ranks may have different plain tensors, and then different gradients.

    Args:
        name: Name of the function.
        gathered: The gathered full tensors, or views of them. Other objects are ignored.
        operands: The operands before the gather.
    """
    leaves = [each for each in tree_leaves(operands) if type(each) in (Tensor, nn.Parameter)]
    if any(_gather_of(each) is None for each in leaves):
        for each in gathered:
            if isinstance(each, Tensor) and (node := _gather_of(each)) is not None:
                node.combined_by = name


def _gather_of(tensor: Tensor) -> Any:
    """Returns the function of autograd that has gathered a full tensor or the base of a view; None
    if there is none."""
    node: Any = tensor.grad_fn
    while node is not None and type(node).__name__ != GATHER:
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node


# The class of the function of autograd that gathers a tensor.
GATHER = "_FullTensorBackward"


def refuse_random(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Raise the ValueError for a function that draws random numbers."""
    why = "random values would depend on the sharding (initialize full parameters instead)"
    raise refusal(cls, func, (args, kwargs), why)


def is_inplace(func: Function) -> bool:
    """Returns whether a torch function modifies its first argument, according to its name."""
    name = func.__name__
    return (name[-1] == "_" and name[-2] != "_") or name in _INPLACE_OPERATORS


def check_inplace(func: Function, tensor: Any) -> None:
    """Check an in-place change of a FlatDTensor, as autograd does for other tensors.

    Autograd cannot detect the change of a slice. If the device still reads the slice from host
    memory, wait for it.

    Raises:
        RuntimeError: ``func`` is in-place and ``tensor``, one of its arguments, requires grad.
    """
    if is_inplace(func):
        check_change(func.__name__, tensor)


def check_change(name: str, tensor: Any) -> None:
    """Run :func:`check_inplace` for a function ``name`` that changes ``tensor``."""
    if (backref := getattr(tensor, "backref", None)) is not None:
        backref.prepare_change()
    if torch.is_grad_enabled() and tensor.requires_grad:
        flat = getattr(tensor, "_flat", None)
        named = f"{flat.name}, " if flat is not None and flat.name else ""
        is_for_part = name == "requires_grad_"
        raise RuntimeError(
            f"{name}: expected torch.no_grad() around an in-place change; found {named}a "
            f"{type(tensor).__name__} of shape {tuple(tensor.shape)} that requires grad"
            f"{'. To train a part, make it a parameter before shard()' * is_for_part}"
        )


def _range(flat: FlatPlacement) -> str:
    return f"[{flat.start}, {flat.stop})"


def _first_flat(cls: Any, found: Any) -> FlatPlacement | None:
    if isinstance(found, FlatPlacement):
        return found
    if isinstance(found, cls):
        flat: FlatPlacement = found._flat
        return flat
    if isinstance(found, dict):
        found = tuple(found.values())
    for value in found if isinstance(found, list | tuple) else ():
        if (first := _first_flat(cls, value)) is not None:
            return first
    return None
