"""fp8 on the wire: bytes are those of the definition, and training equals that of one process
with the same quantiser. ``meetings/test_codec_contract.py`` tests split parameters."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.codecs import Piece
from fsdp_engine.extensions.fp8 import DecodingCodec, Float8, Float8Codec, arithmetic
from tests import reference
from tests.extensions.fp8 import interpreted_kernels
from tests.extensions.fp8.float8_reference import (
    fp8_bytes,
    quantised,
    reference_grid,
    rounded_loss,
)
from tests.extensions.fp8.int8_codec import Int8, Int8Codec
from tests.extensions.transformer_engine.te_training import counting
from tests.megatron.configs import Config
from tests.messages import Messages, count_step
from tests.models import Stack, Transformer, token_batch
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks
from tests.scenario import Run, Scenario
from tests.training import mesh_of

OPTIONS = [Float8(g, p) for g in ("tensor", "row", "block") for p in (False, True)]
every_option = pytest.mark.parametrize(
    "options", OPTIONS, ids=[f"{each.granularity}-{each.power_of_two_scales}" for each in OPTIONS]
)


def encoded(tensors: list[Tensor], options: Float8) -> tuple[Tensor, Float8Codec]:
    sizes = [tensor.numel() for tensor in tensors]
    starts = [0, *itertools.accumulate(sizes)]
    pieces = [Piece(i, 0, size, starts[i]) for i, size in enumerate(sizes)]
    codec, wire = Float8Codec(options), torch.full((sum(sizes),), 77, dtype=torch.uint8)
    codec.prepare(tensors, pieces, [], torch.device("cpu"))
    list(codec.encode(torch.cat([tensor.flatten() for tensor in tensors]), [wire]))
    return wire, codec


SCALES = st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 3.0, 1e30, 3e38])
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 150)) | st.tuples(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 7)
)


@every_option
@given(data=st.data(), chunk=st.sampled_from([1, 100, 1 << 24]))
@settings(deadline=None, max_examples=15)
def test_bytes_and_scales_are_those_of_the_reference_and_are_widened_to_its_values(
    options: Float8, data: Any, chunk: int
) -> None:
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = [
        torch.randn(shape, generator=generator).clamp(-3, 3) / 3 * data.draw(SCALES)
        for shape in shapes
    ]
    out = [torch.empty_like(tensor) for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "CHUNK", chunk)
        wire, codec = encoded(tensors, options)
        starts = [0, *itertools.accumulate(tensor.numel() for tensor in tensors)]
        codec.decode(wire, starts[:-1], out)
    expected = [fp8_bytes(tensor, options)[0].flatten() for tensor in tensors]
    assert torch.equal(wire, torch.cat(expected))
    assert torch.equal(codec.scales, torch.cat([reference_grid(each, options) for each in tensors]))
    for found, tensor in zip(out, tensors, strict=True):
        assert torch.equal(found, quantised(tensor, options))


SCENARIO = Scenario(model=partial(Transformer, 2), max_norm=float("inf"))


@functools.cache
def trained_alone(options: Float8) -> Run:
    quantise = partial(quantised, options=options)
    return SCENARIO.but(loss_of=partial(rounded_loss, quantise)).alone()


@pytest.mark.parametrize("pair", FEW_PAIRS)
@pytest.mark.parametrize(
    "options", [None, Float8("tensor"), Float8("block", power_of_two_scales=True)]
)
@on_ranks(4)
def test_fp8_param_gather_trains_as_one_process_with_the_same_quantiser(
    options: Float8 | None, pair: tuple[str, str]
) -> None:
    rules = [] if options is None else [options]
    given = {"config": Config(fp8_param_gather=True), "codec_rules": rules}
    found = SCENARIO.but(pair=pair, mesh=mesh_of(2, 2), options=given).sharded()
    expected = trained_alone(options or Float8())
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert abs(ours.loss - theirs.loss) < 2e-5, pair
        for name, wanted in theirs.gradients.items():
            # One weight in thousands may round to the other neighbour after a step.
            assert reference.relative_error(ours.gradients[name], wanted) < 3e-2, name


@on_ranks(2)
def test_fp8_param_gather_halves_the_bytes_of_bf16() -> None:
    sent = {}
    for fp8 in (False, True):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
        engine = fe.shard(
            model,
            config=Config(fp8_param_gather=fp8),
            mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            codec_rules=[Float8("tensor")] if fp8 else [],
        )
        messages = Messages()
        with messages.counting():
            model(torch.randn(2, 256)).float().sum().backward()
        group = engine.mesh.inner.gather_group
        assert group is not None
        sent[fp8] = messages.sent[group.group_name]
    assert 0.5 * sent[False] <= sent[True] <= 0.505 * sent[False]


@on_ranks(2)
def test_vectors_and_excluded_names_travel_in_the_compute_dtype() -> None:
    model = Stack()
    # A star does not cross dots.
    engine = fe.shard(model, codec_rules=[Float8(exclude=("blocks.0.*", "last.weight"))])
    kinds = {
        record.name: buffer.kind.codec for buffer in engine.buffers for record in buffer.records
    }
    for name, param in model.named_parameters():
        is_plain = param.ndim < 2 or name == "last.weight"
        assert kinds[name] == ("cast" if is_plain else "float8 row"), name
    count_step(model, engine, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def test_unknown_granularities_are_refused() -> None:
    with pytest.raises(ValueError, match="granularity: expected one of tensor, row, block"):
        Float8("column")
    with pytest.raises(TypeError, match="exclude: expected a tuple"):
        Float8(exclude="head")  # type: ignore[arg-type]


def by_row(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@pytest.mark.parametrize("pair", FEW_PAIRS)
@on_ranks(4)
def test_a_codec_of_a_users_own_trains_as_one_process_with_the_same_quantiser(
    pair: tuple[str, str],
) -> None:
    scenario = Scenario(model=partial(Transformer, 2), pair=pair, mesh=mesh_of(2, 2))
    with counting(Int8Codec, "encode") as encode:
        found = scenario.but(options={"codec_rules": [Int8()]}).sharded()
    codecs = [buffer.weights.codec for buffer in found.engine.buffers]
    num_codecs = sum(isinstance(each, Int8Codec) for each in codecs)
    assert encode.call_count == scenario.steps * num_codecs > 0
    expected = scenario.but(loss_of=partial(rounded_loss, by_row)).alone()
    lines = reference.differences(found.steps, expected.steps, 2e-5)
    assert not lines, "\n".join([f"{pair}:", *lines[:8]])


@on_ranks(2)
def test_a_decoding_codec_holds_its_full_wire_only_while_it_is_decoded() -> None:
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, codec_rules=[Int8()])
    assert any(isinstance(buffer.weights.codec, DecodingCodec) for buffer in engine.buffers)
    rest = sum(engine.memory_bytes().values())
    model(*token_batch(2, dist.get_rank())).backward()
    held = engine.memory_bytes()
    assert sum(held.values()) - held["grad"] == rest


def test_triton_kernels_find_the_elements_and_scales_that_functions_of_torch_find() -> None:
    pytest.importorskip("triton")
    # A process of its own, because Triton must be imported anew for its interpreter.
    command = [sys.executable, "-m", interpreted_kernels.__name__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(interpreted_kernels.GRANULARITIES) * len(
        interpreted_kernels.CASES
    )
