"""Compares the Triton kernels of fp8 with functions of torch in Triton's interpreter, on the CPU.

The interpreter rounds in its own way, so values here are exact in e4m3. ``tests/gpu`` compares
rounding. Run by ``test_float8.py``.
"""

from __future__ import annotations

import itertools
import os

import torch

from fsdp_engine.codecs import Piece
from fsdp_engine.extensions.fp8.arithmetic import (
    E4M3_LARGEST,
    GRANULARITIES,
    Encoding,
    TorchArithmetic,
    grids_of,
    to_e4m3,
)

# Shapes of parameters, and the range of elements that a rank has: a part, all, or none of them.
# Some have few columns, some more columns than a tile, and one has no elements.
CASES = {
    "unaligned": [((130, 129), (5, 16000)), ((3, 7), (0, 21)), ((4, 5), (20, 20))],
    "aligned": [((64, 256), (0, 16384)), ((96, 512), (1024, 4096)), ((16, 16), (16, 256))],
    "wide": [((3, 5000), (4999, 10001)), ((2, 2048), (0, 4096)), ((0, 8), (0, 0))],
}


def compare(granularity: str, case: str) -> None:
    """Raises AssertionError if a kernel reads or writes other elements or scales."""
    from fsdp_engine.extensions.fp8.fused_kernels import FusedArithmetic

    params = [torch.empty(shape, device="meta") for shape, _ in CASES[case]]
    ends = [0, *itertools.accumulate(stop - start for _, (start, stop) in CASES[case])]
    # A shard begins with padding.
    pieces = [
        Piece(i, start, stop, 16 + ends[i]) for i, (_, (start, stop)) in enumerate(CASES[case])
    ]
    offsets = [32, *(32 + each for each in itertools.accumulate(p.numel() for p in params))]
    full_size = offsets.pop()
    generator = torch.Generator().manual_seed(0)
    exact = torch.randint(0, 127, (16 + ends[-1],), generator=generator, dtype=torch.uint8)
    scale = 2.0**-3
    main = exact.view(torch.float8_e4m3fn).float() * scale
    encoded = torch.randint(0, 127, (full_size,), generator=generator, dtype=torch.uint8)
    encoding = Encoding(granularity, E4M3_LARGEST, torch.float8_e4m3fn, to_e4m3)
    grids = grids_of(params, granularity)
    factors = torch.rand(grids[-1].stop, generator=generator) + 0.5
    results = []
    for arithmetic in (
        TorchArithmetic(encoding, grids, pieces),
        FusedArithmetic(encoding, grids, pieces, torch.device("cpu")),
    ):
        amaxes = torch.zeros(grids[-1].stop)
        arithmetic.note_amaxes(main, amaxes)
        wire = torch.full((16 + ends[-1],), 77, dtype=torch.uint8)
        arithmetic.encode(main, torch.full_like(amaxes, scale), wire)
        values = torch.full((full_size,), -1.0)
        views = [
            values[offset : offset + param.numel()].view(param.shape)
            for offset, param in zip(offsets, params, strict=True)
        ]
        arithmetic.decode(encoded, factors, offsets, views)
        results.append((amaxes, wire, values))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(results[1][1][16:], exact[16:])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    for granularity, case in itertools.product(GRANULARITIES, CASES):
        compare(granularity, case)
        print(granularity, case)
