"""State of bitsandbytes and of pytorch_optimizer's FlashAdamW: codes in one tensor, and scales of
blocks in another.

Both are saved unchanged, under the package's names, as slices of the tensors that a single process
would save.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsdp_engine.extensions.low_bit_state.block_state import BlockState
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.optim.state_format import StateFormat

_BLOCK = 256
_ELEMENTWISE = ("adam", "ademamix", "adagrad", "lion", "momentum", "rmsprop")
# Scales have one element per block. Maps of codes are equal for all parameters.
_SCALES = ("absmax1", "absmax2")
_MAPS = ("qmap1", "qmap2")
# FlashAdamW has a scale for every 32 elements of each parameter. All shard boundaries are multiples
# of 64.
_FLASH_BLOCK = 32


class BitsandbytesRules:
    """Mixin of a shadow of bitsandbytes' optimizers. A slice has the configuration of its
    parameter, and its state is quantised if that of the full parameter is."""

    __slots__ = ()

    state: Mapping[Any, dict[str, Any]]

    def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
        original = _unsharded(self)
        config: dict[str, Any] = original.get_config(gindex, pindex, group)
        param = original.param_groups[gindex]["params"][pindex]
        if isinstance(param, FlatDTensor):
            config["min_8bit_size"] = 0 if _is_large(param, config) else sys.maxsize
        return config

    def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        if p.numel():
            super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
        else:  # Kernels cannot be launched for zero elements.
            self.state[p]["step"] += 1

    def check_overrides(self) -> None:
        # Overrides are for parameters of modules, not for slices.
        _unsharded(self).check_overrides()


def _unsharded(shadow: Any) -> Any:
    """Returns an object of the optimizer's class that shares the attributes of a shadow. Its param
    groups have the sharded parameters instead of slices."""
    original: Any = object.__new__(type(shadow).__bases__[-1])
    original.__dict__ = shadow.__dict__
    return original


def _is_large(param: FlatDTensor, config: Mapping[str, Any]) -> bool:
    return param.flat_placement.sharded_shape.numel() >= int(config["min_8bit_size"])


class BitsandbytesState(BlockState):
    """The format of bitsandbytes. See :class:`StateFormat`."""

    mixins = (BitsandbytesRules,)

    def is_elementwise(self, optimizer: Any, kind: type) -> bool:
        """See :class:`StateFormat`. False for subclasses, LARS, LAMB, and clipping by norms of
        parameters."""
        args = getattr(optimizer, "args", None)
        # Only versions up to 0.48 have the last two options.
        return (
            kind is type(optimizer)
            and kind.__module__.startswith("bitsandbytes.optim.")
            and getattr(optimizer, "optimizer_name", "") in _ELEMENTWISE
            and not getattr(args, "max_unorm", 0)
            and getattr(args, "percentile_clipping", 100) == 100
            and getattr(args, "block_wise", True)
        )

    def placement_of(self, key: Any, placement: FlatPlacement) -> FlatPlacement | None:
        """See :class:`StateFormat`."""
        if key in _SCALES and placement.spread is None:
            return placement.of_blocks(_BLOCK)
        return None if key in (*_SCALES, *_MAPS) else placement

    def block_size(self, optimizer: Any, number: int, index: int) -> int:
        """See :class:`BlockState`."""
        group = optimizer.param_groups[number]
        config = optimizer.get_config(number, index, group)
        is_quantized = config["optim_bits"] == 8 and _is_large(group["params"][index], config)
        return _BLOCK if is_quantized else 0


class FlashState(StateFormat):
    """The format of FlashAdamW. See :class:`StateFormat`."""

    def placement_of(self, key: Any, placement: FlatPlacement) -> FlatPlacement | None:
        """See :class:`StateFormat`."""
        if not str(key).endswith("::scales"):
            return placement
        return placement.of_blocks(_FLASH_BLOCK) if placement.spread is None else None
