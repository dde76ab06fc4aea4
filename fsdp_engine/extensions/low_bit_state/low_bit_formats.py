"""Choice of the format of an optimizer's state by the package of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsdp_engine.extensions.low_bit_state.block_state import TORCHAO
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.optim.state_format import StateFormat

# In state dicts of bitsandbytes the tensors of quantised state are in a dict within the state of a
# parameter. They include maps of codes, which are equal for all parameters.
_WITHIN = "__bnb_optimizer_quant_state__"
_MAPS = ("qmap1", "qmap2")
_FLASH_SCALES = "::scales"


class LowBitFormats(StateFormat):
    """Formats of the supported packages. See :class:`StateFormat`."""

    @classmethod
    def of(cls, optimizer: Any) -> StateFormat:
        """See :class:`StateFormat`."""
        for kind in type(optimizer).__mro__:
            if kind.__module__.startswith(TORCHAO):
                from fsdp_engine.extensions.low_bit_state.torchao_state import TorchaoState

                return TorchaoState()
            if kind.__module__.startswith("bitsandbytes.optim.") and hasattr(kind, "get_config"):
                from fsdp_engine.extensions.low_bit_state.separate_scales import BitsandbytesState

                return BitsandbytesState()
            if kind.__module__.startswith("pytorch_optimizer.") and kind.__name__ == "FlashAdamW":
                from fsdp_engine.extensions.low_bit_state.separate_scales import FlashState

                return FlashState()
        return StateFormat()

    @staticmethod
    def flattened(name: str, param: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`StateFormat`."""
        within = state.get(_WITHIN, {})
        parts = {key: within[key] for key in within if key not in _MAPS}
        parts |= {key: state[key] for key in state if str(key).endswith(_FLASH_SCALES)}
        for key, value in parts.items():
            is_part = isinstance(value, Tensor) and value.ndim
            if is_part and isinstance(param, FlatDTensor) and not isinstance(value, FlatDTensor):
                raise ValueError(
                    f"optimizer: expected state of {name} in its shape, or a scale for each block "
                    f"of its elements; found {key!r} of shape {tuple(value.shape)}, which differs "
                    "between ranks. Save optimizer.state_dict() on each rank"
                )
        return {**{key: state[key] for key in state if key != _WITHIN}, **within}
