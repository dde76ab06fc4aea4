"""Megatron-Core's wrappers, with their names, arguments and attributes, on the engine of
:func:`~fsdp_engine.sharding.shard`.

The wrappers differ from ``shard`` as follows: the module is wrapped; gradients are final when
``finish_grad_sync`` returns, not when backward returns; ``zero_grad_buffer`` begins a step; the
config selects levels and timing; initial values are those of rank 0. If parameters are not sharded,
there are no units, and all parameters are in buckets.

``module.sharded_state_dict`` runs while modules hold full main weights, so its entries reference
full parameters. Optimizers step sharded parameters, and find the entry of each of them by
:func:`entries_by_parameter`.

The two FSDP wrappers are ``DistributedDataParallel`` with other arguments:

    class                           replaces              level
    FullyShardedDataParallel        --use-megatron-fsdp   data_parallel_sharding_strategy
    TorchFullyShardedDataParallel   --use-torch-fsdp2     optim_grads_params
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.buffers.full_values import gather_main_grads
from fsdp_engine.comm.copy_lanes import finish_compute
from fsdp_engine.comm.mesh import ranks_that_meet
from fsdp_engine.comm.rendezvous import reporting
from fsdp_engine.engine import Engine
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.megatron.config import DistributedDataParallelConfig
from fsdp_engine.megatron.wrapper_arguments import (
    ParseArguments,
    parse_megatron_fsdp,
    parse_torch_fsdp,
    parser_for,
    requested_mesh,
)
from fsdp_engine.megatron.wrapper_attributes import WrapperAttributes
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.sharding import check_types, make_engine
from fsdp_engine.strategies import Role, Strategy
from fsdp_engine.units.assignment import UnitSelector
from fsdp_engine.units.build import FIRST_PARAMETERS

# Maps a full parameter to its sharded one while a state dict references the full one.
_SHARDED_OF: Any = WeakIdKeyDictionary()


def record_full_params(engine: Engine) -> None:
    """Record the sharded parameter of each full one. Call within ``engine.unsharded()``."""
    for buffer in engine.buffers:
        for record, sharded in zip(buffer.records, buffer.sharded_params, strict=True):
            module, name = record.holders[0]
            _SHARDED_OF[module._parameters[name]] = sharded


def sharded_param_of(tensor: Tensor) -> Tensor:
    """Returns the sharded parameter of the full parameter ``tensor``; ``tensor`` itself if it is
    not a recorded full parameter."""
    found: Tensor = _SHARDED_OF.get(tensor, tensor)
    return found


def entries_by_parameter(entries: Iterable[Any]) -> dict[int, Any]:
    """Returns Megatron-Core's ``ShardedTensor``s and factories by ``id`` of the sharded
    parameter."""
    return {
        id(sharded_param_of(entry.data)): entry
        for entry in entries
        if isinstance(getattr(entry, "data", None), Tensor)
    }


class DistributedDataParallel(WrapperAttributes):
    """Data parallelism at any sharding level, with Megatron-Core's interface.

    A step consists of ``zero_grad_buffer()``; forward and backward of each microbatch (if
    ``overlap_grad_reduce`` is set, all but the last under ``no_sync()``); ``finish_grad_sync()`` or
    ``finalize_model_grads``; and ``optimizer.step()``. Build the optimizer after the wrapper.

    Args:
        module: Any module; modified in place, as by ``shard``.
        config: The options. None: all defaults.
        mesh: Mesh of the data-parallel ranks: (inner,) or (outer, inner). None: all ranks on one
            axis.
        expert_mesh: Ranks that share the parameters whose attribute ``allreduce`` is False.
        disable_bucketing: Use one bucket for each kind of parameter.
        units: The modules that become units if parameters are sharded; see ``find_units`` in
            ``units/assignment.py``.
        mp_policy: The policy of dtypes. None: parameters in their own dtype, with fp32 main
            weights, and gradients in the dtype that ``grad_reduce_in_fp32`` selects.
        **legacy: ``data_parallel_group`` (a group for a mesh of one axis),
            ``accumulate_allreduce_grads_in_fp32``, ``overlap_grad_reduce``,
            ``use_distributed_optimizer``, ``check_for_nan_in_grad``, ``bucket_size``.

    The constructor also accepts the arguments of Megatron-Core's own class, with ``mesh``,
    ``expert_mesh``, ``units`` and ``mp_policy`` as additional keywords:

    Args:
        config: The model's ``TransformerConfig``.
        ddp_config: This package's config, or Megatron-Core's, whose fields are copied to it.
        module, disable_bucketing: As above.
        pg_collection: Megatron-Core's ``ProcessGroupCollection``. None: the groups of its
            ``parallel_state`` if that is initialized.
        full_param_layout: The layout of Megatron-Core's buffers; ignored.

    Attributes:
        module: The wrapped module.
        engine: The module's engine.
        ddp_config: The config for Megatron-Core's code.

    Raises:
        ValueError: An argument is invalid, a field of Megatron-Core's config is not supported,
            arguments contradict each other, or arguments differ between ranks. All ranks raise,
            before anything is modified.
        TypeError: An argument has another type. All ranks raise, as above.
    """

    module: nn.Module
    engine: Engine

    @overload
    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        mesh: DeviceMesh | None = None,
        *,
        expert_mesh: DeviceMesh | None = None,
        disable_bucketing: bool = False,
        units: UnitSelector | Iterable[UnitSelector] | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        **legacy: Any,
    ) -> None: ...

    @overload
    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: object | None = None,
        **kwargs: Any,
    ) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        what, parse = type(self).__name__, self._parser_for(args, kwargs)
        with reporting(what, ranks_that_meet(requested_mesh(parse, args, kwargs))):
            call = parse(*args, **kwargs)
            config, policy, units = call.config, call.mp_policy, call.units
            check_types(call.module, policy)
            if call.disable_bucketing:
                config = dataclasses.replace(config, bucket_size=None, num_buckets=1)
            if policy is None:
                policy = MixedPrecisionPolicy(narrow_grads=not config.grad_reduce_in_fp32)
            policy = config.applied_to(policy)
            levels = Strategy.from_names(*config.level_names)
            if units is None and not levels.depth(Role.PARAM):
                units = ()
        self.module = call.module
        self.engine = make_engine(
            call.module,
            call.mesh,
            levels,
            policy,
            config.to_options(),
            config.timing,
            units=units,
            expert_mesh=call.expert_mesh,
            initial_values=FIRST_PARAMETERS,
            extensions=config.to_extensions(),
            num_rows=config.num_distributed_optimizer_instances,
            what=what,
        )
        vars(self.engine)["config"] = config
        if call.sums_gradients:
            for buffer in self.engine.buffers:
                if buffer.grads is not None:
                    buffer.grads.divide_by(buffer.grads.divisor / self.engine.mesh.size)
        for unit in self.engine.units if call.keeps_after_forward else ():
            unit.options.keeps_after_forward = True
        self._set_attributes(call, config, self.engine.mesh.size)
        for buffer in self.engine.buffers:
            buffer.attach_main_grads()
        _gather_for_sharded_state_dict(self.module, self.engine, self._gather_unless_overlapped)
        self._gather_unless_overlapped()

    def _parser_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParseArguments:
        """Returns the parser for the arguments."""
        return parser_for(args, kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward accumulates gradients, without reducing them along axes over
        which gradients are not sharded."""
        with self.engine.no_sync():
            yield

    def set_is_first_microbatch(self) -> None:
        """Set ``is_first_microbatch`` on every submodule that has it.

        Megatron-Core's schedules call this before a step's first forward. Transformer Engine's
        modules then quantize their weights again instead of reusing the cached fp8 weights.
        """
        for module in self._modules_with_is_first_microbatch:
            module.is_first_microbatch = True  # type: ignore[assignment]

    @functools.cached_property
    def _modules_with_is_first_microbatch(self) -> list[nn.Module]:
        return [each for each in self.module.modules() if hasattr(each, "is_first_microbatch")]

    def broadcast_params(self) -> None:
        """Broadcast values from the first of the ranks that hold the same shard. Collective.

        Shards that only one rank holds do not change. (The constructor sets all shards to the
        values of rank 0.)
        """
        self.engine.broadcast_params()

    def start_grad_sync(self, *unused: object) -> None:
        """Issue the reductions that are ready and not issued yet. Collective.

        Without ``overlap_grad_reduce`` the reductions are complete on return.

        Args:
            *unused: Parameters, which Megatron-Core's schedules pass; ignored.
        """
        self.engine.start_grad_sync(wait=not self.ddp_config.overlap_grad_reduce)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Finish all reductions. On return ``.grad`` of the parameters is final. Collective.

        Args:
            force_all_reduce: Also gather full gradients on every rank, to save or inspect them.
                ``main_grad.cpu()`` of a parameter is then the full gradient before clipping, until
                gradients are cleared.

        Raises:
            RuntimeError: A backward has not finished, or modules have delayed weight gradients; the
                message names the parameters. Or a check of gradients failed; then all ranks raise.
        """
        self.engine.finish_grad_sync()
        if force_all_reduce:
            for buffer in self.engine.buffers:
                gather_main_grads(buffer)

    def start_param_sync(
        self, *unused: object, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Issue the first parameter gathers of the next forward. Collective.

        Args:
            *unused: Parameters, which Megatron-Core's schedules pass; ignored.
            force_sync: Wait for the gathers, as without ``overlap_param_gather``.
            force_dispatch: Ignored. In Megatron-Core it dispatches gathers that are delayed to the
                optimizer's step; this engine has no such gathers.
        """
        wait = force_sync or not self.ddp_config.overlap_param_gather
        self.engine.start_param_sync(wait=wait)

    def stop_communication(self) -> None:
        """Do nothing: sharded parameters may be read whether or not gathers are pending.

        Megatron-LM calls it for its FSDP wrapper before it computes the norm of the parameters.
        """

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Clear gradients and free their memory until the next backward or
        :meth:`restore_grad_buffers`. ``main_grad`` must not be accessed in between.

        Args:
            synchronize: Wait for the device first.
            empty_cache: Also release the caching allocator's unused memory to the device.
        """
        device = self.engine.mesh.device
        if synchronize:
            finish_compute(device)
        self.engine.zero_grad_buffer(zero=False)
        for buffer in self.engine.buffers:
            if buffer.grads is not None:
                buffer.grads.free()
        if empty_cache and is_accelerator(device):
            module_of(device).empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Allocate persistent gradients again, filled with zeros.

        Args:
            synchronize: Wait for the device afterwards.
        """
        for buffer in self.engine.buffers:
            if buffer.grads is not None:
                buffer.grads.restore()
        if synchronize:
            finish_compute(self.engine.mesh.device)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all main gradients by ``factor`` (a number or a 0-d tensor), in place.
        Collective after ``finish_grad_sync(force_all_reduce=True)``."""
        self.engine.scale_gradients(factor)
        for buffer in self.engine.buffers:
            if buffer.grads is not None and buffer.published.has_full:
                gather_main_grads(buffer)

    def zero_grad_buffer(self, zero_buffer: bool = True) -> None:
        """Begin an iteration: zero the gradients and set ``.grad`` to None.

        Args:
            zero_buffer: Fill the buffer with zeros. False: the next gradients overwrite it.
        """
        self.engine.zero_grad_buffer(zero=zero_buffer)

    def state_dict(  # type: ignore[override]
        self, prefix: str = "", keep_vars: bool = False, *, destination: Any = None
    ) -> dict[str, Any]:
        """Returns the module's state dict with its own keys; sharded parameters are
        ``FlatDTensor``\\ s."""
        into = {} if destination is None else {"destination": destination}
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **into)

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Returns the state dict to save in a checkpoint, sharded at the strategy's level.

        Calls the module's method of this name if it has one, else its ``state_dict``.
        """
        own = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        return dict(own(prefix=prefix, keep_vars=keep_vars))

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's ``sharded_state_dict`` of full main weights, for Megatron-Core's
        ``dist_checkpointing``. Collective. The full main weights are in memory during the call, and
        as long as the result references them.

        Takes the arguments of the module's method; calling that method directly is equivalent.

        Raises:
            AttributeError: The module has no such method.
            RuntimeError: A forward or backward is in progress.
        """
        module: Any = self.module
        return module.sharded_state_dict(*args, **kwargs)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Load full or sharded values, which the next forward uses. Collective.

        Values whose sharding differs from the parameters' are gathered first.

        Raises:
            RuntimeError: Keys or shapes do not match, as in ``nn.Module.load_state_dict``.
        """
        # Use state_dict() instead of named_parameters(), because wrappers such as Float16Module add
        # no prefix to the keys of state dicts.
        params = self.module.state_dict(keep_vars=True)
        values = {name: _loadable(value, params.get(name)) for name, value in state_dict.items()}
        result = self.module.load_state_dict(values, strict=strict)
        self.engine.weights_changed()
        self._gather_unless_overlapped()
        return result

    def _gather_unless_overlapped(self) -> None:
        """If the level does not shard parameters, gather them from the main weights now, unless
        ``overlap_param_gather`` is set. A forward then issues no gathers, so ranks may skip it."""
        if not self.ddp_config.overlap_param_gather and self.engine.strategy.depth(Role.PARAM) == 0:
            self.engine.start_param_sync(wait=True)


def _gather_for_sharded_state_dict(module: Any, engine: Engine, then: Callable[[], None]) -> None:
    """Make ``sharded_state_dict`` return full main weights, unless full parameters are the main
    weights anyway. This changes the method of ``module`` and of each module that ``unwrap_model``
    may return instead (the ``module`` of a ``Float16Module``). ``then`` is called after each call
    of such a method."""
    if all(each.is_plain for each in engine.buffers):
        return
    is_gathered = False

    def with_full_weights(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_gathered
            if is_gathered:  # the method of an enclosing module called it
                return method(*args, **kwargs)
            with engine.unsharded():
                record_full_params(engine)
                is_gathered = True
                try:
                    state = method(*args, **kwargs)
                finally:
                    is_gathered = False
            then()
            return state

        return sharded_state_dict

    while isinstance(module, nn.Module) and hasattr(module, "sharded_state_dict"):
        wrapped: Any = module
        wrapped.sharded_state_dict = with_full_weights(wrapped.sharded_state_dict)
        module = getattr(module, "module", None)


def _loadable(value: Any, param: Tensor | None) -> Any:
    """Returns ``value``, gathered if it is sharded differently from ``param``."""
    if not isinstance(value, FlatDTensor) or param is None:
        return value
    has_same_placement = isinstance(
        param, FlatDTensor
    ) and param.flat_placement.is_same_on_all_ranks(value.flat_placement)
    return value if has_same_placement else value.full_tensor()


class FullyShardedDataParallel(DistributedDataParallel):
    """Replaces the class of ``megatron.core.distributed.fsdp.mcore_fsdp_adapter``.

    Args:
        config: The model's ``TransformerConfig``.
        ddp_config: Megatron-Core's ``DistributedDataParallelConfig`` or this package's; it is
            copied. ``data_parallel_sharding_strategy`` and ``outer_dp_sharding_strategy`` are the
            levels, with or without ``use_megatron_fsdp``.
        module: The model; modified in place.
        fsdp_unit_modules: Classes, or dotted paths of classes, whose modules become units. None:
            transformer layers if parameters are sharded, else buckets.
        disable_bucketing: Use one bucket for each kind of parameter that belongs to no unit.
        device: The expected device of this rank, which is checked. None: no check.
        pg_collection: Megatron-Core's ``ProcessGroupCollection``. None: the groups of its
            ``parallel_state`` if that is initialized.
        **kwargs: ``mesh``, ``expert_mesh``, ``mp_policy``, as for ``DistributedDataParallel``.

    Attributes:
        device: This rank's device.
        fsdp_unit_modules: Classes of the modules whose parameters are freed after use.
        param_and_grad_buffer: The methods of Megatron-FSDP's buffer that Megatron-LM calls.

    Raises:
        ValueError, TypeError: As for ``DistributedDataParallel``. All ranks raise, before anything
            is modified.
    """

    megatron_class = "FullyShardedDataParallel"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device: torch.device = self.engine.mesh.device
        units = [unit for unit in self.engine.units[1:] if unit.reshards]
        classes = [type(module) for unit in units for module in unit.modules]
        self.fsdp_unit_modules = list(dict.fromkeys(classes))
        self.param_and_grad_buffer = MegatronFSDPBuffer(self.engine)

    def _parser_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParseArguments:
        return parse_megatron_fsdp

    def synchronize_gradient_reduce(self) -> None:
        """Wait for the reductions in flight, without issuing any."""
        self.engine.wait_for_reductions()

    def synchronize_param_gather(self) -> None:
        """Wait for the gathers in flight, and free prefetched parameters."""
        self.engine.wait_for_gathers()

    def stop_communication(self) -> None:
        """Wait for all communication in flight, for example before a checkpoint or an
        evaluation."""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()


class TorchFullyShardedDataParallel(DistributedDataParallel):
    """Replaces ``megatron.core.distributed.TorchFullyShardedDataParallel``: parameters, gradients
    and optimizer state are sharded.

    Args:
        config: The model's ``TransformerConfig``.
        ddp_config: Megatron-Core's ``TorchFullyShardedDataParallelConfig`` or
            ``DistributedDataParallelConfig``, or this package's; it is copied.
            ``reshard_after_forward=False`` (or 1) keeps gathered parameters from forward to
            backward. A number greater than 1 has the effect of True, the default. If it is not the
            number of ranks that share a parameter, the wrapper also warns.
        module: The model; modified in place.
        sub_modules_to_wrap: Classes, or dotted paths of classes, whose modules become units. None:
            transformer layers and the modules outside of them. Classes that modules list in
            ``_fsdp_modules`` are added (with None: to Megatron-Core's default list).
        disable_bucketing: Use one bucket for each kind of parameter that belongs to no unit.
        process_group: The group of data-parallel ranks. None: the group of ``parallel_state``,
            including context parallelism, if that is initialized.
        **kwargs: ``pg_collection``, ``mesh``, ``expert_mesh``, ``mp_policy``, as for
            ``DistributedDataParallel``.

    Attributes:
        process_group: The data-parallel group.
        device_mesh: The mesh of the data-parallel ranks.

    Raises:
        ValueError, TypeError: As for ``DistributedDataParallel``, or ``ddp_config`` names another
            level. All ranks raise, before anything is modified.
    """

    megatron_class = "TorchFullyShardedDataParallel"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device_mesh: DeviceMesh = self.engine.mesh.device_mesh

    def _parser_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParseArguments:
        return parse_torch_fsdp

    @property
    def process_group(self) -> ProcessGroup:
        """The data-parallel group. For a mesh of two axes: the group of the inner axis."""
        return self.device_mesh.get_group(self.device_mesh.ndim - 1)


class MegatronFSDPBuffer:
    """The attribute ``param_and_grad_buffer``, with the methods of Megatron-FSDP's buffer that
    Megatron-LM calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def copy_main_weights_to_model_weights(self) -> None:
        """Mark the main weights as changed, so that the next use of each parameter gathers them.
        ``optimizer.step()`` does the same."""
        self._engine.weights_changed()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._engine.zero_grad_buffer()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients, in place."""
        self._engine.scale_gradients(scaling_factor)

    def manual_buffer_registration(self) -> None:
        """Check that communication buffers are registered with NCCL. The constructor of the wrapper
        registers them if ``nccl_ub`` is set.

        Raises:
            RuntimeError: ``nccl_ub`` is not set.
        """
        if not self._engine.memory.is_fixed:
            raise RuntimeError(
                "manual_buffer_registration: expected nccl_ub=True in the config; found False"
            )
