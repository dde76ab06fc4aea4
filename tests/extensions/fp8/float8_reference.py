"""An independent implementation of fp8 for whole tensors, and the loss of training with a
quantising codec in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fsdp_engine.extensions.fp8 import Float8
from tests.reference import Batch


def _parts(matrix: Tensor, options: Float8) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yields the elements that share a scale, row after row, with the scale."""
    size = {"tensor": matrix.shape, "row": (1, matrix.shape[1]), "block": (128, 128)}
    height, width = size[options.granularity]
    for top in range(0, matrix.shape[0], max(height, 1)):
        for left in range(0, matrix.shape[1], max(width, 1)):
            place = slice(top, top + height), slice(left, left + width)
            scale = matrix[place].abs().max() / 448
            if options.power_of_two_scales and scale > 0:
                scale = 2.0 ** torch.log2(scale).ceil()
            yield place, torch.maximum(scale, torch.tensor(2.0**-126))


def reference_grid(tensor: Tensor, options: Float8) -> Tensor:
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    return torch.stack([scale for _, scale in _parts(matrix, options)])


def fp8_bytes(tensor: Tensor, options: Float8) -> tuple[Tensor, Tensor]:
    """The gathered bytes of ``tensor``, and the scale of each byte, as matrices."""
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    scales = torch.empty_like(matrix)
    for place, scale in _parts(matrix, options):
        scales[place] = scale
    fp8 = (matrix / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return fp8.view(torch.uint8), scales


def quantised(tensor: Tensor, options: Float8) -> Tensor:
    """``tensor``, converted to fp8 and back to fp32."""
    data, scales = fp8_bytes(tensor, options)
    return (data.view(torch.float8_e4m3fn).float() * scales).view(tensor.shape)


def rounded_loss(quantise: Callable[[Tensor], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """The loss with quantised copies of the matrices, which get the gradients of their copies."""
    copies = {
        name: param + (quantise(param.detach()) - param.detach()) if param.ndim >= 2 else param
        for name, param in model.named_parameters()
    }
    loss: Tensor = torch.func.functional_call(model, copies, batch)
    return loss
