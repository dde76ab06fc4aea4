"""The base class of formats whose state is quantised in blocks."""

from __future__ import annotations

from typing import Any

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.optim.state_format import StateFormat

# Modules of torchao's optimizers that quantise their state.
TORCHAO = ("torchao.optim.", "torchao.prototype.low_bit_optim.")


class BlockState(StateFormat):
    """Base class of formats that quantise state in blocks. See [Note: Blocks of quantised state] in
    the folder's ``__init__.py``."""

    def block_size(self, optimizer: Any, number: int, index: int) -> int:
        """Returns the block size in elements for the state of a sharded parameter; 0 if the state
        is not quantised.

        Args:
            optimizer: The optimizer.
            number: Number of the param group.
            index: Index of the parameter in the group.
        """
        raise NotImplementedError

    def check(self, optimizer: Any) -> None:
        """See :class:`StateFormat`. Raises on all ranks."""
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if not isinstance(param, FlatDTensor):
                    continue
                multiple = param.flat_placement.boundary_multiple
                size = self.block_size(optimizer, number, index)
                if size and multiple is not None and multiple % size:
                    raise ValueError(
                        f"{param.flat_placement.name or 'a parameter'}: expected shard boundaries "
                        f"on multiples of {size} elements, the blocks in which "
                        f"{type(optimizer).__name__} quantises its state; found multiples of "
                        f"{multiple}. Return a multiple of {size} from fe.shard's granule for this "
                        "parameter"
                    )
