"""The codec seam, with toys: weights travel as one byte each, quantised by an amax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.extensions.fp8 import DecodingCodec
from fsdp_engine.precision import ParamDtypes
from tests import reference
from tests.extensions.fp8.float8_reference import rounded_loss
from tests.extensions.fp8.int8_codec import Int8
from tests.models import Transformer, token_batch
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks
from tests.scenario import Scenario
from tests.training import mesh_of


class ByteCodec(DecodingCodec):
    """One scale for each parameter, the same on all ranks: a collective for each buffer."""

    wire_dtype = torch.uint8

    def prepare(self, params: Any, pieces: Any, groups: Any, device: Any) -> None:
        self.pieces, self.groups = pieces, groups
        self.amax = torch.ones(len(params), device=device)
        self.num_released = 0
        self.full: list[Tensor] = []

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        (wire,) = wires
        for piece in self.pieces:
            part = main[piece.offset : piece.offset + piece.stop - piece.start]
            self.amax[piece.index] = part.abs().max() if part.numel() else 0.0
        for group in self.groups:
            yield [dist.all_reduce(self.amax, op=dist.ReduceOp.MAX, group=group, async_op=True)]
        self.amax.clamp_(min=1e-12)
        for piece in self.pieces:
            place = slice(piece.offset, piece.offset + piece.stop - piece.start)
            steps = (main[place] * (127.0 / self.amax[piece.index])).round()
            wire[place] = steps.to(torch.int8).view(torch.uint8)

    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        for amax, offset, param in zip(self.amax, offsets, params, strict=True):
            steps = wire[offset : offset + param.numel()].view(torch.int8)
            param.view(-1).copy_(steps * (amax / 127.0))

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        self.full.append(full[0])
        return super().bind(param, full)

    def before_release(self) -> None:
        assert all(param.untyped_storage().nbytes() for param in self.full)
        self.num_released += 1


def matrices_in_bytes(
    name: str, param: Tensor, dtypes: ParamDtypes
) -> tuple[str, Callable[[], ParamCodec]] | None:
    return ("bytes", ByteCodec) if param.ndim >= 2 and param.requires_grad else None


def by_tensor(weight: Tensor) -> Tensor:
    amax = weight.abs().max()
    return (weight * (127.0 / amax)).round() * (amax / 127.0)


def by_row(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


RULES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "bytes": (matrices_in_bytes, by_tensor),
    "int8, on the base class of fp8's": (Int8(), by_row),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", FEW_PAIRS)
@on_ranks(4)
def test_a_quantising_codec_trains_like_one_process_with_the_same_quantiser(
    pair: tuple[str, str], rule: str
) -> None:
    codec_rule, quantise = RULES[rule]
    scenario = Scenario(model=partial(Transformer, 2), pair=pair, mesh=mesh_of(2, 2))
    found = scenario.but(options={"codec_rules": [codec_rule]}).sharded()
    expected = scenario.but(loss_of=partial(rounded_loss, quantise)).alone()
    lines = reference.differences(found.steps, expected.steps, 2e-5)
    assert not lines, "\n".join([f"{pair}:", *lines[:8]])


@on_ranks(2)
def test_a_decoding_codec_holds_its_full_wire_only_while_it_is_decoded() -> None:
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, extensions=[fe.CodecRules([matrices_in_bytes])])
    rest = sum(engine.memory_bytes().values())
    model(*token_batch(2, dist.get_rank())).backward()
    held = engine.memory_bytes()
    assert sum(held.values()) - held["grad"] == rest
    codecs = [b.weights.codec for b in engine.buffers if b.kind.codec == "bytes"]
    assert codecs
    assert all(codec.num_released for codec in codecs)  # type: ignore[attr-defined]
