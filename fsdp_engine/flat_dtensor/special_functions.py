"""Functions of FlatDTensors that make views and new tensors, read elements, or run backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fsdp_engine.extension_list import advice_for
from fsdp_engine.flat_dtensor.elementwise import elementwise
from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement
from fsdp_engine.flat_dtensor.slices import (
    GATHER,
    Args,
    Function,
    Handler,
    Kwargs,
    as_gradient,
    check_gradient,
    refusal,
    rewrap,
    unwrap,
)


def _view(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``view``, ``reshape`` etc. to the same shape, or ``view(dtype)`` of equal item size."""
    tensor, *target = args
    if not isinstance(tensor, cls):  # plain.view_as(flat)
        return getattr(tensor, func.__name__.removesuffix("_as"))(*(t.shape for t in target))
    shape = tuple(tensor._flat.shape)
    target = [*target, *kwargs.values()]
    if target and isinstance(target[0], torch.dtype):
        if target[0].itemsize != tensor.dtype.itemsize:
            raise refusal(cls, func, args, "changes the number of elements")
        return elementwise(cls, func, args, kwargs)
    if func.__name__.endswith("_as"):
        if target[0] is tensor and tensor.is_leaf and tensor.requires_grad:
            # Code that looks for the AccumulateGrad node calls this, but no backward reaches the
            # node of a sharded parameter.
            why = "looks for this parameter in the graph, which contains the full parameter"
            instead = ["register_post_accumulate_grad_hook", advice_for("view_as")]
            raise refusal(cls, func, args, f"{why} (use {', or '.join(filter(None, instead))})")
        target = list(target[0].shape)
    elif len(target) == 1 and not isinstance(target[0], int | Tensor):
        target = list(target[0])
    if func.__name__ in {"flatten", "ravel"}:
        target = [-1]
    if func.__name__ in {"expand", "expand_as"} and len(target) == len(shape):
        target = [mine if size == -1 else size for size, mine in zip(target, shape, strict=True)]
    elif -1 in target and math.prod(shape):
        known = math.prod(size for size in target if size != -1)
        target = [math.prod(shape) // known if size == -1 else size for size in target]
    if tuple(target) != shape:
        raise refusal(cls, func, args, f"changes the shape to {tuple(target)}")
    if tensor.requires_grad:
        return tensor.contiguous()
    detached = tensor.alias()
    return as_gradient(detached) if tensor.is_gradient else detached


def _view_as_real(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``view_as_real``, by which optimizers view complex elements as pairs of real ones."""
    (tensor,) = (*args, *kwargs.values())
    return rewrap(cls, func(unwrap(tensor)).reshape(-1), tensor._flat.of_parts)


def _view_as_complex(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    (tensor,) = (*args, *kwargs.values())
    flat: FlatPlacement | None = tensor._flat.of_numbers
    if flat is None:
        raise refusal(cls, func, tensor, "would combine components of one number from two ranks")
    return rewrap(cls, func(unwrap(tensor).view(-1, 2)), flat)


def _conj(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Returns a copy, because the FlatDTensor would not have the conjugate flag of its slice."""
    return elementwise(cls, torch.conj_physical, args, kwargs)


def _new(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``new_zeros`` etc. A result of the same shape is a FlatDTensor, any other is plain."""
    tensor, *rest = args
    local, flat = tensor._local_tensor, tensor._flat
    size = kwargs.pop("size", None)
    if size is None and func.__name__ == "new_full":
        size, *rest = rest
    elif size is None:
        size, rest = (
            (rest, []) if not rest or isinstance(rest[0], int | Tensor) else (rest[0], rest[1:])
        )
    if tuple(size) != tuple(flat.shape):
        return func(local, tuple(size), *rest, **kwargs)
    return cls._wrap(func(local, (flat.numel,), *rest, **kwargs), flat)


def _new_tensor(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], cls) and any(isinstance(each, cls) for each in args[1:]):
        raise refusal(cls, func, args)  # torch would read the argument element by element
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _item(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``item``, ``bool()`` etc. on a tensor of one element. Collective."""
    if math.prod(args[0]._flat.shape) != 1:
        raise refusal(cls, func, args, "needs a tensor of one element")
    return func(args[0].full_tensor(), *args[1:], **kwargs)


def _backward(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> None:
    inputs = kwargs.get("inputs")
    flat = [
        each
        # torch 2.11 passes the caller's argument, a tensor or any sequence; torch 2.13 a tuple.
        for each in ((inputs,) if isinstance(inputs, Tensor) else inputs or ())
        if isinstance(each, cls)
    ]
    if flat:
        # Modules compute with full parameters, so the graph does not contain these tensors.
        names = ", ".join(each._flat.name or str(tuple(each.shape)) for each in flat[:4])
        raise ValueError(
            f"backward: expected no sharded parameters in inputs=; found {names}. Omit inputs= "
            "and call requires_grad_(False) on parameters that need no gradient"
        )
    tensor, *rest = args
    if not isinstance(tensor, cls):  # torch.autograd.backward of one or several tensors
        tensors = (tensor,) if isinstance(tensor, Tensor) else tuple(tensor)
        if len(tensors) != 1 or not isinstance(tensors[0], cls):
            raise refusal(cls, func, args, "of several tensors (sum the losses)")
        tensor, kwargs = tensors[0], dict(kwargs)
        gradients = kwargs.pop("grad_tensors", None)
        if gradients is None and rest:
            gradients = rest[0]
        rest = [gradients[0] if isinstance(gradients, list | tuple) else gradients]
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
    gradient = rest[0] if rest else kwargs.get("gradient")
    if gradient is None and tensor._flat.shape:
        raise refusal(
            cls, func, args, "needs a gradient argument, since the tensor is not a scalar"
        )
    if gradient is not None and not isinstance(gradient, cls):
        raise refusal(cls, func, args, "needs a gradient of the same slice")
    local = unwrap(tensor)
    seed = torch.scalar_tensor(1.0, dtype=local.dtype, device=local.device).expand_as(local)
    rest = [seed if gradient is None else gradient._local_tensor, *rest[1:]]
    kwargs = {key: value for key, value in kwargs.items() if key != "gradient"}
    local.backward(*rest, **kwargs)


def _check_leads_to_slices(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Check the outputs of ``torch.autograd.grad`` with respect to sharded tensors.

    Raises:
        ValueError: The graph leads to the full parameter of one of them, whose gradient would have
            to be reduced. Or a gathered tensor was combined with plain tensors, which may differ
            between the ranks, so that its gradient is the mean over the ranks.
    """
    backrefs = [each.backref for each in inputs if each.backref is not None]
    names = {
        id(backref.full_param): backref.name
        for backref in backrefs
        if backref.full_param is not None
    }
    waiting = [getattr(output, "grad_fn", None) for output in outputs] if inputs else []
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise ValueError(
                f"autograd.grad: expected inputs that are not parameters of a sharded model; found "
                f"{name}, whose gradient is reduced over the ranks by backward() only. Call "
                "backward() and read .grad, or shard at level no_shard without mixed precision"
            )
        if type(node).__name__ == GATHER and (combined_by := getattr(node, "combined_by", "")):
            found = node.flat.name or f"a sharded tensor of shape {tuple(node.flat.shape)}"
            raise ValueError(
                f"autograd.grad: expected no sharded tensor that {combined_by} combines with plain "
                f"tensors, which may differ between the ranks; found {found}. Its gradient would "
                "be the mean over the ranks. For this rank's gradient take full = "
                "p.full_tensor().detach().requires_grad_() in place of p"
            )
        waiting += [following for following, _ in node.next_functions]


def _grad(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``torch.autograd.grad``. ``grad_outputs`` of sharded outputs are gradients of slices."""
    outputs = args[0] if args else kwargs["outputs"]
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    sharded = [value for value in inputs if isinstance(value, cls)]
    _check_leads_to_slices((outputs,) if isinstance(outputs, Tensor) else outputs, sharded)
    seeds = (*args[2:3], kwargs.get("grad_outputs"))
    for seed in tree_leaves(seeds):
        if isinstance(seed, cls):
            seed.is_gradient = True
    grads = torch._C._disabled_torch_function_impl(func, (cls,), args, kwargs)
    for grad, wrt in zip(grads, inputs, strict=True):
        if grad is not None and isinstance(wrt, cls):
            check_gradient(cls, grad, wrt._flat)
    return grads


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("view", "view_as", "reshape", "reshape_as"), _view),
    **dict.fromkeys(("expand", "expand_as", "flatten", "ravel"), _view),
    "view_as_real": _view_as_real,
    "view_as_complex": _view_as_complex,
    "conj": _conj,
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
    "new_tensor": _new_tensor,
    **dict.fromkeys(("item", "is_nonzero", "__bool__", "__nonzero__", "__float__"), _item),
    **dict.fromkeys(("__int__", "__long__", "__index__", "__complex__"), _item),
    "backward": _backward,
    "grad": _grad,
}
