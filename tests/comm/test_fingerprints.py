"""Fingerprints of tensors that differ."""

from __future__ import annotations

import pytest
import torch

from fsdp_engine.comm.fingerprints import fingerprints

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signs_order_and_single_elements_change_the_fingerprint(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(64, 64, dtype=torch.float64, generator=generator).mul(100).to(dtype)
    others = [-value, value.flip(0), value.t().contiguous(), value[:-1]]
    for places in ([(0, 0)], [(0, 0), (0, 1)], [(3, 5), (60, 2)]):
        for factor in (-1, 2):
            other = value.clone()
            for row, column in places:
                other[row, column] = value[row, column] * factor + (factor == 2)
            others.append(other)
    found = fingerprints([value, *others])
    assert len(set(found)) == len(found)
    assert fingerprints([value.clone()]) == found[:1]
