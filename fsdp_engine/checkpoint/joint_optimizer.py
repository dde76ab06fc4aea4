"""Converts several optimizers, or Megatron-Core's, to one torch optimizer for checkpoints.

Megatron-Core's ``FP32Optimizer`` and ``Float16OptimizerWithFloat16Params`` have a torch optimizer
in ``optimizer``, and a loss scaler or None in ``grad_scaler``. Its ``ChainedOptimizer`` has several
of them in ``chained_optimizers``. The state of a scaler is saved as a hyperparameter of the
optimizer's param groups. This file does not import Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# One optimizer over all parameters, or several optimizers over different parameters.
Optimizers = Optimizer | Sequence[Optimizer]


class _States(Mapping[Tensor, Any]):
    """The state by parameter, over all optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def _states(self) -> list[Any]:
        # The dicts are not kept, because load_state_dict replaces them.
        return [optimizer.state for optimizer in self._optimizers]

    def __getitem__(self, param: Tensor) -> Any:
        for states in self._states:
            if param in states:
                return states[param]
        raise KeyError(param)

    def __iter__(self) -> Iterator[Tensor]:
        for states in self._states:
            yield from states

    def __len__(self) -> int:
        return sum(map(len, self._states))


class JointOptimizer(Optimizer):
    """Optimizers over different parameters that are saved and loaded as one. It cannot step.

    Parameters are numbered consecutively over all optimizers.

    Args:
        optimizers: The optimizers; at least one.

    Raises:
        ValueError: Two optimizers have the same parameter.
    """

    # Optimizer.__init__ is not called, because it would copy the groups. The joint optimizer shares
    # them with the optimizers.
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        params = [id(param) for group in self._groups() for param in group["params"]]
        if (num_shared := len(params) - len(set(params))) > 0:
            raise ValueError(
                "optimizers: expected each parameter in one optimizer only; found "
                f"{num_shared} parameters in several optimizers"
            )
        self.param_groups = self._groups()
        self.state = _States(self.optimizers)  # type: ignore[assignment]
        # Checkpoints contain the name of the optimizer's class, so this name lists all classes.
        self.__class__ = type(
            "And".join(type(each).__name__ for each in self.optimizers), (type(self),), {}
        )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of one optimizer over all groups."""
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer, first in self._numbered():
            packed = optimizer.state_dict()
            states |= {index + first: state for index, state in packed["state"].items()}
            groups += [
                {**group, "params": [index + first for index in group["params"]]}
                for group in packed["param_groups"]
            ]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each optimizer's part of the state dict into it."""
        groups = iter(state_dict["param_groups"])
        for optimizer, first in self._numbered():
            mine = [next(groups) for _ in optimizer.param_groups]
            indices = {index for group in mine for index in group["params"]}
            optimizer.load_state_dict(
                {
                    "state": {
                        index - first: state
                        for index, state in state_dict["state"].items()
                        if index in indices
                    },
                    "param_groups": [
                        {**group, "params": [index - first for index in group["params"]]}
                        for group in mine
                    ],
                }
            )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Raise TypeError, because the joined optimizers step, not this one."""
        raise TypeError(
            "JointOptimizer: expected calls of step() of each of its optimizers; found a call of "
            "its own step()"
        )

    def _numbered(self) -> Iterator[tuple[Optimizer, int]]:
        """Yield each optimizer, and the number of its first parameter."""
        first = 0
        for optimizer in self.optimizers:
            yield optimizer, first
            first += sum(len(group["params"]) for group in optimizer.param_groups)


def join_optimizers(optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Returns None for no optimizer, one optimizer unchanged, several as a
    :class:`JointOptimizer`."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    return JointOptimizer(optimizers)


def single_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that :func:`join_optimizers` has joined, or a list of the given one.
    Joint optimizers may contain joint optimizers."""
    if not isinstance(optimizer, JointOptimizer):
        return [optimizer]
    return [single for each in optimizer.optimizers for single in single_optimizers(each)]


_SCALER = "grad_scaler"


class _WrappedOptimizers(JointOptimizer):
    """Torch optimizers with the loss scalers of Megatron-Core's optimizers.

    Args:
        wrapped: Each torch optimizer with its scaler; at least one scaler is not None.
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
        """Load each optimizer's part of the state dict, and the states of scalers in its groups."""
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
    """Returns the torch optimizer to save. An optimizer of Megatron-Core is replaced by its torch
    optimizer, and several optimizers are joined to one.

    Raises:
        ValueError: There is no optimizer in a list, two optimizers have the same parameter, or a
            Megatron-Core optimizer has fp32 copies of parameters or no torch optimizer.
    """
    if isinstance(optimizer, list | tuple):
        if not optimizer:
            raise ValueError(
                "optimizer: expected one optimizer or several, or None for weights alone; found an "
                f"empty {type(optimizer).__name__}"
            )
        return join_optimizers([torch_optimizer(each) for each in optimizer])
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
    # Scalers without state, such as constant ones, are not saved.
    if any(scaler is not None and scaler.state_dict() for _, scaler in wrapped):
        return _WrappedOptimizers(wrapped)
    return join_optimizers([each for each, _ in wrapped])


def _is_megatron(optimizer: Any) -> bool:
    """Returns whether an object has the attributes of Megatron-Core's optimizers."""
    return hasattr(optimizer, "chained_optimizers") or (
        hasattr(optimizer, "get_loss_scale") and hasattr(optimizer, "optimizer")
    )
