"""Context parallelism in a simulation: torch's own ``context_parallel``, on fake tensors.

Within :meth:`ContextParallel.shards`, torch's context manager shards the batch along the sequence,
load-balanced for causal attention, and ``scaled_dot_product_attention`` is torch's ring attention
(``torch.distributed.tensor.experimental``), which issues collectives, and a kernel for each block
of keys. Two things differ from training:

    the kernel        fake tensors are on the CPU, where ``scaled_dot_product_attention`` selects a
                      kernel that has no ring attention. FlashAttention's operation is called, which
                      CUDA has (``aten._scaled_dot_product_flash_attention``).
    asynchronous      torch waits for collectives of fake tensors at once, since those are usually
    collectives       traced. Within ring attention it waits where it does in training: the
                      messages run beside the attention of the block before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from fsdp_engine.planner.simulation.device_kernels import Place, replaced
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.operations import Operations
from fsdp_engine.planner.simulation.packed_sequences import masks_of_rows
from fsdp_engine.planner.simulation.simulation_error import as_simulation_error, check_count

_RINGS: list[Place] = [
    (_attention, "_templated_ring_attention"),
    (_attention, "_templated_ring_attention_backward"),
]


def check_context_parallel(context_parallel: int, size: int, machine: Machine) -> None:
    """Check a context-parallel degree.

    Args:
        context_parallel: The degree.
        size: The ranks of the engine's inner axis, which it has to divide.
        machine: The simulated machine.

    Raises:
        TypeError, ValueError: It is not a divisor, or the machine's host computes.
    """
    check_count("context_parallel", context_parallel, "1 rank or more")
    if size % context_parallel:
        raise ValueError(
            f"context_parallel: expected a divisor of the {size} ranks of the inner axis; "
            f"found {context_parallel}"
        )
    if context_parallel > 1 and not machine.host_runs_ahead:
        raise ValueError(
            "context_parallel: expected 1 on a machine whose host computes, since torch has no "
            f"ring attention for CPUs; found {context_parallel} on {machine.name}"
        )


class ContextParallel:
    """The context-parallel ranks of a simulation.

    Args:
        mesh: The mesh of these ranks, one axis.
        operations: The operations of the simulation.
    """

    def __init__(self, mesh: DeviceMesh, operations: Operations) -> None:
        self._mesh = mesh
        self._operations = operations

    def check_batch(self, inputs: Any) -> None:
        """Check that sequences can be sharded.

        Raises:
            ValueError: No tensor has a dimension 1, or its size is not divisible.
        """
        length, divisor = sequence_length(inputs), 2 * self._mesh.size()
        if length is None:
            raise ValueError(
                "batch: expected a tensor with sequences in dimension 1 with context_parallel; "
                "found none"
            )
        if length % divisor:
            raise ValueError(
                f"context_parallel: expected sequences divisible by {divisor}, twice the "
                f"context-parallel ranks; found {length} tokens and {self._mesh.size()} ranks"
            )

    @contextmanager
    def shards(self, inputs: Any, *, needs_attention: bool = True) -> Iterator[None]:
        """Context of the forward and backward of one batch. Tensors whose dimension 1 is the
        sequence are sharded in place, and restored at its end.

        Args:
            inputs: With one such tensor at least.
            needs_attention: There must be ring attention.

        Raises:
            ValueError: No attention of the forward was ring attention.
            SimulationError: torch's context manager raised an exception.
        """
        length = sequence_length(inputs)
        buffers = {
            id(each): each for each in _tensors(inputs) if each.ndim > 1 and each.shape[1] == length
        }
        before = self._operations.num_ring_attentions
        with ExitStack() as stack:
            own: dict[Place, Any] = {place: _asynchronous(getattr(*place)) for place in _RINGS}
            # In which torch keeps functions that it has replaced, and their meshes, for ever.
            own[_attention, "_replaced_functions"] = {}
            # torch's context manager replaces it again, by a function that calls it with DTensors.
            kernel = self._kernel()
            stack.enter_context(replaced({**own, (F, kernel.__name__): kernel}))
            # Ring attention takes no masks; training drops them (``accelerate``'s hooks do).
            stack.enter_context(masks_of_rows())
            with as_simulation_error("sharding the batch along the sequence"):
                stack.enter_context(
                    context_parallel(
                        self._mesh,
                        buffers=list(buffers.values()),
                        buffer_seq_dims=[1] * len(buffers),
                    )
                )
            yield
        if needs_attention and self._operations.num_ring_attentions == before:
            raise ValueError(
                "context_parallel: expected a model that calls "
                "torch.nn.functional.scaled_dot_product_attention, which torch's context_parallel "
                "replaces by ring attention; found no call"
            )

    def _kernel(self) -> Callable[..., Tensor]:
        def scaled_dot_product_attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,  # the kernel takes fewer heads of keys anyway
        ) -> Tensor:
            # Dynamo traces this in checkpointed blocks: it must have no side effects.
            if attn_mask is not None:
                raise ValueError(
                    "context_parallel: expected attention without a mask, with is_causal instead "
                    "(torch's ring attention takes no masks); found attn_mask of shape "
                    f"{tuple(attn_mask.shape)}"
                )
            if is_causal and not _attention._cp_options.enable_load_balance:
                raise ValueError(
                    "context_parallel: expected torch's load balancing with causal attention; "
                    "found enable_load_balance=False"
                )
            found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return found

        return scaled_dot_product_attention


def _asynchronous(ring: Callable[..., Any]) -> Callable[..., Any]:
    """Ring attention whose collectives of fake tensors are asynchronous."""

    @wraps(ring)
    def call(*args: Any, **kwargs: Any) -> Any:
        collectives = _attention.ft_c
        with replaced({(collectives, "_maybe_wrap_tensor"): collectives.AsyncCollectiveTensor}):
            return ring(*args, **kwargs)

    return call


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def sequence_length(inputs: Any) -> int | None:
    """The size of dimension 1 of the first tensor that has one."""
    return next((each.shape[1] for each in _tensors(inputs) if each.ndim > 1), None)
