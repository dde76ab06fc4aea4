"""The cost of operations: flops and bytes of computation; bytes, ranks and links of collectives.

The flops of matrix products and attention are those of ``torch.utils.flop_counter``; causal
attention is counted in full, as there. Other operations have no flops and take the time of the
bytes that they read and write; functions (gelu, softmax, norms) also take time per element.
Collectives take the time of a ring: for an all-gather or a reduce-scatter of N bytes over n ranks
each rank sends (n - 1) / n of N in n - 1 hops, and twice that for an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_engine.simulation.clock import Clock, axis_of
from fsdp_engine.simulation.machine import Link, Machine
from fsdp_engine.simulation.memory_tracker import MemoryTracker
from fsdp_engine.simulation.operation_cache import OperationCache, Recipe
from fsdp_engine.simulation.workspaces import as_returned

_aten = torch.ops.aten

# Operations that read only the rows that they return.
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
# Operations that allocate or view memory without accessing it.
_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NOTHING |= {"set_", "resize_", "detach", "detach_", "alias", "lift_fresh", "_unsafe_view"}
# Functions with a cost per element, also in backward.
_FUNCTIONS = {"gelu", "silu", "sigmoid", "tanh", "elu", "softplus", "mish", "hardswish", "glu"}
_FUNCTIONS |= {"_softmax", "_log_softmax", "logsumexp", "log_sigmoid_forward", "log_sigmoid"}
_FUNCTIONS |= {"exp", "expm1", "log", "log1p", "pow", "sin", "cos", "erf", "rsqrt"}
_FUNCTIONS |= {"native_layer_norm", "_fused_rms_norm", "native_batch_norm", "native_group_norm"}
# The factor of (n - 1) / n of the bytes that each rank sends, and of n - 1 hops.
_RINGS = {
    "_allgather_base_": 1,
    "_reduce_scatter_base_": 1,
    "allreduce_": 2,
    "broadcast_": 1,
}
_ALL_TO_ALL, _SEND = "alltoall_base_", "send"


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    count: int = flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)
    return count


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    shapes = (grad.shape, query.shape, key.shape, value.shape)
    count: int = flop_counter.sdpa_backward_flop_count(*shapes)
    return count


# Attention on fake tensors uses the CPU's kernel, which flop_counter does not list.
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


_OURS = {Tensor, FakeTensor, torch.nn.Parameter}
_DEVICE = torch.ops.prim.device.default


class Operations(TorchDispatchMode):
    """Mode in which every operation advances the clock.

    Args:
        clock: the clock of the lanes.
        memory: tracks the results of operations.
        inner_size: number of ranks on the inner axis, which are consecutive; also the stride of
            ranks on the outer axis.
        fake: the mode of the tensors.
        known: a cache of operations.
    """

    def __init__(
        self,
        clock: Clock,
        memory: MemoryTracker,
        inner_size: int,
        fake: FakeTensorMode,
        known: OperationCache,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._known = known
        self._seconds_by: dict[Recipe, float | None] = {}
        self._clock = clock
        self._memory = memory
        self._inner_size = inner_size

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would call into the compiler for every operation, which is slower than this class.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of the model, of autograd, the optimizer or the engine."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # autograd calls this several times per tensor
        if not _OURS.issuperset(types):
            return NotImplemented  # the operations of the subclass are dispatched here again
        kwargs = kwargs or {}
        out, recipe = self._known.run(self._fake, func, args, kwargs)
        out = as_returned(func, args, out)
        if func.namespace == "c10d":
            self._message(func, args)
        elif func.namespace not in ("prim", "profiler"):
            self._operation(func, args, kwargs, out, recipe)
        return out

    def _operation(
        self, func: Any, args: Any, kwargs: Any, out: Any, recipe: Recipe | None
    ) -> None:
        if recipe is None:
            seconds = self._seconds(func, args, kwargs, out)
        elif recipe in self._seconds_by:
            seconds = self._seconds_by[recipe]
        else:
            seconds = self._seconds_by[recipe] = self._seconds(func, args, kwargs, out)
        if seconds is None:
            self._clock.call()
        else:
            self._clock.compute(func._overloadpacket.__name__, seconds)
        results = (out,) if type(out) is FakeTensor else _tensors(out)
        self._memory.made(results)

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
        """Device time of the operation; None if it only takes host time."""
        packet = func._overloadpacket
        name = packet.__name__
        if func.is_view or name in _NOTHING:
            return None
        operands = [] if name in _LOOKUPS else _tensors((args, kwargs))
        num_bytes = sum(_num_bytes(each) for each in (*operands, *_tensors(out)))
        if name in _LOOKUPS:
            num_bytes *= 2
        flops = 0
        formula: Any = flop_counter.flop_registry.get(packet)
        if packet in _MORE_FLOPS:
            flops = _MORE_FLOPS[packet](*args, **kwargs)
        elif formula is not None:
            flops = formula(*args, **kwargs, out_val=out)
        dtype = next((t.dtype for t in _tensors(args) if t.is_floating_point()), torch.float32)
        name = packet.__name__
        elements = 0
        if name.removesuffix("_").removesuffix("_data").removesuffix("_backward") in _FUNCTIONS:
            elements = max((each.numel() for each in _tensors(out)), default=0)
        return self._clock.machine.processor.seconds(
            flops,
            num_bytes,
            dtype,
            is_attention="scaled_dot_product" in name,
            function_elements=elements,
        )

    def _message(self, func: Any, args: Any) -> None:
        name = func._overloadpacket.__name__
        if name not in _RINGS and name not in (_ALL_TO_ALL, _SEND):
            return  # sends no data: a barrier, a wait, a receive
        num_bytes = max(_num_bytes(each) for each in _tensors(args))
        num_ranks = next(each for each in map(_as_group, args) if each is not None).size()
        stride = self._stride
        machine = self._clock.machine
        if name == _SEND:
            link = machine.link_to(args[2] * stride)  # the simulated rank is the first of its node
            sent, seconds = float(num_bytes), link.seconds(num_bytes, 1)
        else:
            link = machine.link(num_ranks, stride)
            ring = _RINGS.get(name, 1)
            sent = sent_bytes(num_bytes, num_ranks, ring)
            if name == _ALL_TO_ALL:
                seconds = all_to_all_seconds(machine, num_bytes, num_ranks, stride)
            else:
                seconds = message_seconds(link, num_bytes, num_ranks, ring)
        self._clock.send(sent, seconds, seconds * link.processor_share)

    @property
    def _stride(self) -> int:
        """The stride between the ranks of the running lane's axis."""
        lane = self._clock.lane_at_work
        return self._inner_size if lane is not None and axis_of(lane) == "outer" else 1


def message_seconds(link: Link, num_bytes: int, num_ranks: int, ring: int = 1) -> float:
    """Seconds of a collective of ``num_bytes`` over ``num_ranks`` with ``ring`` passes of a
    ring."""
    return link.seconds(sent_bytes(num_bytes, num_ranks, ring), ring * (num_ranks - 1))


def all_to_all_seconds(machine: Machine, num_bytes: int, num_ranks: int, stride: int) -> float:
    """Seconds of an all-to-all of ``num_bytes`` over ``num_ranks`` with a stride of ``stride``.
    Communication within the node overlaps with that to other nodes."""
    part = num_bytes / num_ranks
    near = min(num_ranks, math.ceil(machine.ranks_per_node / stride)) - 1
    far = num_ranks - 1 - near
    within, between = machine.within_node, machine.between_nodes
    return max(within.seconds(near * part, near), between.seconds(far * part, far))


def sent_bytes(num_bytes: float, num_ranks: int, ring: int = 1) -> float:
    """Bytes that each rank sends in such a collective."""
    return ring * num_bytes * (num_ranks - 1) / num_ranks


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _as_group(value: Any) -> dist.ProcessGroup | None:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:
        return None  # a reduction's operator
