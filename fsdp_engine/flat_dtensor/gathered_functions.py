"""Runs functions that cannot be computed from slices on the gathered full tensor. Collective.

    p.norm(dim=1)   p @ x   torch.linalg.svdvals(p)       result: a plain tensor, equal on all ranks
    p[0]   p.T   p.view(-1)                               result: a plain tensor; any in-place
                                                          change of it also changes the parameter
    p[0] = 1   p.index_fill_(0, i, 1)                     the parameter gets its slice of the result

All ranks must make the same calls. Gradients are the mean over the ranks, as for ``full_tensor()``.
In an optimizer's step these functions raise, because all ranks would repeat the same computation on
full matrices.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.callers import user_stacklevel
from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement
from fsdp_engine.flat_dtensor.full_reductions import reduce_over
from fsdp_engine.flat_dtensor.random_values import one_generator
from fsdp_engine.flat_dtensor.slices import (
    DRAWS,
    Args,
    Function,
    Kwargs,
    check_change,
    check_inplace,
    is_inplace,
    mark_mixed,
    name_of,
    words,
)
from fsdp_engine.memory.allocator import as_bytes

REDUCTIONS = words(
    """
    sum nansum mean count_nonzero any all max min amax amin norm linalg_vector_norm linalg_norm
    """
)
NAMES = words(
    """
    __getitem__ T mT H mH t transpose swapaxes swapdims permute movedim moveaxis adjoint select
    narrow unbind chunk split tensor_split unfold diagonal squeeze unsqueeze view reshape
    flatten ravel unflatten expand real imag
    as_strided broadcast_to dsplit hsplit vsplit split_with_sizes view_as expand_as
    __matmul__ __rmatmul__ matmul mm mv bmm baddbmm addmm addmv dot vdot inner outer einsum
    tensordot kron linear std var std_mean var_mean median nanmedian mode argmax argmin aminmax
    topk sort argsort msort kthvalue quantile nanquantile prod cumsum cumprod cummax cummin
    logsumexp softmax log_softmax logcumsumexp renorm index_select take gather take_along_dim
    masked_select nonzero argwhere tril triu diag trace det logdet slogdet inverse pinverse
    matrix_power matrix_exp cholesky qr svd tolist __iter__ __reversed__ __contains__ histc
    bincount unique unique_consecutive flip roll rot90 repeat repeat_interleave tile cat concat
    concatenate stack hstack vstack dstack cov corrcoef cdist dist cosine_similarity normalize
    linalg_svdvals linalg_svd linalg_matrix_norm linalg_cond linalg_matrix_rank linalg_eigvals
    linalg_eigvalsh linalg_eig linalg_eigh linalg_qr linalg_det linalg_slogdet linalg_inv
    linalg_pinv linalg_cholesky linalg_multi_dot linalg_cross linalg_lstsq linalg_solve diff
    """
)

_ARRAYS = frozenset({"numpy", "__array__"})
_COLLECTIVES = "torch.distributed"

_warned: set[str] = set()


class GatheredCopy:
    """The gathered full values of a sharded tensor, over which there may be views.

    Args:
        target: The sharded tensor.
        full: The full values.
    """

    def __init__(self, target: Any, full: Tensor) -> None:
        self._target = target
        self.full = full.detach()
        self._version = target._local_tensor._version

    @property
    def flat(self) -> FlatPlacement:
        """The placement of the sharded tensor."""
        flat: FlatPlacement = self._target._flat
        return flat

    @property
    def may_be_stale(self) -> bool:
        """Whether the sharded tensor or another one in its buffer has changed after the gather."""
        return bool(self._version != self._target._local_tensor._version)

    def is_viewed_by(self, tensor: Tensor) -> bool:
        """Returns whether ``tensor`` shares the memory of the full values."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return False
        return bool(tensor.untyped_storage()._cdata == self.full.untyped_storage()._cdata)

    def check_change(self, name: str) -> None:
        """See :func:`~fsdp_engine.flat_dtensor.slices.check_change`."""
        check_change(name, self._target)

    def write_back(self, name: str, views: Sequence[Tensor], before: Tensor | None) -> None:
        """Copy changed views into the sharded tensor. Collective.

        Args:
            name: Name of the function that changed them.
            views: The changed views of the full values.
            before: The full values before the change, if the sharded tensor may have changed since
                the gather.

        Raises:
            RuntimeError: The sharded tensor requires grad and grad mode is enabled.
            ValueError: Ranks have written different values, or these elements of the sharded tensor
                have changed since the gather.
        """
        self.check_change(name)
        with torch.no_grad():
            fresh: Tensor = self._target.full_tensor()
            for view in views:
                place = _same_view(view, fresh)
                if before is not None and not _are_equal(_same_view(view, before), place):
                    what = self.flat.name or "a sharded tensor"
                    raise ValueError(
                        f"{name}: expected a view of {what} that was taken after its last change; "
                        f"found an older one, with values from before that change. {what} is "
                        "unchanged: take the view anew"
                    )
                place.copy_(view)
            self.store(name, fresh)
            if before is not None:
                self.full.copy_(fresh)

    def store(self, name: str, full: Tensor) -> None:
        """Copy this rank's slice of ``full`` into the sharded tensor. Collective.

        Args:
            name: Name of the function that changed the values, for errors.
            full: The full values.

        Raises:
            ValueError: ``full`` differs between ranks.
        """
        target, flat, words = self._target, self.flat, _words(full)
        extremes = [reduce_over(words.clone(), flat.groups, op) for op in ("max", "min")]
        if not torch.equal(*extremes):
            what = flat.name or "a sharded tensor"
            raise ValueError(
                f"{name}: expected the same values of {what} on every rank; found different ones. "
                f"{what} is unchanged: write equal values on all ranks (broadcast them first)"
            )
        target.local.copy_(flat.slice_of_full(full))
        self._version = target._local_tensor._version


def _same_view(view: Tensor, full: Tensor) -> Tensor:
    """Returns a view of ``full`` with the same elements that ``view`` has of another copy."""
    elements = full.view(-1).view(view.dtype)
    return elements.as_strided(view.size(), view.stride(), view.storage_offset())


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_words(one), _words(other))


def _words(full: Tensor) -> Tensor:
    """Returns the bytes of a full tensor as 64-bit words, padded with zeros."""
    flat = as_bytes(full)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)


class GatheredView(Tensor):
    """A view of a gathered tensor. Functions that change it also change the sharded tensor.

    This holds for all forms of change (in-place functions, ``out=``, lists, ``inplace=True``,
    ``torch.nn.init``). In other respects the view acts as a plain tensor. All ranks must make the
    same changes.
    """

    _copy: GatheredCopy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        views = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        copies = list({id(each._copy): each._copy for each in views}.values())
        if name == "__dlpack__" or str(getattr(func, "__module__", "")).startswith(_COLLECTIVES):
            what = copies[0].flat.name or "a sharded tensor"
            raise ValueError(
                f"{name}: expected a plain tensor; found a view of {what}, which was gathered: "
                f"{what} would not change. Pass a .clone(), pass the slice ({what}.to_local()), or "
                "work within engine.unsharded()"
            )
        if is_inplace(func) and args and isinstance(args[0], cls):
            args[0]._copy.check_change(name)
        before = {id(each): each.full.clone() for each in copies if each.may_be_stale}
        draws = getattr(func, "__module__", "") == "torch.nn.init" or name in DRAWS
        with torch._C.DisableTorchFunctionSubclass():
            versions = list(map(_version_of, views))
            mark_mixed(name, views, (args, kwargs))
        if any(each is not cls and "__torch_function__" in vars(each) for each in types):
            plain = tree_map_only(cls, lambda each: each._plain(), (args, kwargs))
            result = func(*plain[0], **plain[1])
        else:
            with torch._C.DisableTorchFunctionSubclass(), _drawing(draws, kwargs, copies[0]):
                result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            changed = [
                view
                for view, version in zip(views, versions, strict=True)
                if version != _version_of(view)
                or (version is None and (is_inplace(func) or kwargs.get("out") is not None))
            ]
            for copy in copies:
                own = [view for view in changed if view._copy is copy]
                if own:
                    copy.write_back(name, own, before.get(id(copy)))
        if name in _ARRAYS:
            result.flags.writeable = False
            return result
        return _as_views(result, copies)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def _version_of(tensor: Tensor) -> int | None:
    """Returns the version counter, or None for tensors without one (``torch.inference_mode``)."""
    return None if tensor.is_inference() else tensor._version


def _drawing(draws: bool, kwargs: Kwargs, copy: GatheredCopy) -> AbstractContextManager[None]:
    """Returns a context in which random draws, if ``draws``, are the same on all ranks."""
    if not draws:
        return nullcontext()
    return one_generator(kwargs.get("generator"), copy.full.device, copy.flat)


def run_gathered(cls: Any, func: Function, args: Args, kwargs: Kwargs, error: ValueError) -> Any:
    """Run ``func`` on full tensors if it is in ``NAMES`` or is an in-place function. Collective.

    Args:
        cls: The class of sharded tensors.
        func, args, kwargs: The call, which is not defined for slices.
        error: The error that the call has raised for slices.

    Raises:
        ValueError: ``func`` cannot run on full tensors; this is ``error``.
        RuntimeError: An optimizer's step makes the call.
    """
    name = name_of(func)
    changes = is_inplace(func) and bool(args) and isinstance(args[0], cls)
    if name not in REDUCTIONS:
        # numpy() must share memory, but numpy(force=True) may return a copy.
        is_known = name in NAMES or (name == "numpy" and kwargs.get("force", False))
        # Code calls p.expand_as(p) to find the node that accumulates the gradient of p. The graph
        # of a gathered copy does not contain it.
        is_of_itself = name.endswith("_as") and len(args) > 1 and args[0] is args[1]
        if not (is_known or changes) or is_of_itself or kwargs.get("out") is not None:
            raise error
        if (optimizer := _stepping()) is not None:
            if changes and any(_has_other_slice(args[0], each) for each in args[1:]):
                raise error  # the state was saved with other ranks or levels
            raise RuntimeError(
                f"{optimizer}: expected an optimizer that treats each element by itself, since "
                "parameters, gradients and state are sharded into flat slices; found one that "
                f"needs full tensors: its step calls {name}. Pass it to fe.shard_optimizer before "
                "its first step"
            ) from error
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} of a sharded tensor gathers the full tensor, and every rank must call it. "
            "This warning is shown once per function; full_tensor() gathers without a warning",
            stacklevel=user_stacklevel(),
        )
    sharded = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)}
    if changes:
        check_inplace(func, args[0])
    full = {key: each.full_tensor() for key, each in sharded.items()}
    mark_mixed(name, full.values(), (args, kwargs))
    copies = [GatheredCopy(sharded[key], each) for key, each in full.items()]
    version = _version_of(copies[0].full) if changes else None
    args, kwargs = tree_map_only(cls, lambda each: full[id(each)], (args, kwargs))
    result = func(*args, **kwargs)
    if changes:
        copy = copies[0]
        is_unchanged = version is not None and version == _version_of(copy.full)
        if is_unchanged or args[0].shape != copy.flat.shape:
            raise error
        # An in-place transposition of a square matrix changes the strides only.
        copy.store(name, args[0].detach().contiguous())
    for key, each in full.items():
        if result is each:  # such as a view with the same shape
            return sharded[key]
    if name == "numpy":
        result.flags.writeable = False
    return _as_views(result, copies)


def _has_other_slice(tensor: Any, other: Any) -> bool:
    """Returns whether ``other`` is a sharded tensor with the same shape and another slice."""
    return (
        isinstance(other, type(tensor))
        and other.shape == tensor.shape
        and not other._flat.is_same_on_all_ranks(tensor._flat)
    )


def _as_views(result: Any, copies: Sequence[GatheredCopy]) -> Any:
    """Returns ``result``, with views of the full tensors converted to :class:`GatheredView`."""
    if isinstance(result, torch.Size):  # which tree_map_only converts to a tuple
        return result

    def as_view(tensor: Tensor) -> Tensor:
        for copy in copies:
            if copy.is_viewed_by(tensor):
                view: Any = tensor.as_subclass(GatheredView)
                view._copy = copy
                return cast(Tensor, view)
        return tensor

    return tree_map_only(Tensor, as_view, result)


def _stepping() -> str | None:
    """Returns the class name of the optimizer whose step is on the call stack, or None.

    Only called before a gather or an error, so not in a step that succeeds.
    """
    frame = sys._getframe(1)
    while frame is not None:
        stepped = frame.f_locals.get("self") if "step" in frame.f_code.co_name else None
        if isinstance(stepped, torch.optim.Optimizer):
            return type(stepped).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None
