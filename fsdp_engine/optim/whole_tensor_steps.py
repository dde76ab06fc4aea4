"""Steps of optimizers that may need whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from fsdp_engine.optim.shadow import StepHook
from fsdp_engine.optim.step_placement import StepPlacement


class WholeTensorSteps:
    """Steps of optimizers that are not known to update each element by itself. A seam
    (:func:`.implementation`): here they are refused."""

    @staticmethod
    def make_hook(
        optimizer: Optimizer, whole: Sequence[str], placement: StepPlacement
    ) -> StepHook | None:
        """Returns the hook that steps the optimizer on whole tensors; None: it needs only slices.

        Args:
            optimizer: The optimizer.
            whole: Patterns of names of parameters that it steps whole, each by itself.
            placement: The place of its state between steps.

        Raises:
            ValueError: The hook cannot be made.
        """
        raise ValueError(
            f"optimizer: expected one that is known to update each element by itself, such as "
            f"AdamW, or elementwise=True; found {type(optimizer).__name__}. The extension "
            "whole_tensor_optimizers steps others, and is not part of this installation"
        )
