"""Every codec keeps the contract in [Note: What a codec keeps] of ``codecs/base.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine.codecs as codecs
from fsdp_engine.codecs import CastCodec, ParamCodec, Piece
from fsdp_engine.extension_list import names_of
from fsdp_engine.extensions.fp8 import DecodingCodec, Float8, Float8Codec, ScaledCodec, arithmetic
from fsdp_engine.extensions.transformer_engine.quantized_codec import TransformerEngineCodec
from tests.extensions.fp8.int8_codec import Int8, Int8Codec
from tests.extensions.transformer_engine.te_on_cpu import RECIPES, make_weight
from tests.extensions.transformer_engine.te_training import make_codec
from tests.pool import on_ranks

NAN, INF = float("nan"), float("inf")
# Shapes, and elements of padding before each. MXFP8 has scales of 32 elements.
SHAPES = ((5, 7), (1, 3), (130, 129), (2, 1))
MXFP8_SHAPES = ((32, 64), (64, 32), (160, 128), (32, 32))
PADDING = 6
CODECS: dict[str, Callable[[], ParamCodec]] = {
    "identity": lambda: CastCodec(torch.float32, torch.float32),
    "bf16": lambda: CastCodec(torch.float32, torch.bfloat16),
    "fp16": lambda: CastCodec(torch.float32, torch.float16),
    **{
        f"fp8 {granularity}{' power of two' if power else ''}": (
            lambda granularity=granularity, power=power: Float8Codec(Float8(granularity, power))
        )
        for granularity in ("tensor", "row", "block")
        for power in (False, True)
    },
    **{
        f"int8 {granularity}": lambda granularity=granularity: Int8Codec(Int8(granularity))
        for granularity in ("tensor", "row", "block")
    },
    **{f"te {recipe}": (lambda recipe=recipe: make_codec(recipe)) for recipe in RECIPES},
}
# By parameter and element: the planted value.
PLANTED = {(0, 3): NAN, (0, 34): INF, (2, 128): -INF, (2, 16000): NAN, (3, 1): NAN}


def test_every_codec_is_held_to_the_contract() -> None:
    found = (getattr(codecs, name) for name in (*codecs.__all__, *names_of("codecs")))
    kinds = {each for each in found if isinstance(each, type)}
    kinds = {each for each in kinds if issubclass(each, ParamCodec)}
    kinds -= {ParamCodec, DecodingCodec, ScaledCodec}
    assert kinds == {CastCodec, Float8Codec, TransformerEngineCodec}


def mains(name: str, *, plants: bool) -> list[Tensor]:
    """Main weights for a codec: zeros in the second parameter."""
    generator = torch.Generator().manual_seed(0)
    shapes = MXFP8_SHAPES if name == "te mxfp8" else SHAPES
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values[1].zero_()
    if plants:
        for (index, element), value in PLANTED.items():
            values[index].view(-1)[element] = value
    return values


def encoded(codec: ParamCodec, values: list[Tensor], low: int, high: int) -> list[Tensor]:
    """Full parameters on this rank. Its shard is ``low`` to ``high`` of a flat buffer whose padding
    is NaN."""
    starts, position = [], 0
    for value in values:
        starts.append(position + PADDING)
        position += PADDING + value.numel()
    line = torch.full((position + PADDING,), NAN)
    pieces = []
    for index, (value, start) in enumerate(zip(values, starts, strict=True)):
        line[start : start + value.numel()] = value.flatten()
        begin = min(max(low - start, 0), value.numel())
        end = max(min(max(high - start, 0), value.numel()), begin)
        pieces.append(Piece(index, begin, end, max(start + begin - low, 0)))
    high = min(high, line.numel())
    params: list[Any] = [nn.Parameter(torch.zeros(value.shape)) for value in values]
    if isinstance(codec, TransformerEngineCodec):
        recipe = codec._recipe.name
        zeros = [torch.zeros(value.shape, dtype=torch.bfloat16) for value in values]
        params = [make_weight(each, recipe) for each in zeros]
    group = dist.group.WORLD
    whole = high - low == line.numel()
    codec.prepare(params, pieces, [] if whole else [group], torch.device("cpu"))
    wires = [torch.zeros(line.numel(), dtype=codec.wire_dtype) for _ in range(codec.num_gathers)]
    views = [
        [wire[start : start + value.numel()].view(value.shape) for wire in wires]
        for value, start in zip(values, starts, strict=True)
    ]
    full = (
        [[torch.zeros(value.shape)] for value in values]
        if isinstance(codec, DecodingCodec)
        else views
    )
    bound = [codec.bind(param, each) for param, each in zip(params, full, strict=True)]
    for works in codec.encode(line[low:high], [wire[low:high] for wire in wires]):
        for work in works:
            work.wait()
    if not whole:
        gathered: list[Any] = [None] * dist.get_world_size()
        parts = [wire[low:high].view(torch.uint8) for wire in wires]
        dist.all_gather_object(gathered, (low, high, parts))
        for begin, end, parts in gathered:
            for wire, part in zip(wires, parts, strict=True):
                wire[begin:end].view(torch.uint8).copy_(part)
    if isinstance(codec, TransformerEngineCodec):
        return [weight.dequantize(dtype=torch.float32) for weight in bound]  # type: ignore[call-arg]
    if isinstance(codec, DecodingCodec):
        (wire,) = wires
        codec.decode(wire, starts, [each for (each,) in full])
    return [each for (each,) in full]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", CODECS)
@on_ranks(3)
def test_what_a_codec_keeps(name: str) -> None:
    numel = sum(each.numel() + PADDING for each in mains(name, plants=False)) + PADDING
    for cuts in ((0, 20, 8000, numel), (0, numel - 3, numel - 3, numel)):  # one empty rank
        rank = dist.get_rank()
        for plants in (False, True):
            values = mains(name, plants=plants)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(arithmetic, "CHUNK", 100)
                found = encoded(CODECS[name](), values, cuts[rank], cuts[rank + 1])
            for index, (full, value) in enumerate(zip(found, values, strict=True)):
                assert full[value.isnan()].isnan().all(), (name, index)
                if not name.startswith("te"):  # its kernels saturate
                    assert not full[value.isinf()].isfinite().any(), (name, index)
                if not plants:
                    assert torch.allclose(full.float(), value, rtol=2**-4, atol=0.02), (name, index)
            assert not found[1].any()
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, [bits(full) for full in found])
            for other in everybody:
                assert all(torch.equal(*pair) for pair in zip(other, everybody[0], strict=True))
            if name.startswith("te") and plants:  # its amax loses a NaN of another rank
                continue
            whole = encoded(CODECS[name](), values, 0, numel)
            torch.testing.assert_close(found, whole, rtol=0, atol=0, equal_nan=True)
