"""Slices of main weights that are passed to users as plain tensors (``FlatDTensor.to_local()``).

Functions of torch that write to a tensor increment its version counter, by which the engine detects
that it has to gather the weights again. Collectives, and writes through NumPy, DLPack and pointers,
do not increment it. When a slice is passed to one of these, it marks the weights as changed, and
the next forward gathers them. All ranks must make the same calls, as for all writes: ranks that
gathered different weights would wait for each other. A read by a function of torch marks nothing,
so it may be made on one rank only. ``storage()`` raises: slices of several parameters share a
storage, from which ``save_pretrained`` of transformers would conclude that they are tied.

The engine does not detect writes through an array or pointer that was made before the last forward;
call ``engine.weights_changed()`` on all ranks after them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_engine.flat_dtensor.slices import Args, Function, Kwargs, name_of, storage_refusal

_POINTERS = frozenset({"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"})
# Before 2.13, some of torch's collectives (broadcast) do not dispatch on the class of tensors.
COLLECTIVES_DISPATCH = TorchVersion(torch.__version__) >= "2.13"
# For each slice of main weights, a weak reference to the method that marks them as changed.
_MARKS: Any = WeakTensorKeyDictionary()
_writes_unseen: dict[Function, bool] = {}


def watch_slice(local: Tensor, mark: Callable[[], None]) -> None:
    """Call the method ``mark`` when ``local`` may be changed without a change of its version."""
    _MARKS[local] = weakref.WeakMethod(mark)


def given_out(local: Tensor, given: Tensor) -> Tensor:
    """Returns ``given``, an alias of ``local``, as the tensor to pass to the user.

    For a slice of main weights, this is a :class:`GivenSlice`.
    """
    mark = _MARKS.get(local)
    if mark is None or type(given) is not Tensor:
        return given
    if not COLLECTIVES_DISPATCH:
        _run(mark)
    return _as_given(given, mark)


class GivenSlice(Tensor):
    """Acts as a plain tensor, and marks main weights as changed: see the module docstring."""

    _mark: Any

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.storage:
            raise storage_refusal("storage", "this rank's slice of a sharded parameter")
        unseen = _writes_unseen.get(func)
        if unseen is None:
            is_collective = str(getattr(func, "__module__", "")).startswith("torch.distributed")
            unseen = _writes_unseen[func] = is_collective or name_of(func) in _POINTERS
        others = any(each is not cls and "__torch_function__" in vars(each) for each in types)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if not others:
                    result = func(*args, **kwargs)
                    is_tensor = isinstance(result, Tensor)
                    if type(result) is Tensor or (
                        not is_tensor and isinstance(result, list | tuple)
                    ):
                        return _aliases(cls, func, result, args)
                    return result
            plain = tree_map_only(cls, lambda each: each.plain(), (args, kwargs))
            return func(*plain[0], **plain[1])
        finally:
            if unseen:
                for each in tree_leaves((args, kwargs)):
                    if isinstance(each, cls):
                        _run(each._mark)

    def plain(self) -> Tensor:
        """Returns a plain tensor over the same memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().clone()


def _aliases(cls: Any, func: Function, result: Any, args: Args) -> Any:
    """Returns ``result``, with views of a slice converted to ``cls``."""
    first = args[0] if args else None
    if not isinstance(first, cls):
        return result
    is_alias = name_of(func) in {"detach", "data"}

    def alias(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and (is_alias or tensor._is_view()):
            return _as_given(tensor, first._mark)
        return tensor

    return alias(result) if type(result) is Tensor else tree_map_only(Tensor, alias, result)


def _as_given(tensor: Tensor, mark: Any) -> Tensor:
    given: Any = tensor.as_subclass(GivenSlice)
    given._mark = mark
    result: Tensor = given
    return result


def _run(mark: Any) -> None:
    method = mark()
    if method is not None:
        method()
