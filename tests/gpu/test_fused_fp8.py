"""The Triton kernels of fp8 on a CUDA device: bits, and the steps of an engine that uses them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.accelerator import module_of
from fsdp_engine.codecs import Piece
from fsdp_engine.extensions.fp8 import Float8Codec
from fsdp_engine.extensions.fp8.arithmetic import (
    E4M3_LARGEST,
    GRANULARITIES,
    Encoding,
    TorchArithmetic,
    grids_of,
    to_e4m3,
)
from fsdp_engine.extensions.fp8.fused_check import works_on
from tests.extensions.fp8.interpreted_kernels import CASES
from tests.gpu.scene import LEVELS, ON_GPU, assert_same, make_batches, make_model, train_sharded

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(
        torch.cuda.is_available()
        and module_of(torch.device("cuda")).get_device_capability() < (8, 9),
        reason="needs a device of compute capability 8.9 or above",
    ),
]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_kernels_give_the_bits_of_functions_of_torch(
    granularity: str, case: str, dtype: torch.dtype
) -> None:
    from fsdp_engine.extensions.fp8.fused_kernels import FusedArithmetic

    device = torch.device("cuda")
    params = [torch.empty(shape, device="meta") for shape, _ in CASES[case]]
    ends = [0, *itertools.accumulate(stop - start for _, (start, stop) in CASES[case])]
    pieces = [Piece(i, start, stop, ends[i]) for i, (_, (start, stop)) in enumerate(CASES[case])]
    offsets = [0, *itertools.accumulate(param.numel() for param in params)]
    full_size = offsets.pop()
    generator = torch.Generator().manual_seed(0)
    main = torch.randn(ends[-1], generator=generator)
    # Each thousand elements has another magnitude, from denormal to near the largest number.
    powers = torch.tensor([-140.0, -120.0, 0.0, 100.0, 120.0])
    main *= 2.0 ** powers[torch.arange(main.numel()) // 1000 % 5]
    main[:7] = torch.tensor([NAN, 0.0, -0.0, INF, 1.0, -INF, -NAN])
    main = main.to(dtype).to(device)
    encoded = torch.randint(0, 256, (full_size,), generator=generator, dtype=torch.uint8)
    encoding = Encoding(granularity, E4M3_LARGEST, torch.float8_e4m3fn, to_e4m3)
    grids = grids_of(params, granularity)
    results = []
    for arithmetic in (
        TorchArithmetic(encoding, grids, pieces),
        FusedArithmetic(encoding, grids, pieces, device),
    ):
        amaxes = torch.zeros(grids[-1].stop, device=device)
        arithmetic.note_amaxes(main, amaxes)
        amaxes.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        scales = (amaxes / E4M3_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        wire = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        arithmetic.encode(main, scales, wire)
        values = torch.zeros(full_size, dtype=dtype, device=device)
        views = [
            values[offset : offset + param.numel()].view(param.shape)
            for offset, param in zip(offsets, params, strict=True)
        ]
        arithmetic.decode(encoded.to(device), scales, offsets, views)
        results.append((amaxes, wire, values))
    (amaxes, wire, values), (found_amaxes, found_wire, found_values) = results
    assert torch.equal(_bits(found_amaxes.nan_to_num(7.0)), _bits(amaxes.nan_to_num(7.0)))
    assert torch.equal(found_amaxes.isnan(), amaxes.isnan())
    # NaN may have either sign; a scale that is not finite makes any byte NaN.
    same = (found_wire == wire) | (wire & 0x7F == 0x7F) & (found_wire & 0x7F == 0x7F)
    assert bool(same.all())
    assert torch.equal(found_values.isnan(), values.isnan())
    assert torch.equal(_bits(found_values.nan_to_num(7.0)), _bits(values.nan_to_num(7.0)))


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("level", LEVELS)
def test_steps_are_those_of_functions_of_torch(
    mesh: DeviceMesh, level: str, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works_on(torch.device("cuda", 0), granularity)
    batches = make_batches(4)

    def train() -> Any:
        model = make_model()
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        engine = fe.shard(
            model,
            mesh=mesh,
            strategy=level,
            mp_policy=policy,
            extensions=[fe.Float8(granularity=granularity)],
        )
        codecs = {buffer.weights.codec for buffer in engine.buffers}
        kinds = {type(c._arithmetic) for c in codecs if isinstance(c, Float8Codec)}
        return kinds, train_sharded(model, engine, batches)

    kinds, found = train()
    assert {kind.__name__ for kind in kinds} == {"FusedArithmetic"}
    monkeypatch.setattr(Float8Codec, "make_arithmetic", Float8Codec.__base__.make_arithmetic)
    kinds, expected = train()
    assert kinds == {TorchArithmetic}
    assert_same(found, expected, tolerance=1e-6)
