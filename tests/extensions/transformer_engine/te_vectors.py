"""Weights with difficult values, cut anywhere and quantised by Transformer Engine: on a CPU over
the stand-ins, on CUDA by the real kernels. Bytes, scales and amaxes are, bit by bit, those of
``te_reference.py``. CUDA's kernels take denormal values as zeros, stand-ins do not."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.extensions.transformer_engine.te_on_cpu import encodings, load, make_weight
from tests.extensions.transformer_engine.te_reference import Quantised, quantise

# Magnitudes. In bf16 the first of the extremes is zero, the second is denormal, and the third is
# near the largest number.
ORDINARY = (0.0, 1e-30, 0.02, 3.0, 1e30)
FILLS = (*ORDINARY, 1e-42, 3e-39, 3e38)
GUARD = 0x55


def matrix(shape: tuple[int, int], fills: list[float], seed: int) -> Tensor:
    """fp32; every 32 rows have the next magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([fills[row // 32 % len(fills)] for row in range(shape[0])])
    return torch.randn(shape, generator=generator).clamp(-3, 3) / 3 * rows[:, None]


def read_encodings(weight: Any) -> Quantised:
    """The encodings that products read. Where the device takes any layout, backward reads rows."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    found = encodings(weight)
    if found.column_bytes is None and is_non_tn_fp8_gemm_supported():
        rows, scale_inv = found[:2]
        return found._replace(column_bytes=rows, column_scale_inv=scale_inv)
    return found


def assert_equal(found: Quantised, expected: Quantised) -> None:
    for name, ours, theirs in zip(found._fields[:4], found, expected, strict=False):
        assert ours is not None, name
        assert torch.equal(ours.cpu(), theirs), name


class Buffer:
    """All ranks' bytes of some weights, as an engine holds them: each encoding in one flat buffer
    with guard bytes before, between and after."""

    def __init__(self, weights: list[Any]) -> None:
        self.weights = weights
        self.starts = []
        end = 64
        for weight in weights:
            self.starts.append(end)
            end += weight.numel() + 64 - weight.numel() % 64 + 64
        all_names = {
            "Float8Tensor": ["_data"],
            "MXFP8Tensor": ["_rowwise_data", "_columnwise_data"],
        }
        self.flat = {
            name: torch.full((end,), GUARD, dtype=torch.uint8, device=weights[0].device)
            for name in all_names.get(type(weights[0]).__name__, ["_rowwise_data"])
        }
        for start, weight in zip(self.starts, weights, strict=True):
            for name, flat in self.flat.items():
                setattr(weight, name, flat[start : start + weight.numel()].view(weight.shape))

    def guards(self) -> Tensor:
        free = torch.ones(next(iter(self.flat.values())).numel(), dtype=torch.bool)
        for start, weight in zip(self.starts, self.weights, strict=True):
            free[start : start + weight.numel()] = False
        return torch.cat([flat.cpu()[free] for flat in self.flat.values()])


def pieces_of(sizes: list[int], low: int, high: int) -> list[tuple[int, int]]:
    """(start, stop) in each tensor, for elements ``low`` to ``high`` of all tensors in a row."""
    ends = list(itertools.accumulate(sizes))
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    return [
        (min(max(low, begin), end) - begin, min(max(high, begin), end) - begin)
        for begin, end in zip(begins, ends, strict=True)
    ]


def random_case(
    recipe: str, seed: int, values: tuple[float, ...], *, aligned: bool
) -> tuple[list[Tensor], list[int], list[float]]:
    """Returns main weights, the offsets at which the ranks' parts begin, and scales.

    Args:
        values: magnitudes to choose from.
        aligned: Dims are multiples of 16, as matrix products of fp8 need, and offsets of parts are
            multiples of 64, as in an engine.
    """
    choose = random.Random(seed)
    unit, most = (32, 4) if recipe == "mxfp8" else (16, 20) if aligned else (1, 160)
    mains = []
    for number in range(choose.randint(1, 4)):
        shape = (unit * choose.randint(1, most), unit * choose.randint(1, most))
        fills = choose.choices(values, k=choose.randint(1, 3))
        mains.append(matrix(shape, fills, seed + number))
    grain = 64 if aligned else 1
    last = sum(main.numel() for main in mains) // grain
    cuts = [grain * choose.choice([0, last, choose.randint(0, last)]) for _ in range(3)]
    return mains, sorted(cuts), [choose.choice([0.5, 1.0, 3.0, 1e5]) for _ in mains]


@torch.no_grad()
def quantise_split(
    recipe: str,
    dtype: torch.dtype,
    seeds: list[int],
    values: tuple[float, ...] = FILLS,
    device: str = "cpu",
) -> None:
    """Check that each rank's part equals this part of the reference, and that the gathered weights
    equal the reference."""
    load()
    from transformer_engine.pytorch.tensor.utils import post_all_gather_processing

    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        mains, cuts, scales = random_case(recipe, seed, values, aligned=device != "cpu")
        expected = []
        for main, scale in zip(mains, scales, strict=True):
            is_zero = main.abs() < (0 if device == "cpu" else torch.finfo(torch.float32).tiny)
            seen = torch.where(is_zero, main * 0, main)
            expected.append(quantise(seen, recipe, dtype, scale if recipe == "delayed" else None))
        sizes = [main.numel() for main in mains]
        bounds = [0, *cuts[: world - 1], sum(sizes)]
        pieces = [pieces_of(sizes, *bound) for bound in itertools.pairwise(bounds)]
        buffer = _quantised(recipe, dtype, [m.to(device) for m in mains], scales, pieces[rank])
        for weight, (start, stop), each in zip(buffer.weights, pieces[rank], expected, strict=True):
            found = encodings(weight)
            pairs = [(found.row_bytes, each.row_bytes)]
            if recipe == "mxfp8":
                pairs.append((found.column_bytes, each.column_bytes))
            for ours, theirs in pairs:
                assert torch.equal(ours.cpu().view(-1)[start:stop], theirs.view(-1)[start:stop])
            if recipe == "delayed":
                assert weight._quantizer.amax.item() == each.amax
        for flat, owner in itertools.product(buffer.flat.values(), range(world)):
            for base, (start, stop) in zip(buffer.starts, pieces[owner], strict=True):
                dist.broadcast(flat[base + start : base + stop], owner)
        post_all_gather_processing(buffer.weights)
        for weight, each in zip(buffer.weights, expected, strict=True):
            assert_equal(read_encodings(weight), each)
        assert buffer.guards().eq(GUARD).all()


def _quantised(
    recipe: str,
    dtype: torch.dtype,
    mains: list[Tensor],
    scales: list[float],
    own: list[tuple[int, int]],
) -> Buffer:
    """Weights in a buffer, after each rank has quantised its own elements of ``mains``."""
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    weights: list[Any] = [
        make_weight(torch.zeros_like(main, dtype=dtype), recipe) for main in mains
    ]
    if recipe == "delayed":
        for weight, scale in zip(weights, scales, strict=True):
            weight._quantizer.scale.fill_(scale)
    buffer = Buffer(weights)
    names = "_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv"
    before = [getattr(weight, name, None) for weight in weights for name in names]
    parts = zip(mains, own, strict=True)
    quantize_master_weights(
        weights,
        [main.view(-1)[start:stop] if stop > start else None for main, (start, stop) in parts],
        [start if stop > start else None for start, stop in own],
        dist.group.WORLD,
        None,
        manual_post_all_gather_processing=True,
    )
    after = [getattr(weight, name, None) for weight in weights for name in names]
    assert all(a is b for a, b in zip(after, before, strict=True))
    return buffer
