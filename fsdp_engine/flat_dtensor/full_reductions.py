"""Reductions over all dims: each rank reduces its slice, then the ranks reduce the scalars.

The functions are collective. The result is a plain tensor, equal on all ranks. An empty slice
contributes the neutral element. Sums are differentiable. Ranks may use a sum differently
(`output / model.head.weight.norm()`): its gradient is the mean over the ranks, as for any
parameter, and every slice gets this gradient.

Reductions over some dims, and those without a gradient for slices (``max``), raise the error for
unsupported functions. They then run on the gathered full tensor (``gathered_functions.py``).

``norm ** p`` is additive over slices: with slices of norms 3 and 4, the 2-norm is
(9 + 16) ** 0.5 = 5.

[Note: Norms with full_tensor]
The norm of a DTensor is a DTensor, which scripts convert by ``full_tensor()`` before they log it.
The norm of a FlatDTensor is already the norm of the full tensor, equal on all ranks;
``full_tensor()`` returns its value unchanged.

``torch.nn.utils.clip_grad_norm_`` computes one norm from many. For parameters of ``fully_shard`` it
returns a DTensor that is replicated over the mesh, as FSDP2 does. If some norms are of plain
tensors, or of tensors over other meshes, the result is a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_engine.accelerator import current_accelerator, module_of
from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.flat_dtensor.elementwise import elementwise
from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement
from fsdp_engine.flat_dtensor.norms import ROW, real_dtype, slice_norm
from fsdp_engine.flat_dtensor.slices import (
    Args,
    Function,
    Handler,
    Kwargs,
    once_differentiable,
    refusal,
    slices_differ,
    unwrap,
)

# The name of the collective in errors. If one rank does not call norm() etc., other ranks wait.
_EVERY_RANK = "a reduction of a sharded tensor (every rank must call it)"

# Functions of ``torch.nn.utils.get_total_norm``. Results of all other functions are plain tensors.
_KEEPS = (torch.stack, torch.linalg.vector_norm, Tensor.to)


class FullNorm(Tensor):
    """The norm of a full tensor; see the module docstring.

    Attributes:
        mesh: The mesh over which the norm of several tensors is a DTensor. None: that norm is a
            plain tensor.
    """

    mesh: DeviceMesh | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain_kwargs = {key: _plain(value) for key, value in (kwargs or {}).items()}
        result = func(*map(_plain, args), **plain_kwargs)
        if func not in _KEEPS or type(result) is not Tensor:
            return result
        mesh = _common_mesh(args)
        if func is torch.linalg.vector_norm and mesh is not None and not result.requires_grad:
            placements = [Replicate()] * mesh.ndim
            return DTensor.from_local(result, mesh, placements, run_check=False)
        norm = result.as_subclass(FullNorm)
        norm.mesh = mesh
        return norm

    def full_tensor(self) -> Tensor:
        """Returns the value, which is the norm of the full tensor, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _plain(value: Any) -> Any:
    if isinstance(value, FullNorm):
        return value.full_tensor()
    if isinstance(value, (list, tuple)) and any(isinstance(each, FullNorm) for each in value):
        return type(value)(map(_plain, value))
    return value


def _norms(args: Any) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from _norms(value)
        elif isinstance(value, Tensor):
            yield value


def _common_mesh(args: Any) -> DeviceMesh | None:
    """Returns the mesh of all norms, or None if meshes differ or a norm has none."""
    meshes = [norm.mesh if isinstance(norm, FullNorm) else None for norm in _norms(args)]
    first = meshes[0] if meshes else None
    return first if all(mesh == first for mesh in meshes) else None


def as_full_norm(norm: Tensor, flat: FlatPlacement) -> Tensor:
    """Returns ``norm`` as a :class:`FullNorm` with the same memory and graph.

    Args:
        norm: The norm of a full tensor, 0-d.
        flat: The placement of this tensor.
    """
    result = norm.as_subclass(FullNorm)
    if flat.norm_is_dtensor:
        result.mesh = flat.device_mesh
    return result


Groups = tuple[ProcessGroup, ...]

_NO_GRADIENT = "has no gradient here (use torch.no_grad())"
# The supported parameters of functions, in positional order.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "sum": ("input", "dim", "keepdim", "dtype"),
    "nansum": ("input", "dim", "keepdim", "dtype"),
    "mean": ("input", "dim", "keepdim", "dtype"),
    "count_nonzero": ("input", "dim"),
    "any": ("input", "dim", "keepdim"),
    "all": ("input", "dim", "keepdim"),
    "max": ("input", "dim", "keepdim"),
    "min": ("input", "dim", "keepdim"),
    "amax": ("input", "dim", "keepdim"),
    "amin": ("input", "dim", "keepdim"),
    "norm": ("input", "p", "dim", "keepdim", "dtype"),
    "linalg_vector_norm": ("input", "p", "dim", "keepdim", "dtype"),
    "linalg_norm": ("input", "p", "dim", "keepdim", "dtype"),
}


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, flat: FlatPlacement) -> Tensor:
        ctx.flat = flat
        return reduce_over(value.clone(), flat.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return mean_over_mesh(grad, ctx.flat), None


def reduce_over(
    tensor: Tensor, groups: Sequence[ProcessGroup], op: str = "sum", what: str = _EVERY_RANK
) -> Tensor:
    """Reduce a small tensor in place over each of ``groups`` in turn, and return it."""
    for group in groups:
        all_reduce_(tensor, group, op, what)
    return tensor


def mean_over_mesh(grad: Tensor, flat: FlatPlacement) -> Tensor:
    """Returns the mean of a gradient over all ranks of the mesh."""
    mesh = flat.mesh
    if mesh.size() == 1:
        return grad
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    device = mesh.device_type if grad.device.type != mesh.device_type else grad.device
    total = reduce_over(grad.to(device, copy=True), groups)
    return total.div_(mesh.size()).to(grad.device)


def _sum_over(value: Tensor, flat: FlatPlacement) -> Tensor:
    if value.requires_grad:
        total: Tensor = _SumOverRanks.apply(value, flat)  # type: ignore[no-untyped-call]
        return total
    return reduce_over(value, flat.groups)


def extreme_over(value: Tensor, groups: Groups, op: str, what: str = _EVERY_RANK) -> Tensor:
    """Returns the maximum or minimum over the ranks, or NaN if any value is NaN.

    Collectives alone may lose NaN.
    """
    if not groups:
        return value
    if not value.is_floating_point():
        return reduce_over(value.long(), groups, op, what).to(value.dtype)
    nan = value.isnan()
    sign = 1.0 if op == "max" else -1.0
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    # One collective reduces the values (first row) and whether any of them is NaN (second row).
    both = torch.stack((wide.masked_fill(nan, -sign * math.inf), nan * sign))
    reduced = reduce_over(both, groups, op, what)
    return reduced[0].masked_fill(reduced[1] != 0, math.nan).to(value.dtype)


def _bind(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Returns the arguments of a reduction by name.

    Raises:
        ValueError: The call is not a reduction over all dims of a FlatDTensor.
    """
    named = ((key, value) for key, value in kwargs.items() if value is not None)
    kwargs = {"p" if key == "ord" else key: value for key, value in named}
    bound = dict(zip(_PARAMETERS[func.__name__], args, strict=False)) | kwargs
    unknown = bound.keys() - set(_PARAMETERS[func.__name__]) or len(args) > len(bound)
    tensor = bound.get("input")
    if unknown or not isinstance(tensor, cls):
        raise refusal(cls, func, (args, kwargs))
    ndim, dim = len(tensor._flat.shape), bound.get("dim")
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    is_partial = dims and {each % max(ndim, 1) for each in dims} != set(range(ndim))
    if is_partial or bound.get("keepdim"):
        why = f"reduces over dim {dim} only" if is_partial else "keeps dims"
        raise refusal(cls, func, (args, kwargs), why)
    return bound


def _sum(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``sum``, ``nansum``, ``mean`` or ``count_nonzero``."""
    bound = _bind(cls, func, args, kwargs)
    flat, local, name = bound["input"]._flat, unwrap(bound["input"]), func.__name__
    if name == "count_nonzero":
        return _sum_over(local.count_nonzero(), flat)
    dtype = bound.get("dtype") or local.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        if name == "mean":
            return func(local, dtype=dtype)  # raises torch's error
        dtype = bound.get("dtype") or torch.int64
    # Sums of slices are in fp32, because bf16 would round them before they are reduced.
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    add = torch.nansum if name == "nansum" else torch.sum
    total = _sum_over(add(local, dtype=wide), flat)
    return (total / math.prod(flat.shape) if name == "mean" else total).to(dtype)


def _extreme(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``max``, ``min``, ``amax``, ``amin``, ``any`` or ``all``; elementwise for two tensors."""
    if func.__name__ in {"max", "min"} and any(
        isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())
    ):
        return elementwise(cls, func, args, kwargs)
    bound = _bind(cls, func, args, kwargs)
    tensor = bound["input"]
    if func.__name__ in {"max", "min"} and bound.get("dim") is not None:
        raise refusal(cls, func, args, "returns values and indices of a dim")
    flat, local = tensor._flat, tensor._local_tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise refusal(cls, func, args, _NO_GRADIENT)
    op = "min" if func.__name__ in {"min", "amin", "all"} else "max"
    if func.__name__ in {"any", "all"}:
        local = local.bool()
    elif not math.prod(flat.shape):
        return func(local)  # raises torch's error
    value = func(local) if local.numel() else _neutral(local, op)
    return extreme_over(value, flat.groups, op)


def _neutral(local: Tensor, op: str) -> Tensor:
    if local.dtype == torch.bool:
        value: float = op == "min"
    elif local.dtype.is_floating_point:
        value = math.inf if op == "min" else -math.inf
    else:
        info = torch.iinfo(local.dtype)
        value = info.max if op == "min" else info.min
    return torch.scalar_tensor(value, dtype=local.dtype, device=local.device)


def _norm(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``norm``, ``linalg.vector_norm``, or ``linalg.norm`` if it is a vector norm."""
    bound = _bind(cls, func, args, kwargs)
    flat, p = bound["input"]._flat, bound.get("p")
    if func.__name__ == "linalg_norm" and len(flat.shape) > 1 and p not in (None, "fro"):
        raise refusal(cls, func, args, f"ord={p} is a norm of matrices")
    order = _order(cls, func, args, p)
    local = unwrap(bound["input"])
    if local.requires_grad and not math.isfinite(order):
        raise refusal(cls, func, args, _NO_GRADIENT)
    dtype = bound.get("dtype") or local.dtype
    if not math.prod(flat.shape):
        return torch.linalg.vector_norm(local, order, dtype=dtype)  # torch may raise an error
    norm = _slice_norm(local, order, dtype)
    return as_full_norm(_norm_over(norm, order, flat).to(real_dtype(dtype)), flat)


def _foreach_norm(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``_foreach_norm`` or ``_foreach_max``, with one all-reduce for tensors of one mesh."""
    tensors = list(args[0])
    takes_norms = func.__name__ == "_foreach_norm"
    order = math.inf
    if takes_norms:
        p = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        order = _order(cls, func, args, p)
    results: list[Any] = [None] * len(tensors)
    by_groups: dict[Groups | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = tensor._flat.groups if isinstance(tensor, cls) else None
        by_groups.setdefault(key, []).append(index)
    for key, indices in by_groups.items():
        flat = tensors[indices[0]]._flat if key is not None else None
        chosen = [unwrap(t) if isinstance(t, cls) else t for t in (tensors[i] for i in indices)]
        if takes_norms:
            values = torch.stack(_slice_norms(chosen, order))
            reduced = _norm_over(values, order, flat)
        else:
            values = torch.stack([t.max() if t.numel() else _neutral(t, "max") for t in chosen])
            reduced = extreme_over(values, key or (), "max")
        for index, local, value in zip(indices, chosen, reduced.unbind(), strict=True):
            value = value.to(real_dtype(kwargs.get("dtype") or local.dtype))
            is_norm = takes_norms and key is not None
            results[index] = as_full_norm(value, tensors[index]._flat) if is_norm else value
    return results


def _order(cls: Any, func: Function, args: Args, p: Any) -> float:
    if p is None or p == "fro":
        return 2.0
    if not isinstance(p, int | float) or (p < 0 and p != -math.inf):
        raise refusal(cls, func, args, f"the norm of order {p!r} is not additive over slices")
    return float(p)


def slice_norms(slices: Sequence[Tensor], order: float) -> list[Tensor]:
    """Returns the p-norm of each slice as a 0-d fp64 tensor, like :func:`slice_norm`.

    Args:
        slices: 1-D tensors, none of them empty.
        order: The order p.
    """
    # A single call computes the norms of all slices for which it is as accurate as slice_norm:
    # small slices, and slices on devices that sum in trees.
    batched = [
        place
        for place, each in enumerate(slices)
        if (each.numel() < ROW or each.device.type != "cpu")
        and real_dtype(each.dtype).itemsize >= 4
        and not each.requires_grad
        and math.isfinite(order)
    ]
    found = torch._foreach_norm([slices[place] for place in batched], order) if batched else ()
    norms = dict(zip(batched, found, strict=True))
    return [
        norms[place].double() if place in norms else slice_norm(each, order)
        for place, each in enumerate(slices)
    ]


def _slice_norms(locals_: list[Tensor], order: float) -> list[Tensor]:
    held = [local for local in locals_ if local.numel()]
    norms = iter(slice_norms(held, order))
    return [next(norms) if local.numel() else _norm_of_nothing(local, order) for local in locals_]


def _slice_norm(local: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    if not local.numel():
        return _norm_of_nothing(local, order)
    return slice_norm(local, order, torch.promote_types(real_dtype(dtype), torch.float32))


def _norm_of_nothing(local: Tensor, order: float) -> Tensor:
    # An empty slice is summed, so that the result has a graph on this rank, too.
    return local.sum().abs().double() + (math.inf if order == -math.inf else 0.0)


def _norm_over(norms: Tensor, order: float, flat: FlatPlacement | None) -> Tensor:
    """Compute norms over all ranks from norms of slices.

    Args:
        norms: The norms of slices, in fp64, so that squares do not overflow.
        order: The order p.
        flat: The placement of one of the slices. None: these are norms of full, plain tensors.
    """
    if flat is None or not (flat.groups or norms.requires_grad):
        return norms
    if not math.isfinite(order):
        return extreme_over(norms, flat.groups, "max" if order > 0 else "min")
    if order == 0:
        return _sum_over(norms, flat)
    total = _sum_over(norms**order, flat)
    # The root is not differentiable at 0, where torch's norms have gradient 0.
    zero = total == 0
    root = total.masked_fill(zero, 1.0) ** (1.0 / order)
    return root.masked_fill(zero, 0.0)


def equal(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Run ``equal`` or ``allclose`` on two FlatDTensors of one slice. All ranks get one result."""
    a, b, *_ = args
    if not (isinstance(a, cls) and isinstance(b, cls)):
        raise refusal(cls, func, args, "compares a FlatDTensor and a plain tensor")
    if not a._flat.is_same_on_all_ranks(b._flat):
        raise slices_differ(func, a._flat, b._flat)
    is_equal = func(a._local_tensor, b._local_tensor, *args[2:], **kwargs)
    value = torch.scalar_tensor(int(is_equal), dtype=torch.int64, device=a._local_tensor.device)
    return bool(reduce_over(value, a._flat.groups, "min").item())


def unscale(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> None:
    """Run ``_amp_foreach_non_finite_check_and_unscale_``, and reduce ``found_inf`` over ranks."""
    grads, found_inf, inverse_scale = args
    device = current_accelerator() if inverse_scale.device.type == "cpu" else None
    if device is not None:
        # For gradients on the host, GradScaler copies its scale to the host without waiting.
        module_of(device).current_stream(device).synchronize()
    func([t._local_tensor if isinstance(t, cls) else t for t in grads], found_inf, inverse_scale)
    for groups in {t._flat.groups: None for t in grads if isinstance(t, cls)}:
        reduce_over(found_inf, groups, "max")


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("sum", "nansum", "mean", "count_nonzero"), _sum),
    **dict.fromkeys(("max", "min", "amax", "amin", "any", "all"), _extreme),
    **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm"), _norm),
    **dict.fromkeys(("_foreach_norm", "_foreach_max"), _foreach_norm),
    **dict.fromkeys(("equal", "allclose"), equal),
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
}
