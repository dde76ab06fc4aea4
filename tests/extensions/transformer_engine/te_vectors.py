"""Weights with difficult values, cut anywhere and quantised by Transformer Engine: on a CPU over
the stand-ins, on CUDA by the real kernels. The vectors and the reference are the same.

What must hold, bit by bit for all values on every device:

    a cut weight = an uncut one    bytes and scales
    Transformer Engine = the       the same, and amaxes; CUDA's kernels take denormal values as
    reference (te_reference.py)    zeros, stand-ins do not
"""

from __future__ import annotations

import importlib
import itertools
import random
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import encodings, make_weight
from tests.extensions.transformer_engine.te_reference import Quantised, quantise

# Magnitudes. In bf16 the first two extremes are nothing and denormal, the last is near its largest
# number.
ORDINARY = (0.0, 1e-30, 0.02, 3.0, 1e30)
FILLS = (*ORDINARY, 1e-42, 3e-39, 3e38)
GUARD = 0x55


def load(device: str) -> None:
    """Makes Transformer Engine importable in this process: on a CPU over the stand-ins."""
    if device == "cpu":
        te_on_cpu.load()
    else:
        importlib.import_module("transformer_engine.pytorch")


def matrix(shape: tuple[int, int], fills: list[float], seed: int) -> Tensor:
    """fp32; every 32 rows have the next magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([fills[row // 32 % len(fills)] for row in range(shape[0])])
    return torch.randn(shape, generator=generator).clamp(-3, 3) / 3 * rows[:, None]


def read_encodings(weight: Any) -> Quantised:
    """What products read: the rows in backward, too, where the device takes any layout."""
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


def without_denormals(values: Tensor) -> Tensor:
    """Zeros of their signs in place of denormal values."""
    return torch.where(values.abs() < torch.finfo(torch.float32).tiny, values * 0, values)


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
        self.names = {
            "Float8Tensor": ["_data"],
            "MXFP8Tensor": ["_rowwise_data", "_columnwise_data"],
        }
        self.flat = {
            name: torch.full((end,), GUARD, dtype=torch.uint8, device=weights[0].device)
            for name in self._names(weights[0])
        }
        for start, weight in zip(self.starts, weights, strict=True):
            for name, flat in self.flat.items():
                setattr(weight, name, flat[start : start + weight.numel()].view(weight.shape))

    def _names(self, weight: Any) -> list[str]:
        return self.names.get(type(weight).__name__, ["_rowwise_data"])

    def guards(self) -> Tensor:
        """The bytes that belong to no weight."""
        free = torch.ones(next(iter(self.flat.values())).numel(), dtype=torch.bool)
        for start, weight in zip(self.starts, self.weights, strict=True):
            free[start : start + weight.numel()] = False
        return torch.cat([flat.cpu()[free] for flat in self.flat.values()])


def pieces_of(sizes: list[int], low: int, high: int) -> list[tuple[int, int]]:
    """Of elements ``low`` to ``high`` of the tensors one after the other: (start, stop) in each."""
    ends = list(itertools.accumulate(sizes))
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    return [
        (min(max(low, begin), end) - begin, min(max(high, begin), end) - begin)
        for begin, end in zip(begins, ends, strict=True)
    ]


def random_case(
    recipe: str, seed: int, values: tuple[float, ...], *, aligned: bool
) -> tuple[list[Tensor], list[int], list[float]]:
    """Main weights; where the ranks' parts of all their elements begin; scales.

    Args:
        values: magnitudes to choose from.
        aligned: dims are multiples of 16, which is what matrix products of fp8 take, and cuts of
            64, where an engine's fall.
    """
    choose = random.Random(seed)
    unit, most = (32, 4) if recipe == "mxfp8" else (16, 20) if aligned else (1, 160)
    mains = []
    for number in range(choose.randint(1, 4)):
        shape = (unit * choose.randint(1, most), unit * choose.randint(1, most))
        fills = choose.choices(values, k=choose.randint(1, 3))
        mains.append(matrix(shape, fills, seed + number))
    total = sum(main.numel() for main in mains)
    grain = 64 if aligned else 1
    last = total // grain
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
    """On every rank: its part is what the whole's part is, and after a gather the weights are what
    uncut ones are, and what the reference says."""
    load(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        mains, cuts, scales = random_case(recipe, seed, values, aligned=device != "cpu")
        sizes = [main.numel() for main in mains]
        bounds = [0, *cuts[: world - 1], sum(sizes)]
        given = scales if recipe == "delayed" else [None] * len(scales)
        seen = mains if device == "cpu" else [without_denormals(main) for main in mains]
        expected = [
            quantise(main, recipe, dtype, scale) for main, scale in zip(seen, given, strict=True)
        ]
        mains = [main.to(device) for main in mains]
        whole = _quantised(recipe, dtype, mains, scales, [(0, size) for size in sizes])
        own = pieces_of(sizes, bounds[rank], bounds[rank + 1])
        parts = _quantised(recipe, dtype, mains, scales, own)
        for part, uncut, (start, stop), each in zip(
            parts.weights, whole.weights, own, expected, strict=True
        ):
            found, wanted = encodings(part), encodings(uncut)
            pairs = [(found.row_bytes, wanted.row_bytes)]
            if recipe == "mxfp8":
                pairs.append((found.column_bytes, wanted.column_bytes))
            for ours, theirs in pairs:
                assert torch.equal(ours.reshape(-1)[start:stop], theirs.reshape(-1)[start:stop])
            if recipe == "delayed":
                assert part._quantizer.amax.item() == each.amax
        for flat, owner in itertools.product(parts.flat.values(), range(world)):
            owned = pieces_of(sizes, bounds[owner], bounds[owner + 1])
            for base, (start, stop) in zip(parts.starts, owned, strict=True):
                dist.broadcast(flat[base + start : base + stop], owner)
        _post_process(whole.weights)
        _post_process(parts.weights)
        for part, uncut, each in zip(parts.weights, whole.weights, expected, strict=True):
            wanted = Quantised(*(tensor.cpu() for tensor in read_encodings(uncut)[:4]))
            assert_equal(read_encodings(part), wanted)
            assert_equal(wanted, each)
            assert part.get_high_precision_init_val() is None
        assert parts.guards().eq(GUARD).all()
        assert whole.guards().eq(GUARD).all()


def _quantised(
    recipe: str,
    dtype: torch.dtype,
    mains: list[Tensor],
    scales: list[float],
    own: list[tuple[int, int]],
) -> Buffer:
    """Weights in a buffer, of which each rank has quantised its own elements of ``mains``."""
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    weights = [make_weight(torch.zeros_like(main, dtype=dtype), recipe) for main in mains]
    if recipe == "delayed":
        for weight, scale in zip(weights, scales, strict=True):
            weight._quantizer.scale.fill_(scale)
    buffer = Buffer(weights)
    names = "_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv"
    before = [[getattr(weight, name, None) for name in names] for weight in weights]
    quantize_master_weights(
        weights,
        [
            main.view(-1)[start:stop] if stop > start else None
            for main, (start, stop) in zip(mains, own, strict=True)
        ],
        [start if stop > start else None for start, stop in own],
        dist.group.WORLD,
        None,
        manual_post_all_gather_processing=True,
    )
    for weight, tensors in zip(weights, before, strict=True):
        after = [getattr(weight, name, None) for name in names]
        assert all(a is b for a, b in zip(after, tensors, strict=True))
    return buffer


def _post_process(weights: list[Any]) -> None:
    from transformer_engine.pytorch.tensor.utils import post_all_gather_processing

    post_all_gather_processing(weights)


def shapes(recipe: str) -> Any:
    if recipe == "mxfp8":
        return st.tuples(st.integers(1, 5), st.integers(1, 4)).map(lambda s: (32 * s[0], 32 * s[1]))
    return st.tuples(st.integers(1, 300), st.integers(1, 200))
