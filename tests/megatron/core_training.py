"""Megatron-Core's GPT, trained by its own loop, with its own wrapper or with this package's.

The two differ by an import, and by the levels of the case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from tests.megatron.core_on_cpu import on_cpu

VOCAB, LENGTH, HIDDEN, BATCH, STEPS = 32, 8, 16, 2, 3


@dataclass(frozen=True)
class Case:
    """How to train.

    Attributes:
        level: of our wrapper.
        tensor, pipeline: sizes of these groups; the others are data parallel.
        bf16: of weights; else fp32.
        tied: the output layer shares the embedding's weight.
        per_token: losses are sums over tokens, and ranks have different numbers of them.
        sequence: sequence parallel, beside tensor parallel.
        overlap: of reductions and gathers, in our wrapper and, as far as it has that, in theirs.
        bucket_size: elements.
        microbatches: of a step.
        optimizer: "sgd" or "adam", of Megatron-Core.
        own_optimizer: torch's own of that name instead, with our clipping.
        grads_in_fp32: reduce in fp32.
        virtual: chunks of each pipeline rank, for the interleaved schedule.
        sync_funcs: the schedule says when to reduce and to gather.
        experts: expert-parallel ranks of layers with four experts and biased routers; 0: dense.
        expert_tensor: tensor-parallel ranks of an expert.
        layers: of the model; None: 2, or 4 with ``virtual``.
        recompute: None, "selective", or the method of full recomputation, "uniform" or "block".
        their_finalize: Megatron-Core's own ``finalize_model_grads`` after our wrapper.
    """

    level: str = "no_shard"
    tensor: int = 1
    pipeline: int = 1
    bf16: bool = False
    tied: bool = True
    per_token: bool = False
    sequence: bool = False
    overlap: bool = False
    bucket_size: int | None = None
    microbatches: int = 2
    optimizer: str = "sgd"
    own_optimizer: bool = False
    grads_in_fp32: bool = True
    virtual: int | None = None
    sync_funcs: bool = False
    experts: int = 0
    expert_tensor: int = 1
    recompute: str | None = None
    layers: int | None = None
    their_finalize: bool = False


@dataclass
class Trained:
    """Results of a rank by step: the losses of its microbatches, and the gradients' norm."""

    losses: list[list[float]]
    norms: list[float]


def make_gpt(
    *, dtype: torch.dtype, virtual: int | None, tied: bool, experts: dict[str, Any], **fields: Any
) -> tuple[Any, list[Any]]:
    """Megatron-Core's config and this rank's shard of a small GPT, in chunks.

    Args:
        dtype: of its weights.
        virtual: chunks of each pipeline rank; None: one, without virtual stages.
        tied: the output layer shares the embedding's weight.
        experts: fields of the config where layers have four experts; empty: dense.
        **fields: of the config beside these and sizes.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        # Fused kernels are compiled, for a minute.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **experts,
        **fields,
    )
    torch.manual_seed(3)
    models = []
    for chunk in range(virtual or 1):
        vp_stage = chunk if virtual else None
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=4 if experts else None),
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=tied,
            vp_stage=vp_stage,
        )
        models.append(model.to(dtype))
    return config, models


def make_models(case: Case) -> tuple[Any, list[Any]]:
    """:func:`make_gpt` of a case."""
    experts: dict[str, Any] = {
        "num_moe_experts": 4,
        "expert_model_parallel_size": case.experts,
        "expert_tensor_parallel_size": case.expert_tensor,
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "add_bias_linear": False,
    }
    recompute: dict[str, Any] = {}
    if case.recompute == "selective":
        recompute = {"recompute_granularity": "selective"}
    elif case.recompute is not None:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": case.recompute,
            "recompute_num_layers": 1,
        }
    return make_gpt(
        dtype=torch.bfloat16 if case.bf16 else torch.float32,
        virtual=case.virtual,
        tied=case.tied,
        experts=experts if case.experts else {},
        num_layers=case.layers or (4 if case.virtual else 2),
        num_attention_heads=max(2, case.tensor),
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        calculate_per_token_loss=case.per_token,
        sequence_parallel=case.sequence,
        **recompute,
    )


def wrap(case: Case, ours: bool, config: Any, model: Any) -> Any:
    """The model in Megatron-Core's wrapper, or in ours, called as it calls its own."""
    from megatron.core import distributed

    fields: dict[str, Any] = {
        "grad_reduce_in_fp32": case.grads_in_fp32,
        "overlap_grad_reduce": case.overlap,
        "bucket_size": case.bucket_size,
    }
    if ours:
        fields |= {
            "overlap_param_gather": case.overlap,
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": case.level,
        }
    theirs: Any = distributed
    ddp_config = theirs.DistributedDataParallelConfig(**fields)
    wrapper = fe.DistributedDataParallel if ours else theirs.DistributedDataParallel
    return wrapper(config=config, ddp_config=ddp_config, module=model)


@contextlib.contextmanager
def model_parallel(case: Case) -> Iterator[None]:
    """Within it Megatron-Core runs, on a CPU, with the case's groups."""
    with on_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            case.tensor,
            case.pipeline,
            case.virtual,
            expert_model_parallel_size=case.experts or 1,
            expert_tensor_parallel_size=case.expert_tensor,
        )
        try:
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()


def train(case: Case, ours: bool) -> Trained:
    """Trains on all ranks of the default group, by Megatron-Core's schedules."""
    with model_parallel(case):
        return _train(case, ours)


def _train(case: Case, ours: bool) -> Trained:
    from megatron.core import distributed, parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, models = make_models(case)
    theirs: Any = distributed
    chunks = [wrap(case, ours, config, model) for model in models]
    step, optimizer = _make_step(case, chunks, ours)
    config.finalize_model_grads_func = (
        fe.finalize_model_grads if ours and not case.their_finalize else theirs.finalize_model_grads
    )
    config.grad_scale_func = getattr(optimizer, "scale_loss", None)
    if case.overlap:
        config.no_sync_func = _each([chunk.no_sync for chunk in chunks])
    if case.sync_funcs:
        config.grad_sync_func = _each([chunk.start_grad_sync for chunk in chunks])
        if ours:  # theirs gathers only with its distributed optimizer
            config.param_sync_func = _each([chunk.start_param_sync for chunk in chunks])
    trained = Trained([], [])
    for number in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        seed = 100 * number + parallel_state.get_data_parallel_rank()
        losses = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, case),
            data_iterator=[_batches(seed, case.microbatches) for _ in chunks],
            model=chunks,
            num_microbatches=case.microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        trained.losses.append([each["loss"] for each in losses])
        trained.norms.append(step())
    return trained


def _each(functions: list[Any]) -> Any:
    """As schedules take them: a list only of several."""
    return functions if len(functions) > 1 else functions[0]


def _make_step(case: Case, chunks: list[Any], ours: bool) -> tuple[Callable[[], float], Any]:
    """Clip and step, which returns the norm before clipping; and the optimizer."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if case.own_optimizer and ours:
        (chunk,) = chunks
        # As OptimizerConfig has them by default.
        makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
            "adam": functools.partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-8),
        }
        own = makers[case.optimizer](chunk.parameters(), lr=0.1, weight_decay=0.0)
        fe.shard_optimizer(own)

        def step_own() -> float:
            norm = chunk.engine.clip_grad_norm_(1.0)
            own.step()
            return float(norm)

        return step_own, own
    options = OptimizerConfig(
        optimizer=case.optimizer,
        lr=0.1,
        weight_decay=0.0 if case.own_optimizer else 0.01,
        clip_grad=1.0,
        bf16=case.bf16,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
    )
    theirs = get_megatron_optimizer(options, chunks)

    def step() -> float:
        done, norm, _ = theirs.step()
        assert done
        return float(norm)

    return step, theirs


def _batches(seed: int, count: int) -> Iterator[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=dice)


def _forward_step(case: Case, batches: Iterator[Tensor], model: Any) -> Any:
    batch = next(batches)
    tokens, labels = batch[:, :-1], batch[:, 1:]
    positions = torch.arange(LENGTH)[None].expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(tokens, positions, mask, labels=labels)
    counts = torch.ones_like(labels, dtype=torch.float32)
    if case.per_token:
        counts[:, : dist.get_rank() % 2 + 1] = 0.0  # ranks of unequal length

    def mean(found: Tensor) -> Any:
        total = (found.float() * counts).sum()
        if case.per_token:
            return total, counts.sum().int(), {"loss": total.item()}
        return total / counts.sum(), {"loss": total.item()}

    return losses, mean


def differences(mine: Trained, theirs: Trained, limit: float) -> list[str]:
    """Where losses or norms differ by more than ``limit``, relatively."""
    pairs = [
        ("norm", step, *both)
        for step, both in enumerate(zip(mine.norms, theirs.norms, strict=True))
    ]
    for step, (xs, ys) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
        pairs += [("loss", step, x, y) for x, y in zip(xs, ys, strict=True)]
    return [
        f"step {step}: {what} {x} for {y}"
        for what, step, x, y in pairs
        if not abs(x - y) <= limit * abs(y)
    ]


def compare(cases: list[Case], limit: float) -> list[str]:
    """On one rank: where training with our wrapper differs from that with Megatron-Core's own."""
    references: dict[Case, Trained] = {}
    found = []
    for case in cases:
        key = dataclasses.replace(case, level="no_shard", overlap=False, bucket_size=None)
        key = dataclasses.replace(key, sync_funcs=False, their_finalize=False)
        if key not in references:
            references[key] = train(key, ours=False)
        lines = differences(train(case, ours=True), references[key], limit)
        found += [f"{case}: {line}" for line in lines]
    return found
