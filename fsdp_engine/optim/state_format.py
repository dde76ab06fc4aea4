"""The format in which an optimizer stores the state of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.flat_dtensor import FlatPlacement

# Packages whose optimizers quantise their state in blocks.
QUANTIZING_PACKAGES = ("torchao.", "bitsandbytes.")


class StateFormat:
    """Seam (:func:`.implementation`): the format of an optimizer's state.

    In this class state tensors are plain, and state of the parameter's shape is sharded like the
    parameter.

    Attributes:
        mixins: Further base classes of the optimizer's shadows.
        has_plain_tensors: Whether no state tensor is of a subclass of ``Tensor``.
    """

    mixins: tuple[type, ...] = ()
    has_plain_tensors = True

    @classmethod
    def of(cls, optimizer: Any) -> StateFormat:
        """Returns the format of an optimizer's state.

        Raises:
            ValueError: The format needs an extension that is not part of the installation.
        """
        modules = (kind.__module__ for kind in type(optimizer).__mro__)
        if any(module.startswith(QUANTIZING_PACKAGES) for module in modules):
            raise ValueError(
                f"optimizer: expected state in plain tensors; found {type(optimizer).__name__}, "
                "whose state is quantised. The extension low_bit_state shards it, and is not part "
                "of this installation"
            )
        return cls()

    def is_elementwise(self, optimizer: Optimizer, kind: type) -> bool:
        """Returns whether the step of class ``kind`` is known to be elementwise.

        An update that depends on a block of quantised state alone counts, too.

        Args:
            optimizer: The optimizer.
            kind: The class of the optimizer, or one of its base classes.
        """
        return False

    def placement_of(self, key: Any, placement: FlatPlacement) -> FlatPlacement | None:
        """Returns the placement of a state. None: each rank holds the full state.

        Args:
            key: The key of the state.
            placement: The parameter's placement.
        """
        return placement

    def check(self, optimizer: Optimizer) -> None:
        """Check that the slices of the optimizer's parameters can have state in this format.

        Raises:
            ValueError: A shard boundary is inside a block of quantised state.
        """

    def register(self, optimizer: Optimizer) -> None:
        """Register further hooks of an optimizer that steps slices."""

    @staticmethod
    def flattened(name: str, param: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a parameter's state from a state dict, without the format's containers.

        Args:
            name: The name of the parameter, for errors.
            param: The parameter.
            state: Its state.

        Raises:
            ValueError: A state tensor differs between ranks, and is not sharded like a FlatDTensor.
        """
        return state
