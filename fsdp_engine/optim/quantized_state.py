"""State of torchao's low-bit optimizers (AdamW8bit, AdamW4bit, AdamWFp8, and Adam of these).

They quantise state in blocks of consecutive elements, here of each rank's slice. The boundaries of
the blocks depend on the number of ranks. Therefore ``state_dict()`` returns dequantised fp32
values, as for any Adam, and ``load_state_dict()`` quantises them in the blocks of this rank's
slice. With the same number of ranks the loaded codes equal the saved ones:

    slices   codes, scales --state_dict--> fp32 values --load_state_dict--> codes, scales

In a signed quantisation map the largest value is 1 and the smallest -0.993 (4 bit: -0.888). A block
whose element of the largest magnitude is negative has no code for that element, and torchao would
change the scale of the block at each load. :func:`_rescaled` compensates for this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.flat_dtensor.elementwise import slice_of_distributed

_MODULES = ("torchao.optim.", "torchao.prototype.low_bit_optim.")
_SIGNED = "exp_avg"
_QUANTIZED = (_SIGNED, "exp_avg_sq", "max_exp_avg_sq")


def is_blockwise(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is one of torchao's that quantise their state, or a subclass."""
    return any(map(is_blockwise_class, type(optimizer).__mro__))


def is_blockwise_class(kind: type) -> bool:
    """Whether a class is that of such an optimizer in torchao, not a subclass."""
    return kind.__module__.startswith(_MODULES)


def is_quantized_state(value: object) -> bool:
    """Whether a tensor, or the slice of a FlatDTensor, is a quantised tensor subclass."""
    local = value._local_tensor if isinstance(value, FlatDTensor) else value
    return isinstance(local, Tensor) and hasattr(local, "dequantize") and _is_subclass(local)


def save_values(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of ``state_dict()``: replace quantised state by its fp32 values."""
    states = {
        key: {name: _values_of(value) for name, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


@torch.no_grad()
def quantize_values(optimizer: Any) -> None:
    """Post-hook of ``load_state_dict()``: quantise values in the blocks of this rank's slices."""
    for param, state in optimizer.state.items():
        for name in _QUANTIZED:
            value = state.get(name)
            if not isinstance(value, Tensor) or is_quantized_state(value):
                continue
            placement = param.flat_placement if isinstance(param, FlatDTensor) else None
            local: Tensor | None = value
            if placement is not None:
                local, placement = _slice_of(value, placement)
            if local is None:
                continue  # a wrong shape; the next step raises
            quantized = optimizer._new_buffer(local, name == _SIGNED)
            if not _is_subclass(quantized):
                continue
            quantized.copy_(_rescaled(local, quantized))
            state[name] = quantized
            if placement is not None:
                state[name] = FlatDTensor.from_flat_local(quantized, placement)


def _slice_of(value: Tensor, placement: FlatPlacement) -> tuple[Tensor | None, FlatPlacement]:
    """The plain slice of a loaded value, and its placement; None for a slice of another shape."""
    if isinstance(value, FlatDTensor):
        return value.local, value.flat_placement
    if isinstance(value, DTensor):
        return slice_of_distributed(value, placement), placement
    fits = value.ndim > 0 and value.shape == placement.shape
    return placement.slice_of_full(value) if fits else None, placement


def _values_of(value: Any) -> Any:
    if not is_quantized_state(value):
        return value
    if isinstance(value, FlatDTensor):
        local: Any = value._local_tensor
        return FlatDTensor.from_flat_local(local.dequantize(), value.flat_placement)
    return value.dequantize()


def _rescaled(values: Tensor, target: Any) -> Tensor:
    """Scale the element of the largest magnitude of each block, if it is negative, by 1 / |smallest
    value of the quantisation map of ``target``|. Other elements are unchanged."""
    least = target.qmap.min() if hasattr(target, "qmap") else None
    if least is None or least >= 0:
        return values
    blocks = values.reshape(-1, target.block_size)
    lowest, at = blocks.min(1, keepdim=True)
    is_largest = -lowest >= blocks.amax(1, keepdim=True)
    scaled = torch.where(is_largest, lowest / -least, lowest)
    return blocks.scatter(1, at, scaled).view(values.shape)


def _is_subclass(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter)
