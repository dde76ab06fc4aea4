"""fp8 of whole tensors, written down a second time: loops over what shares a scale."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fsdp_engine.extensions.fp8 import Float8


def _places(matrix: Tensor, options: Float8) -> list[list[tuple[slice, slice]]]:
    """What shares a scale, in rows of such places."""
    size = {"tensor": matrix.shape, "row": (1, matrix.shape[1]), "block": (128, 128)}
    height, width = size[options.granularity]
    return [
        [
            (slice(top, top + height), slice(left, left + width))
            for left in range(0, matrix.shape[1], max(width, 1))
        ]
        for top in range(0, matrix.shape[0], max(height, 1))
    ]


def _scale(part: Tensor, options: Float8) -> Tensor:
    scale = part.abs().max() / 448
    if options.power_of_two_scales and scale > 0:
        scale = 2.0 ** torch.log2(scale).ceil()
    return torch.maximum(scale, torch.tensor(2.0**-126))


def reference_scales(matrix: Tensor, options: Float8) -> Tensor:
    """The scale of each element, in the shape of ``matrix``."""
    scales = torch.empty_like(matrix)
    for place in itertools.chain(*_places(matrix, options)):
        scales[place] = _scale(matrix[place], options)
    return scales


def reference_grid(tensor: Tensor, options: Float8) -> Tensor:
    """The scales of ``tensor``, each once, row after row: 1-D, as a codec keeps them."""
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    parts = itertools.chain(*_places(matrix, options))
    return torch.stack([_scale(matrix[place], options) for place in parts])


def reference_bytes(matrix: Tensor, scales: Tensor) -> Tensor:
    """e4m3 numbers as bytes, in the shape of ``matrix``."""
    return (matrix / scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def fp8_bytes(tensor: Tensor, options: Float8) -> Tensor:
    """The gathered bytes of ``tensor``: uint8, viewed as a matrix."""
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    return reference_bytes(matrix, reference_scales(matrix, options))


def quantised(tensor: Tensor, options: Float8) -> Tensor:
    """``tensor`` after a journey as fp8, in fp32."""
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    scales = reference_scales(matrix, options)
    fp8 = reference_bytes(matrix, scales).view(torch.float8_e4m3fn)
    return (fp8.float() * scales).view(tensor.shape)
