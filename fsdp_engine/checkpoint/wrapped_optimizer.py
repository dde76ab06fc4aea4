"""Unwraps Megatron-Core's optimizers: checkpoints contain the state of the torch optimizers.

``FP32Optimizer`` and ``Float16OptimizerWithFloat16Params`` have a torch optimizer in ``optimizer``,
and a loss scaler or None in ``grad_scaler``; ``ChainedOptimizer`` has several of them in
``chained_optimizers``. The state of a scaler is saved as a hyperparameter of the optimizer's param
groups. Megatron-Core is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from fsdp_engine.checkpoint.joint_optimizer import JointOptimizer, join_optimizers

_SCALER = "grad_scaler"


class _WrappedOptimizers(JointOptimizer):
    """Torch optimizers with the loss scalers of Megatron-Core's optimizers.

    Args:
        wrapped: each torch optimizer with its scaler; at least one scaler is not None.
    """

    def __init__(self, wrapped: list[tuple[Optimizer, Any]]) -> None:
        super().__init__([optimizer for optimizer, _ in wrapped])
        self.scalers = [scaler for _, scaler in wrapped]

    def state_dict(self) -> dict[str, Any]:
        """Returns the joint state dict; each group contains the state of its scaler."""
        packed = super().state_dict()
        for group, scaler in zip(packed["param_groups"], self._scaler_of_groups(), strict=True):
            if scaler is not None:
                group[_SCALER] = dict(scaler.state_dict())
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each optimizer's part into it, and the state in its groups into its scaler."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        states: dict[int, tuple[Any, Any]] = {}
        for group, scaler in zip(groups, self._scaler_of_groups(), strict=True):
            state = group.pop(_SCALER, None)
            if scaler is not None and state is not None:
                states[id(scaler)] = scaler, state
        super().load_state_dict({**state_dict, "param_groups": groups})
        for scaler, state in states.values():
            scaler.load_state_dict(state)

    def _scaler_of_groups(self) -> Iterator[Any]:
        for optimizer, scaler in zip(self.optimizers, self.scalers, strict=True):
            for _ in optimizer.param_groups:
                yield scaler


def torch_optimizer(optimizer: Any) -> Any:
    """Returns a torch optimizer unchanged; for one of Megatron-Core, its torch optimizers as one.

    Raises:
        ValueError: an optimizer of Megatron-Core has fp32 copies of parameters, or no torch
            optimizer.
    """
    if isinstance(optimizer, Optimizer) or not _is_megatron(optimizer):
        return optimizer
    wrapped: list[tuple[Optimizer, Any]] = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if any(len(group) for group in getattr(each, "float16_groups", ())):
            raise ValueError(
                "optimizer: expected one that steps the main weights; found a "
                f"{type(each).__name__} with fp32 copies of its own. Wrap the model with "
                "preserve_fp32_weights=True"
            )
        if each.optimizer is not None:
            wrapped.append((each.optimizer, getattr(each, "grad_scaler", None)))
    if not wrapped:
        raise ValueError(
            "optimizer: expected one with parameters; found a "
            f"{type(optimizer).__name__} without any"
        )
    # Constant scalers have no state.
    if any(scaler is not None and scaler.state_dict() for _, scaler in wrapped):
        return _WrappedOptimizers(wrapped)
    return join_optimizers([each for each, _ in wrapped])


def _is_megatron(optimizer: Any) -> bool:
    """Whether an object has the attributes of Megatron-Core's optimizers."""
    return hasattr(optimizer, "chained_optimizers") or (
        hasattr(optimizer, "get_loss_scale") and hasattr(optimizer, "optimizer")
    )
