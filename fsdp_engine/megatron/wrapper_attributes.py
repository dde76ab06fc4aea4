"""Attributes of the wrapper that Megatron-Core's training loop, optimizers and checkpoints read.

Attributes without a counterpart in this engine, such as bucket groups, are empty sequences.
Attributes that could only be used incorrectly raise an error that names the alternative.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from fsdp_engine.megatron.config import DistributedDataParallelConfig
from fsdp_engine.megatron.process_groups import CollectedGroups
from fsdp_engine.megatron.wrapper_arguments import WrapperArguments

_NO_GROUPS = CollectedGroups()


class MegatronClassMixin:
    """Makes ``isinstance(wrapper, ...)`` also true for Megatron-Core's class if that is imported,
    for ``unwrap_model`` and training loops. ``type(wrapper)`` is the wrapper's own class.

    Attributes:
        megatron_class: Name of the class of ``megatron.core.distributed`` that the wrapper
            replaces.
    """

    megatron_class = "DistributedDataParallel"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        distributed = sys.modules.get("megatron.core.distributed")
        found = getattr(distributed, self.megatron_class, None)
        return found if isinstance(found, type) else type(self)


def _group(field: str, doc: str) -> Any:
    """Returns a property of the wrapper: the process group in this field of ``groups``, or None."""
    return property(lambda self: getattr(self.groups, field), doc=doc)


class WrapperAttributes(MegatronClassMixin, nn.Module):
    """Base class of the wrapper with these attributes; see the module docstring.

    Attributes:
        module: The wrapped module.
        config: Megatron-Core's config of the model; None if the wrapper was given none.
        sums_gradients: Whether gradients are sums over data-parallel ranks, because ``config`` has
            ``calculate_per_token_loss``. Otherwise they are means.
        ddp_config: A copy of the config for Megatron-Core's code, with ``use_megatron_fsdp`` False
            since the engine is not Megatron-FSDP. ``engine.config`` is the config itself.
        bucket_size: Number of elements at which a bucket is closed. None: ``num_buckets`` or
            ``disable_bucketing`` sets the number of buckets.
        groups: Process groups by the field names of a ``ProcessGroupCollection``.
        bucket_groups, expert_parallel_bucket_groups, expert_parallel_buffers: Empty lists.
        param_to_bucket_group: An empty dict.
        remove_forward_pre_hook_handles: Non-empty while forward pre-hooks are enabled.
        force_all_reduce: Always False.
        overlap_param_gather_with_optimizer_step: False until Megatron-Core's
            ``get_megatron_optimizer`` assigns it.
    """

    module: nn.Module

    def _set_attributes(
        self, call: WrapperArguments, config: DistributedDataParallelConfig, num_ranks: int
    ) -> None:
        """Set the attributes from the wrapper's arguments."""
        self.config = call.model_config
        self.sums_gradients = call.sums_gradients
        self.ddp_config: DistributedDataParallelConfig = copy.copy(config)
        self.ddp_config.use_megatron_fsdp = self.ddp_config.use_custom_fsdp = False
        closes_by_size = config.num_buckets is None
        self.bucket_size = config.to_options().closing_size(num_ranks) if closes_by_size else None
        self.groups = call.groups if call.groups is not None else _NO_GROUPS
        self.bucket_groups: list[object] = []
        self.expert_parallel_bucket_groups: list[object] = []
        self.expert_parallel_buffers: list[object] = []
        self.param_to_bucket_group: dict[Tensor, object] = {}
        self.force_all_reduce = False
        self.overlap_param_gather_with_optimizer_step = False
        self.remove_forward_pre_hook_handles: dict[nn.Module, object] = {}
        if self.use_forward_hook:
            self.enable_forward_pre_hook()

    @property
    def use_forward_hook(self) -> bool:
        """Whether parameters are gathered during forward (``overlap_param_gather``)."""
        return self.ddp_config.overlap_param_gather

    def enable_forward_pre_hook(self) -> None:
        """Record that forward pre-hooks are enabled. The engine gathers outdated parameters before
        each use whether or not this method was called."""
        assert self.use_forward_hook
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles[self.module] = self.module

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Record that forward pre-hooks are disabled.

        Args:
            param_sync: Gather parameters; all of them are current on return. Collective.
        """
        assert self.use_forward_hook
        self.remove_forward_pre_hook_handles.clear()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def start_param_sync(
        self, *unused: object, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Issue parameter gathers."""
        raise NotImplementedError

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The module's trainable parameters."""
        return [param for param in self.module.parameters() if param.requires_grad]

    @property
    def buffers(self) -> _Buffers:
        """``nn.Module.buffers``. In Megatron-Core's wrapper this attribute is the list of gradient
        buffers, over which its distributed optimizer iterates. Iterating over this object
        raises."""
        return _Buffers(super().buffers)

    dp_group = _group("dp", "The data-parallel group.")
    dp_cp_group = _group("data", "The data-parallel group including context parallelism.")
    intra_dp_cp_group = dp_cp_group
    expt_dp_group = _group("expt_dp", "The group of ranks that hold the same experts.")
    intra_expt_dp_group = expt_dp_group
    tp_group = _group("tp", "The tensor-parallel group.")
    pp_group = _group("pp", "The pipeline-parallel group.")
    ep_group = _group("ep", "The expert-parallel group.")


class _Buffers:
    """``nn.Module.buffers`` that raises an error if ``DistributedOptimizer`` iterates over it."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, recurse: bool = True) -> Iterator[Tensor]:
        """Iterate over the buffers of the wrapper's modules."""
        found: Iterator[Tensor] = self._method(recurse)
        return found

    def __add__(self, others: list[object]) -> list[object]:
        """Returns the wrapper's gradient buffers and ``expert_parallel_buffers``: an empty list."""
        return [*others]

    def __iter__(self) -> NoReturn:
        raise RuntimeError(
            "DistributedOptimizer: expected an optimizer that steps the wrapper's own parameters; "
            "found Megatron-Core's distributed optimizer, which reads buffers of Megatron-Core's "
            "wrapper. Import get_megatron_optimizer from fsdp_engine.megatron, which takes "
            "use_distributed_optimizer=True"
        )
