"""Context parallelism in a simulation: torch's own ``context_parallel``, on fake tensors.

Within :meth:`ContextParallel.shards`, torch's context manager shards the batch along the sequence,
load-balanced for causal attention, and replaces ``scaled_dot_product_attention`` by torch's ring
attention (``torch.distributed.tensor.experimental``). Ring attention issues collectives, and one
kernel for each block of keys. Two things differ from training:

    the kernel        Fake tensors are on the CPU, where ``scaled_dot_product_attention`` selects a
                      kernel without ring attention. The simulation calls FlashAttention's operation
                      of CUDA instead (``aten._scaled_dot_product_flash_attention``).
    asynchronous      torch waits immediately for collectives of fake tensors, since those are
    collectives       usually traced. Within ring attention the simulation waits where training
                      does: communication overlaps with the attention of the previous block.
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
    """Check a degree of context parallelism.

    Args:
        context_parallel: The degree.
        size: Number of ranks on the engine's inner axis, which the degree must divide.
        machine: The simulated machine.

    Raises:
        TypeError, ValueError: The degree is not a divisor, or the machine is a CPU.
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
    """The context-parallel group of a simulated rank.

    Args:
        mesh: The mesh of the group's ranks, with one axis.
        operations: The operations of the simulation.
    """

    def __init__(self, mesh: DeviceMesh, operations: Operations) -> None:
        self._mesh = mesh
        self._operations = operations

    def check_batch(self, inputs: Any) -> None:
        """Check that the sequences of a batch can be sharded.

        Raises:
            ValueError: No tensor has a dimension 1, or its size is not a multiple of twice the
                ranks.
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
        """Shard sequences during the forward and backward of one batch. Tensors whose dimension 1
        is the sequence are sharded in place, and restored at the end.

        Args:
            inputs: The batch. At least one of its tensors has a sequence.
            needs_attention: Whether to require that ring attention runs.

        Raises:
            ValueError: The forward did not run ring attention, although it is required.
            SimulationError: torch's context manager raised an exception.
        """
        length = sequence_length(inputs)
        buffers = {
            id(each): each for each in _tensors(inputs) if each.ndim > 1 and each.shape[1] == length
        }
        before = self._operations.num_ring_attentions
        with ExitStack() as stack:
            own: dict[Place, Any] = {place: _asynchronous(getattr(*place)) for place in _RINGS}
            # torch keeps replaced functions, and their meshes, in this dict forever.
            own[_attention, "_replaced_functions"] = {}
            # torch's context manager wraps this function in one that calls it with DTensors.
            kernel = self._kernel()
            stack.enter_context(replaced({**own, (F, kernel.__name__): kernel}))
            # Ring attention takes no masks. Training drops them, too (by ``accelerate``'s hooks).
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
                "replaces by ring attention; found a forward that does not call it"
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
            enable_gqa: bool = False,  # the kernel always accepts fewer heads of keys
        ) -> Tensor:
            # Dynamo traces this function in checkpointed blocks, so it must have no side effects.
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
    """Returns ring attention with asynchronous collectives of fake tensors."""

    @wraps(ring)
    def call(*args: Any, **kwargs: Any) -> Any:
        collectives = _attention.ft_c
        with replaced({(collectives, "_maybe_wrap_tensor"): collectives.AsyncCollectiveTensor}):
            return ring(*args, **kwargs)

    return call


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def sequence_length(inputs: Any) -> int | None:
    """Returns the size of dimension 1 of the first tensor that has this dimension, or None."""
    return next((each.shape[1] for each in _tensors(inputs) if each.ndim > 1), None)
