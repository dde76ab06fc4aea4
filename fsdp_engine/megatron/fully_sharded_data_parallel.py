"""Megatron-Core's two FSDP wrappers, with their names, arguments and attributes.

Both are :class:`~.distributed_data_parallel.DistributedDataParallel` with other arguments:

    class                           replaces              level
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
from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel
from fsdp_engine.megatron.wrapper_arguments import (
    ParseArguments,
    parse_megatron_fsdp,
    parse_torch_fsdp,
)


class FullyShardedDataParallel(DistributedDataParallel):
    """Replaces the class of ``megatron.core.distributed.fsdp.mcore_fsdp_adapter``.

    Args:
        config: the model's ``TransformerConfig``.
        ddp_config: Megatron-Core's ``DistributedDataParallelConfig`` or this package's; it is
            copied. ``data_parallel_sharding_strategy`` and ``outer_dp_sharding_strategy`` are the
            levels, with or without ``use_megatron_fsdp``.
        module: the model; modified in place.
        fsdp_unit_modules: classes, or dotted paths of classes, whose modules become units. None:
            transformer layers if parameters are sharded, else buckets.
        disable_bucketing: one bucket for each kind of parameter that belongs to no unit.
        device: checked against this rank's device. None: no check.
        pg_collection: Megatron-Core's ``ProcessGroupCollection``. None: the groups of its
            ``parallel_state`` if that is initialized.
        **kwargs: ``mesh``, ``expert_mesh``, ``mp_policy``, as for ``DistributedDataParallel``.

    Attributes:
        device: this rank's device.
        fsdp_unit_modules: classes of the modules whose parameters are freed after use.
        param_and_grad_buffer: the methods of Megatron-FSDP's buffer that Megatron-LM calls.

    Raises:
        ValueError, TypeError: as for ``DistributedDataParallel``; on all ranks, before anything is
            modified.
    """

    megatron_class = "FullyShardedDataParallel"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device: torch.device = self.engine.mesh.device
        units = [unit for unit in self.engine.units[1:] if unit.reshards]
        classes = [type(module) for unit in units for module in unit.built.modules]
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
        config: the model's ``TransformerConfig``.
        ddp_config: Megatron-Core's ``TorchFullyShardedDataParallelConfig`` or
            ``DistributedDataParallelConfig``, or this package's; it is copied.
            ``reshard_after_forward=False`` keeps gathered parameters from forward to backward; a
            number of ranks is treated as True, with a warning; the default is True.
        module: the model; modified in place.
        sub_modules_to_wrap: classes, or dotted paths of classes, whose modules become units. None:
            transformer layers and the modules outside of them. Classes in ``_fsdp_modules``
            attributes of modules are added (if this argument is None, to Megatron-Core's default).
        disable_bucketing: one bucket for each kind of parameter that belongs to no unit.
        process_group: data-parallel ranks. None: those of ``parallel_state``, including context
            parallelism, if that is initialized.
        **kwargs: ``pg_collection``, ``mesh``, ``expert_mesh``, ``mp_policy``, as for
            ``DistributedDataParallel``.

    Attributes:
        process_group: data-parallel ranks.
        device_mesh: their mesh.

    Raises:
        ValueError, TypeError: as for ``DistributedDataParallel``; or ``ddp_config`` names another
            level. On all ranks, before anything is modified.
    """

    megatron_class = "TorchFullyShardedDataParallel"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device_mesh: DeviceMesh = self.engine.mesh.device_mesh

    def _parser_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParseArguments:
        return parse_torch_fsdp

    @property
    def process_group(self) -> ProcessGroup:
        """The data-parallel group; of a mesh of two axes, the inner axis' group."""
        return self.device_mesh.get_group(self.device_mesh.ndim - 1)


class MegatronFSDPBuffer:
    """``param_and_grad_buffer``: the methods of Megatron-FSDP's buffer that Megatron-LM calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def copy_main_weights_to_model_weights(self) -> None:
        """Mark the main weights as changed, so that the next use of each parameter gathers them.
        ``optimizer.step()`` marks them as well."""
        self._engine.weights_changed()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._engine.zero_grad_buffer()

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients, in place."""
        self._engine.scale_gradients(scaling_factor)

    def manual_buffer_registration(self) -> None:
        """Check that communication buffers are registered with NCCL. With ``nccl_ub`` the wrapper
        registers them when it is constructed.

        Raises:
            RuntimeError: ``nccl_ub`` is not set.
        """
        if not self._engine.config.nccl_ub:
            raise RuntimeError(
                "manual_buffer_registration: expected nccl_ub=True in the config; found False"
            )
