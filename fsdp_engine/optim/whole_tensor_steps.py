"""Steps of optimizers that may need full tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from fsdp_engine.optim.shadow import StepHook
from fsdp_engine.optim.step_placement import StepPlacement


class WholeTensorSteps:
    """Seam (:func:`.implementation`): steps of optimizers that are not known to be elementwise.

    This class raises an error for such an optimizer.
    """

    @staticmethod
    def make_hook(
        optimizer: Optimizer, whole: Sequence[str], placement: StepPlacement
    ) -> StepHook | None:
        """Returns the hook that steps the optimizer on full tensors. None: slices are enough.

        Args:
            optimizer: The optimizer.
            whole: Patterns of names of parameters that are stepped as full tensors, each
                independently.
            placement: The place of the optimizer's state between steps.

        Raises:
            ValueError: The hook cannot be made.
        """
        raise ValueError(
            f"optimizer: expected one that is known to update each element by itself, such as "
            f"AdamW, or elementwise=True; found {type(optimizer).__name__}. The extension "
            "whole_tensor_optimizers steps others, and is not part of this installation"
        )
