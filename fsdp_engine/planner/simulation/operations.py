"""Costs of operations: flops and bytes of computation; bytes, ranks and links of collectives.

The flops of matrix products and attention are computed by ``torch.utils.flop_counter``. It counts
causal attention in full; the time of causal attention is that of the blocks that kernels do not
skip. Other operations have no flops and take the time of the bytes that they read and write;
functions (gelu, softmax, norms) also take time per element.
Collectives take the time of a ring: for an all-gather or a reduce-scatter of N bytes over n ranks
each rank sends (n - 1) / n of N in n - 1 hops, and twice that for an all-reduce.

[Note: Model flops]
Model flops utilization is the time that the model's flops take at the machine's peak, divided by
the step time (Chowdhery et al., "PaLM", 2022, appendix B). Model flops are the flops of products
and of attention in forward and backward, without recomputation: operations that run under grad mode
in backward recompute activations, and attention's backward computes the scores again. Frozen
weights have no gradient to count. Causal attention counts in full, as in that definition.

[Note: Operation cache]
A model of eighty blocks runs the same few hundred operations eighty times, in forward and backward,
in each of two steps, and ``plan`` repeats this for every strategy. The metadata of an operation's
results depend only on the metadata of its arguments: dtype, shape, strides, offset, device. torch
computes them by shape functions in Python, which took three quarters of a simulation's time. This
cache runs each operation once per metadata, and stores a recipe for its results. For a later call
with the same metadata, the recipe returns for each result

    an argument      x.add_(y)    the same tensor
    a view of one    x.t()        a tensor over its storage
    a new tensor     x + y        with a new storage

Only the shape functions are skipped. As without the cache, the model, autograd, hooks and the
engine run, operations advance the clock, and the memory tracker records storages. The cache is
therefore independent of blocks, units, checkpointing and side effects, and results are identical
(``tests/planner/simulation/test_operation_cache.py``).

Some operations have no recipe, and torch runs them every time. They are outside of aten
(collectives); change an argument's shape or storage; return values other than tensors and whole
numbers; take tensors that are not fake, have a constant value (``torch.tensor(1.0)``), or are
complex or sparse; return a storage unlike that of ``empty_strided``; or return a tensor that equals
several arguments, so that one call does not determine which (``torch.add(x, y, out=x)``).
Operations whose result's shape depends on values raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_engine.kernel_interface import allocator, lanes, not_compiled
from fsdp_engine.planner.simulation import chunked_products
from fsdp_engine.planner.simulation.chunked_products import ChunkedProduct
from fsdp_engine.planner.simulation.clock import CONTEXT_LANE, MODEL_LANE, Clock, SimulatedTicket
from fsdp_engine.planner.simulation.copies import Direction
from fsdp_engine.planner.simulation.flex_attention import BACKWARD, FORWARD, FlexKernel
from fsdp_engine.planner.simulation.fusion import Kernel, name_of, value_of
from fsdp_engine.planner.simulation.machine import Attention, Link, Machine
from fsdp_engine.planner.simulation.memory_access import (
    accessed_bytes,
    irregular_elements,
    num_bytes_of,
    scratch_bytes,
    tensors_of,
)
from fsdp_engine.planner.simulation.memory_tracker import TRANSIENT, MemoryTracker, as_returned

# Types of values that are part of the key. Their type is part of it, too: 1, 1.0 and True are
# equal.
_PLAIN = {type(None), bool, int, float, str}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_SEQUENCES = {tuple, list, torch.Size}

# Operations that change an argument's shape or storage, or create a tensor with a constant value.
# (Operations such as ``transpose_`` have a tag and are not listed.)
_UNCACHED = {"set_", "resize_", "resize_as_", "_resize_output_", "lift", "lift_fresh"}

# The engine sets the storages of tensors by this operation; the fake mode is not involved.
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default

# For each chunk the host issues a product, a copy, and waits and barriers of two streams.
_CALLS_OF_A_CHUNK = 4

# Replaces the index of an argument if several arguments or results share the storage.
_AMBIGUOUS = -1

_DEVICE_NAMES = ("fake_device", "_fake_device")  # in torch 2.11, and later


@dataclass(frozen=True)
class _View:
    """Metadata of a tensor over a storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Result:
    """The recipe of one tensor.

    Attributes:
        argument: Index of the argument that the result is, or is a view of. None: it is new.
        view: Metadata of the result. None: the result is the argument itself.
        device: Fake device of the result.
        attributes: Attributes of the fake tensor, except its mode.
    """

    argument: int | None
    view: _View | None
    device: torch.device
    attributes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Recipe:
    """The recipe of an operation's results, shared by all calls with the same metadata.

    Attributes:
        results: Recipes of the results in order. A result that is a number or None is its own
            recipe.
        container: Type of the results' container. None: there is a single result.
    """

    results: tuple[_Result | int | None, ...]
    container: Callable[[Any], Any] | None


class OperationCache:
    """Recipes by operation and metadata. Several simulations may share a cache.

    Attributes:
        num_hits: Number of calls whose results were created from a recipe.
        num_misses: Number of calls that torch ran.
    """

    def __init__(self) -> None:
        self._recipes: dict[Any, Recipe] = {}
        self.num_hits = self.num_misses = 0

    def run(
        self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Recipe | None]:
        """Call ``func(*args, **kwargs)`` below all dispatch modes except ``mode``.

        Returns:
            The result, and the recipe or None. Calls with the same recipe are the same operation on
            the same metadata.
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
        out = _grouped_product(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        if key is not None and _is_cacheable(func):
            recipe = _recipe_of(out, mode, tensors)
            if recipe is not None:
                self._recipes[key] = recipe
        return out, recipe


def _grouped_product(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns the result of a product of grouped matrices; None for any other operation. torch's
    shape function (2.11 to 2.13) only accepts bf16, although the kernels accept other dtypes.

    Raises:
        RuntimeError: The numbers of groups differ, or the matrices cannot be multiplied.
    """
    if func is not _GROUPED_PRODUCT or args[0].dtype == torch.bfloat16:
        return None
    left, right, offsets = args[0], args[1], kwargs.get("offs", args[2] if args[2:] else None)
    counts = [each.shape[0] for each in (left, right) if each.ndim == 3]
    counts += [] if offsets is None else [offsets.shape[0]]
    if len({*counts}) != 1:
        raise RuntimeError(
            "_grouped_mm: expected matrices and offsets of the same number of groups; found "
            f"{tuple(left.shape)} and {tuple(right.shape)} in {counts} groups"
        )
    # The rows, columns, or both, of all groups form one matrix.
    found: Tensor = (left if left.ndim == 2 else left[0]) @ (right if right.ndim == 2 else right[0])
    if left.ndim == right.ndim:
        found = found.expand(counts[0], -1, -1).clone()
    return found.to(kwargs.get("out_dtype") or left.dtype)


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
    """Returns the metadata of arguments, as a part of the key; None if they contain unsupported
    values. Appends their tensors to ``tensors``."""
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
    results: list[_Result | int | None] = []
    storages: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        shared = _storage_of(tensor) in storages
        storages[_storage_of(tensor)] = _AMBIGUOUS if shared else number
    for each in (out,) if container is None else out:
        result: _Result | int | None = None
        if type(each) is int and container is not None:
            result = each  # attention also returns lengths
        elif each is not None:
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
    """Returns the bytes of the storage that ``empty_strided`` creates for the view; -1 if the view
    has an offset."""
    if view.offset:
        return -1
    if 0 in view.shape:
        return 0
    steps = zip(view.shape, view.stride, strict=True)
    return view.dtype.itemsize * (1 + sum((size - 1) * step for size, step in steps))


def _results_of(recipe: Recipe, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> Any:
    made = [
        _tensor_of(each, mode, tensors) if isinstance(each, _Result) else each
        for each in recipe.results
    ]
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
    # Does the same as FakeTensor.__new__, without its checks.
    fake: FakeTensor = Tensor._make_subclass(
        FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=result.device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(result.attributes, fake_mode=mode)
    return fake


_aten = torch.ops.aten
_COPY = _aten.copy_.default

# Functions with a cost per element. Their backwards have this cost, too.
_FUNCTIONS = {"gelu", "silu", "sigmoid", "tanh", "elu", "softplus", "mish", "hardswish", "glu"}
_FUNCTIONS |= {"_softmax", "_log_softmax", "logsumexp", "log_sigmoid_forward", "log_sigmoid"}
_FUNCTIONS |= {"exp", "expm1", "log", "log1p", "pow", "sin", "cos", "erf", "rsqrt"}
_FUNCTIONS |= {"native_layer_norm", "_fused_rms_norm", "native_batch_norm", "native_group_norm"}
# Functions that remain in decomposed graphs. `pow` is usually a product there.
_FUSED_FUNCTIONS = _FUNCTIONS - {"pow"}
# Number of passes of the ring. In each pass a rank sends (n - 1) / n of the bytes in n - 1 hops.
_RINGS = {"_allgather_base_": 1, "allgather_": 1, "allgather_coalesced_": 1}
_RINGS |= {"allgather_into_tensor_coalesced_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_": 1}
_RINGS |= {"reduce_scatter_tensor_coalesced_": 1, "allreduce_": 2, "allreduce_coalesced_": 2}
_RINGS |= {"broadcast_": 1, "reduce_": 1, "gather_": 1, "scatter_": 1}
# Collectives in which only the root has the tensors of all ranks.
_ROOTED = ("gather_", "scatter_")
_ALL_TO_ALL, _ALL_TO_ALL_OF_LISTS, _SEND = "alltoall_base_", "alltoall_", "send"
# Namespace of collectives that models issue, for example through DTensors.
_MODEL_COLLECTIVES = "_c10d_functional"
_MODEL_RINGS = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "broadcast": 1}
_MODEL_RINGS |= {"all_reduce": 2}


def _with_heads(key: Tensor, query: Tensor) -> tuple[int, ...]:
    """Returns the shape of keys or values with as many heads as queries, which may share heads of
    keys in a kernel. torch's formulas support shared heads since 2.13."""
    return (key.shape[0], query.shape[1], *key.shape[2:])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = (query.shape, *(_with_heads(each, query) for each in (key, value)))
    count: int = flop_counter.sdpa_flop_count(*shapes)
    return count


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    shapes = (grad.shape, query.shape, *(_with_heads(each, query) for each in (key, value)))
    count: int = flop_counter.sdpa_backward_flop_count(*shapes)
    return count


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Returns the flops of a product whose rows, inner dimension or columns are divided into
    groups, or of a batched product."""
    num_products = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return 2 * num_products * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _recurrent(rows: Tensor, into: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """Returns the flops of an LSTM layer: both matrices multiply each row at each time step."""
    return 2 * (rows.numel() // rows.shape[-1]) * (into.numel() + recurrent.numel())


def _recurrent_backward(rows: Tensor, *matrices: Any, **_: Any) -> int:
    return 2 * _recurrent(rows, *matrices)


# Formulas for operations that flop_counter does not list, or lists without shared heads of keys.
# Attention on fake tensors is the CPU's kernel, except for ring attention.
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: _grouped,
    _aten._scaled_grouped_mm: _grouped,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
}


# The kernels of ring attention; see ``context_parallel.py``.
_RING_ATTENTION = _aten._scaled_dot_product_flash_attention.default
_RING_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default

# Attention's backward on fake tensors, on all devices.
_ATTENTION_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _RING_ATTENTION_BACKWARD,
}
_WITH_SCRATCH = {*_ATTENTION_BACKWARD, _aten.sum.dim_IntList}
# One of the five products of attention's backward computes the scores again.
_ATTENTION_BACKWARD_SHARE = 4 / 5

_OURS = {Tensor, FakeTensor, torch.nn.Parameter}
_DEVICE = torch.ops.prim.device.default


class Operations(TorchDispatchMode):
    """A dispatch mode in which every operation advances the clock.

    Args:
        clock: The clock of the lanes.
        memory: The tracker of the memory of results.
        fake: The fake mode of the tensors.
        known: The cache of operations.

    Attributes:
        is_recomputation: Whether the compiled operations that run now are recomputations.
        data_ranks: The data-parallel ranks, once there is an engine. Other groups belong to the
            model.
        context_ranks: The context-parallel ranks.
        num_ring_attentions: Number of forwards of ring attention so far, one per block of keys.
    """

    supports_higher_order_operators = True  # torch passes them to this mode

    def __init__(
        self,
        clock: Clock,
        memory: MemoryTracker,
        fake: FakeTensorMode,
        known: OperationCache,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._known = known
        self._seconds_by: dict[Recipe, float | None] = {}
        self._flops_by: dict[Recipe, tuple[float, float]] = {}
        self._clock = clock
        self._memory = memory
        self.data_ranks: frozenset[int] | None = None
        self.context_ranks: list[int] = []
        self.num_ring_attentions = 0
        self._ranks: dict[str, list[int]] = {}  # ranks by name of the group
        self._pending: dict[int, SimulatedTicket] = {}  # by storage of the result
        self._seconds_of_fused: dict[Kernel, float] = {}
        self._is_compiled = False
        self.is_recomputation = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: torch then compiles code although this mode is active, and disables the
        mode during compilation."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would make each operation call into the compiler, which is slower.
        return False

    @not_compiled
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of the model, of autograd, the optimizer or the engine."""
        composed = _composed(func)
        if composed is not None:
            return self._run_composed(func, composed, args, kwargs or {})
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # autograd calls this several times per tensor
        if not _OURS.issuperset(types):
            return NotImplemented  # the operations of the subclass are dispatched here again
        kwargs = kwargs or {}
        if func is _RING_ATTENTION:
            self.num_ring_attentions += 1
        if func is _RING_ATTENTION_BACKWARD and not args:
            args, kwargs = _positional(func, kwargs)
        out, recipe = self._known.run(self._fake, func, args, kwargs)
        out = as_returned(func, args, out)
        if func.namespace == "c10d":
            self._message(func, args)
        elif func.namespace == _MODEL_COLLECTIVES:
            self._message_of_model(func, args, out)
            self._memory.made(tensors_of(out))
        elif func.namespace == chunked_products.NAMESPACE:
            self._chunked_product(func, args, kwargs, out, recipe)
        elif func.namespace not in ("prim", "profiler"):
            self._operation(func, args, kwargs, out, recipe)
        return out

    @contextmanager
    def compiled(self, *, is_backward: bool) -> Iterator[None]:
        """Run a compiled graph in this context: its views and allocations take no host time.

        Args:
            is_backward: Whether it is a backward graph.
        """
        before = self._is_compiled, self.is_recomputation
        self._is_compiled = True
        # A forward graph that runs in the backward phase recomputes activations.
        self.is_recomputation = self._clock.phase == "backward" and not is_backward
        try:
            yield
        finally:
            self._is_compiled, self.is_recomputation = before

    def fused(self, kernel: Kernel) -> None:
        """Run a kernel of fused operations. Its results are already allocated."""
        seconds = self._seconds_of_fused.get(kernel)
        if seconds is None:
            functions = sum(
                value_of(node).numel() for node in kernel.nodes if name_of(node) in _FUSED_FUNCTIONS
            )
            processor = self._clock.machine.processor
            seconds = processor.fused_seconds(kernel.num_bytes, functions)
            self._seconds_of_fused[kernel] = seconds
        self._clock.compute(kernel.label, seconds)

    def _run_composed(self, func: Any, composed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the operations that a composed operation consists of."""
        clock = self._clock
        flops, seconds = clock.model_flops, clock.seconds_at_peak
        with self:
            out = composed(*args, **kwargs)
        if str(func) == BACKWARD:  # one of its products computes the scores again
            clock.model_flops -= (1 - _ATTENTION_BACKWARD_SHARE) * (clock.model_flops - flops)
            added = clock.seconds_at_peak - seconds
            clock.seconds_at_peak -= (1 - _ATTENTION_BACKWARD_SHARE) * added
        return out

    def flex_attention(self, kernel: FlexKernel, num_bytes: int) -> None:
        """Run a kernel of ``flex_attention``. Its results are already allocated.

        Args:
            kernel: The kernel.
            num_bytes: Number of bytes that the kernel reads and writes.
        """
        query, processor = kernel.query, self._clock.machine.processor
        name = BACKWARD if kernel.is_backward else FORWARD
        if kernel.is_backward:
            # A separate kernel first sums the products of each output and its gradient, in fp32.
            sums = query.shape[:-1].numel() * torch.float32.itemsize
            outputs = query.shape[:-1].numel() * kernel.value.shape[-1] * query.itemsize
            self._clock.compute("fused mul, sum", processor.fused_seconds(2 * outputs + sums))
        seconds = processor.seconds(
            kernel.computed_share * kernel.flops, num_bytes, query.dtype, attention=kernel.shape
        )
        self._clock.compute(name, seconds)
        if kernel.is_backward:
            self._memory.sample(sums)
        if not self._is_again():
            share = _ATTENTION_BACKWARD_SHARE if kernel.is_backward else 1.0
            flops = share * kernel.flops
            self._clock.model_flops += flops
            self._clock.seconds_at_peak += self._seconds_at_peak(flops, query.dtype)

    def _operation(
        self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Recipe | None
    ) -> None:
        if self._memory.has_places:
            if func is _COPY and self._copies_state(args):
                return
            if self._clock.machine.host_runs_ahead and self._is_on_host(args):
                self._operation_on_host(func, args, kwargs, out)
                return
        if recipe is None:
            seconds = self._seconds(func, args, kwargs, out)
        elif recipe in self._seconds_by:
            seconds = self._seconds_by[recipe]
        else:
            seconds = self._seconds_by[recipe] = self._seconds(func, args, kwargs, out)
        if seconds is None:
            if not self._is_compiled:
                self._clock.call()
        else:
            self._clock.compute(func._overloadpacket.__name__, seconds)
            self._count_flops(func, args, kwargs, out, recipe)
        results = (out,) if type(out) is FakeTensor else tensors_of(out)
        if self._clock.lane_at_work in lanes.LANES and not self._clock.machine.host_runs_ahead:
            self._memory.made(results, TRANSIENT)
        else:
            self._memory.made(results)
        if func in _WITH_SCRATCH and self._clock.machine.host_runs_ahead:
            self._memory.sample(scratch_bytes(func, args, out))

    def _copies_state(self, args: Any) -> bool:
        """Run a copy if it is between the device and another place. Returns whether it is."""
        target, source = args[0], args[1]
        places = [self._memory.place_of(each) for each in (target, source)]
        if places[0] == places[1]:
            return False
        direction = Direction.INTO if places[0] is None else Direction.OUT
        place = places[1] if places[0] is None else places[0]
        assert place is not None
        self._clock.copy(place, direction, num_bytes_of(source))
        return True

    def _is_on_host(self, args: Any) -> bool:
        """Returns whether a tensor of an operation is in host memory, so that the host of a device
        computes the operation. All tensors of a list are at the same place."""
        for each in args:
            if isinstance(each, list | tuple) and each:
                each = each[0]
            if isinstance(each, Tensor) and self._memory.place_of(each) == allocator.HOST:
                return True
        return False

    def _operation_on_host(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Run an operation on the host of a device. Its new results are in host memory."""
        if func is _COPY:  # does not read the target
            num_bytes: int | None = sum(map(num_bytes_of, args[:2]))
        else:
            num_bytes = accessed_bytes(func, args, kwargs, out)
        if num_bytes is None:
            self._clock.call()
        else:
            self._clock.compute_on_host(func._overloadpacket.__name__, num_bytes)
        results = tensors_of(out)
        self._memory.made(results)
        for each in results:
            if self._memory.place_of(each) is None:
                self._memory.moved(each, allocator.HOST)

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
        """Returns the device time of an operation; None if it only takes host time."""
        packet = func._overloadpacket
        num_bytes = accessed_bytes(func, args, kwargs, out)
        if num_bytes is None:
            return None
        flops = _flops(func, args, kwargs, out)
        dtype = _dtype(args)
        name = packet.__name__
        attention = _attention_of(func, args, kwargs)
        is_product = flops > 0 and attention is None
        elements = 0
        if name.removesuffix("_").removesuffix("_data").removesuffix("_backward") in _FUNCTIONS:
            elements = max((each.numel() for each in tensors_of(out)), default=0)
        return self._clock.machine.processor.seconds(
            flops,
            num_bytes,
            dtype,
            attention=attention,
            product_elements=sum(each.numel() for each in tensors_of(out)) if is_product else 0,
            function_elements=elements,
            irregular_elements=irregular_elements(func, args, out),
        )

    def _count_flops(
        self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Recipe | None
    ) -> None:
        """Add the operation's model flops; see [Note: Model flops]."""
        if self._is_again():
            return
        known = None if recipe is None else self._flops_by.get(recipe)
        if known is None:
            flops = float(_flops(func, args, kwargs, out))
            name = func._overloadpacket.__name__
            if "scaled_dot_product" in name and "backward" in name:
                flops *= _ATTENTION_BACKWARD_SHARE
            if func in (_RING_ATTENTION, _RING_ATTENTION_BACKWARD):
                flops *= _ring_block_share(func, args, kwargs)
            known = flops, self._seconds_at_peak(flops, _dtype(args))
            if recipe is not None:
                self._flops_by[recipe] = known
        self._clock.model_flops += known[0]
        self._clock.seconds_at_peak += known[1]

    def _seconds_at_peak(self, flops: float, dtype: torch.dtype) -> float:
        return flops / self._clock.machine.processor.peak_flops(dtype) if flops else 0.0

    def _is_again(self) -> bool:
        """Returns whether an operation has no model flops, because it recomputes activations or is
        part of the optimizer step."""
        phase = self._clock.phase
        is_again = phase == "backward" and torch.is_grad_enabled()
        return is_again or self.is_recomputation or phase == "step"

    def _message(self, func: Any, args: Any) -> None:
        name = func._overloadpacket.__name__
        if name not in _RINGS and name not in (_ALL_TO_ALL, _ALL_TO_ALL_OF_LISTS, _SEND):
            return  # counted as sending no data, for example a barrier, a wait or a receive
        group = next(each for each in map(_as_group, args) if each is not None)
        num_ranks, stride = group.size(), self._stride(group)
        if name in _ROOTED:
            num_bytes = num_ranks * max(map(num_bytes_of, tensors_of(args)))
        else:
            num_bytes = max(sum(map(num_bytes_of, tensors_of(each))) for each in args)
        machine = self._clock.machine
        if name == _SEND:
            link = machine.link_to(args[2] * stride)  # the simulated rank is the first of its node
            sent, seconds = float(num_bytes), link.seconds(num_bytes, 1)
        elif name == _ALL_TO_ALL_OF_LISTS or (name == _ALL_TO_ALL and args[3]):
            link = machine.link(num_ranks, stride)
            if name == _ALL_TO_ALL:  # parts of different sizes, none for this rank
                output, source, _, from_ranks, to_ranks = args[:5]
                received = [each * output.itemsize for each in from_ranks]
                to_others = [each * source.itemsize for each in to_ranks]
            else:
                received, to_others = ([*map(num_bytes_of, each)] for each in args[:2])
                received[group.rank()] = to_others[group.rank()] = 0  # only copied
            sent = float(sum(to_others))
            seconds = exchange_seconds(machine, to_others, received, stride)
        else:
            link = machine.link(num_ranks, stride)
            ring = _RINGS.get(name, 1)
            sent = sent_bytes(num_bytes, num_ranks, ring)
            if name == _ALL_TO_ALL:
                seconds = all_to_all_seconds(machine, num_bytes, num_ranks, stride)
            else:
                seconds = message_seconds(link, num_bytes, num_ranks, ring)
        of_compute = seconds * link.processor_share
        if self._clock.lane_at_work is None and self._is_of_model(group):
            ended = self._clock.send_for_model(name.strip("_"), sent, seconds, of_compute)
            self._clock.wait_for_model(ended)
        else:
            self._clock.send(sent, seconds, of_compute)

    def _message_of_model(self, func: Any, args: Any, out: Any) -> None:
        """Start a collective of the model in parallel to compute, or wait for its result."""
        name = func._overloadpacket.__name__
        if name == "wait_tensor":
            ended = self._pending.pop(_storage_of(args[0]), None)
            if ended is not None:
                self._clock.wait_for_model(ended)
            return
        num_bytes = max(sum(map(num_bytes_of, tensors_of(each))) for each in (args, out))
        group = _resolve_process_group(
            GroupName(next(each for each in args[::-1] if isinstance(each, str)))
        )
        num_ranks, stride = group.size(), self._stride(group)
        machine = self._clock.machine
        link = machine.link(num_ranks, stride)
        ring = _MODEL_RINGS.get(name.removesuffix("_").removesuffix("_coalesced"), 1)
        sent = sent_bytes(num_bytes, num_ranks, ring)
        seconds = message_seconds(link, num_bytes, num_ranks, ring)
        if "all_to_all" in name and _num_peers(args) == 1:
            # Each rank sends to the next rank. In a group over several nodes, some next ranks are
            # on other nodes.
            sent = float(num_bytes)
            seconds = machine.link_to((num_ranks - 1) * stride).seconds(sent, 1)
        elif "all_to_all" in name:
            seconds = all_to_all_seconds(machine, num_bytes, num_ranks, stride)
        of_compute = seconds * link.processor_share
        if self._clock.lane_at_work is not None:
            self._clock.send(sent, seconds, of_compute)
            return
        is_of_context = self._ranks_of(group) == self.context_ranks
        lane = CONTEXT_LANE if is_of_context else MODEL_LANE
        ended = self._clock.send_for_model(name, sent, seconds, of_compute, lane)
        for each in tensors_of(out):
            self._pending[_storage_of(each)] = ended

    def _chunked_product(
        self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Recipe | None
    ) -> None:
        """Run a product overlapped with the collective of its operand or result; see [Note: Chunked
        products]."""
        product = ChunkedProduct.of(func, args, out)
        clock, name, num_chunks = self._clock, func._overloadpacket.__name__, product.group.size()
        machine, num_bytes, dtype = clock.machine, product.message_bytes, product.dtype
        seconds = machine.processor.seconds
        chunk = sum(
            seconds(flops, part_bytes, dtype, product_elements=elements)
            for flops, part_bytes, elements in product.parts
        )
        link = machine.link(num_chunks, self._stride(product.group))
        of_message = message_seconds(link, num_bytes, num_chunks)
        clock.call(_CALLS_OF_A_CHUNK * num_chunks)
        if product.is_gathered:
            clock.compute("copy", seconds(0, 2 * num_bytes / num_chunks, dtype))
        else:
            clock.compute(name, chunk)
        ended = clock.send_for_model(
            name, sent_bytes(num_bytes, num_chunks), of_message, of_message * link.processor_share
        )
        clock.compute(name, (num_chunks - 1) * chunk)
        clock.wait_for_model(ended)
        if product.is_gathered:
            clock.compute(name, chunk)
        else:
            clock.compute("sum", seconds(0, num_bytes + num_bytes / num_chunks, dtype))
        self._count_flops(func, args, kwargs, out, recipe)
        self._memory.made(tensors_of(out))
        if not product.is_gathered or out[0] is None:
            self._memory.sample(num_bytes)

    def _stride(self, group: dist.ProcessGroup) -> int:
        """Returns the stride between the ranks of a group."""
        ranks = self._ranks_of(group)
        return ranks[1] - ranks[0] if len(ranks) > 1 else 1

    def _is_of_model(self, group: dist.ProcessGroup) -> bool:
        """Returns whether the group belongs to the model: it has at most one of the data-parallel
        ranks."""
        ranks = self._ranks_of(group)
        return (
            self.data_ranks is not None
            and len(ranks) > 1
            and len(self.data_ranks.intersection(ranks)) < 2
        )

    def _ranks_of(self, group: dist.ProcessGroup) -> list[int]:
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = dist.get_process_group_ranks(group)
        return self._ranks[name]


def message_seconds(link: Link, num_bytes: int, num_ranks: int, ring: int = 1) -> float:
    """Returns the seconds of a collective of ``num_bytes`` over ``num_ranks`` with ``ring`` passes
    of a ring."""
    return link.seconds(sent_bytes(num_bytes, num_ranks, ring), ring * (num_ranks - 1))


def all_to_all_seconds(machine: Machine, num_bytes: int, num_ranks: int, stride: int) -> float:
    """Returns the seconds of an all-to-all of ``num_bytes`` over ``num_ranks`` ranks with this
    stride. Communication within the node overlaps with communication between nodes."""
    part = num_bytes / num_ranks
    near = _ranks_in_node(machine, num_ranks, stride) - 1
    far = num_ranks - 1 - near
    within, between = machine.within_node, machine.between_nodes
    return max(within.seconds(near * part, near), between.seconds(far * part, far))


def exchange_seconds(
    machine: Machine, sent: Sequence[int], received: Sequence[int], stride: int
) -> float:
    """Returns the seconds of an all-to-all with parts of different sizes; see
    :func:`all_to_all_seconds`.

    Args:
        machine: The machine.
        sent, received: Bytes by rank of the group.
        stride: The stride of the group's ranks.
    """

    def seconds(link: Link, ranks: range) -> float:
        num_bytes = max(sum(sizes[rank] for rank in ranks) for sizes in (sent, received))
        num_peers = sum(1 for rank in ranks if sent[rank] or received[rank])
        return link.seconds(num_bytes, num_peers)

    in_node = _ranks_in_node(machine, len(sent), stride)
    near, far = range(in_node), range(in_node, len(sent))
    return max(seconds(machine.within_node, near), seconds(machine.between_nodes, far))


def _ranks_in_node(machine: Machine, num_ranks: int, stride: int) -> int:
    """Returns the number of ranks with this stride in the node of the first rank, including it."""
    return min(num_ranks, math.ceil(machine.ranks_per_node / stride))


def sent_bytes(num_bytes: float, num_ranks: int, ring: int = 1) -> float:
    """Returns the bytes that each rank sends in a collective with ``ring`` passes of a ring."""
    return ring * num_bytes * (num_ranks - 1) / num_ranks


@cache
def _composed(func: Any) -> Callable[..., Any] | None:
    """Returns a function that runs the operations that ``func`` is composed of. None: ``func`` is a
    kernel. Autograd decomposes composed operations before they reach this mode, except torch's
    Python operators and the functions that these call."""
    if isinstance(func, HigherOrderOperator):
        composed: Callable[..., Any] | None
        composed = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if composed is None:
            raise NotImplementedError(
                f"{func}: expected an operator with a kernel for CompositeExplicitAutograd; found "
                "none"
            )
        return composed
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Some composed operations, such as ``silu_backward``, are a kernel on the CPU and on devices.
    is_composed = (
        func.namespace == "aten"
        and has_kernel(func.name(), "CompositeImplicitAutograd")
        and not has_kernel(func.name(), "CPU")
    )
    return func.decompose if is_composed else None


def _dtype(args: Any) -> torch.dtype:
    """Returns the dtype of an operation's products."""
    return next((t.dtype for t in tensors_of(args) if t.is_floating_point()), torch.float32)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns the floating-point operations of matrix products and attention."""
    packet = func._overloadpacket
    if func.namespace == chunked_products.NAMESPACE:
        return ChunkedProduct.of(func, args, out).flops
    if packet in _MORE_FLOPS:
        return _MORE_FLOPS[packet](*args, **kwargs)
    formula: Any = flop_counter.flop_registry.get(packet)
    count: int = 0 if formula is None else formula(*args, **kwargs, out_val=out)
    return count


def _attention_of(func: Any, args: Any, kwargs: Any) -> Attention | None:
    """Returns the shape of an attention operation; None for other operations."""
    name = func._overloadpacket.__name__
    if "scaled_dot_product" not in name:
        return None
    given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
    given |= kwargs
    query, key = given["query"], given["key"]
    is_causal = bool(given.get("is_causal", False))
    return Attention(query.shape[-2], key.shape[-2], is_causal, "backward" in name, query.shape[-1])


def _positional(func: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments that were given by name, split into positional and keyword-only
    ones."""
    names = [each.name for each in func._schema.arguments if not each.kwarg_only]
    others = {name: value for name, value in kwargs.items() if name not in names}
    return [kwargs[name] for name in names if name in kwargs], others


def _ring_block_share(func: Any, args: Any, kwargs: Any) -> float:
    """Returns the model flops of a block of ring attention divided by the computed flops.
    Load-balanced causal attention computes half of the queries or of the keys of each block except
    the diagonal one, but its model flops count in full."""
    block = _attention_of(func, args, kwargs)
    assert block is not None
    return 1.0 if block.num_queries == block.num_keys else 2.0


def _num_peers(args: Any) -> int | None:
    """Returns the number of ranks that get a part of an all-to-all, including this rank if it keeps
    a part; None: all."""
    sizes = args[2]
    return None if not sizes else sum(1 for size in sizes if size)


def _as_group(value: Any) -> dist.ProcessGroup | None:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:
        return None  # a reduction's operator
