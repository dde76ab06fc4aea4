"""Codes of blocks: their errors, feedback, NaN and Inf, and sizes of messages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_engine.extensions.quantized_reduction.block_codes import LARGEST, BlockCodes, Errors

NAN, INF = float("nan"), float("inf")
every_size = pytest.mark.parametrize("numel", [1, 8, 255, 256, 1000])
every_bits = pytest.mark.parametrize("bits", LARGEST)


def errors_of(codes: BlockCodes, numel: int) -> Errors:
    return codes.make_errors(1, numel, lambda count, dtype: torch.zeros(count, dtype=dtype))


def sent(codes: BlockCodes, values: Tensor, errors: Errors | None = None) -> Tensor:
    """The values that the receiver decodes."""
    message = torch.full((1, codes.num_bytes(values.numel())), 0xA5, dtype=torch.uint8)
    codes.encode(values.unsqueeze(0), message, errors)
    return codes.decode(message, values.numel(), torch.float32).squeeze(0)


@every_bits
@every_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_element_is_off_by_half_a_step_of_its_block_at_most(
    bits: int, numel: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    codes = BlockCodes(bits, 64)
    values = (torch.randn(numel) * torch.logspace(-3, 3, numel)).to(dtype)
    found = sent(codes, values)
    for block, decoded in zip(values.float().split(64), found.split(64), strict=True):
        step = block.abs().max() / LARGEST[bits]
        assert (decoded - block).abs().max() <= step * 0.501


def test_the_worked_example() -> None:
    values = torch.tensor([1.27, -0.5, 0.004, *[0.0] * 5])
    codes = BlockCodes(8, 8)
    errors = errors_of(codes, 8)
    expected = torch.tensor([1.27, -0.5, *[0.0] * 6])
    torch.testing.assert_close(sent(codes, values, errors), expected)
    lost = codes.values_of(errors, 1, 8)[0]
    torch.testing.assert_close(lost, values - expected, atol=1e-4, rtol=0)


@every_bits
def test_with_errors_kept_the_mean_of_what_is_sent_is_the_mean_of_the_values(bits: int) -> None:
    torch.manual_seed(0)
    codes = BlockCodes(bits, 256)
    values = torch.randn(1000)
    errors, total, without = errors_of(codes, 1000), torch.zeros(1000), sent(codes, values)
    for _ in range(64):
        total += sent(codes, values, errors)
    once = (without - values).abs().max()
    # The error of one of 64 steps remains, and 64 roundings of errors to 8 bits.
    assert (total / 64 - values).abs().max() < once / 20


@every_bits
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_nan_and_changes_no_other_element(bits: int, bad: float) -> None:
    codes = BlockCodes(bits, 8)
    errors = errors_of(codes, 24)
    values = torch.linspace(-1, 1, 24)
    values[10] = 0.0
    planted = values.clone()
    planted[10] = bad
    found, expected = sent(codes, planted, errors), sent(codes, values)
    assert found[10].isnan()
    expected[10] = found[10]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert sent(codes, values, errors)[10] == 0.0


@every_bits
def test_several_messages_are_those_of_each(bits: int) -> None:
    torch.manual_seed(0)
    codes = BlockCodes(bits, 64)
    values = torch.randn(3, 100)
    errors = codes.make_errors(3, 100, lambda count, dtype: torch.zeros(count, dtype=dtype))
    alone = [errors_of(codes, 100) for _ in range(3)]
    for _ in range(2):
        messages = torch.empty(3, codes.num_bytes(100), dtype=torch.uint8)
        codes.encode(values, messages, errors)
        found = codes.decode(messages, 100, torch.float32)
        for row, expected, kept in zip(found, values, alone, strict=True):
            assert torch.equal(row, sent(codes, expected, kept))
    for row, kept in zip(codes.values_of(errors, 3, 100), alone, strict=True):
        assert torch.equal(row, codes.values_of(kept, 1, 100)[0])


@every_bits
def test_zeros_stay_zeros(bits: int) -> None:
    codes = BlockCodes(bits, 8)
    assert not sent(codes, torch.zeros(20), errors_of(codes, 20)).any()
    assert not sent(codes, torch.full((20,), 1e-44), errors_of(codes, 20)).any()


def test_messages_have_a_quarter_and_an_eighth_of_the_bytes_of_fp32() -> None:
    assert BlockCodes(8, 256).num_bytes(10**6) / 4e6 == pytest.approx(0.254, abs=1e-3)
    assert BlockCodes(4, 256).num_bytes(10**6) / 4e6 == pytest.approx(0.129, abs=1e-3)


@every_bits
@pytest.mark.parametrize("large", [3.4e38, torch.finfo(torch.float32).max, 1e200])
def test_the_largest_numbers_change_no_other_block_and_no_later_step(
    bits: int, large: float
) -> None:
    codes = BlockCodes(bits, 8)
    errors = errors_of(codes, 16)
    values = torch.linspace(-1, 1, 16, dtype=torch.float64)
    planted = values.clone()
    planted[3] = large
    found = sent(codes, planted, errors)
    assert found.isfinite().all()
    assert found[3] > 3e38 * 0.9
    assert (found[8:] - values[8:].float()).abs().max() < 0.1
    sent(codes, values, errors)
    assert (sent(codes, values, errors) - values.float()).abs().max() < 0.3
