"""Final reductions of gradients after the last microbatch: :func:`finalize_model_grads`.

Data parallelism alone needs no such reductions. Model parallelism produces partial gradients for
layers that are replicated on all tensor ranks and process a part of the sequence on each, and for
weights that are replicated on several pipeline stages. Attributes mark these parameters:

    mark                                  group                reduction
    pipeline_parallel                     pipeline             sum
    sequence_parallel                     tensor               sum
    average_gradients_across_tp_domain    tensor               average
    shared_embedding                      embedding            sum
    position_embedding                    position_embedding   sum

[Note: Token weighting]
With ``num_tokens`` a rank's loss is the *sum* over its tokens. The engine averages gradients over
the R ranks of its mesh, so they are ``1/R * sum over ranks``. The mean over all N tokens of all
ranks is ``1/N * sum over ranks``, so the factor is ``R / N``. A chunk whose config has
``calculate_per_token_loss`` sums gradients, as Megatron-Core's own ``finalize_model_grads``
expects; its factor is ``1 / N``. Only the last stage has the number of tokens, and it differs
between ranks of data and context parallelism. One all-reduce over stages, data and context, to
which the other stages contribute 0, is both the broadcast and the sum. The factor remains on the
device, without a host sync.

[Note: Router bias]
Expert biases of routers are updated for load balancing without an auxiliary loss. Wang et al. 2024,
"Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv:2408.15664): ``bias +=
rate * sign(mean count - count)``, with the attribute names of Megatron-Core's router. With the
router's quantile balancing (megatron-core 0.19), biases are moving averages of each step's
quantiles, minus the mean over experts. The quantiles are averaged over microbatches and
data-parallel ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.engine import Engine
from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel
from fsdp_engine.megatron.marked_gradients import MarkedGrad, check_equal_over_group, sum_over_group
from fsdp_engine.megatron.process_groups import (
    CollectedGroups,
    ModelParallelGroups,
    collect_groups,
    spanned_group,
)
from fsdp_engine.memory import allocator
from fsdp_engine.units.plan import label_of

# Counts in these dtypes are summed in fp32; others (integers) in fp64, which holds them exactly.
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Router:
    """A module that routes tokens to experts with a bias, and counts the tokens of each expert.

    Attributes:
        name: The name of the module.
        bias: The bias of each expert, shape ``(experts,)``.
        counts: This rank's tokens per expert since the last update, shape ``(experts,)``.
        is_updated: Whether the bias changes. False in evaluation mode and with
            ``frozen_expert_bias``; ranks still sum the counts.
    """

    name: str
    bias: Tensor
    counts: Tensor
    is_updated: bool = True


def router_of(name: str, module: nn.Module | None) -> Router | None:
    """Returns ``module`` as a router; None if its ``expert_bias`` is None or missing.

    Raises:
        ValueError: ``expert_bias`` and ``local_tokens_per_expert`` differ in shape.
    """
    bias = getattr(module, "expert_bias", None)
    if bias is None:
        return None
    counts = getattr(module, "local_tokens_per_expert", None)
    if bias.ndim != 1 or counts is None or counts.shape != bias.shape:
        found = None if counts is None else tuple(counts.shape)
        raise ValueError(
            f"{name}: expected expert_bias and local_tokens_per_expert of one shape, (experts,); "
            f"found {tuple(bias.shape)} and {found}"
        )
    is_frozen = getattr(module, "frozen_expert_bias", False)
    return Router(name, bias, counts, bool(getattr(module, "training", True)) and not is_frozen)


@torch.no_grad()
def update_expert_biases(
    routers: Sequence[Router], group: ProcessGroup | None, rate: float, device: torch.device
) -> None:
    """Update all biases from the counts of all ranks of the group in one all-reduce, and zero the
    counts.

    Args:
        routers: The routers, in the same order on all ranks.
        group: The group over which counts are summed. None: this rank only.
        rate: Absolute change of a bias per update.
        device: The device of the biases and counts.
    """
    all_counts = [router.counts for router in routers]
    narrow = all(counts.dtype in _NARROW for counts in all_counts)
    dtype = torch.float32 if narrow else torch.float64
    sizes = [counts.numel() for counts in all_counts]
    buffer = allocator.empty(sum(sizes), dtype, device)
    sums = buffer.split(sizes)
    torch._foreach_copy_(list(sums), all_counts)
    all_reduce_(buffer, group)
    for router, counts in zip(routers, sums, strict=True):
        if router.is_updated:
            offset = torch.sign(counts.mean() - counts)
            router.bias.add_(offset.to(router.bias.dtype), alpha=rate)
    torch._foreach_zero_(all_counts)


@torch.no_grad()
def update_quantile_biases(
    routers: Sequence[Any], group: ProcessGroup | None, momentum: float, device: torch.device
) -> None:
    """Average the quantiles over the group in one all-reduce, update the biases of quantile
    balancing, and zero the sums of quantiles.

    Args:
        routers: Modules with ``qb_beta`` (the bias) and ``qb_beta_accum`` (the sum of quantiles),
            shape ``(experts,)``, and ``qb_beta_count`` (the number of summands), in the same order
            on all ranks. In evaluation mode the bias does not change.
        group: The group over which quantiles are averaged. None: this rank only.
        momentum: Factor of the previous bias in the new one.
        device: The device of the biases.
    """
    sizes = [router.qb_beta_accum.numel() for router in routers]
    buffer = allocator.empty(sum(sizes), torch.float32, device)
    means = buffer.split(sizes)
    for router, mean in zip(routers, means, strict=True):
        torch.div(router.qb_beta_accum, router.qb_beta_count.clamp(min=1), out=mean)
    all_reduce_(buffer, group)
    buffer.div_(1 if group is None else group.size())
    for router, mean in zip(routers, means, strict=True):
        if router.training:
            bias = router.qb_beta.mul_(momentum).add_(mean, alpha=1 - momentum)
            bias.sub_(bias.mean(dim=-1, keepdim=True))
        router.qb_beta_accum.zero_()
        router.qb_beta_count.zero_()


AVERAGE_MARK = "average_gradients_across_tp_domain"
# The field of ModelParallelGroups for each mark. Groups are reduced in the order of FIELDS.
MARKS = {
    "pipeline_parallel": "pipeline",
    "sequence_parallel": "tensor",
    AVERAGE_MARK: "tensor",
    "shared_embedding": "embedding",
    "position_embedding": "position_embedding",
}
FIELDS = ("pipeline", "tensor", "embedding", "position_embedding")
QK_LAYER_NORMS = ("q_layernorm", "k_layernorm")


@dataclass(frozen=True)
class _EngineCache:
    """Cached properties of an engine, without a strong reference to it.

    Attributes:
        positions: The positions of parameters, by name, in the order of registration, which is the
            same on all stages.
        routers: Modules that may have an expert bias, by name.
        quantile_routers: Modules with biases of quantile balancing, by name.
        trackers: Modules that track a global auxiliary loss over a step.
        compared: Keys of the comparisons between ranks that were made.
    """

    positions: dict[str, int]
    routers: dict[str, weakref.ref[nn.Module]]
    quantile_routers: dict[str, weakref.ref[nn.Module]]
    trackers: list[weakref.ref[nn.Module]]
    compared: set[tuple[object, ...]]


_ENGINE_CACHES: weakref.WeakKeyDictionary[Engine, _EngineCache] = weakref.WeakKeyDictionary()


def finalize_model_grads(
    model_chunks: Iterable[DistributedDataParallel],
    num_tokens: int | float | Tensor | None = None,
    pg_collection: object | None = None,
    force_all_reduce: bool = False,
    *,
    groups: ModelParallelGroups | None = None,
    config: object | None = None,
) -> None:
    """Finish the gradients of a step. Call once per step, after the last microbatch. Collective.

    The function executes these items in order. Items 4 and 5 send at most two all-reduces each,
    and items 2, 3 and 6 at most one. (The first call also compares the ranks' marks.)

    1. ``finish_grad_sync`` is called on every chunk.
    2. Gradients of parameters marked ``pipeline_parallel`` are summed over the stages (and over
       this rank's chunks if several chunks have a parameter of one name).
    3. Gradients of parameters marked ``sequence_parallel``, and with ``config.qk_layernorm`` of
       parameters whose names contain ``q_layernorm`` or ``k_layernorm``, are summed over tensor
       ranks. Gradients of parameters marked ``average_gradients_across_tp_domain`` are averaged.
    4. Gradients of parameters marked ``shared_embedding``, then of those marked
       ``position_embedding``, are summed over the stages that hold a copy.
    5. In modules with buffers ``expert_bias`` and ``local_tokens_per_expert``, each of shape
       ``(experts,)``, counts are summed over tensor x context x data, then
       ``bias += rate * sign(mean count - count)`` is computed and counts are zeroed. (Loss-free
       balancing, Wang et al. 2024, arXiv:2408.15664.) The bias does not change in evaluation mode
       or with ``frozen_expert_bias``. If ``config.moe_router_load_balancing_type`` is
       "quantile_balancing", ``qb_beta`` of modules is updated from the mean of
       ``qb_beta_accum / qb_beta_count`` over context x data. If it contains "global_aux_loss",
       ``reset_global_aux_loss_tracker`` of modules is called.
    6. With ``num_tokens`` gradients are scaled to those of the mean loss over all tokens, provided
       that every rank's loss is the sum over its tokens. See [Note: Token weighting].

    Frozen parameters are skipped. If no rank of a group has a gradient, it remains None.

    Args:
        model_chunks: The chunks of this rank (several with a virtual pipeline).
        num_tokens: This rank's number of tokens in all microbatches together, as a number or a
            tensor of one element. Only the value of the last stage is used. Pass it on all ranks or
            on none.
        pg_collection: Megatron-Core's ``ProcessGroupCollection``. If it and ``groups`` are None,
            the groups that the chunks were wrapped with are used, or those of ``parallel_state``.
        force_all_reduce: Also gather full gradients; see
            ``DistributedDataParallel.finish_grad_sync``.
        groups: This rank's process groups, as this package's class.
        config: Any object with the attributes ``qk_layernorm`` (default False),
            ``sequence_parallel`` (default True: marks of that name are used),
            ``moe_router_bias_update_rate`` (default 1e-3), ``moe_router_load_balancing_type`` and
            ``moe_router_quantile_balancing_ema`` (default 0). None: the first chunk's config, if it
            was wrapped with Megatron-Core's ``TransformerConfig``.

    Raises:
        ValueError: Both ``groups`` and ``pg_collection`` are given; the group of a marked parameter
            is None; marks contradict each other; ranks of a group hold different slices; token
            counts are needed and ``data`` and ``context`` do not contain the ranks of a chunk's
            mesh; ``num_tokens`` has several elements; an ``expert_bias`` and its counts differ in
            shape. Gradients are not changed in these cases.
        TypeError: An argument has another type.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, Iterable) else [model_chunks]
    _check_types(chunks, num_tokens, groups)
    groups = _groups_of(chunks, groups, pg_collection)
    if not chunks:
        return
    if config is None:
        config = getattr(chunks[0], "config", None)
    rate = float(getattr(config, "moe_router_bias_update_rate", 1e-3))
    marked = _find_marked(chunks, groups, config)
    routers = [
        router
        for chunk in chunks
        for name, module in _cache_of(chunk.engine).routers.items()
        if (router := router_of(name, module())) is not None
    ]
    balancing = getattr(config, "moe_router_load_balancing_type", None) or ()
    quantile_routers: dict[str, Any] = {}
    if balancing == "quantile_balancing":
        quantile_routers = {
            f"chunk {number}: {name}": module()
            for number, chunk in enumerate(chunks)
            for name, module in _cache_of(chunk.engine).quantile_routers.items()
        }
    reasons = ["num_tokens"] if num_tokens is not None else []
    reasons += [f"expert_bias of {router.name}" for router in routers]
    reasons += [f"qb_beta of {name}" for name in quantile_routers]
    if reasons:
        _check_data_groups(chunks, groups, reasons[0])
    device = chunks[0].engine.mesh.device
    with torch.no_grad():
        _compare(chunks, marked, groups)
        counts_group: ProcessGroup | None = None
        quantiles_group: ProcessGroup | None = None
        tokens_group: ProcessGroup | None = None
        if routers:
            axes = [groups.tensor, groups.context, groups.data, groups.expert]
            biases = [(router.name, router.bias) for router in routers]
            counts_group = _spanned_group(chunks, axes, "an expert_bias", biases)
        if quantile_routers:  # tensor-parallel ranks have the same quantiles
            biases = [(name, router.qb_beta) for name, router in quantile_routers.items()]
            axes = [groups.context, groups.data]
            quantiles_group = _spanned_group(chunks, axes, "a qb_beta", biases)
        if num_tokens is not None:
            axes = [groups.pipeline, groups.data, groups.context]
            tokens_group = _spanned_group(chunks, axes, "num_tokens")
        for chunk in chunks:
            chunk.finish_grad_sync()
        for field in FIELDS:
            if marked[field]:
                sum_over_group(marked[field], getattr(groups, field), device)
        if routers:
            update_expert_biases(routers, counts_group, rate, device)
        if quantile_routers:
            momentum = float(getattr(config, "moe_router_quantile_balancing_ema", 0.0))
            modules = [*quantile_routers.values()]
            update_quantile_biases(modules, quantiles_group, momentum, device)
        if "global_aux_loss" in balancing:
            for tracker in (each for chunk in chunks for each in _cache_of(chunk.engine).trackers):
                module: Any = tracker()
                if module is not None:
                    module.reset_global_aux_loss_tracker()
        if num_tokens is not None:
            _scale(chunks, _tokens_of_last_stage(num_tokens, groups, device), tokens_group)
        if force_all_reduce:
            for chunk in chunks:
                chunk.finish_grad_sync(force_all_reduce=True)


def _check_types(
    chunks: Sequence[DistributedDataParallel], num_tokens: object, groups: object
) -> None:
    if groups is not None and not isinstance(groups, ModelParallelGroups):
        raise TypeError(f"groups: expected ModelParallelGroups; found {type(groups).__name__}")
    for chunk in chunks:
        if not isinstance(getattr(chunk, "engine", None), Engine):
            raise TypeError(
                "model_chunks: expected a list of DistributedDataParallel; found "
                f"{type(chunk).__name__}"
            )
    if num_tokens is None:
        return
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | float | Tensor):
        raise TypeError(f"num_tokens: expected a number or a tensor; found {num_tokens!r}")
    if isinstance(num_tokens, Tensor) and num_tokens.numel() != 1:
        raise ValueError(f"num_tokens: expected one element; found shape {tuple(num_tokens.shape)}")


def _groups_of(
    chunks: Sequence[DistributedDataParallel],
    groups: ModelParallelGroups | None,
    collection: object | None,
) -> ModelParallelGroups:
    if groups is not None:
        if collection is not None:
            raise ValueError("groups, pg_collection: expected one of them; found both")
        return groups
    wrapped_with = [getattr(chunk, "groups", None) for chunk in chunks[:1]]
    if collection is None and wrapped_with and isinstance(wrapped_with[0], CollectedGroups):
        return wrapped_with[0].for_gradients()
    found = collect_groups(collection)
    return found.for_gradients() if found is not None else ModelParallelGroups()


def _check_data_groups(
    chunks: Sequence[DistributedDataParallel], groups: ModelParallelGroups, reason: str
) -> None:
    for chunk in chunks:
        size = chunk.engine.mesh.size
        if size > 1 and groups.data is None and groups.context is None:
            raise ValueError(
                f"groups.data, groups.context: expected a ProcessGroup in at least one, for "
                f"{reason}, since the chunk's mesh has {size} ranks; found None in both"
            )


def _find_marked(
    chunks: Sequence[DistributedDataParallel], groups: ModelParallelGroups, config: object
) -> dict[str, list[MarkedGrad]]:
    """Returns the gradients to reduce over each group, by the group's field."""
    has_qk_norms = bool(getattr(config, "qk_layernorm", False))
    marks = [*MARKS]
    if not getattr(config, "sequence_parallel", True):
        marks.remove("sequence_parallel")
    places: dict[str, dict[tuple[int, str, bool], list[tuple[ParamAndGradBuffer, int]]]]
    places = {field: {} for field in FIELDS}
    for number, chunk in enumerate(chunks):
        candidates = [
            (record.name, buffer, index)
            for buffer in chunk.engine.buffers
            if buffer.grads is not None
            for index, record in enumerate(buffer.records)
            if has_qk_norms or set(marks) & vars(buffer.sharded_params[index]).keys()
        ]
        positions = _cache_of(chunk.engine).positions
        for name, buffer, index in sorted(candidates, key=lambda each: positions[each[0]]):
            param = buffer.sharded_params[index]
            found = [mark for mark in marks if getattr(param, mark, False)]
            sums = _sums_of(name, param, found, groups, has_qk_norms)
            for field, average in sums.items():
                # Replicas in the chunks of a virtual pipeline have the same name.
                key = (-1 if field == "pipeline" else number, name, average)
                places[field].setdefault(key, []).append((buffer, index))
    sums_by_field = {}
    for field, by_key in places.items():
        group = getattr(groups, field)
        marked = [MarkedGrad(name, tuple(at), avg) for (_, name, avg), at in by_key.items()]
        several = group is not None and group.size() > 1
        sums_by_field[field] = [each for each in marked if several or len(each.places) > 1]
    return sums_by_field


def _sums_of(
    name: str,
    param: Tensor,
    marks: Sequence[str],
    groups: ModelParallelGroups,
    has_qk_norms: bool,
) -> dict[str, bool]:
    """Returns the fields of the groups over which the parameter's gradient is reduced, and for each
    whether the gradient is averaged."""
    if not param.requires_grad:
        return {}
    if AVERAGE_MARK in marks and "sequence_parallel" in marks:
        raise ValueError(
            f"{name}: expected one of the marks sequence_parallel (sum) and {AVERAGE_MARK}; "
            "found both"
        )
    for mark in marks:
        if getattr(groups, MARKS[mark]) is None:
            raise ValueError(
                f"{name}: expected a ProcessGroup in groups.{MARKS[mark]}, since the parameter is "
                f"marked {mark}; found None"
            )
    sums = {MARKS[mark]: mark == AVERAGE_MARK for mark in marks}
    if has_qk_norms and groups.tensor is not None and any(part in name for part in QK_LAYER_NORMS):
        sums.setdefault("tensor", False)
    return sums


def _compare(
    chunks: Sequence[DistributedDataParallel],
    marked: dict[str, list[MarkedGrad]],
    groups: ModelParallelGroups,
) -> None:
    """Compare slices between ranks, once per set of parameters and group; see
    [Note: Equal slices]."""
    compared = _cache_of(chunks[0].engine).compared
    for field in FIELDS:
        group: ProcessGroup | None = getattr(groups, field)
        # Ranks without marked parameters also take part, because other ranks may have some.
        if group is None or (group.size() == 1 and not marked[field]):
            continue
        ids = [id(b.sharded_params[i]) for each in marked[field] for b, i in each.places]
        key = (field, group.group_name, *ids)
        if key in compared:
            continue
        for each in marked[field]:
            if len(set(each.descriptions())) > 1:
                raise ValueError(
                    f"{each.name}: expected the same slice in all chunks, since it is marked "
                    f"pipeline_parallel; found {each.descriptions()}"
                )
        names = [each.name for each in marked[field]]
        slices = [each.descriptions()[0] for each in marked[field]]
        check_equal_over_group(f"marked parameters of groups.{field}", names, slices, group)
        compared.add(key)


def _spanned_group(
    chunks: Sequence[DistributedDataParallel],
    axes: Sequence[ProcessGroup | None],
    what: str,
    biases: Sequence[tuple[str, Tensor]] = (),
) -> ProcessGroup | None:
    """Returns the group that spans ``axes``. The first call checks that the group contains the
    chunks' meshes, and that its ranks have the same number of ``biases`` (name of the module,
    value), of the same sizes."""
    group = spanned_group(chunks[0].engine.mesh.device, *axes)
    compared = _cache_of(chunks[0].engine).compared
    engines, values = (id(chunk.engine) for chunk in chunks), (id(bias) for _, bias in biases)
    key = (what, group and group.group_name, *engines, *values)
    if key not in compared:
        _check_covers_meshes(chunks, group)
        if biases and group is not None:
            sizes = [f"{bias.numel()} experts" for _, bias in biases]
            names = [name for name, _ in biases]
            check_equal_over_group(f"modules with {what}", names, sizes, group)
        compared.add(key)
    return group


def _check_covers_meshes(
    chunks: Sequence[DistributedDataParallel], group: ProcessGroup | None
) -> None:
    for chunk in chunks:
        ranks = chunk.engine.mesh.device_mesh.mesh.flatten().tolist()
        reached = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
        if not set(ranks) <= set(reached):
            raise ValueError(
                "groups.data, groups.context: expected groups that span all ranks of the chunk's "
                f"mesh, {ranks[:16]}; found that all given groups span only {reached[:16]}"
            )


def _tokens_of_last_stage(
    num_tokens: int | float | Tensor, groups: ModelParallelGroups, device: torch.device
) -> Tensor:
    """Returns this rank's contribution to the number of tokens, 0-d fp64: 0 unless on the last
    stage."""
    pipeline = groups.pipeline
    if pipeline is not None and pipeline.rank() != pipeline.size() - 1:
        return torch.zeros((), dtype=torch.float64, device=device)
    if isinstance(num_tokens, Tensor):
        # The tensor is copied, so that the all-reduce does not modify the user's tensor.
        return num_tokens.detach().reshape(()).to(device, torch.float64, copy=True)
    return torch.full((), num_tokens, dtype=torch.float64, device=device)


def _scale(
    chunks: Sequence[DistributedDataParallel], tokens: Tensor, group: ProcessGroup | None
) -> None:
    """Scale gradients to the mean over all tokens; see [Note: Token weighting]."""
    total = all_reduce_(tokens, group).clamp_(min=1.0)
    for chunk in chunks:
        dtypes = {b.kind.dtypes.main_grad for b in chunk.engine.buffers if b.grads is not None}
        factor = (1 if chunk.sums_gradients else chunk.engine.mesh.size) / total
        chunk.scale_gradients(factor if torch.float64 in dtypes else factor.float())


def _cache_of(engine: Engine) -> _EngineCache:
    if engine not in _ENGINE_CACHES:
        names = (name for name, _ in engine.model.named_parameters())
        routers = {
            label_of(name): weakref.ref(module)
            for name, module in engine.model.named_modules()
            if hasattr(module, "expert_bias")
        }
        quantile_routers = {
            label_of(name): weakref.ref(module)
            for name, module in engine.model.named_modules()
            if getattr(module, "qb_beta_accum", None) is not None
        }
        trackers = [
            weakref.ref(module)
            for module in engine.model.modules()
            if hasattr(module, "reset_global_aux_loss_tracker")
        ]
        positions = {name: at for at, name in enumerate(names)}
        _ENGINE_CACHES[engine] = _EngineCache(positions, routers, quantile_routers, trackers, set())
    return _ENGINE_CACHES[engine]
