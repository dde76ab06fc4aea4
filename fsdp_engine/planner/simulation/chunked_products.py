"""Asynchronous tensor parallelism: products that overlap, in chunks, with the all-gather of their
operand or the reduce-scatter of their result.

[Note: Chunked products]
With ``torch._inductor.config._micro_pipeline_tp`` inductor replaces two patterns by operations of
``torch.ops.symm_mem``, for groups with symmetric memory: an all-gather and the products that read
its result, and a product and the reduce-scatter of its result. Simulations run the same pass of
torch. Such an operation has a chunk for each rank (``torch/distributed/_symmetric_memory``): a
gathered chunk is copied while the previous chunk is multiplied, and a chunk of a result is sent
while the next one is computed. The first chunk of a gathered product and the last chunk of a
reduced product are the rank's own and need no communication. So on n ranks an operation takes

    max(product, message + product / n)

plus the time to copy this rank's chunk into symmetric memory, or to sum the n chunks that it has
received.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.distributed_c10d import (
    GroupName,
    ProcessGroup,
    _resolve_process_group,
)
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

NAMESPACE = "symm_mem"

# Tags of AOTAutograd's partitioner on the nodes of a backward graph.
_TAG = "partitioner_tag"
_OF_BACKWARD = ("is_backward", "must_be_in_backward")

_LAYOUT = "inductor_force_stride_order"


@dataclass(frozen=True)
class ChunkedProduct:
    """An operation of :data:`NAMESPACE` that combines a product and a collective.

    Attributes:
        group: The process group. Each of its ranks has a chunk.
        is_gathered: Whether the first operand is gathered. False: the result is reduced.
        parts: For each matrix that a chunk is multiplied with: flops, bytes read and written, and
            elements of the result.
        message_bytes: Bytes of the gathered operand, or of the result before it is reduced.
        dtype: The dtype of the operands.
    """

    group: ProcessGroup
    is_gathered: bool
    parts: tuple[tuple[int, int, int], ...]
    message_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, func: Any, args: Any, out: Any) -> ChunkedProduct:
        """Returns the product for an operation of torch, its arguments and its result."""
        is_gathered = "all_gather" in func._overloadpacket.__name__
        name = [each for each in args if isinstance(each, str)][-1]
        group = _resolve_process_group(GroupName(name))
        operand, weights, results = args[0], args[1], out[1] if is_gathered else [out]
        if not is_gathered:
            weights = [weights]
        size = operand.numel() if is_gathered else operand.numel() // group.size()
        parts = []
        for weight, result in zip(weights, results, strict=True):
            columns = weight.shape[-1]
            elements = size // operand.shape[-1] * columns
            num_bytes = size * operand.itemsize + weight.nbytes + elements * result.itemsize
            parts.append((2 * size * columns, num_bytes, elements))
        of_message = size * operand.itemsize if is_gathered else elements * out.itemsize
        return cls(group, is_gathered, tuple(parts), group.size() * of_message, operand.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of all chunks."""
        return self.group.size() * sum(flops for flops, _, _ in self.parts)


def chunk_products(graph: GraphModule) -> None:
    """Replace products and collectives in a graph of aten operations by chunked products, if
    inductor would do so; see [Note: Chunked products]."""
    from torch._inductor import config

    if not config._micro_pipeline_tp:
        return
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    view_to_reshape(graph)  # the pass expects reshapes instead of views
    with patch("torch.distributed.is_nccl_available", lambda: True):  # simulated devices have NCCL
        micro_pipeline_tp_pass(graph.graph)
    for node in list(graph.graph.nodes):
        if _LAYOUT in str(node.target):  # no copy: the previous kernel writes in this stride order
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = _value(node)
            if any(map(is_of_backward, node.all_input_nodes)):
                node.meta[_TAG] = _OF_BACKWARD[0]
    graph.graph.eliminate_dead_code()


def is_of_backward(node: Node) -> bool:
    """Returns whether a node of a backward graph belongs to backward, not to a recomputed
    forward."""
    is_gradient = node.op == "placeholder" and node.name.startswith("tangents")
    return is_gradient or node.meta.get(_TAG) in _OF_BACKWARD


def _value(node: Node) -> Any:
    def value(operand: Node) -> Any:
        return operand.meta["val"]

    args: Any = map_arg(node.args, value)
    kwargs: Any = map_arg(node.kwargs, value)
    assert callable(node.target)
    with _disable_current_modes():
        return node.target(*args, **kwargs)


@contextmanager
def simulated_symmetric_memory() -> Iterator[None]:
    """Let programs enable symmetric memory for simulated groups in this context. At the end of the
    context the names of the groups are removed, since later groups may have the same names."""
    import torch.distributed._symmetric_memory as symmetric

    class Registered:
        """Replacement for torch's binding, which stores groups for the life of the process."""

        @staticmethod
        def set_group_info(*args: Any) -> None:
            """Ignore the group."""

    with (
        patch.dict(symmetric._group_name_to_store),
        patch.object(symmetric, "_SymmetricMemory", Registered),
    ):
        yield
