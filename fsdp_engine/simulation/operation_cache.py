"""Cache of the results' metadata of operations on fake tensors.

[Note: Operation cache]
A model of eighty blocks runs the same few hundred operations eighty times, in forward and backward,
in each of two steps, and ``plan`` does so for every strategy. The metadata of an operation's
results depend only on the metadata of its arguments: dtype, shape, strides, offset, device. torch
computes them by shape functions in Python, which took three quarters of a simulation's time. This
cache runs each operation once per metadata, and stores a recipe for its results. For a later call
with the same metadata, the recipe returns for each result

    an argument      x.add_(y)    the same tensor
    a view of one    x.t()        a tensor over its storage
    a new tensor     x + y        with a new storage

Only the shape functions are skipped. The model, autograd, hooks and the engine run as without the
cache, operations advance the clock, and the memory tracker records storages. The cache is therefore
independent of blocks, units, checkpointing and side effects, and results are identical
(``tests/simulation/test_operation_cache.py``).

There is no recipe, and torch runs the operation every time, for: operations outside of aten
(collectives); operations that change an argument's shape or storage, or return other values than
tensors; arguments that are not fake, or fake tensors with a constant value
(``torch.tensor(1.0)``); complex and sparse tensors; results whose storage differs from that of
``empty_strided``; and results for which one call does not determine which argument they are
(``torch.add(x, y, out=x)``). Operations whose result's shape depends on values raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

# Types of values that are part of the key. Their type is as well, since 1, 1.0 and True are equal.
_PLAIN = {type(None), bool, int, float, str}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_SEQUENCES = {tuple, list, torch.Size}

# Operations that change an argument's shape or storage, or create a tensor with a constant value.
# (Operations such as ``transpose_`` have a tag and are not listed.)
_UNCACHED = {"set_", "resize_", "resize_as_", "_resize_output_", "lift", "lift_fresh"}

# The engine sets the storages of tensors by this operation; the fake mode is not involved.
_SET = torch.ops.aten.set_.source_Storage_storage_offset

# Instead of an argument's number: several arguments or results share the storage.
_AMBIGUOUS = -1

_DEVICE_NAMES = ("fake_device", "_fake_device")  # of a fake tensor, in torch 2.11 and since


@dataclass(frozen=True)
class _View:
    """Metadata of a view of a storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Result:
    """The recipe of one tensor.

    Attributes:
        argument: number of the argument that it is, or is a view of. None: it is new.
        view: its metadata. None: it is the argument itself.
        device: its fake device.
        attributes: of the fake tensor, except for its mode.
    """

    argument: int | None
    view: _View | None
    device: torch.device
    attributes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Recipe:
    """The recipe of an operation's results, shared by all calls with the same metadata.

    Attributes:
        results: recipes in order; None for a result that is None.
        container: type of the results' container. None: a single result.
    """

    results: tuple[_Result | None, ...]
    container: Callable[[Any], Any] | None


class OperationCache:
    """Recipes by operation and metadata; may be shared by several simulations.

    Attributes:
        num_hits: calls whose results were created from a recipe.
        num_misses: calls that torch ran.
    """

    def __init__(self) -> None:
        self._recipes: dict[Any, Recipe] = {}
        self.num_hits = self.num_misses = 0

    def run(
        self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Recipe | None]:
        """Call ``func(*args, **kwargs)`` below all dispatch modes but ``mode``.

        Returns:
            The result, and the recipe; None if there is no recipe. Calls with the same recipe are
            the same operation on the same metadata.
        """
        if func is _SET and _is_supported(args[0], mode):
            with in_kernel_invocation_manager(mode):
                func(*args, **kwargs)
            return args[0], None
        tensors: list[FakeTensor] = []
        key = _key(mode, func, args, kwargs, tensors)
        recipe = self._recipes.get(key)
        if recipe is not None:
            self.num_hits += 1
            return _results_of(recipe, mode, tensors), recipe
        self.num_misses += 1
        out = func(*args, **kwargs)
        if key is not None and _is_cacheable(func):
            recipe = _recipe_of(out, mode, tensors)
            if recipe is not None:
                self._recipes[key] = recipe
        return out, recipe


def _is_cacheable(func: Any) -> bool:
    return (
        func.namespace == "aten"
        and torch.Tag.inplace_view not in func.tags
        and func._overloadpacket.__name__ not in _UNCACHED
    )


def _key(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
    given = _metadata(args, mode, tensors)
    if given is None:
        return None
    settings = (torch.get_default_dtype(), torch.is_inference_mode_enabled())
    if not kwargs:
        return func, settings, given
    named = _metadata(kwargs.values(), mode, tensors)
    return None if named is None else (func, settings, given, named, *kwargs)


def _metadata(
    values: Any, mode: FakeTensorMode, tensors: list[FakeTensor]
) -> tuple[Any, ...] | None:
    """The metadata of arguments, as a part of the key; None if they contain unsupported values.
    Appends their tensors to ``tensors``."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_supported(value, mode):
                return None
            place = (value.shape, value.stride(), value.storage_offset())
            found += (value.dtype, *place, value.fake_device)
            tensors.append(value)
        elif kind in _PLAIN:
            found += (kind, value)
        elif kind in _SEQUENCES:
            inner = _metadata(value, mode, tensors)
            if inner is None:
                return None
            found.append(inner)
        else:
            return None
    return tuple(found)


def _is_supported(tensor: Any, mode: FakeTensorMode) -> bool:
    return (
        type(tensor) is FakeTensor
        and tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
    )


def _recipe_of(out: Any, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> Recipe | None:
    container = type(out) if type(out) in (tuple, list) else None
    results: list[_Result | None] = []
    storages: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        shared = _storage_of(tensor) in storages
        storages[_storage_of(tensor)] = _AMBIGUOUS if shared else number
    for each in (out,) if container is None else out:
        result = None
        if each is not None:
            result = _result_of(each, mode, tensors, storages)
            if result is None:
                return None
            # Another result over the same new storage is not supported.
            storages.setdefault(_storage_of(each), _AMBIGUOUS)
        results.append(result)
    return Recipe(tuple(results), container)


def _result_of(
    tensor: Any, mode: FakeTensorMode, tensors: Sequence[FakeTensor], storages: dict[int, int]
) -> _Result | None:
    if not _is_supported(tensor, mode):
        return None
    device = tensor.fake_device
    same = [number for number, argument in enumerate(tensors) if argument is tensor]
    if same:
        return _Result(same[0], None, device, {}) if len(same) == 1 else None
    attributes = {name: value for name, value in vars(tensor).items() if name != "fake_mode"}
    if any(attributes[name] is not None for name in attributes if name not in _DEVICE_NAMES):
        return None
    offset = int(tensor.storage_offset())
    view = _View(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)
    base = storages.get(_storage_of(tensor))
    if base is None:
        fits = tensor.untyped_storage().nbytes() == _least_bytes(view)
    else:
        fits = base != _AMBIGUOUS and tensors[base].dtype == view.dtype
    if tensor.requires_grad or not fits:
        return None
    return _Result(base, view, device, attributes)


def _storage_of(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _least_bytes(view: _View) -> int:
    """Bytes of the storage that ``empty_strided`` creates for the view; -1 if the view has an
    offset."""
    if view.offset:
        return -1
    if 0 in view.shape:
        return 0
    steps = zip(view.shape, view.stride, strict=True)
    return view.dtype.itemsize * (1 + sum((size - 1) * step for size, step in steps))


def _results_of(recipe: Recipe, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> Any:
    made = [None if each is None else _tensor_of(each, mode, tensors) for each in recipe.results]
    return made[0] if recipe.container is None else recipe.container(made)


def _tensor_of(result: _Result, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> FakeTensor:
    view = result.view
    if view is None:
        assert result.argument is not None
        return tensors[result.argument]
    if result.argument is None:
        with torch._C._DisableTorchDispatch():
            inner = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="meta")
    else:
        with in_kernel_invocation_manager(mode):
            base = tensors[result.argument]
            inner = torch.as_strided(base, view.shape, view.stride, view.offset)
    # Like FakeTensor.__new__, without its checks.
    fake: FakeTensor = Tensor._make_subclass(
        FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=result.device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(result.attributes, fake_mode=mode)
    return fake
