"""What operations return, worked out once for each shape.

[Note: Known operations]
A model of eighty blocks runs the same few hundred operations eighty times, forward and backward, in
each of two steps, and a planning does so for every strategy. What an operation on fake tensors
returns follows from its arguments' metadata: dtype, shape, strides, offset, device. To find it
torch runs shape functions in Python, which took three quarters of a simulation's time. Here each
operation is worked out once, and how its results come about is kept as a recipe. Who comes with the
same arguments again gets results by the recipe, each of them

    an argument      x.add_(y)    the very tensor
    a view of one    x.t()        a tensor over its storage
    a new tensor     x + y        over a storage of its own

That is all that is left out. The model, autograd, hooks and the engine run as ever; operations take
their time on the clock, storages come and go before the memory watch. So nothing has to be known of
blocks, units, checkpointing or side effects, and what is found is the same to the last bit
(``tests/simulation/test_known_operations.py``).

There is a recipe only where it says all. Every time anew torch works out: operations that are not
its own (messages), those that change an argument's shape or storage, or return something else than
tensors; arguments that are not fake, or fakes that know their value (``torch.tensor(1.0)``);
complex and sparse tensors; results that do not lie in their storage as those of ``empty_strided``
do, or of which one call does not show which argument they are (``torch.add(x, y, out=x)``).
Operations whose result's shape hangs on values raise, and leave no recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

# Values that are their own metadata. 1, 1.0 and True are equal, so types belong to the key.
_PLAIN = {type(None), bool, int, float, str}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_SEQUENCES = {tuple, list, torch.Size}

# They change an argument's shape or storage, or make a tensor that knows its value. (Operations
# with a tag for the former, ``transpose_``, do not have to be named.)
_UNFIT = {"set_", "resize_", "resize_as_", "_resize_output_", "lift", "lift_fresh"}

# The engine's way to tensors over storages of its own. That a fake tensor lies elsewhere now, its
# mode need not know.
_SET = torch.ops.aten.set_.source_Storage_storage_offset

# In place of an argument's number: which of some is meant, this call does not show.
_UNCLEAR = -1

_DEVICE_NAMES = ("fake_device", "_fake_device")  # of a fake tensor, in torch 2.11 and since


@dataclass(frozen=True)
class _View:
    """Elements of a storage; of dtype, too."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Result:
    """How one tensor comes about.

    Attributes:
        argument: which of the arguments' tensors it is, or is a view of; None: it is new.
        view: where its elements lie; None: it is that argument.
        device: that it seems to be on.
        attributes: of the fake tensor, but for its mode.
    """

    argument: int | None
    view: _View | None
    device: torch.device
    attributes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Recipe:
    """How an operation's results come about. One stands for all calls that have it.

    Attributes:
        results: in order; None where it returned None.
        container: of the results; None: there is one, and no container.
    """

    results: tuple[_Result | None, ...]
    container: Callable[[Any], Any] | None


class KnownOperations:
    """Recipes by operation and metadata, also for several simulations one after the other.

    Attributes:
        num_known: calls whose results were made by a recipe.
        num_worked_out: those that torch worked out.
    """

    def __init__(self) -> None:
        self._recipes: dict[Any, Recipe] = {}
        self.num_known = self.num_worked_out = 0

    def run(
        self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Recipe | None]:
        """Call ``func(*args, **kwargs)`` below all dispatch modes but ``mode``.

        Returns:
            What it returns, and the recipe. Calls with the same recipe do the same on the same
            metadata; None: nothing is known of it.
        """
        if func is _SET and _is_ours(args[0], mode):
            with in_kernel_invocation_manager(mode):
                func(*args, **kwargs)
            return args[0], None
        tensors: list[FakeTensor] = []
        key = _key(mode, func, args, kwargs, tensors)
        recipe = self._recipes.get(key)
        if recipe is not None:
            self.num_known += 1
            return _made_by(recipe, mode, tensors), recipe
        self.num_worked_out += 1
        out = func(*args, **kwargs)
        if key is not None and _is_fit(func):
            recipe = _recipe_of(out, mode, tensors)
            if recipe is not None:
                self._recipes[key] = recipe
        return out, recipe


def _is_fit(func: Any) -> bool:
    return (
        func.namespace == "aten"
        and torch.Tag.inplace_view not in func.tags
        and func._overloadpacket.__name__ not in _UNFIT
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
    """Of arguments, to be compared; None: they hold something that has more to it. Their tensors
    are added to ``tensors``."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_ours(value, mode):
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


def _is_ours(tensor: Any, mode: FakeTensorMode) -> bool:
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
        storages[_storage_of(tensor)] = _UNCLEAR if shared else number
    for each in (out,) if container is None else out:
        result = None
        if each is not None:
            result = _result_of(each, mode, tensors, storages)
            if result is None:
                return None
            # Another result over the same new storage would not get its own.
            storages.setdefault(_storage_of(each), _UNCLEAR)
        results.append(result)
    return Recipe(tuple(results), container)


def _result_of(
    tensor: Any, mode: FakeTensorMode, tensors: Sequence[FakeTensor], storages: dict[int, int]
) -> _Result | None:
    if not _is_ours(tensor, mode):
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
        fits = base != _UNCLEAR and tensors[base].dtype == view.dtype
    if tensor.requires_grad or not fits:
        return None
    return _Result(base, view, device, attributes)


def _storage_of(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _least_bytes(view: _View) -> int:
    """Of the storage that ``empty_strided`` makes; -1: it makes none such."""
    if view.offset:
        return -1
    if 0 in view.shape:
        return 0
    steps = zip(view.shape, view.stride, strict=True)
    return view.dtype.itemsize * (1 + sum((size - 1) * step for size, step in steps))


def _made_by(recipe: Recipe, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> Any:
    made = [None if each is None else _tensor_by(each, mode, tensors) for each in recipe.results]
    return made[0] if recipe.container is None else recipe.container(made)


def _tensor_by(result: _Result, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> FakeTensor:
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
    # As FakeTensor.__new__ does, but for its checks.
    fake: FakeTensor = Tensor._make_subclass(
        FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=result.device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(result.attributes, fake_mode=mode)
    return fake
