"""Functions that cannot be computed from slices: gather the full tensor and run on it. Collective.

    p.norm(dim=1)   p @ x   torch.linalg.svdvals(p)       a plain tensor, equal on all ranks
    p[0]   p.T   p.view(-1)                               the same; in-place changes of it raise,
                                                          since they do not change the parameter

All ranks must make the same calls. Gradients are those of ``full_tensor()``: the mean over the
ranks. In an optimizer's step these functions raise, since all ranks would repeat the same
computation on full matrices.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.flat_dtensor.slices import Args, Function, Kwargs, is_inplace, name_of, words

_VIEWS = words(
    """
    __getitem__ T mT H mH t transpose swapaxes swapdims permute movedim moveaxis adjoint select
    narrow unbind chunk split tensor_split unfold diagonal squeeze unsqueeze view reshape
    flatten ravel unflatten expand real imag detach data __get__
    """
)
REDUCTIONS = words(
    """
    sum nansum mean count_nonzero any all max min amax amin norm linalg_vector_norm linalg_norm
    """
)
NAMES = _VIEWS - {"detach", "data", "__get__"} | words(
    """
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

_warned: set[str] = set()


class GatheredView(Tensor):
    """A view of a gathered tensor: a plain tensor, except that in-place changes raise, since they
    would modify the gathered copy only."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        changes = is_inplace(func) or name == "__setitem__"
        if isinstance(args[0] if changes and args else kwargs.get("out"), cls):
            raise ValueError(
                f"{name}: expected a plain tensor; found a view of a sharded tensor, which was "
                "gathered: the parameter would not change. Modify a .clone(), work within "
                "engine.unsharded(), or assign full values (param.copy_(values))"
            )
        if any(other is not cls and "__torch_function__" in vars(other) for other in types):
            plain = tree_map_only(cls, lambda each: each._plain(), (args, kwargs))
            return func(*plain[0], **plain[1])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _as_views(result) if name in _VIEWS else result

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def run_gathered(cls: Any, func: Function, args: Args, kwargs: Kwargs, error: ValueError) -> Any:
    """Run ``func`` on full tensors if it is listed above. Collective.

    Args:
        cls: the class of sharded tensors.
        func, args, kwargs: the call, which is not defined for slices.
        error: the error that the call raised for slices.

    Raises:
        ValueError: ``error``, if ``func`` is not listed, or is in-place.
        RuntimeError: an optimizer's step makes the call.
    """
    name = name_of(func)
    if name not in REDUCTIONS:
        # numpy() shares memory, numpy(force=True) may copy.
        is_known = name in NAMES or (name == "numpy" and kwargs.get("force", False))
        if not is_known or kwargs.get("out") is not None:
            raise error
        if (optimizer := _stepping()) is not None:
            raise RuntimeError(
                f"{optimizer}: expected an optimizer that treats each element by itself, since "
                "parameters, gradients and state are sharded into flat slices; found one that "
                f"needs whole tensors: its step calls {name}. Pass it to fe.shard_optimizer before "
                "its first step"
            ) from error
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} of a sharded tensor gathers the full tensor, and every rank must call it. "
            "This warning is shown once per function; full_tensor() gathers without a warning",
            stacklevel=4,
        )
    sharded = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)}
    full = {key: each.full_tensor() for key, each in sharded.items()}
    args, kwargs = tree_map_only(cls, lambda each: full[id(each)], (args, kwargs))
    result = func(*args, **kwargs)
    for key, each in full.items():
        if result is each:  # for example a view to the same shape
            return sharded[key]
    return _as_views(result) if name in _VIEWS else result


def _as_views(result: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.as_subclass(GatheredView), result)


def _stepping() -> str | None:
    """The class name of the optimizer whose step is on the call stack; None if there is none. Only
    called if a full tensor is about to be gathered or refused, so not in a step that succeeds."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if "step" in frame.f_code.co_name else None
        if isinstance(owner, torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None
