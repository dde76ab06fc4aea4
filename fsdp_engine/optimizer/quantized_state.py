"""State of torchao's low-bit optimizers (AdamW8bit, AdamW4bit, AdamWFp8, and Adam of these).

They quantise state in blocks of consecutive elements, of each rank's slice here. Where the blocks
are depends on the number of ranks, so ``state_dict()`` has the values instead, in fp32, as any Adam
would; ``load_state_dict()`` quantises them in the blocks of this rank's slice. The same number of
ranks finds the codes that were saved:

    slices   codes, scales --state_dict--> fp32 values --load_state_dict--> codes, scales

In a signed map the largest value is 1 and the smallest -0.993 (4 bit: -0.888), so a block whose
largest element is negative has no code for it, and torchao would scale the block anew at each
load. :func:`_rescaled` prevents that.
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
    """Whether it is an optimizer of torchao's that quantises its state, or a subclass."""
    return any(map(is_blockwise_class, type(optimizer).__mro__))


def is_blockwise_class(kind: type) -> bool:
    """Whether it is the class of such an optimizer, as torchao has it."""
    return kind.__module__.startswith(_MODULES)


def is_quantized_state(value: object) -> bool:
    """Whether a tensor, or the slice of a FlatDTensor, is of a class of its own."""
    local = value._local_tensor if isinstance(value, FlatDTensor) else value
    return isinstance(local, Tensor) and hasattr(local, "dequantize") and _has_class(local)


def save_values(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A post-hook of ``state_dict``: values in place of codes."""
    states = {
        key: {name: _values_of(value) for name, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


@torch.no_grad()
def quantize_values(optimizer: Any) -> None:
    """A post-hook of ``load_state_dict``: codes in place of values, in the blocks of slices."""
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
                continue  # the next step says what is wrong with it
            made = optimizer._new_buffer(local, name == _SIGNED)
            if not _has_class(made):
                continue
            made.copy_(_rescaled(local, made))
            state[name] = made
            if placement is not None:
                state[name] = FlatDTensor.from_flat_local(made, placement)


def _slice_of(value: Tensor, placement: FlatPlacement) -> tuple[Tensor | None, FlatPlacement]:
    """The plain slice of a loaded value, and where it lies; None: it does not fit."""
    if isinstance(value, FlatDTensor):
        return value.local, value.flat_placement
    if isinstance(value, DTensor):
        return slice_of_distributed(value, placement), placement
    fits = value.ndim > 0 and value.shape == placement.shape
    return placement.part_of(value) if fits else None, placement


def _values_of(value: Any) -> Any:
    if not is_quantized_state(value):
        return value
    if isinstance(value, FlatDTensor):
        local: Any = value._local_tensor
        return FlatDTensor.from_flat_local(local.dequantize(), value.flat_placement)
    return value.dequantize()


def _rescaled(values: Tensor, target: Any) -> Tensor:
    """``values`` in which the largest element of a block, if negative, is as much larger as the
    map of ``target`` has no code for -1."""
    least = target.qmap.min() if hasattr(target, "qmap") else None
    if least is None or least >= 0:
        return values
    blocks = values.reshape(-1, target.block_size)
    lowest, at = blocks.min(1, keepdim=True)
    is_largest = -lowest >= blocks.amax(1, keepdim=True)
    scaled = torch.where(is_largest, lowest / -least, lowest)
    return blocks.scatter(1, at, scaled).view(values.shape)


def _has_class(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter)
