"""What becomes of a buffer whose main weights get another dtype.

The policy follows, but for its ``main_params_dtype``: the later word counts. Where it says nothing
of compute weights they get the same dtype, and likewise gradients. Worked example, fp32 weights
that are turned to bf16: with ``MixedPrecisionPolicy()`` all is bf16; with ``reduce_dtype=fp32``
gradients are summed in fp32, and kept in bf16.
"""

from __future__ import annotations

import dataclasses

import torch

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.spec import BufferKind
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.codecs.cast import CastCodec
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices import memory
from fsdp_engine.planning.plan import keeps_statistics
from fsdp_engine.precision import MixedPrecisionPolicy


def kind_after(
    buffer: ParamAndGradBuffer,
    dtype: torch.dtype,
    policy: MixedPrecisionPolicy,
    config: DistributedDataParallelConfig,
) -> tuple[BufferKind, ParamCodec]:
    """What ``buffer`` is with main weights of ``dtype``, and its codec.

    Raises:
        ValueError: it cannot be had; names the first parameter.
    """
    name = buffer.records[0].name
    modules = [module for record in buffer.records for module, _ in record.owners]
    compute = None if any(map(keeps_statistics, modules)) else policy.param_dtype
    policy = dataclasses.replace(policy, main_params_dtype=dtype, param_dtype=compute)
    probe = memory.empty(0, dtype, "cpu").requires_grad_(buffer.kind.requires_grad)
    dtypes = policy.resolve(probe, config.reduce_scatter_with_fp32_accumulation)
    kind = dataclasses.replace(buffer.kind, dtypes=dtypes)
    if config.nccl_ub:
        raise ValueError(
            f"{name}: expected {buffer.kind.dtypes.main} to stay, since nccl_ub registers memory "
            f"once; found a conversion to {dtype}. Convert the model before shard()"
        )
    try:
        codec = buffer.weights.codec.converted(dtypes)
    except NotImplementedError as error:
        raise ValueError(
            f"{name}: {error}, and a conversion to {dtype}. Convert the model before shard()"
        ) from None
    if buffer.is_plain and not codec.is_identity:
        raise ValueError(
            f"{name}: expected main weights to stay in {dtypes.compute}, in which the policy has "
            f"weights computed, since they are the compute weights; found a conversion to {dtype}. "
            "Convert the model before it is sharded, or shard it at level optim"
        )
    if codec.is_identity and not buffer.is_plain and buffer.spec.optim_depth == 0:
        codec = CastCodec(dtypes.main, dtypes.compute, copies=True)
    return kind, codec
