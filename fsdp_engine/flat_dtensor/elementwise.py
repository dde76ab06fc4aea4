"""Runs elementwise functions of tensors or lists of tensors on slices, and wraps the results.

[Note: Beside plain tensors]
A plain operand of one element is a coefficient that is the same on every rank, and the result is a
slice. Any other plain operand is normally data of this rank, for which the full tensor is needed:
`loss * model.scale.exp()`, `x + model.bias`. In this case small FlatDTensors are gathered and the
result is a plain tensor; larger ones raise an error. This applies if

- a plain tensor has more than one element, or would add dims;
- a plain tensor requires grad: with a slice, it would get only a part of its gradient;
- a parameter has one element and requires grad: it may be combined with a loss later.

An in-place function of a slice uses the corresponding slice of a full plain operand, which has to
be the same on every rank. The same applies to operands of a gradient that is passed to a hook
(``takes_slices``). If a plain tensor is modified in place, FlatDTensor operands are gathered.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement, FlatShard
from fsdp_engine.flat_dtensor.slices import (
    Args,
    Function,
    Kwargs,
    as_gradient,
    check_change,
    check_inplace,
    is_inplace,
    mark_mixed,
    refusal,
    rewrap,
    slices_differ,
    unwrap,
)

# Maximum number of elements of a tensor that is gathered implicitly.
SMALL = 1 << 16


def elementwise(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` on slices or on full tensors; see [Note: Beside plain tensors]."""
    if _needs_gather(cls, func, args, kwargs):
        return _run_gathered(cls, func, args, kwargs)
    flat: FlatPlacement | None = None
    takes_slices = is_gradient = False
    flat_of: dict[int, Any] = {}  # FlatDTensors by id of the slice
    locals_: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, cls):
            mine = value._flat
            if flat is None:
                flat = mine
            elif not flat.is_same_on_all_ranks(mine):
                raise slices_differ(func, flat, mine)
            check_inplace(func, value)
            takes_slices = takes_slices or value.takes_slices
            is_gradient = is_gradient or value.is_gradient
            value = _remember(flat_of, value)
        locals_.append(value)
    if flat is None:  # the FlatDTensor is inside a list
        raise refusal(cls, func, (args, kwargs))
    locals_ = [
        scalar(cls, func, value, flat, takes_slices)
        if isinstance(value, Tensor) and id(value) not in flat_of
        else value
        for value in locals_
    ]
    if isinstance(kwargs.get("out"), cls):
        check_change(func.__name__, kwargs["out"])
    options = dict(zip(kwargs, locals_[len(args) :], strict=True))
    requires_grad = options.pop("requires_grad", False)
    options.pop("memory_format", None)  # has no effect, because slices are 1-D
    result = func(*locals_[: len(args)], **options)
    # In-place functions and no-ops return one of their arguments, whose FlatDTensor is the result.
    if kwargs.get("out") is not None:
        return kwargs["out"]
    operand = flat_of.get(id(result))
    if operand is not None:
        if is_gradient:
            operand.is_gradient = not _has_full_operand(cls, args, kwargs)
        return operand
    result = rewrap(cls, result, flat)
    if (takes_slices or is_gradient) and isinstance(result, cls):
        result.takes_slices, result.is_gradient = takes_slices, is_gradient
    return result.requires_grad_() if requires_grad else result


def foreach(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``torch._foreach_*`` or the function of a fused optimizer on lists of tensors.

    Lists may contain FlatDTensors and plain tensors. All FlatDTensors at one index must have the
    same slice.
    """
    flats: list[FlatPlacement | None] | None = None
    records = torch.is_grad_enabled()
    changed: Any = args[0] if args and is_inplace(func) else None

    def to_local(value: Any) -> Any:
        nonlocal flats
        if not isinstance(value, list | tuple) or not any(isinstance(t, Tensor) for t in value):
            # The coefficient of gradient clipping may be a DTensor of one element.
            return value.full_tensor() if isinstance(value, DTensor) else value
        found = [t._flat if isinstance(t, cls) else None for t in value]
        first = flats = found if flats is None else flats
        if found is not first and not all(map(operator.is_, found, first)):
            _check_columns(cls, func, value, found, first)
        if not records and None not in found:
            if value is changed:
                for tensor in value:
                    if tensor.backref is not None:
                        tensor.backref.prepare_change()
            return [t._local_tensor for t in value]
        local = []
        for tensor, mine, other in zip(value, found, first, strict=True):
            if mine is not None:
                check_inplace(func, tensor)
                local.append(unwrap(tensor))
            else:
                local.append(tensor if other is None else scalar(cls, func, tensor, other))
        return local

    local_args = [to_local(value) for value in args]
    result = func(*local_args, **{key: to_local(value) for key, value in kwargs.items()})
    if func.__name__.startswith("_fused_"):
        # torch does not increment the parameters' version counters (2.11 to 2.13).
        torch.autograd.graph.increment_version(local_args[0])
    if func.__name__[-1] == "_":
        return None if result is None else args[0]
    assert flats is not None
    return type(result)(
        value if flat is None else rewrap(cls, value, flat)
        for value, flat in zip(result, flats, strict=True)
    )


def _has_full_operand(cls: Any, args: Args, kwargs: Kwargs) -> bool:
    """Returns whether an operand is a full plain tensor, whose slice was used."""
    operands = (*args, *kwargs.values())
    return any(
        isinstance(each, Tensor) and not isinstance(each, cls) and each.ndim for each in operands
    )


def _needs_gather(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Returns whether operands have to be gathered; see [Note: Beside plain tensors]."""
    follows = torch.is_grad_enabled()
    num_dims, wants = 0, False
    plain: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, cls):
            if value.takes_slices:
                return False
            num_dims = len(value._flat.shape)
            if follows and value.backref is not None and value.requires_grad:
                wants = wants or math.prod(value._flat.shape) == 1
        elif isinstance(value, Tensor):
            plain.append(value)
    if is_inplace(func) and plain and plain[0] is args[0] and not isinstance(args[0], DTensor):
        return True
    if not (wants or plain) or is_inplace(func) or kwargs.get("out") is not None:
        return False
    return wants or any(
        tensor.numel() != 1 or tensor.ndim > num_dims or (follows and tensor.requires_grad)
        for tensor in plain
    )


def _run_gathered(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    # A plain tensor that is modified in place already has the full size, so the gather of the same
    # number of elements is acceptable.
    limit = max(SMALL, args[0].numel()) if is_inplace(func) else SMALL

    def gathered(value: Any) -> Any:
        if not isinstance(value, cls):
            return value
        if math.prod(value._flat.shape) > limit:
            why = f"tensors of more than {limit} elements are not gathered implicitly"
            raise refusal(cls, func, (value,), f"mixes a FlatDTensor and plain tensors; {why}")
        return value.full_tensor()

    values = list(map(gathered, args))
    options = {key: gathered(value) for key, value in kwargs.items()}
    mark_mixed(func.__name__, [*values, *options.values()], (args, kwargs))
    return func(*values, **options)


def slice_of(tensor: Tensor, flat: FlatPlacement) -> Tensor | None:
    """Returns this rank's slice of a full tensor that is expanded to the shape of ``flat``, 1-D.

    Returns None if it cannot be expanded.
    """
    shape = tuple(flat.shape)
    is_expandable = tensor.ndim <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(tensor.shape[::-1], shape[::-1], strict=False)
    )
    if not is_expandable or not shape:
        return None
    row = math.prod(flat.sharded_shape[1:])
    first = flat.start // max(row, 1)
    # Only the rows that contain the slice are copied.
    expanded = tensor.expand(shape)
    shard = expanded if flat.spread is None else flat.spread.shard_of(expanded)
    rows = shard[first : -(-flat.stop // max(row, 1))]
    return rows.reshape(-1)[flat.start - first * row : flat.stop - first * row]


def scalar(
    cls: Any, func: Function, tensor: Tensor, flat: FlatPlacement, takes_slices: bool = False
) -> Tensor:
    """Convert a plain operand of ``func`` to an operand of a slice.

    Returns:
        A tensor of one element, with at most one dim; or the slice of a full tensor, if ``func`` is
        in-place or ``takes_slices`` is True.

    Raises:
        ValueError: The operand has more elements, would add dims to the result, or requires grad.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        why = "would give a plain tensor the gradient of this slice only (use torch.no_grad())"
        raise refusal(cls, func, flat, why)
    if (takes_slices or is_inplace(func)) and tensor.ndim:
        part = slice_of(_full(tensor), flat)
        if part is not None:
            return part
    if tensor.numel() != 1 or tensor.ndim > len(flat.shape):
        found = f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        why = f"mixes a FlatDTensor of shape {tuple(flat.shape)} and a {found}"
        raise refusal(cls, func, flat, why)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.reshape(1) if tensor.ndim else tensor


def convert(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``to``, ``type`` or ``type_as``. Other tensor arguments only define dtype and device.

    A memory format has no effect, because slices are 1-D.
    """
    if func.__name__ == "type" and len(args) == 1 and not kwargs:
        return args[0]._local_tensor.type()
    args = (args[0], *(t._local_tensor if isinstance(t, cls) else t for t in args[1:]))
    kwargs = {k: t._local_tensor if isinstance(t, cls) else t for k, t in kwargs.items()}
    if not isinstance(args[0], cls):
        return func(*args, **kwargs)
    local = unwrap(args[0])
    kwargs.pop("memory_format", None)
    result = func(local, *args[1:], **kwargs)
    if result is local:
        return args[0]
    converted = rewrap(cls, result, args[0]._flat)
    return as_gradient(converted) if args[0].is_gradient else converted


def copy_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``copy_`` from the same slice, from a scalar, or from a full tensor.

    This rank's slice of a full tensor is copied. The full tensor has to be equal on all ranks, or a
    DTensor, which is gathered. ``load_state_dict`` can thus load an unsharded model's state dict.
    """
    target, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
    if not isinstance(target, cls):
        why = (
            "copies this rank's elements into a tensor that is not sharded (to load a model that "
            "is not sharded, save engine.full_state_dict(), called on all ranks; for an average of "
            "the weights, use fe.EMA(engine))"
        )
        raise refusal(cls, func, (source,), why)
    if not isinstance(source, Tensor):
        source = torch.as_tensor(source)
    flat: FlatPlacement = target._flat
    for tensor in (target, source):
        check_inplace(func, tensor)
    is_gradient = False
    if isinstance(source, cls) and flat.is_same_on_all_ranks(source._flat):
        is_gradient = source.is_gradient
        source = source._local_tensor
    elif (slice_ := slice_of_distributed(source, flat)) is not None:
        source = slice_
    elif source.shape == flat.shape:
        source = flat.slice_of_full(_full(source))
    else:
        source = scalar(cls, func, source, flat)
    func(target._local_tensor, source, *args[2:], **{k: v for k, v in kwargs.items() if k != "src"})
    if target.is_gradient != is_gradient:
        target.is_gradient = is_gradient
    return target


def set_masked(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``tensor[mask] = value`` with a mask of the same slice and a scalar value."""
    target, mask, value = args
    has_same_slice = (
        isinstance(mask, cls)
        and isinstance(target, cls)
        and mask._flat.is_same_on_all_ranks(target._flat)
    )
    if not has_same_slice or mask.dtype != torch.bool:
        raise refusal(cls, func, args)
    if isinstance(value, Tensor):
        value = scalar(cls, func, value, target._flat)
    check_inplace(func, target)
    target._local_tensor.masked_fill_(mask._local_tensor, value)


def slice_of_distributed(source: Tensor, flat: FlatPlacement) -> Tensor | None:
    """Returns this rank's slice of a DTensor without communication, or None if that is impossible.

    It is possible for a replicated DTensor, and for one with the placements of ``flat`` or of its
    ``spread``, which ``distribute_tensor`` returns.
    """
    if not isinstance(source, DTensor) or source.shape != flat.shape:
        return None
    if source.device_mesh != flat.device_mesh and not is_replicated(source):
        return None  # on another mesh, ranks have other ranges
    if flat.spread is not None:
        has_shard = flat.spread.has(source) or source._spec.placements == flat.placements
        return source._local_tensor.reshape(-1)[flat.start : flat.stop] if has_shard else None
    if is_replicated(source):
        return source._local_tensor.reshape(-1)[flat.start : flat.stop]
    last = source._spec.placements[-1]
    if not (isinstance(last, FlatShard) and last.span == (flat.start, flat.stop)):
        return None
    local = source._local_tensor.reshape(-1)
    # transformers and PEFT wrap a full tensor with the placements of a parameter whose placements
    # have no dim (``set_peft_model_state_dict``).
    is_full = local.numel() == source.numel() != flat.numel
    return local[flat.start : flat.stop] if is_full else local


def _full(source: Tensor) -> Tensor:
    if not isinstance(source, DTensor):
        return source
    # set_model_state_dict passes replicated DTensors: see state_dicts.py.
    return source.to_local() if is_replicated(source) else source.full_tensor()


def is_replicated(source: DTensor) -> bool:
    """Returns whether every rank of the mesh holds the full tensor."""
    # The spec of a 0-d FlatDTensor is replicated, but its placements are not (FlatPlacement.spec).
    return all(isinstance(placement, Replicate) for placement in source.placements)


def _remember(flat_of: dict[int, Any], tensor: Any) -> Tensor:
    local = unwrap(tensor)
    flat_of.setdefault(id(local), tensor)
    return local


def _check_columns(
    cls: Any,
    func: Function,
    tensors: Sequence[Any],
    found: list[FlatPlacement | None],
    expected: list[FlatPlacement | None],
) -> None:
    for tensor, mine, other in zip(tensors, found, expected, strict=True):
        if mine is not None and not mine.is_same_on_all_ranks(other):
            if other is None:
                why = "mixes a plain tensor and a FlatDTensor at one index"
                raise refusal(cls, func, (tensor,), why)
            raise slices_differ(func, other, mine)
