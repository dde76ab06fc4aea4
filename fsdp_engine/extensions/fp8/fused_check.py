"""Decides whether a device can use ``fused_kernels.py``, by comparing its results with torch's."""

from __future__ import annotations

import functools
import warnings

import torch

from fsdp_engine.accelerator import module_of
from fsdp_engine.codecs.base import Piece
from fsdp_engine.extensions.fp8.arithmetic import (
    E4M3_LARGEST,
    Encoding,
    TorchArithmetic,
    grids_of,
    to_e4m3,
)
from fsdp_engine.memory import allocator

# Triton converts to e4m3 by an instruction that devices before this capability lack.
_LEAST_CAPABILITY = (8, 9)
# The shape of each parameter, and the range of its elements that a rank has.
_PARAMS = (((130, 129), (5, 16000)), ((3, 7), (0, 21)), ((64, 256), (0, 16384)))


@functools.cache
def works_on(device: torch.device, granularity: str) -> bool:
    """Returns whether the kernels run on a CUDA device and give the bytes of functions of torch.

    Warns, and returns False, if Triton is installed but cannot compile the kernels, or if they
    give other bytes.
    """
    if torch.version.hip or module_of(device).get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    try:
        problem = "" if gives_equal_bytes(device, granularity) else "other bytes"
    except Exception as error:  # Triton raises many classes, also those of a missing C compiler
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warnings.warn(
            f"fp8: expected the Triton kernels on {device} to compile and to give the bytes of "
            f"torch's functions; found {problem}. Slower functions of torch encode weights instead",
            stacklevel=2,
        )
    return not problem


def gives_equal_bytes(device: torch.device, granularity: str) -> bool:
    """Returns whether the kernels compute what functions of torch do, for three parameters of which
    a rank has all or a part."""
    from fsdp_engine.extensions.fp8.fused_kernels import FusedArithmetic

    encoding = Encoding(granularity, E4M3_LARGEST, torch.float8_e4m3fn, to_e4m3)
    generator = torch.Generator().manual_seed(0)
    params, pieces, offsets, place, full = [], [], [], 0, 0
    for index, (shape, (start, stop)) in enumerate(_PARAMS):
        params.append(torch.empty(shape, device="meta"))
        pieces.append(Piece(index, start, stop, place))
        offsets.append(full)
        place += stop - start
        full += params[-1].numel()
    main = allocator.zeros(place, torch.float32, "cpu").normal_(generator=generator).to(device)
    encoded = torch.randint(0, 127, (full,), generator=generator, dtype=torch.uint8).to(device)
    grids = grids_of(params, encoding.granularity)
    found = []
    for arithmetic in (
        TorchArithmetic(encoding, grids, pieces),
        FusedArithmetic(encoding, grids, pieces, device),
    ):
        amaxes = allocator.zeros(grids[-1].stop, torch.float32, device)
        arithmetic.note_amaxes(main, amaxes)
        scales = amaxes / encoding.largest + 1e-3
        wire = allocator.zeros(place, torch.uint8, device)
        arithmetic.encode(main, scales, wire)
        values = allocator.zeros(full, torch.bfloat16, device)
        views = [
            values[offset : offset + param.numel()].view(param.shape)
            for offset, param in zip(offsets, params, strict=True)
        ]
        arithmetic.decode(encoded, scales, offsets, views)
        found.append((amaxes, wire, values))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))
