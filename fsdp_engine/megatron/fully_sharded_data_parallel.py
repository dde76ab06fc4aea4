"""Megatron-Core's two other wrappers, by their names, arguments and attributes.

Both are :class:`~.distributed_data_parallel.DistributedDataParallel` with other arguments:

    class                           for                   level
    FullyShardedDataParallel        --use-megatron-fsdp   data_parallel_sharding_strategy
    TorchFullyShardedDataParallel   --use-torch-fsdp2     optim_grads_params
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.engine import Engine
from fsdp_engine.megatron.call_shapes import (
    Shape,
    megatron_fsdp_call,
    torch_fsdp_call,
)
from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel


class FullyShardedDataParallel(DistributedDataParallel):
    """Takes the place of ``megatron.core.distributed.fsdp.mcore_fsdp_adapter``'s class.

    Args:
        config: the model's ``TransformerConfig``.
        ddp_config: Megatron-Core's ``DistributedDataParallelConfig`` or ours, of which a copy is
            taken. ``data_parallel_sharding_strategy`` and ``outer_dp_sharding_strategy`` are the
            levels, whether or not it has ``use_megatron_fsdp``.
        module: the model; changed in place.
        fsdp_unit_modules: classes, or dotted paths of classes, whose modules are gathered and
            reduced as one. None: transformer layers where parameters are sharded, else buckets.
        disable_bucketing: one bucket for each kind of parameter that belongs to no unit.
        device: this rank's device, which is checked. None: the same.
        pg_collection: Megatron-Core's ``ProcessGroupCollection``. None: the groups of its
            ``parallel_state``, where that is initialised.
        **ours: ``mesh``, ``expert_mesh``, ``mp_policy``, as of ``DistributedDataParallel``.

    Attributes:
        device: this rank's device.
        fsdp_unit_modules: classes of the modules that are gathered as one and freed after use.
        param_and_grad_buffer: the calls of Megatron-FSDP's buffer that Megatron-LM makes.

    Raises:
        ValueError, TypeError: as of ``DistributedDataParallel``; on all ranks, before anything is
            changed.
    """

    counterpart = "FullyShardedDataParallel"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device: torch.device = self.engine.mesh.device
        units = [unit for unit in self.engine.units[1:] if unit.reshards]
        classes = [type(module) for unit in units for module in unit.built.modules]
        self.fsdp_unit_modules = list(dict.fromkeys(classes))
        self.param_and_grad_buffer = BufferCalls(self.engine)

    def _shape_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape:
        return megatron_fsdp_call

    def synchronize_gradient_reduce(self) -> None:
        """Wait for the reductions in flight. Issues none."""
        self.engine.wait_for_reductions()

    def synchronize_param_gather(self) -> None:
        """Wait for the gathers in flight, and free parameters gathered ahead of use."""
        self.engine.wait_for_gathers()

    def stop_communication(self) -> None:
        """Wait for all communication in flight, as before a checkpoint or an evaluation."""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()


class TorchFullyShardedDataParallel(DistributedDataParallel):
    """Takes the place of ``megatron.core.distributed.TorchFullyShardedDataParallel``: parameters,
    gradients and optimizer state are sharded.

    Args:
        config: the model's ``TransformerConfig``.
        ddp_config: Megatron-Core's ``TorchFullyShardedDataParallelConfig`` or
            ``DistributedDataParallelConfig``, or ours, of which a copy is taken.
            ``reshard_after_forward`` False keeps gathered parameters from forward to backward; a
            number of ranks is taken as True, with a warning; without the field it is True.
        module: the model; changed in place.
        sub_modules_to_wrap: classes, or dotted paths of classes, whose modules are gathered and
            reduced as one. None: transformer layers, and the modules beside them. Classes in
            ``_fsdp_modules`` attributes of modules are added (where it is None: to Megatron-Core's
            default).
        disable_bucketing: one bucket for each kind of parameter that belongs to no unit.
        process_group: data-parallel ranks. None: those of ``parallel_state``, with context
            parallel, where that is initialised.
        **ours: ``pg_collection``, ``mesh``, ``expert_mesh``, ``mp_policy``, as of
            ``DistributedDataParallel``.

    Attributes:
        process_group: data-parallel ranks.
        device_mesh: their mesh.

    Raises:
        ValueError, TypeError: as of ``DistributedDataParallel``; or ``ddp_config`` names another
            level. On all ranks, before anything is changed.
    """

    counterpart = "TorchFullyShardedDataParallel"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device_mesh: DeviceMesh = self.engine.mesh.device_mesh

    def _shape_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape:
        return torch_fsdp_call

    @property
    def process_group(self) -> ProcessGroup:
        """Data-parallel ranks; of a mesh of two axes, those of the inner one."""
        return self.device_mesh.get_group(self.device_mesh.ndim - 1)


class BufferCalls:
    """``param_and_grad_buffer``: Megatron-LM's calls of Megatron-FSDP's buffer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def copy_main_weights_to_model_weights(self) -> None:
        """Let the next use of each parameter have its main weights, as after ``optimizer.step()``
        it has in any case."""
        self._engine.weights_changed()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._engine.zero_grad_buffer()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients, in place."""
        self._engine.scale_gradients(scaling_factor)

    def manual_buffer_registration(self) -> None:
        """Check that communication buffers are registered with NCCL. With ``nccl_ub`` they were,
        once, when the wrapper was made.

        Raises:
            RuntimeError: ``nccl_ub`` is not set.
        """
        if not self._engine.config.nccl_ub:
            raise RuntimeError(
                "manual_buffer_registration: expected nccl_ub=True in the config; found False"
            )
