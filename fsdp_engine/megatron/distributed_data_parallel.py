"""Megatron-Core's wrapper, by its names, on the same engine as :func:`~fsdp_engine.sharding.shard`.

What differs from ``shard``: the module is wrapped, gradients are final when ``finish_grad_sync``
returns instead of when backward does, ``zero_grad_buffer`` begins a step, the config says levels
and timing, and initial values are those of rank 0. Where parameters are not cut there are no units:
everything is in buckets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.config import DistributedDataParallelConfig, Timing
from fsdp_engine.devices.accelerator import is_accelerator, module_of
from fsdp_engine.devices.lanes import finish_compute
from fsdp_engine.devices.mesh import ranks_that_meet
from fsdp_engine.devices.rendezvous import reporting
from fsdp_engine.engine import Engine
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.megatron.call_shapes import Shape, meant_mesh, shape_of
from fsdp_engine.megatron.loop_attributes import LoopAttributes
from fsdp_engine.megatron.whole_weights import note_whole_params
from fsdp_engine.planning.assignment import UnitSelector
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.sharding import check_types, make_engine
from fsdp_engine.strategies import Role, Strategy


class DistributedDataParallel(LoopAttributes):
    """Data parallelism at any sharding level, with Megatron-Core's contract.

    A step: ``zero_grad_buffer()``; forward and backward of each microbatch, all but the last under
    ``no_sync()`` where ``overlap_grad_reduce`` is set; ``finish_grad_sync()`` (or
    ``finalize_model_grads``); ``optimizer.step()``. The optimizer is built after the wrapper.

    Args:
        module: any module; changed in place, as by ``shard``.
        config: None: all defaults.
        mesh: data-parallel ranks: (inner,) or (outer, inner). None: all ranks on one axis.
        expert_mesh: ranks that share the parameters whose attribute ``allreduce`` is False.
        disable_bucketing: one bucket for each kind of parameter.
        units: what is gathered and reduced as one where parameters are cut: see
            :func:`~fsdp_engine.planning.assignment.find_units`.
        mp_policy: dtypes. None: parameters in their own dtype, with fp32 main weights; gradients
            as ``grad_reduce_in_fp32`` says.
        **older: ``data_parallel_group`` (a group for a mesh of one axis),
            ``accumulate_allreduce_grads_in_fp32``, ``overlap_grad_reduce``,
            ``use_distributed_optimizer``, ``check_for_nan_in_grad``, ``bucket_size``.

    Or as Megatron-Core calls its own, ``mesh``, ``expert_mesh``, ``units`` and ``mp_policy`` being
    keywords besides:

    Args:
        config: of the model, its ``TransformerConfig``.
        ddp_config: our config or Megatron-Core's, whose fields are taken for ours.
        module, disable_bucketing: as above.
        pg_collection: its ``ProcessGroupCollection``. None: the groups of its ``parallel_state``,
            where that is initialised.

    Attributes:
        module: the module.
        engine: its engine.
        ddp_config: the config, as Megatron-Core's code is to see it.

    Raises:
        ValueError: an argument, a field of Megatron-Core's config that has no meaning here,
            arguments that contradict each other, or how arguments of ranks differ; on all ranks,
            before anything is changed.
        TypeError: likewise.
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
        **older: Any,
    ) -> None: ...

    @overload
    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: object | None = None,
        **ours: Any,
    ) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        what, shape = type(self).__name__, self._shape_of(args, kwargs)
        with reporting(what, ranks_that_meet(meant_mesh(shape, args, kwargs))):
            call = shape(*args, **kwargs)
            config, policy, units = call.config, call.mp_policy, call.units
            check_types(call.module, policy, config)
            if call.disable_bucketing:
                config = dataclasses.replace(config, bucket_size=None, num_buckets=1)
            if policy is None:
                policy = MixedPrecisionPolicy(narrow_grads=not config.grad_reduce_in_fp32)
            levels = Strategy.from_names(*config.level_names)
            if units is None and not levels.depth(Role.PARAM):
                units = ()
        self.module = call.module
        self.engine = make_engine(
            call.module,
            call.mesh,
            levels,
            policy,
            config,
            Timing.of(config),
            units=units,
            expert_mesh=call.expert_mesh,
            broadcast=True,
            what=what,
        )
        if call.sums_gradients:
            for buffer in self.engine.buffers:
                if buffer.grads is not None:
                    buffer.grads.divide_by(buffer.grads.divisor / self.engine.mesh.size)
        for unit in self.engine.units if call.keeps_after_forward else ():
            unit.options.keeps_after_forward = True
        self._take(call, config, self.engine.mesh.size)
        for buffer in self.engine.buffers:
            buffer.attach_main_grads()
        _save_whole_values(self.module, self.engine, self._gather_unless_overlapped)
        self._gather_unless_overlapped()

    def _shape_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape:
        """The function that reads the arguments."""
        return shape_of(args, kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward accumulates; axes that do not cut gradients are not reduced."""
        with self.engine.no_sync():
            yield

    def set_is_first_microbatch(self) -> None:
        """Set ``is_first_microbatch`` on every submodule that has it.

        Megatron-Core's schedules call this before a step's first forward. Transformer Engine's
        modules then quantise their weights anew instead of reusing the cached fp8 weights.
        """
        for module in self._modules_with_is_first_microbatch:
            module.is_first_microbatch = True  # type: ignore[assignment]

    @functools.cached_property
    def _modules_with_is_first_microbatch(self) -> list[nn.Module]:
        return [each for each in self.module.modules() if hasattr(each, "is_first_microbatch")]

    def broadcast_params(self) -> None:
        """Give the values of rank 0 to all ranks that hold the same elements. Collective.

        At construction every value was made rank 0's already, also those that ranks hold alone.
        """
        self.engine.broadcast_params()

    def start_grad_sync(self, *unused: object) -> None:
        """Issue the reductions that are ready and not issued yet. Collective.

        Without ``overlap_grad_reduce`` they are done when it returns.

        Args:
            *unused: what Megatron-Core's schedules give: parameters, not looked at.
        """
        self.engine.start_grad_sync(wait=not self.ddp_config.overlap_grad_reduce)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """On return gradients are final: ``.grad`` of the parameters. Collective.

        Args:
            force_all_reduce: every rank has gradients whole, to save or inspect them: sharded ones
                are gathered. ``main_grad.cpu()`` of a parameter is the whole gradient, before
                clipping, until gradients are cleared.

        Raises:
            RuntimeError: a backward is not over, or modules have put off weight gradients; names
                the parameters. Or, on all ranks, what checks of gradients found.
        """
        self.engine.finish_grad_sync()
        if force_all_reduce:
            for buffer in self.engine.buffers:
                buffer.gather_main_grads()

    def start_param_sync(
        self, *unused: object, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Issue the parameter gathers that the next forward would begin with. Collective.

        Args:
            *unused: what Megatron-Core's schedules give: parameters, not looked at.
            force_sync: return when they are done, as without ``overlap_param_gather``.
            force_dispatch: for a gather that waits for Megatron-Core's optimizer; none does here.
        """
        wait = force_sync or not self.ddp_config.overlap_param_gather
        self.engine.start_param_sync(wait=wait)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Gradients are cleared, and their memory goes, until the next backward or
        :meth:`restore_grad_buffers`. ``main_grad`` must not be looked at meanwhile.

        Args:
            synchronize: wait for the device before.
            empty_cache: the device's allocator gives the memory back, too.
        """
        device = self.engine.mesh.device
        if synchronize:
            finish_compute(device)
        self.engine.zero_grad_buffer(zero=False)
        for buffer in self.engine.buffers:
            buffer.free_gradients()
        if empty_cache and is_accelerator(device):
            module_of(device).empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Gradients that last have memory again: zeros.

        Args:
            synchronize: wait for the device after.
        """
        for buffer in self.engine.buffers:
            buffer.restore_gradients()
        if synchronize:
            finish_compute(self.engine.mesh.device)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all main gradients by ``factor`` (a number, or a 0-d tensor), in place.
        Collective after ``finish_grad_sync(force_all_reduce=True)``."""
        self.engine.scale_gradients(factor)
        for buffer in self.engine.buffers:
            if buffer.has_whole_grads:
                buffer.gather_main_grads()

    def zero_grad_buffer(self, zero_buffer: bool = True) -> None:
        """Begin an iteration: gradients are zero, and ``.grad`` is None.

        Args:
            zero_buffer: False: the buffer is left as it is, and the next gradients overwrite it.
        """
        self.engine.zero_grad_buffer(zero=zero_buffer)

    def state_dict(  # type: ignore[override]
        self, prefix: str = "", keep_vars: bool = False, *, destination: Any = None
    ) -> dict[str, Any]:
        """The module's, by its own keys; sharded parameters are ``FlatDTensor``\\ s."""
        into = {} if destination is None else {"destination": destination}
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **into)

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What a checkpoint needs: sharded where the strategy shards.

        The module's own method of this name, if it has one, else its ``state_dict``.
        """
        own = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        return dict(own(prefix=prefix, keep_vars=keep_vars))

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, as Megatron-Core's ``dist_checkpointing`` saves and loads it: of whole
        main weights. Collective; all of them are held whole meanwhile, and by what is returned.

        Takes the arguments of the module's method, which asked for directly does the same.

        Raises:
            AttributeError: the module has no such method.
            RuntimeError: a forward or backward is under way.
        """
        module: Any = self.module
        return module.sharded_state_dict(*args, **kwargs)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Take full or sharded values, which the very next forward uses. Collective.

        Values that are sharded otherwise than the parameters are gathered first.

        Raises:
            RuntimeError: keys or shapes that do not fit, as of ``nn.Module.load_state_dict``.
        """
        # By the keys of state dicts: modules around the model (Float16Module) add none to them.
        params = self.module.state_dict(keep_vars=True)
        fitting = {name: _fitting(value, params.get(name)) for name, value in state_dict.items()}
        result = self.module.load_state_dict(fitting, strict=strict)
        self.engine.weights_changed()
        self._gather_unless_overlapped()
        return result

    def _gather_unless_overlapped(self) -> None:
        """Without overlap forwards gather nothing but cut parameters, also on ranks that have no
        batch for one."""
        if not self.ddp_config.overlap_param_gather and self.engine.strategy.depth(Role.PARAM) == 0:
            self.engine.start_param_sync(wait=True)


def _save_whole_values(module: Any, engine: Engine, then: Callable[[], None]) -> None:
    """Let ``sharded_state_dict`` see whole main weights, where modules hold slices: that of
    ``module``, and of each module that ``unwrap_model`` may return instead (of ``Float16Module``
    its ``module``)."""
    if all(each.is_plain for each in engine.buffers):
        return
    is_whole = False

    def of_whole(of_slices: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(of_slices)
        def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_whole
            if is_whole:  # called by that of a module around this one
                return of_slices(*args, **kwargs)
            with engine.unsharded():
                note_whole_params(engine)
                is_whole = True
                try:
                    state = of_slices(*args, **kwargs)
                finally:
                    is_whole = False
            then()
            return state

        return sharded_state_dict

    while isinstance(module, nn.Module) and hasattr(module, "sharded_state_dict"):
        saving: Any = module
        saving.sharded_state_dict = of_whole(saving.sharded_state_dict)
        module = getattr(module, "module", None)


def _fitting(value: Any, param: Tensor | None) -> Any:
    """``value`` as ``param`` can take it."""
    if not isinstance(value, FlatDTensor) or param is None:
        return value
    same = isinstance(param, FlatDTensor) and param.flat_placement == value.flat_placement
    return value if same else value.full_tensor()
