"""Tensor-parallel plans of published jobs, for the Llama of transformers, and their losses.

KempnerForge, kempnerforge/distributed/tensor_parallel.py of April 2026 (commits 01b461a, with which
its report was measured, and 0c4eba1): sequence parallelism; each of q, k, v, gate and up gathers
its input; the embedding is not sharded; logits are gathered for the loss, which is that of bf16
logits (scripts/train.py).

torchtitan, torchtitan/parallelisms/parallelize_llama.py of December 2024: sequence parallelism; one
gather before attention and one before the MLP (in fp8 if linears are in fp8); the embedding is
sharded by rows; the loss is computed on sharded logits in fp32 (``loss_parallel``).

Outputs of blocks are DTensors here, and local tensors in torchtitan, with the same collectives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

_NORMS = ("input_layernorm", "post_attention_layernorm")


def kempner_forge(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the plan of KempnerForge."""

    def replicate(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return DTensor.from_local(output, mesh, [Replicate()])

    model.get_submodule("model.embed_tokens").register_forward_hook(replicate)
    plan: dict[str, Any] = {f"model.layers.*.{name}": SequenceParallel() for name in _NORMS}
    for name in ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel(input_layouts=Shard(1))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = _to_sequences(RowwiseParallel)
    plan["model.norm"] = SequenceParallel()
    plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def torchtitan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the plan of torchtitan."""
    _apply_torchtitan(model, mesh, ColwiseParallel, RowwiseParallel, PrepareModuleInput)


def torchtitan_fp8(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the plan of torchtitan with linears in fp8, whose inputs are gathered in fp8."""
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    _apply_torchtitan(
        model, mesh, Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
    )


def with_symmetric_memory(apply: Callable[..., None]) -> Callable[..., None]:
    """Returns a plan that also enables symmetric memory for its group, as torchtitan does.
    Asynchronous tensor parallelism needs it."""

    def applied(model: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed import _symmetric_memory

        apply(model, mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13: no need to call it
            _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)

    return applied


def asynchronous(is_async: bool) -> AbstractContextManager[None]:
    """Context in which inductor makes tensor parallelism asynchronous, or does not."""
    from torch._inductor import config

    found: AbstractContextManager[None] = config.patch(_micro_pipeline_tp=is_async)
    return found


def torchtitan_fp8_stage(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the plan of torchtitan, with linears in fp8, to a stage of ``fe.CausalLMStages``, and
    compile its blocks. Stages send and receive local shards of sequences."""

    def to_shards(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(each, mesh, [Shard(1)]) for each in inputs)

    def to_local(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
        return output.to_local()

    model = stage.get_submodule("causal_lm")
    torchtitan_fp8(model, mesh)
    if not stage.is_first:
        stage.register_forward_pre_hook(to_shards)
    if not stage.is_last:
        stage.register_forward_hook(to_local)
    for block in model.get_submodule("model.layers").children():
        block.compile()


def _apply_torchtitan(
    model: nn.Module, mesh: DeviceMesh, by_columns: Any, by_rows: Any, prepare: Any
) -> None:
    plan: dict[str, Any] = {f"model.layers.*.{name}": SequenceParallel() for name in _NORMS}
    plan["model.layers.*.self_attn"] = prepare(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    plan["model.layers.*.mlp"] = prepare(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    for name in ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = by_columns()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = _to_sequences(by_rows)
    ends = {
        "model.embed_tokens": _to_sequences(RowwiseParallel, input_layouts=Replicate()),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    # A stage of a pipeline has some of these.
    modules = dict(model.named_modules())
    plan |= {
        name: style
        for name, style in ends.items()
        if not isinstance(modules.get(name, nn.Identity()), nn.Identity)
    }
    parallelize_module(model, mesh, plan)


def _to_sequences(style: Callable[..., Any], **layouts: Any) -> Any:
    """A style whose output is sharded along the sequence."""
    return style(**layouts, output_layouts=Shard(1), use_local_output=False)


def loss_of_logits(output: Any) -> Tensor:
    """Returns the cross-entropy in the dtype of the logits."""
    logits: Tensor = output.logits.flatten(0, 1)
    targets = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, targets)


def loss_in_fp32(output: Any) -> Tensor:
    """Returns the cross-entropy of the logits in fp32."""
    output.logits = output.logits.float()
    return loss_of_logits(output)
