"""Few bits per element, with one scale for each block of elements.

    values --/ scale--> whole numbers --> codes (1 byte, or 2 codes in a byte)
    scale = largest magnitude of the block / largest code

A message has the codes of all blocks, followed by their scales in fp32. NaN and Inf have the code
below the least one, which decodes to NaN. They do not affect other elements of their block.

Worked example with 8 bits for a block with (1.27, -0.5, 0.004, 0, ...): the scale is 1.27 / 127 =
0.01, the codes are 127, -50, 0, 0, and they decode to 1.27, -0.5, 0, 0. The *error* of the third
element is 0.004.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.memory import allocator

# The largest code by number of bits. The least code is its negative.
LARGEST = {8: 127, 4: 7}
# Errors are at most half a scale, and are kept in codes of 8 bits.
_OF_ERRORS = 0.5 / 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny
# Larger numbers, which only fp64 has, become the largest one of fp32.
_MOST = torch.finfo(torch.float32).max
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Errors:
    """The errors of the last encoding, in 8 bits, to be added to the next values.

    Attributes:
        codes: int8, one for each element of each block.
        scales: fp32, one for each block.
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class BlockCodes:
    """Encodes 1-D tensors.

    Attributes:
        bits: Bits per element: 8 or 4.
        block: Number of elements that share a scale, a multiple of 8.
    """

    bits: int
    block: int

    def num_blocks(self, numel: int) -> int:
        """Returns the number of blocks of ``numel`` elements."""
        return -(-numel // self.block)

    def num_bytes(self, numel: int) -> int:
        """Returns the size in bytes of the message of ``numel`` elements."""
        return self.num_blocks(numel) * (self.block * self.bits // 8 + _SCALE_BYTES)

    def make_errors(self, numel: int, allocate: Callable[[int, torch.dtype], Tensor]) -> Errors:
        """Returns errors of zero for ``numel`` elements.

        Args:
            numel: The number of elements.
            allocate: Returns a 1-D tensor of zeros with a number of elements and a dtype.
        """
        blocks = self.num_blocks(numel)
        return Errors(allocate(blocks * self.block, torch.int8), allocate(blocks, torch.float32))

    def encode(self, values: Tensor, message: Tensor, errors: Errors | None) -> None:
        """Encode ``values`` into ``message``.

        Args:
            values: Real numbers of any dtype, 1-D.
            message: uint8, of ``num_bytes(values.numel())`` elements.
            errors: Added to the values, and replaced by the errors of this call: zero for
                values that are not finite.
        """
        numel, blocks = values.numel(), self.num_blocks(values.numel())
        dtype = torch.promote_types(values.dtype, torch.float32)
        flat = allocator.zeros(blocks * self.block, dtype, values.device)
        flat[:numel].copy_(values)
        rows = flat.view(blocks, self.block)
        if errors is not None:
            rows.add_(errors.codes.view(blocks, self.block) * errors.scales.unsqueeze(1))
        is_bad = ~rows.isfinite()
        rows.masked_fill_(is_bad, 0.0)
        largest = LARGEST[self.bits]
        # A block whose largest magnitude is below the least scale becomes zero.
        scales = rows.abs().amax(1).div_(largest).clamp_(_LEAST_SCALE, _MOST / (largest + 1))
        scales = scales.to(torch.float32)
        numbers = (rows / scales.unsqueeze(1)).round_().clamp_(-largest, largest)
        codes = numbers.to(torch.int8)
        if errors is not None:
            steps = scales * _OF_ERRORS
            rows.sub_(codes * scales.unsqueeze(1)).div_(steps.unsqueeze(1))
            errors.codes.view(blocks, self.block).copy_(rows.round_().clamp_(-127, 127))
            errors.scales.copy_(steps)
        codes.masked_fill_(is_bad, -largest - 1)
        num_codes = message.numel() - blocks * _SCALE_BYTES
        message[num_codes:].view(torch.float32).copy_(scales)
        message[:num_codes].copy_(self._packed(codes.view(-1)))

    def decode(self, message: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the ``numel`` elements of a message, in ``dtype``."""
        blocks = self.num_blocks(numel)
        num_codes = message.numel() - blocks * _SCALE_BYTES
        codes = self._unpacked(message[:num_codes]).view(blocks, self.block)
        scales = message[num_codes:].view(torch.float32)
        values = codes.to(dtype) * scales.to(dtype).unsqueeze(1)
        values.masked_fill_(codes < -LARGEST[self.bits], math.nan)
        return values.view(-1)[:numel]

    def _packed(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.uint8)
        pairs = (codes + 8).to(torch.uint8).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def _unpacked(self, packed: Tensor) -> Tensor:
        if self.bits == 8:
            return packed.view(torch.int8)
        pairs = torch.stack((packed & 15, packed >> 4), 1)
        return pairs.view(-1).to(torch.int8) - 8
