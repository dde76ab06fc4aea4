"""A wrapped model that tests of ``finalize_model_grads`` finish."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from tests.megatron.configs import config_of


class Chunk(fe.DistributedDataParallel):
    """Counts how often its gradients were finished."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh | None, strategy: str, **options: Any
    ) -> None:
        super().__init__(module, config_of(strategy), mesh, **options)
        self.num_finished = 0

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.num_finished += 1
        super().finish_grad_sync(force_all_reduce)
