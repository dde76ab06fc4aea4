"""What Megatron-Core's training loop, optimizers and checkpoints read of its wrapper.

Where this engine has nothing to give (it has no bucket groups of Megatron-Core's kind), there are
empty sequences; what could only be used wrongly raises, and says what to use.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.megatron.call_shapes import Wrapping
from fsdp_engine.megatron.process_groups import CollectedGroups

_NO_GROUPS = CollectedGroups()


class Counterpart:
    """``isinstance(wrapper, ...)`` holds for Megatron-Core's class, too, where that is imported:
    ``unwrap_model`` and training loops ask. ``type(wrapper)`` is the wrapper's own class.

    Attributes:
        counterpart: name of the class of ``megatron.core.distributed`` that the wrapper replaces.
    """

    counterpart = "DistributedDataParallel"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        theirs = sys.modules.get("megatron.core.distributed")
        found = getattr(theirs, self.counterpart, None)
        return found if isinstance(found, type) else type(self)


class LoopAttributes(Counterpart, nn.Module):
    """See the module docstring. A base of the wrapper.

    Attributes:
        module: the wrapped module.
        config: Megatron-Core's config of the model; None where the wrapper got none.
        sums_gradients: gradients are sums over data-parallel ranks, because ``config`` has
            ``calculate_per_token_loss``. Otherwise they are means.
        ddp_config: as Megatron-Core's code is to see it: the engine is not its FSDP, so
            ``use_megatron_fsdp`` is False. ``engine.config`` is the config itself.
        bucket_size: elements that close a bucket; None: ``num_buckets`` or
            ``disable_bucketing`` says how many there are.
        groups: process groups by the names of a ``ProcessGroupCollection``.
        bucket_groups, expert_parallel_bucket_groups, expert_parallel_buffers: empty.
        param_to_bucket_group: empty.
        remove_forward_pre_hook_handles: of each module that the forward pre-hooks gather for,
            while they are enabled.
        force_all_reduce: False.
        overlap_param_gather_with_optimizer_step: assigned by ``get_megatron_optimizer``.
    """

    module: nn.Module

    def _take(self, call: Wrapping, config: DistributedDataParallelConfig, num_ranks: int) -> None:
        """What was given, once the engine is made."""
        self.config = call.model_config
        self.sums_gradients = call.sums_gradients
        self.ddp_config: DistributedDataParallelConfig = copy.copy(config)
        self.ddp_config.use_megatron_fsdp = self.ddp_config.use_custom_fsdp = False
        by_size = config.num_buckets is None
        self.bucket_size = config.closing_size(num_ranks) if by_size else None
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
        """Whether weights are gathered within forward: ``overlap_param_gather`` is set."""
        return self.ddp_config.overlap_param_gather

    def enable_forward_pre_hook(self) -> None:
        """Forward gathers what changed. It does so in any case: what is not current is gathered
        before use, whether or not anybody has called this."""
        assert self.use_forward_hook
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles[self.module] = self.module

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Collective, with ``param_sync``: all weights are current when it returns."""
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
        """Trainable parameters, as users see them."""
        return [param for param in self.module.parameters() if param.requires_grad]

    @property
    def buffers(self) -> _Buffers:
        """``nn.Module``'s method. Megatron-Core's wrapper has buffers of gradients by that name,
        into which its distributed optimizer looks: that raises."""
        return _Buffers(super().buffers)

    @property
    def dp_group(self) -> ProcessGroup | None:
        """Data parallel."""
        return self.groups.dp

    @property
    def dp_cp_group(self) -> ProcessGroup | None:
        """Data parallel, with context parallel."""
        return self.groups.data

    intra_dp_cp_group = dp_cp_group

    @property
    def expt_dp_group(self) -> ProcessGroup | None:
        """Ranks that hold the same experts."""
        return self.groups.expt_dp

    intra_expt_dp_group = expt_dp_group

    @property
    def tp_group(self) -> ProcessGroup | None:
        """Tensor parallel."""
        return self.groups.tp

    @property
    def pp_group(self) -> ProcessGroup | None:
        """Pipeline parallel."""
        return self.groups.pp

    @property
    def ep_group(self) -> ProcessGroup | None:
        """Expert parallel."""
        return self.groups.ep


class _Buffers:
    """``nn.Module.buffers``, of which nobody can take what ``DistributedOptimizer`` wants."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, recurse: bool = True) -> Iterator[Tensor]:
        """Buffers of the wrapper's modules."""
        found: Iterator[Tensor] = self._method(recurse)
        return found

    def __iter__(self) -> NoReturn:
        raise RuntimeError(
            "DistributedOptimizer: expected an optimizer that steps the wrapper's own parameters; "
            "found Megatron-Core's distributed optimizer, which reads buffers of Megatron-Core's "
            "wrapper. Import get_megatron_optimizer from fsdp_engine.megatron, which takes "
            "use_distributed_optimizer=True"
        )
