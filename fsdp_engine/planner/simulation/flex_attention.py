"""Simulates ``torch.nn.attention.flex_attention`` on devices.

Without a compiler, flex_attention runs the operations of torch's own function, which compute and
hold all scores. Compiled, it is one kernel in forward and two in backward. The simulation replaces
inductor's kernels: it allocates their results, and takes the time of the products of the blocks of
scores that the mask does not skip.

[Note: Blocks of a mask]
A kernel computes each block of queries and keys (128 x 128 by default) with at least one pair that
the mask allows. Tensors of the ``BlockMask`` store which blocks these are. If the mask was made
outside of the simulation, these tensors have values, and the blocks are counted. Otherwise the
mask's function is used, which is an argument of the operation, as a graph. It runs with real
indices of queries and keys: with all indices for short sequences, otherwise with some indices of
each block, including the block's corners, so that there are about ``_MOST_PAIRS`` pairs.

The function may also read tensors without values, such as the document of each token. An expression
of such tensors may be true or false; it counts as true, and so does its negation, so that the
blocks are never too few. Causal attention within documents is therefore computed like causal
attention, and attention within documents in full. If the function cannot run, all blocks are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fsdp_engine.planner.simulation.machine import Attention

FORWARD, BACKWARD = "flex_attention", "flex_attention_backward"

# Largest number of pairs of query and key indices with which a mask's function runs.
_MOST_PAIRS = 2**24
# Largest number of pairs per call of the function.
_PAIRS_AT_A_TIME = 2**22
# Largest number of indices of rows and of heads, if a mask depends on them.
_MOST_ROWS = 16

_CPU = torch.device("cpu")
_shares: WeakKeyDictionary[GraphModule, dict[Any, float]] = WeakKeyDictionary()


@dataclass(frozen=True)
class FlexKernel:
    """A compiled kernel of ``flex_attention``.

    Attributes:
        query, key, value: The arguments of the operation.
        computed_share: The fraction of the blocks of scores that the kernel computes.
        is_backward: Whether the kernel computes the backward.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    computed_share: float
    is_backward: bool

    @property
    def flops(self) -> float:
        """Floating-point operations of all scores. Forward has products of queries and keys, and of
        scores and values. Backward computes the first product again, and for each of the two
        products two more for the gradients."""
        rows, heads, queries, size = self.query.shape
        num_scores = rows * heads * queries * self.key.shape[-2]
        value_size = self.value.shape[-1]
        products = 3 * size + 2 * value_size if self.is_backward else size + value_size
        return 2.0 * num_scores * products

    @property
    def shape(self) -> Attention:
        """The shape, with the mean number of keys that are computed for a query. The rate of the
        kernel depends on this number; see ``attention_length`` of ``Processor``."""
        num_keys = max(round(self.computed_share * self.key.shape[-2]), 1)
        sizes = self.query.shape[-2], num_keys
        return Attention(*sizes, False, self.is_backward, self.query.shape[-1], is_flex=True)


def flex_kernel(name: str, args: Sequence[Any]) -> FlexKernel:
    """Returns the kernel for an operation of a compiled graph.

    Args:
        name: The name of the operation, ``FORWARD`` or ``BACKWARD``.
        args: The arguments of the operation.
    """
    is_backward = name == BACKWARD
    query, key, value = args[:3]
    block_mask, mask_buffers = args[9 if is_backward else 4], args[-1]
    share = computed_share(block_mask, mask_buffers, query.shape[-2], key.shape[-2])
    return FlexKernel(query, key, value, share, is_backward)


def computed_share(
    block_mask: Sequence[Any], buffers: Sequence[Any], num_queries: int, num_keys: int
) -> float:
    """Returns the fraction of the blocks of scores that a mask does not skip; see
    [Note: Blocks of a mask].

    Args:
        block_mask: The block mask of the operation, ``BlockMask.as_tuple()`` with a graph for the
            function.
        buffers: The tensors that the function reads.
        num_queries, num_keys: Lengths of the sequences.
    """
    *tensors, query_block, key_block, graph = block_mask
    counts, full_counts = tensors[2], tensors[4]
    num_blocks = math.ceil(num_queries / query_block) * math.ceil(num_keys / key_block)
    if num_blocks == 1:
        return 1.0
    if _has_values(counts):
        with _disable_current_modes():
            computed = int(counts.sum()) + (0 if full_counts is None else int(full_counts.sum()))
        return computed / float(num_blocks * math.prod(counts.shape[:2]))
    known = tuple(each.data_ptr() for each in buffers if _has_values(each))
    sizes = num_queries, num_keys, query_block, key_block, *counts.shape[:2], *known
    shares = _shares.setdefault(graph, {})
    if sizes not in shares:
        shares[sizes] = _share_of_graph(graph, buffers, counts.shape[:2], sizes[:4])
    return shares[sizes]


def _has_values(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _share_of_graph(
    graph: GraphModule, buffers: Sequence[Any], outer: Sequence[int], sizes: Sequence[int]
) -> float:
    """Returns the computed fraction for a mask whose function is a graph.

    Args:
        graph, buffers: See :func:`computed_share`.
        outer: Numbers of rows and of heads that may have different masks.
        sizes: Lengths of queries and keys, and lengths of their blocks.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    rows, heads = (
        _spread(size, _MOST_ROWS) if node.users else [0]
        for node, size in zip(inputs, outer, strict=False)
    )
    num_queries, num_keys, query_block, key_block = sizes
    counts = math.ceil(num_queries / query_block), math.ceil(num_keys / key_block)
    side = math.isqrt(int(_MOST_PAIRS / (len(rows) * len(heads) * counts[0] * counts[1])))
    computed = 0
    try:
        with _disable_current_modes():
            queries = _indices(num_queries, query_block, side)
            keys = _indices(num_keys, key_block, side)
            at_a_time = max(_PAIRS_AT_A_TIME // (queries.shape[1] * keys.numel()), 1)
            function = _mask_function(graph, buffers)
            for row in rows:
                for head in heads:
                    for part in queries.split(at_a_time):
                        index = (torch.tensor(each, device=_CPU) for each in (row, head))
                        found = function(*index, part.flatten(), keys.flatten())
                        found = found.view(*part.shape, *keys.shape)
                        computed += int(found.any(3).any(1).sum())
    except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return 1.0
    return computed / (len(rows) * len(heads) * counts[0] * counts[1])


def _spread(size: int, most: int) -> list[int]:
    """Returns evenly spaced indices below ``size``, at most ``most`` of them."""
    count = min(size, most)
    return [(2 * number + 1) * size // (2 * count) for number in range(count)]


def _indices(length: int, block: int, side: int) -> Tensor:
    """Returns ``side`` evenly spaced indices of each block, including its first and last one; at
    least two, and at most all indices of a block."""
    block = min(block, length)
    count = min(max(side, 2), block)
    offsets = torch.linspace(0, block - 1, count, device=_CPU).round().long()
    starts = torch.arange(0, length, block, device=_CPU)
    return (starts[:, None] + offsets).clamp(max=length - 1)


def _mask_function(graph: GraphModule, buffers: Sequence[Any]) -> Callable[..., Tensor]:
    """Returns a function of a row, a head, queries and keys. It returns whether the mask may allow
    each pair."""
    known = [_on_cpu(each) if _is_known(each) else _unknown() for each in buffers]

    def of_pair(*indices: Tensor) -> Tensor:
        found = _MaskInterpreter(graph).run(*indices, *known)
        possible: Tensor = found.possible if isinstance(found, _Condition) else found
        return possible

    of_keys = torch.vmap(of_pair, in_dims=(None, None, None, 0))
    return torch.vmap(of_keys, in_dims=(None, None, 0, None))


def _is_known(value: Any) -> bool:
    return _has_values(value) or not isinstance(value, Tensor)


def _on_cpu(value: Any) -> Any:
    return value.to(_CPU) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class _Condition:
    """A condition that depends on unknown values.

    Attributes:
        certain: True where the condition is true for all values.
        possible: True where the condition is true for some values.
    """

    certain: Tensor
    possible: Tensor


def _unknown() -> _Condition:
    return _Condition(torch.tensor(False, device=_CPU), torch.tensor(True, device=_CPU))


_ANDS, _ORS = {"bitwise_and", "logical_and", "__and__"}, {"bitwise_or", "logical_or", "__or__"}
_NOTS = {"bitwise_not", "logical_not"}


class _MaskInterpreter(Interpreter):
    """Runs a mask's function with values that may be unknown."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Returns a constant of the graph, or an unknown condition."""
        found = super().get_attr(target, args, kwargs)
        return _on_cpu(found) if _is_known(found) else _unknown()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation. If an operand is unknown, return the bounds of the result."""
        if not any(isinstance(each, _Condition) for each in tree_leaves((args, kwargs))):
            return super().call_function(target, args, kwargs)
        name = getattr(getattr(target, "_overloadpacket", target), "__name__", "")
        operands = [_as_condition(each) for each in args]
        conditions = [each for each in operands if each is not None]
        if len(conditions) == len(operands) and name in _NOTS:
            (operand,) = conditions
            return _Condition(~operand.possible, ~operand.certain)
        if len(conditions) == len(operands) and name in _ANDS | _ORS:
            one, other = conditions
            if name in _ANDS:
                return _Condition(one.certain & other.certain, one.possible & other.possible)
            return _Condition(one.certain | other.certain, one.possible | other.possible)
        return _unknown()


def _as_condition(value: Any) -> _Condition | None:
    """Returns a value as a condition; None if it is not boolean."""
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return _Condition(value, value)
    return value if isinstance(value, _Condition) else None
