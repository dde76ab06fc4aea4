"""Steps of optimizers whose state is offloaded."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.extensions.offload.home import Homes
from fsdp_engine.extensions.offload.offloaded_step import (
    STATE,
    OffloadedStep,
    find_offload,
    is_offloaded,
)
from fsdp_engine.extensions.offload.owned_homes import StateHome
from fsdp_engine.optim.shadow import StepHook
from fsdp_engine.optim.step_placement import StatePlace, StepPlacement


class OffloadedSteps(StepPlacement):
    """Steps of offloaded parameters. See :class:`StepPlacement`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._offload = find_offload(optimizer)
        self._homes: Homes | None = None
        if self._offload is not None and self._offload.moves(STATE):
            self._homes = self._offload.homes(STATE)

    def make_place(self) -> StatePlace:
        """See :class:`StepPlacement`."""
        if self._offload is None or self._homes is None:
            return super().make_place()
        return StateHome(self._offload, self._homes)

    def check_whole_tensors(self, name: str) -> None:
        """See :class:`StepPlacement`."""
        for role in ("main_weights", "gradients"):
            if self._offload is not None and self._offload.moves(role):
                raise ValueError(
                    f"offload.{role}: expected 'device', since {name} steps whole tensors, each on "
                    "one rank; found another place. Offload the optimizer's state alone, or use an "
                    "elementwise optimizer (AdamW)"
                )

    def make_hook(self, optimizer: Optimizer) -> StepHook | None:
        """See :class:`StepPlacement`."""
        return None if self._offload is None else OffloadedStep(optimizer, self._offload)

    @staticmethod
    def is_elsewhere(param: Tensor) -> bool:
        """See :class:`StepPlacement`."""
        return is_offloaded(param)

    def drain(self) -> None:
        """See :class:`StepPlacement`."""
        if self._homes is not None and self._offload is not None:
            self._offload.drain()

    def wait(self) -> None:
        """See :class:`StepPlacement`."""
        if self._homes is not None and self._offload is not None:
            self._offload.wait()
