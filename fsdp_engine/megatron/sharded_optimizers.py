"""Megatron-Core's optimizers over sharded parameters. Imports Megatron-Core.

Its classes step the wrapper's parameters: the main weights, of which a rank holds slices, in fp32
also where modules compute in bf16 or fp16. They need nothing else for a step. What differs:

    norm, zeros         summed over the ranks that share a parameter, then over model-parallel ranks
    master weights      are the parameters themselves: nothing is copied before or after a step
    sharded_state_dict  whole tensors on the host, by the keys of Megatron-Core's own optimizers

Inf and NaN that one rank finds in its slices reach the others in
``torch._amp_foreach_non_finite_check_and_unscale_`` of sharded tensors, then Megatron-Core's own
all-reduce over model-parallel ranks.

[Note: Optimizer state in Megatron-Core's checkpoints]
Entries have the keys and the shapes of those of ``Float16OptimizerWithFloat16Params``:
``optimizer.state.exp_avg.<key>``, ``optimizer.state.fp32_param.<key>``, ``<key>`` being that of the
model's entry. Where the metadata ask for the format ``fully_reshardable``, they are those of
``DistributedOptimizer``, which says ``param`` for ``fp32_param`` and keeps the step in param
groups. So checkpoints load at any level and number of ranks, and those of Megatron-Core's own
optimizers load here. Each rank holds the whole state of its model-parallel part on the host while
it saves or loads, as with ``fully_reshardable``; on the device one buffer at a time is whole.
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
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.devices import memory
from fsdp_engine.devices.collectives import all_reduce_
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel
from fsdp_engine.megatron.whole_weights import entries_by_parameter
from fsdp_engine.optimizer.clip import total_norm

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
_MAIN_WEIGHTS = "fp32_param"
# The metadata's field that names a format of DistributedOptimizer, and the one that has the same
# entries as ours; see [Note: Optimizer state in Megatron-Core's checkpoints].
_FORMAT, _FULLY_RESHARDABLE = "distrib_optim_sharding_type", "fully_reshardable"
# Where an optimizer keeps main weights in its state dict: Megatron-Core's name, for bf16, too.
_MASTERS = "fp32_from_fp16_params"


class _Sharded:
    """Mixed into Megatron-Core's optimizers; see the module docstring.

    Attributes:
        chunks: wrapped modules whose parameters it steps some of.
    """

    chunks: Sequence[DistributedDataParallel]
    optimizer: Any
    config: Any
    get_parameters: Any
    get_main_grads_for_grad_norm: Any
    get_grad_stats_parallel_group: Any

    def get_grad_norm(self) -> float:
        """The norm of all gradients: those of every parameter once. Collective."""
        return math.sqrt(self._sum_over_ranks(_squared_norm))

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip to a norm of ``clip_grad``; returns the norm before. Collective."""
        norm = self.get_grad_norm()
        if params := self.get_parameters():
            clip_grad_by_total_norm_fp32(params, clip_grad, norm)
        return norm

    def count_zeros(self) -> float:
        """How many elements of all gradients are zero. Collective."""
        return self._sum_over_ranks(_num_zeros)

    def _sum_over_ranks(self, of_slices: Any) -> float:
        """The sum of ``of_slices(slices)`` over the ranks that have parts of the gradients."""
        grads = self.get_main_grads_for_grad_norm()
        by_groups: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
        for grad in grads:
            is_flat = isinstance(grad, FlatDTensor)
            groups = grad.flat_placement.groups if is_flat else ()
            local = grad.local if is_flat else grad.detach().reshape(-1)
            by_groups.setdefault(groups, []).append(local)
        device = self.chunks[0].engine.mesh.device
        total = memory.zeros((), torch.float64, device)
        for groups, slices in by_groups.items():
            part = of_slices(slices, device)
            for group in groups:
                all_reduce_(part, group, what="statistics of gradients")
            total += part
        all_reduce_(total, self.get_grad_stats_parallel_group(), what="statistics of gradients")
        return float(total)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Nothing is left to do: the model's parameters are the main weights, in full precision.

        Args:
            state_dict: not looked at; loaded into the model it has changed them already.
        """

    def save_parameter_state(self, filename: str) -> NoReturn:
        """Refused: one file for the state of all data-parallel ranks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_NO_STATE_FILE)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Refused: see :meth:`save_parameter_state`.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_NO_STATE_FILE)

    # --- Megatron-Core's distributed checkpoints ---

    def _sharded_state(
        self, entries: Any, is_loading: bool, metadata: dict[str, Any] | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """State and groups of the torch optimizer, and main weights by group, as entries of a
        checkpoint. Collective unless it is loading.

        Args:
            entries: Megatron-Core's sharded state dict of the model.
            is_loading: the entries are to be filled: their values are not gathered.
            metadata: of the checkpoint.
        """
        is_theirs = (metadata or {}).get(_FORMAT) == _FULLY_RESHARDABLE
        sharded, _ = extract_sharded_tensors_and_factories(entries)
        by_param = entries_by_parameter(nested_values(sharded))
        params = self.get_parameters()
        names = self._names()
        for param in params:
            if id(param) not in by_param:
                raise ValueError(
                    f"model_sharded_state_dict: expected an entry for {names[id(param)]}; found "
                    "none. Pass what sharded_state_dict() of the wrapped modules returned, all "
                    "chunks together, before another call of it"
                )
        packed = self.optimizer.state_dict()
        steps = [state[_STEP] for state in packed[_STATE].values() if _STEP in state]
        keys = self._state_keys()
        whole = self._empty(keys) if is_loading else self._gathered(keys)

        def entry(param: Tensor, key: str) -> Any:
            value = whole[key][id(param)]
            name = "param" if is_theirs and key == _MAIN_WEIGHTS else key
            prefix = f"optimizer.state.{name}"
            return make_sharded_optimizer_tensor(by_param[id(param)], value, prefix)

        state: dict[Any, Any] = {
            index: {key: entry(param, key) for key in keys} for index, param in enumerate(params)
        }
        if steps:
            if any(step != steps[0] for step in steps):
                raise ValueError(
                    "sharded_state_dict: expected one step for all parameters, which is all that "
                    f"Megatron-Core's format has; found {sorted({float(each) for each in steps})}"
                )
            state["common_step"] = copy.deepcopy(steps[0])
        groups = copy.deepcopy(packed[_GROUPS])
        for group in groups:
            group["params"] = LocalNonpersistentObject(group["params"])
            if is_theirs and steps:
                group[_STEP] = float(steps[0])
        masters = [[entry(param, _MAIN_WEIGHTS) for param in row] for row in self._masters()]
        return {_STATE: state, _GROUPS: groups}, masters

    def _state_keys(self) -> list[str]:
        """Names of the state that lies as parameters do; also before the first step."""
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

    def _masters(self) -> list[list[Tensor]]:
        """Of each group the parameters that modules compute with in a narrower dtype."""
        low = {id(param) for buffer, param in self._places() if _is_narrow(buffer)}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [[param for param in group["params"] if id(param) in low] for group in groups]

    def _places(self) -> Iterator[tuple[ParamAndGradBuffer, Tensor]]:
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

    def _empty(self, keys: list[str]) -> dict[str, dict[int, Tensor]]:
        """Memory on the host for the whole of each state of each parameter."""
        return {
            key: {
                id(param): memory.empty(tuple(param.shape), param.dtype, "cpu")
                for param in self.get_parameters()
            }
            for key in [*keys, _MAIN_WEIGHTS]
        }

    def _gathered(self, keys: list[str]) -> dict[str, dict[int, Tensor]]:
        """The whole of each state of each parameter, on the host. Collective."""
        own = {id(param) for param in self.get_parameters()}
        found: dict[str, dict[int, Tensor]] = {key: {} for key in [*keys, _MAIN_WEIGHTS]}
        for chunk in self.chunks:
            for buffer in chunk.engine.buffers:
                params = buffer.sharded_params
                places = [index for index, param in enumerate(params) if id(param) in own]
                for key in found if places else ():
                    if key == _MAIN_WEIGHTS:
                        if not _is_narrow(buffer):
                            continue
                        state: list[Tensor | None] = [param.detach() for param in params]
                    else:
                        state = [self.optimizer.state.get(param, {}).get(key) for param in params]
                    whole = buffer.gather_state(key, state)
                    for index in places:
                        found[key][id(params[index])] = whole[index].to("cpu", copy=True)
        return found

    def _take_state(self, state_dict: dict[str, Any], masters: Any) -> dict[str, Any]:
        """Loaded state as the torch optimizer takes it: of whole values this rank's slices. Main
        weights are changed.

        Args:
            state_dict: of the torch optimizer; its groups' parameters are numbers.
            masters: main weights by group, whole; empty where there are none.
        """
        params = self.get_parameters()
        step = state_dict[_STATE].pop("common_step", None)
        for group in state_dict[_GROUPS]:
            # Of Megatron-Core's distributed optimizer over torch's Adam.
            if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
                in_group = group.pop(_STEP, None)
                step = in_group if step is None else step
        states: dict[int, dict[str, Any]] = {}
        for index, state in state_dict[_STATE].items():
            states[index] = {key: _slice_like(params[index], value) for key, value in state.items()}
            if step is not None:
                states[index][_STEP] = torch.as_tensor(step, dtype=torch.float32).clone()
            elif isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
                # Saved before the first step: there is no state.
                states[index] = states[index] if _STEP in state else {}
        with torch.no_grad():
            for row, values in zip(self._masters(), masters, strict=False):
                for param, value in zip(row, values, strict=True):
                    param.copy_(_slice_like(param, value))
        if masters:
            for chunk in self.chunks:
                chunk.engine.weights_changed()
                chunk._gather_unless_overlapped()
        return {**state_dict, _STATE: {index: state for index, state in states.items() if state}}


class ShardedFP32Optimizer(_Sharded, FP32Optimizer):
    """Megatron-Core's ``FP32Optimizer`` over sharded parameters."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """See [Note: Optimizer state in Megatron-Core's checkpoints]. Collective."""
        return self._sharded_state(model_sharded_state_dict, is_loading, metadata)[0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what :meth:`state_dict` or, loaded, :meth:`sharded_state_dict` returned."""
        state_dict = dict(state_dict)
        if "optimizer" in state_dict:  # of DistributedOptimizer, which has no groups elsewhere
            theirs = state_dict.pop("optimizer")[_GROUPS]
            pairs = zip(theirs, state_dict[_GROUPS], strict=True)
            state_dict[_GROUPS] = [{**group, **own} for group, own in pairs]
        super().load_state_dict(self._take_state(state_dict, []))


class ShardedFloat16Optimizer(_Sharded, Float16OptimizerWithFloat16Params):
    """Megatron-Core's ``Float16OptimizerWithFloat16Params`` over sharded parameters in fp32."""

    def _copy_main_params_to_model_params(self) -> None:
        """They are the same; the engine casts when it gathers."""

    def _copy_main_params_to_param_buffer(self) -> None:
        """They are the same; the engine casts when it gathers."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """They are the same."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """See [Note: Optimizer state in Megatron-Core's checkpoints]. Collective."""
        inner, masters = self._sharded_state(model_sharded_state_dict, is_loading, metadata)
        found: dict[str, Any] = {"optimizer": inner, _MASTERS: masters}
        if (metadata or {}).get(_FORMAT) == _FULLY_RESHARDABLE:
            found["param_state_sharding_type"] = _FULLY_RESHARDABLE
        if self.grad_scaler:
            found["grad_scaler"] = self.grad_scaler.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what :meth:`state_dict` or, loaded, :meth:`sharded_state_dict` returned.

        Collective, where it has main weights.
        """
        masters = state_dict.get(_MASTERS, ())
        inner = self._take_state(dict(state_dict["optimizer"]), masters if any(masters) else [])
        super().load_state_dict({**state_dict, "optimizer": inner, _MASTERS: []})


class ShardedChainedOptimizer(ChainedOptimizer):
    """Megatron-Core's ``ChainedOptimizer`` of such optimizers: their statistics add up, also where
    Megatron-Core reduces them over one group at once."""

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """The norm of all gradients. Collective."""
        norms = [optimizer.get_grad_norm() for optimizer in self.chained_optimizers]
        return math.sqrt(sum(norm**2 for norm in norms))

    @torch.no_grad()
    def count_zeros(self) -> float:
        """How many elements of all gradients are zero. Collective."""
        return float(sum(optimizer.count_zeros() for optimizer in self.chained_optimizers))


def sharded_optimizer(theirs: Any, chunks: Sequence[DistributedDataParallel], config: Any) -> Any:
    """One of Megatron-Core's optimizers as one over sharded parameters, with the same torch
    optimizer, scaler and groups.

    Raises:
        ValueError: it keeps fp32 copies of parameters in a narrower dtype.
    """
    if isinstance(theirs, ChainedOptimizer):
        each = [sharded_optimizer(one, chunks, config) for one in theirs.chained_optimizers]
        return ShardedChainedOptimizer(each)
    inner, init_state = theirs.optimizer, theirs.init_state_fn
    ours: Any
    if isinstance(theirs, Float16OptimizerWithFloat16Params):
        if any(map(len, getattr(theirs, "float16_groups", ()))):
            raise ValueError(
                "preserve_fp32_weights: expected True, since Megatron-Core's optimizer steps fp32 "
                "weights, which would be kept beside main weights in a narrower dtype; found False"
            )
        ours = ShardedFloat16Optimizer(inner, config, theirs.grad_scaler, init_state)
    else:
        ours = ShardedFP32Optimizer(inner, config, init_state)
    ours.chunks = chunks
    ours.grad_stats_parallel_group = theirs.grad_stats_parallel_group
    ours.tp_group = theirs.tp_group
    return ours


_NO_STATE_FILE = (
    "save_parameter_state, load_parameter_state: expected Megatron-Core's distributed checkpoints; "
    "found the older format, in which one rank writes the state of all. Use "
    "--ckpt-format torch_dist (sharded_state_dict), or fsdp_engine.Checkpointer"
)


def _squared_norm(slices: Iterable[Tensor], device: torch.device) -> Tensor:
    return total_norm(list(slices), 2.0, None, device).double().square()


def _num_zeros(slices: Iterable[Tensor], device: torch.device) -> Tensor:
    total = memory.zeros((), torch.float64, device)
    for each in slices:
        total += each.numel() - torch.count_nonzero(each)
    return total


def _is_narrow(buffer: ParamAndGradBuffer) -> bool:
    """Whether modules compute in a narrower dtype than main weights have."""
    return buffer.kind.dtypes.compute != buffer.kind.dtypes.main


def _slice_like(param: Tensor, value: Any) -> Any:
    """What this rank holds of a whole value of the parameter's shape; any other value as it is."""
    if (
        not isinstance(value, Tensor)
        or isinstance(value, FlatDTensor)
        or value.shape != param.shape
    ):
        return value
    if not isinstance(param, FlatDTensor):
        return value.to(param.device)
    placement = param.flat_placement
    local = placement.part_of(value).to(param.device, copy=True)
    return FlatDTensor.from_flat_local(local, placement)
