"""Megatron-Core's optimizers over sharded parameters. This file imports Megatron-Core.

The optimizers step the wrapper's parameters, which are the main weights: each rank holds slices of
them, in fp32 even if modules compute in bf16 or fp16. There are three differences from
Megatron-Core:

    norms, zeros        summed over the ranks that shard a parameter, then over model-parallel ranks
    master weights      are the parameters themselves: no copy before or after a step
    sharded_state_dict  full tensors on the host, with the keys of Megatron-Core's own optimizers

``torch._amp_foreach_non_finite_check_and_unscale_`` on sharded tensors reduces the flag of Inf and
NaN over the data-parallel ranks. Megatron-Core's own all-reduce then reduces it over model-parallel
ranks.

[Note: Optimizer state in Megatron-Core's checkpoints]
Entries have the keys and shapes of ``Float16OptimizerWithFloat16Params``:
``optimizer.state.exp_avg.<key>`` and ``optimizer.state.fp32_param.<key>`` with the ``<key>`` of the
model's entry. If the metadata select the format ``fully_reshardable``, entries have the keys and
shapes of ``DistributedOptimizer``, with ``param`` instead of ``fp32_param`` and the step in the
param groups. Therefore checkpoints, including those of Megatron-Core's own optimizers, can be
loaded at any level and number of ranks. While a rank saves or loads, it holds the full state of its
model-parallel shard on the host, as Megatron-Core does with ``fully_reshardable``. On the device,
the state of only one buffer at a time is full.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.full_values import gather_state
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.megatron.distributed_data_parallel import (
    DistributedDataParallel,
    entries_by_parameter,
)
from fsdp_engine.memory import allocator
from fsdp_engine.optim.clip import total_norm

# Values of the attribute ``grad_norm_group``. Gradients of parameters with the same value are
# clipped together, by their own norm. megatron-core 0.16 has no such values.
_NORM_GROUPS: tuple[str, ...] = getattr(optimizer_module, "SEPARATE_GRAD_NORM_GROUPS", ())

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
_MAIN_WEIGHTS = "fp32_param"
# The metadata's field for the format of DistributedOptimizer, and its supported value; see
# [Note: Optimizer state in Megatron-Core's checkpoints].
_FORMAT, _FULLY_RESHARDABLE = "distrib_optim_sharding_type", "fully_reshardable"
# Megatron-Core's key of the main weights in a state dict, also for bf16.
_MASTERS = "fp32_from_fp16_params"


class _NormGroups:
    """Mixin that computes the norm of gradients separately for each norm group."""

    norm_of_group: Any
    has_grad_norm_group: Any
    grad_norms_by_group: dict[str, float]

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Returns the 2-norm of all gradients without a norm group. Each parameter counts once.
        Collective."""
        return float(self.norm_of_group(None))

    @torch.no_grad()
    def _compute_grad_norms_by_group(self) -> dict[str, float]:
        """Returns the norm of each norm group that some rank has. Collective."""
        found = [group for group in _NORM_GROUPS if self.has_grad_norm_group(group)]
        self.grad_norms_by_group = {group: self.norm_of_group(group) for group in found}
        return self.grad_norms_by_group


class _ShardedOptimizer(_NormGroups):
    """Mixin for Megatron-Core's optimizers; see the module docstring.

    Attributes:
        chunks: Wrapped modules; the optimizer steps some or all of their parameters.
    """

    chunks: Sequence[DistributedDataParallel]
    optimizer: Any
    config: Any
    get_parameters: Any
    get_grad_stats_parallel_group: Any

    def norm_of_group(self, norm_group: str | None) -> float:
        """Returns the 2-norm of the gradients whose parameters have this ``grad_norm_group``; None:
        of the parameters without one. Collective."""
        return math.sqrt(self._sum_over_ranks(_squared_norm, self._grads(norm_group)))

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip gradients to a norm of ``clip_grad``, each norm group separately. Returns the norm
        before clipping of the gradients without a norm group. Collective."""
        norm = self.get_grad_norm()
        others = self._compute_grad_norms_by_group()
        norms: list[tuple[str | None, float]] = [(None, norm), *others.items()]
        for norm_group, each in norms:
            params = [one for one in self.get_parameters() if _norm_group_of(one) == norm_group]
            if params:
                clip_grad_by_total_norm_fp32(params, clip_grad, each)
        return norm

    def count_zeros(self) -> float:
        """Returns the number of zeros in all gradients. Collective."""
        grads = [grad for group in (None, *_NORM_GROUPS) for grad in self._grads(group)]
        return self._sum_over_ranks(_num_zeros, grads)

    def _grads(self, norm_group: str | None) -> list[Tensor]:
        """Returns the gradients of the parameters of a norm group. If model-parallel ranks hold
        replicas of a parameter, only one of them returns its gradient."""
        optimizer: Any = self
        if not hasattr(optimizer, "get_grads_for_grad_norm"):  # megatron-core 0.16
            return list(optimizer.get_main_grads_for_grad_norm())
        return list(optimizer.get_grads_for_grad_norm(norm_group))

    def _sum_over_ranks(self, of_slices: Any, grads: Iterable[Any]) -> float:
        """Returns the sum of ``of_slices(slices)`` over the ranks that hold shards of the
        gradients."""
        by_groups: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
        for grad in grads:
            is_flat = isinstance(grad, FlatDTensor)
            groups = grad.flat_placement.groups if is_flat else ()
            local = grad.local if is_flat else grad.detach().reshape(-1)
            by_groups.setdefault(groups, []).append(local)
        device = self.chunks[0].engine.mesh.device
        total = allocator.zeros((), torch.float64, device)
        for groups, slices in by_groups.items():
            part = of_slices(slices, device)
            for group in groups:
                all_reduce_(part, group, what="statistics of gradients")
            total += part
        all_reduce_(total, self.get_grad_stats_parallel_group(), what="statistics of gradients")
        return float(total)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Do nothing: the model's parameters are the main weights, in full precision.

        Args:
            state_dict: The model's state dict. It is ignored, since loading it has set the main
                weights.
        """

    def save_parameter_state(self, filename: str) -> NoReturn:
        """Raise an error: one file with the state of all data-parallel ranks is not supported.

        Raises:
            RuntimeError: The method was called.
        """
        raise RuntimeError(_NO_STATE_FILE)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Raise an error, as :meth:`save_parameter_state` does.

        Raises:
            RuntimeError: The method was called.
        """
        raise RuntimeError(_NO_STATE_FILE)

    # --- Megatron-Core's distributed checkpoints ---

    def _sharded_state(
        self, entries: Any, is_loading: bool, metadata: dict[str, Any] | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Returns the state and param groups of the torch optimizer, and the main weights by group,
        as entries of a checkpoint. Collective unless ``is_loading``.

        Args:
            entries: Megatron-Core's sharded state dict of the model.
            is_loading: Gather nothing; the entries have uninitialized tensors, which the load
                fills.
            metadata: The metadata of the checkpoint.

        Raises:
            ValueError: ``entries`` lacks a parameter, or the steps of parameters differ.
        """
        is_fully_reshardable = (metadata or {}).get(_FORMAT) == _FULLY_RESHARDABLE
        sharded, _ = extract_sharded_tensors_and_factories(entries)
        by_param = entries_by_parameter(nested_values(sharded))
        params = self.get_parameters()
        names = self._names()
        for param in params:
            if id(param) not in by_param:
                raise ValueError(
                    f"model_sharded_state_dict: expected an entry for {names[id(param)]}; found "
                    "none. Call sharded_state_dict() of all wrapped chunks, and pass the results "
                    "together, before you call it again"
                )
        packed = self.optimizer.state_dict()
        steps = [state[_STEP] for state in packed[_STATE].values() if _STEP in state]
        keys = self._state_keys()
        full_state = self._empty_full_state(keys) if is_loading else self._gather_full_state(keys)

        def entry(param: Tensor, key: str) -> Any:
            value = full_state[key][id(param)]
            name = "param" if is_fully_reshardable and key == _MAIN_WEIGHTS else key
            prefix = f"optimizer.state.{name}"
            return make_sharded_optimizer_tensor(by_param[id(param)], value, prefix)

        state: dict[Any, Any] = {
            index: {key: entry(param, key) for key in keys} for index, param in enumerate(params)
        }
        if steps:
            if any(step != steps[0] for step in steps):
                raise ValueError(
                    "sharded_state_dict: expected the same step for all parameters, since "
                    "Megatron-Core's format stores one step; found "
                    f"{sorted({float(each) for each in steps})}"
                )
            state["common_step"] = copy.deepcopy(steps[0])
        groups = copy.deepcopy(packed[_GROUPS])
        for group in groups:
            group["params"] = LocalNonpersistentObject(group["params"])
            if is_fully_reshardable and steps:
                group[_STEP] = float(steps[0])
        masters = [[entry(param, _MAIN_WEIGHTS) for param in row] for row in self._master_params()]
        return {_STATE: state, _GROUPS: groups}, masters

    def _state_keys(self) -> list[str]:
        """Returns the names of the state tensors with the parameter's shape, even before the first
        step."""
        keys: dict[str, None] = {}
        if self.config.optimizer == "adam":
            keys = dict.fromkeys(("exp_avg", "exp_avg_sq"))
        elif self.config.sgd_momentum:
            keys = {"momentum_buffer": None}
        for param in self.get_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                if key != _STEP and isinstance(value, Tensor) and value.shape == param.shape:
                    keys[key] = None
        return list(keys)

    def _master_params(self) -> list[list[Tensor]]:
        """Returns each group's parameters whose compute dtype differs from their main dtype."""
        low = {id(param) for buffer, param in self._params_by_buffer() if _has_compute_copy(buffer)}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [[param for param in group["params"] if id(param) in low] for group in groups]

    def _params_by_buffer(self) -> Iterator[tuple[ParamAndGradBuffer, Tensor]]:
        for chunk in self.chunks:
            for buffer in chunk.engine.buffers:
                for param in buffer.sharded_params:
                    yield buffer, param

    def _names(self) -> dict[int, str]:
        return {
            id(param): record.name
            for chunk in self.chunks
            for buffer in chunk.engine.buffers
            for record, param in zip(buffer.records, buffer.sharded_params, strict=True)
        }

    def _empty_full_state(self, keys: list[str]) -> dict[str, dict[int, Tensor]]:
        """Returns uninitialized full tensors on the host, by key and ``id`` of the parameter."""
        return {
            key: {
                id(param): allocator.empty(tuple(param.shape), param.dtype, "cpu")
                for param in self.get_parameters()
            }
            for key in [*keys, _MAIN_WEIGHTS]
        }

    def _gather_full_state(self, keys: list[str]) -> dict[str, dict[int, Tensor]]:
        """Returns the full state on the host, by key and ``id`` of the parameter. Collective."""
        own = {id(param) for param in self.get_parameters()}
        found: dict[str, dict[int, Tensor]] = {key: {} for key in [*keys, _MAIN_WEIGHTS]}
        for chunk in self.chunks:
            for buffer in chunk.engine.buffers:
                params = buffer.sharded_params
                places = [index for index, param in enumerate(params) if id(param) in own]
                for key in found if places else ():
                    if key == _MAIN_WEIGHTS:
                        if not _has_compute_copy(buffer):
                            continue
                        state: list[Tensor | None] = [param.detach() for param in params]
                    else:
                        state = [self.optimizer.state.get(param, {}).get(key) for param in params]
                    full_state = gather_state(buffer, key, state)
                    for index in places:
                        found[key][id(params[index])] = full_state[index].to("cpu", copy=True)
        return found

    def _load_sharded_state(self, state_dict: dict[str, Any], masters: Any) -> dict[str, Any]:
        """Returns the loaded state with this rank's slices, for the torch optimizer. Copies the
        loaded main weights into the parameters. Does not change ``state_dict``.

        Args:
            state_dict: The state dict of the torch optimizer, with parameters as indices.
            masters: Full main weights by group; empty if the checkpoint has none.
        """
        params = self.get_parameters()
        loaded = dict(state_dict[_STATE])
        step = loaded.pop("common_step", None)
        groups = [dict(group) for group in state_dict[_GROUPS]]
        for group in groups:
            # Megatron-Core's distributed optimizer over torch's Adam writes the step into groups.
            if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
                in_group = group.pop(_STEP, None)
                step = in_group if step is None else step
        states: dict[int, dict[str, Any]] = {}
        for index, state in loaded.items():
            states[index] = {key: _slice_like(params[index], value) for key, value in state.items()}
            if step is not None:
                states[index][_STEP] = torch.as_tensor(step, dtype=torch.float32).clone()
            elif isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
                # The state was saved before the first step, when Adam has no state.
                states[index] = states[index] if _STEP in state else {}
        with torch.no_grad():
            for row, values in zip(self._master_params(), masters, strict=False):
                for param, value in zip(row, values, strict=True):
                    param.copy_(_slice_like(param, value))
        if masters:
            for chunk in self.chunks:
                chunk.engine.weights_changed()
                chunk._gather_unless_overlapped()
        found = {index: state for index, state in states.items() if state}
        return {**state_dict, _STATE: found, _GROUPS: groups}


class ShardedFP32Optimizer(_ShardedOptimizer, FP32Optimizer):
    """Megatron-Core's ``FP32Optimizer`` over sharded parameters."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the optimizer's entries of a checkpoint. Collective unless ``is_loading``. See
        [Note: Optimizer state in Megatron-Core's checkpoints]."""
        return self._sharded_state(model_sharded_state_dict, is_loading, metadata)[0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or of a loaded :meth:`sharded_state_dict`."""
        state_dict = dict(state_dict)
        if "optimizer" in state_dict:  # DistributedOptimizer stores groups only here
            saved_groups = state_dict.pop("optimizer")[_GROUPS]
            pairs = zip(saved_groups, state_dict[_GROUPS], strict=True)
            state_dict[_GROUPS] = [{**group, **own} for group, own in pairs]
        super().load_state_dict(self._load_sharded_state(state_dict, []))


class ShardedFloat16Optimizer(_ShardedOptimizer, Float16OptimizerWithFloat16Params):
    """Megatron-Core's ``Float16OptimizerWithFloat16Params`` over sharded parameters in fp32."""

    def _copy_main_params_to_model_params(self) -> None:
        """Do nothing: main and model parameters are the same tensors, and gathers cast them."""

    _copy_main_params_to_param_buffer = _copy_main_params_to_model_params

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Do nothing: model and main parameters are the same tensors."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the optimizer's entries of a checkpoint. Collective unless ``is_loading``. See
        [Note: Optimizer state in Megatron-Core's checkpoints]."""
        inner, masters = self._sharded_state(model_sharded_state_dict, is_loading, metadata)
        found: dict[str, Any] = {"optimizer": inner, _MASTERS: masters}
        if (metadata or {}).get(_FORMAT) == _FULLY_RESHARDABLE:
            found["param_state_sharding_type"] = _FULLY_RESHARDABLE
        if self.grad_scaler:
            found["grad_scaler"] = self.grad_scaler.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or of a loaded :meth:`sharded_state_dict`.

        Collective if it contains main weights.
        """
        masters = state_dict.get(_MASTERS, ())
        inner = self._load_sharded_state(
            dict(state_dict["optimizer"]), masters if any(masters) else []
        )
        super().load_state_dict({**state_dict, "optimizer": inner, _MASTERS: []})


class ShardedChainedOptimizer(_NormGroups, ChainedOptimizer):
    """Megatron-Core's ``ChainedOptimizer`` of sharded optimizers. Each optimizer reduces its own
    statistics, which are then summed. Megatron-Core reduces some together, over one group."""

    @torch.no_grad()
    def norm_of_group(self, norm_group: str | None) -> float:
        """Returns the norm of the gradients of a norm group. Collective."""
        norms = [optimizer.norm_of_group(norm_group) for optimizer in self.chained_optimizers]
        return math.sqrt(sum(norm**2 for norm in norms))

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Returns the number of zeros in all gradients. Collective."""
        return float(sum(optimizer.count_zeros() for optimizer in self.chained_optimizers))


def sharded_optimizer(
    megatron_optimizer: Any, chunks: Sequence[DistributedDataParallel], config: Any
) -> Any:
    """Convert one of Megatron-Core's optimizers to one over sharded parameters, with the same torch
    optimizer, gradient scaler and process groups.

    Raises:
        ValueError: The optimizer has fp32 copies of parameters in a narrower dtype.
    """
    if isinstance(megatron_optimizer, ChainedOptimizer):
        each = [
            sharded_optimizer(one, chunks, config) for one in megatron_optimizer.chained_optimizers
        ]
        return ShardedChainedOptimizer(each)
    inner, init_state = megatron_optimizer.optimizer, megatron_optimizer.init_state_fn
    sharded: Any
    if isinstance(megatron_optimizer, Float16OptimizerWithFloat16Params):
        if any(map(len, getattr(megatron_optimizer, "float16_groups", ()))):
            raise ValueError(
                "preserve_fp32_weights: expected True, since main weights are in a narrower dtype "
                "than fp32 and Megatron-Core's optimizer would copy them to fp32; found False"
            )
        sharded = ShardedFloat16Optimizer(inner, config, megatron_optimizer.grad_scaler, init_state)
    else:
        sharded = ShardedFP32Optimizer(inner, config, init_state)
    sharded.chunks = chunks
    sharded.grad_stats_parallel_group = megatron_optimizer.grad_stats_parallel_group
    for name in ("tp_group", "expert_tp_group"):  # megatron-core 0.16 has only the first
        if hasattr(megatron_optimizer, name):
            setattr(sharded, name, getattr(megatron_optimizer, name))
    return sharded


_NO_STATE_FILE = (
    "save_parameter_state, load_parameter_state: expected Megatron-Core's distributed checkpoints; "
    "found the older format, in which one rank writes the state of all ranks. Use "
    "--ckpt-format torch_dist (sharded_state_dict), or fsdp_engine.Checkpointer"
)


def _norm_group_of(param: Tensor) -> str | None:
    found = getattr(param, "grad_norm_group", None)
    return found if found in _NORM_GROUPS else None


def _squared_norm(slices: Iterable[Tensor], device: torch.device) -> Tensor:
    return total_norm(list(slices), 2.0, None, device).double().square()


def _num_zeros(slices: Iterable[Tensor], device: torch.device) -> Tensor:
    total = allocator.zeros((), torch.float64, device)
    for each in slices:
        total += each.numel() - torch.count_nonzero(each)
    return total


def _has_compute_copy(buffer: ParamAndGradBuffer) -> bool:
    """Returns whether the compute dtype differs from the main weights' dtype."""
    return buffer.kind.dtypes.compute != buffer.kind.dtypes.main


def _slice_like(param: Tensor, value: Any) -> Any:
    """Returns this rank's shard of a full value with the parameter's shape; any other value
    unchanged."""
    if (
        not isinstance(value, Tensor)
        or isinstance(value, FlatDTensor)
        or value.shape != param.shape
    ):
        return value
    if not isinstance(param, FlatDTensor):
        return value.to(param.device)
    placement = param.flat_placement
    local = placement.slice_of_full(value).to(param.device, copy=True)
    return FlatDTensor.from_flat_local(local, placement)
