"""Encodes tensors in few bits per element, with one scale for each block of elements.

    values + errors --/ scale--> whole numbers --> codes (1 byte, or 2 codes in a byte)
    scale = largest magnitude of the block / largest code

A message has the codes of all blocks, followed by their scales in fp32. NaN and Inf are encoded as
the least code minus one, which decodes to NaN. They do not change the other elements of the block.

Worked example with 8 bits for a block with (1.27, -0.5, 0.004, 0, ...): the scale is 1.27 / 127 =
0.01, the codes are 127, -50, 0, 0, and they decode to 1.27, -0.5, 0, 0. The *error* of the third
element, its value minus its decoded value, is 0.004. Errors are at most half a scale, and are
stored in codes of 8 bits, too: with 254 steps in a scale, the code of the third element's error is
round(0.4 * 254) = 102.

[Note: Bounded errors]
The size of errors is proportional to that of the encoded gradients. If a large gradient is dropped
or clipped (a ``GradScaler`` skips the step, ``clip_grad_norm_`` scales the gradient), its errors
would still be added to the next step at full size. So errors are decoded with at most
``_MOST_ERRORS`` times the scale that the new values have without errors: errors of much larger
values shrink.

A block of zeros, for example of parameters that a step does not use, is sent as zeros. Its errors
are kept for the next values.
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
# Number of steps into which a scale is divided to encode errors.
_STEPS = 254
# See [Note: Bounded errors].
_MOST_ERRORS = 2.0
# The least scale. Blocks of smaller magnitudes become zero. `_STEPS` / `_LEAST_SCALE` is finite in
# fp32.
_LEAST_SCALE = 1e-35
# Larger numbers, which only fp64 has, become the largest one of fp32.
_MOST = torch.finfo(torch.float32).max
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Errors:
    """The errors of the last encoding, in 8 bits, to be added to the next values.

    Attributes:
        codes: int8, one for each element of each block.
        scales: fp32, one for each block: the size of a step.
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class BlockCodes:
    """Encodes tensors.

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

    def make_errors(
        self, parts: int, numel: int, allocate: Callable[[int, torch.dtype], Tensor]
    ) -> Errors:
        """Returns errors of zero for ``parts`` messages of ``numel`` elements each.

        Args:
            parts, numel: The numbers of messages, and of elements in each.
            allocate: Returns a 1-D tensor of zeros with a number of elements and a dtype.
        """
        blocks = parts * self.num_blocks(numel)
        return Errors(allocate(blocks * self.block, torch.int8), allocate(blocks, torch.float32))

    def values_of(self, errors: Errors, parts: int, numel: int) -> Tensor:
        """Returns errors in fp32, as (``parts``, ``numel``)."""
        rows = errors.codes.view(-1, self.block) * errors.scales.unsqueeze(1)
        return rows.view(parts, self.num_blocks(numel) * self.block)[:, :numel]

    def encode(self, values: Tensor, messages: Tensor, errors: Errors | None) -> None:
        """Encode ``values`` into ``messages``.

        Args:
            values: Real numbers of any dtype, as (messages, elements).
            messages: uint8, as (messages, ``num_bytes(elements)``).
            errors: Added to the values, and replaced by the errors of this call: zero for
                values that are not finite. See [Note: Bounded errors].
        """
        parts, numel = values.shape
        if not numel:
            return
        blocks, largest = self.num_blocks(numel), LARGEST[self.bits]
        dtype = torch.promote_types(values.dtype, torch.float32)
        flat = allocator.empty(parts * blocks * self.block, dtype, values.device)
        rows, matrix = flat.view(-1, self.block), flat.view(parts, blocks * self.block)
        matrix[:, :numel].copy_(values)
        matrix[:, numel:].zero_()
        if dtype == torch.float64:
            flat.copy_(torch.where(flat.isfinite(), flat.clamp(-_MOST, _MOST), flat))
        finite = rows.nan_to_num(0.0, 0.0, 0.0)
        most = torch.linalg.vector_norm(finite, math.inf, 1)
        if errors is not None:
            limit = (most / (largest * _STEPS)).mul_(_MOST_ERRORS).clamp_(max=_MOST)
            added = torch.minimum(errors.scales, limit.to(torch.float32)).unsqueeze(1)
            kept = torch.mul(errors.codes.view_as(rows), added)
            rows.add_(kept)
            most = torch.linalg.vector_norm(finite.add_(kept), math.inf, 1)
        scales = most.div(largest)
        # With this upper limit, the largest code times the largest scale is not rounded to Inf.
        scales = scales.clamp_(_LEAST_SCALE, _MOST / (largest + 0.01)).to(torch.float32)
        num_codes = messages.shape[1] - blocks * _SCALE_BYTES
        messages[:, num_codes:].view(torch.float32).copy_(scales.view(parts, blocks))
        # `rows` counts steps of errors, `numbers` whole scales.
        rows.mul_((_STEPS / scales).unsqueeze(1))
        numbers = torch.div(rows, _STEPS, out=finite).round_()
        bad = float(-largest - 1)
        codes = numbers.nan_to_num_(bad, bad, bad).to(torch.int8)
        messages[:, :num_codes].copy_(self._packed(codes).view(parts, num_codes))
        if errors is not None:
            rows.sub_(numbers, alpha=_STEPS).round_().nan_to_num_(0.0, 0.0, 0.0)
            # A block of zeros was sent as zeros, without its errors, which are kept.
            is_zero = limit == 0.0
            kept_codes = errors.codes.view_as(rows)
            kept_codes.copy_(torch.where(is_zero.unsqueeze(1), kept_codes, rows))
            errors.scales.copy_(torch.where(is_zero, errors.scales, scales.div_(_STEPS)))

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the elements of messages in ``dtype``, as (messages, ``numel``)."""
        parts, blocks = messages.shape[0], self.num_blocks(numel)
        if not numel:
            return allocator.empty(0, dtype, messages.device).view(parts, 0)
        num_codes = messages.shape[1] - blocks * _SCALE_BYTES
        codes = self._unpacked(messages[:, :num_codes]).view(parts, blocks, self.block)
        scales = messages[:, num_codes:].view(torch.float32).to(dtype)
        values = codes * scales.unsqueeze(2)
        values.masked_fill_(codes < -LARGEST[self.bits], math.nan)
        return values.view(parts, blocks * self.block)[:, :numel]

    def _packed(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.uint8)
        pairs = (codes + 8).view(torch.uint8).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def _unpacked(self, packed: Tensor) -> Tensor:
        if self.bits == 8:
            return packed.view(torch.int8)
        pairs = torch.stack((packed & 15, packed >> 4), -1)
        return pairs.view(torch.int8).sub_(8)
