"""The codec seam, with a toy: weights travel as one byte each, quantised by a global amax."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.precision import ParamDtypes
from tests.models import Transformer, token_batch
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks


def quantise(values: Tensor, amax: Tensor) -> Tensor:
    """Signed steps of ``amax / 127``, in a byte."""
    return (values * (127.0 / amax)).round().to(torch.int8).view(torch.uint8)


def dequantise(steps: Tensor, amax: Tensor) -> Tensor:
    return steps.view(torch.int8).to(torch.float32) * (amax / 127.0)


class ByteCodec(ParamCodec):
    """One scale for each parameter, the same on all ranks: a collective for each buffer."""

    wire_dtype = torch.uint8
    decodes = True

    def prepare(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
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
            end = piece.offset + piece.stop - piece.start
            wire[piece.offset : end] = quantise(main[piece.offset : end], self.amax[piece.index])

    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        for index, (offset, param) in enumerate(zip(offsets, params, strict=True)):
            steps = wire[offset : offset + param.numel()]
            param.view(-1).copy_(dequantise(steps, self.amax[index]))

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


def quantised_in_forward(model: nn.Module) -> None:
    """The reference: every forward computes with quantised copies of the matrices."""

    def swap(module: nn.Module, args: Any) -> None:
        for param in model.parameters():
            if param.ndim >= 2:
                param.main = param.detach().clone()
                amax = param.main.abs().max()
                param.data.copy_(dequantise(quantise(param.main, amax), amax))

    model.register_forward_pre_hook(swap)


def restore(model: nn.Module) -> None:
    for param in model.parameters():
        if param.ndim >= 2:
            param.data.copy_(param.main)


@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS)
@on_ranks(4)
def test_a_quantising_codec_trains_like_one_process_with_the_same_quantiser(
    strategy: str, outer: str
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    torch.manual_seed(0)
    model = Transformer(num_blocks=2)
    alone = copy.deepcopy(model)
    fe.shard(model, mesh, strategy=strategy, outer_strategy=outer, codec_rules=[matrices_in_bytes])
    quantised_in_forward(alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        batches = [token_batch(2, 4 * step + rank) for rank in range(4)]
        model(*batches[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sum(alone(*batch) / 4 for batch in batches[:1]).backward()  # type: ignore[union-attr]
        restore(alone)
        for batch in batches[1:]:
            (alone(*batch) / 4).backward()
            restore(alone)
        alone_optimizer.step()
        alone_optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        found = param.full_tensor() if isinstance(param, fe.FlatDTensor) else param
        assert torch.allclose(found, expected, atol=2e-5), (name, strategy, outer)


@on_ranks(2)
def test_a_decoding_codec_holds_its_full_wire_only_while_it_is_decoded() -> None:
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, codec_rules=[matrices_in_bytes])
    rest = sum(engine.memory_bytes().values())
    model(*token_batch(2, dist.get_rank())).backward()
    held = engine.memory_bytes()
    assert sum(held.values()) - held["grad"] == rest
    codecs = [b.weights.codec for b in engine.buffers if b.kind.codec == "bytes"]
    assert codecs
    assert all(codec.num_released for codec in codecs)  # type: ignore[attr-defined]
