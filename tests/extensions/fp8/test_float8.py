"""fp8 on the wire: the bytes of a cut parameter are those of a whole one, and training sees exactly
what one process with the same quantiser sees."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.codecs import Float8, Float8Codec, Piece
from tests import reference
from tests.extensions.fp8.float8_reference import quantised, reference_bytes, reference_scales
from tests.megatron.configs import Config
from tests.messages import Messages, count_step
from tests.models import Stack, Transformer, token_batch
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks
from tests.training import mesh_of

OPTIONS = [Float8(g, p) for g in ("tensor", "row", "block") for p in (False, True)]
LABELS = [f"{each.granularity}-{each.power_of_two_scales}" for each in OPTIONS]


def run(steps: Any) -> None:
    for _ in steps:
        pass


def split_encode(
    tensors: list[Tensor], cuts: list[int], options: Float8
) -> list[tuple[Tensor, Tensor]]:
    """(bytes, scales) of each part of the tensors' row of elements, cut at ``cuts``; the ranks'
    maximum is taken here in place of a process group."""
    line = torch.cat([tensor.flatten() for tensor in tensors])
    ends = list(itertools.accumulate(tensor.numel() for tensor in tensors))
    bounds = [0, *sorted(cuts), line.numel()]
    codecs, generators, wires = [], [], []
    for low, high in itertools.pairwise(bounds):
        pieces = []
        for index, end in enumerate(ends):
            begin = end - tensors[index].numel()
            start, stop = min(max(low, begin), end), min(max(high, begin), end)
            pieces.append(
                Piece(index, start - begin, max(stop, start) - begin, max(start - low, 0))
            )
        codec = Float8Codec(options)
        codec.prepare(tensors, pieces, ["ranks"], torch.device("cpu"))
        codecs.append(codec)
        wires.append(torch.full((high - low,), 77, dtype=torch.uint8))
        generators.append(codec.encode(line[low:high], [wires[-1]]))
    for generator in generators:
        next(generator)  # up to the message
    most = torch.stack([codec.scales for codec in codecs]).amax(0)
    for codec in codecs:
        codec.scales.copy_(most)
    for generator in generators:
        run(generator)
    return [(wire, codec.scales) for wire, codec in zip(wires, codecs, strict=True)]


SCALES = st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 3.0, 1e30, 3e38])
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 150)) | st.tuples(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 7)
)


@pytest.mark.parametrize("options", OPTIONS, ids=LABELS)
@given(data=st.data(), chunk=st.sampled_from([1, 100, 1 << 24]))
@settings(deadline=None, max_examples=25)
def test_any_split_has_the_bytes_and_scales_of_the_whole(
    options: Float8, data: Any, chunk: int
) -> None:
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = [
        torch.randn(shape, generator=generator).clamp(-3, 3) / 3 * data.draw(SCALES)
        for shape in shapes
    ]
    numel = sum(tensor.numel() for tensor in tensors)
    cuts = data.draw(st.lists(st.integers(0, numel), max_size=7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_engine.codecs.scaled.max_steps", lambda tensor, group: iter([()]))
        patch.setattr("fsdp_engine.codecs.scaled.CHUNK", chunk)
        parts = split_encode(tensors, cuts, options)
    wire = torch.cat([part for part, _ in parts])
    for _, scales in parts:
        assert torch.equal(scales, parts[0][1])
    matrices = [tensor.reshape(tensor.shape[0], -1) for tensor in tensors]
    expected = [reference_bytes(m, reference_scales(m, options)).flatten() for m in matrices]
    assert torch.equal(wire, torch.cat(expected))


@pytest.mark.parametrize("options", OPTIONS, ids=LABELS)
@pytest.mark.parametrize("chunk", [1, 1000, 1 << 24])
def test_a_matrix_is_widened_in_parts_as_it_is_at_once(
    options: Float8, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_engine.codecs.scaled.CHUNK", chunk)
    matrix = torch.randn(150, 140, generator=torch.Generator().manual_seed(0))
    codec = Float8Codec(options)
    piece = Piece(0, 0, matrix.numel(), 0)
    codec.prepare([matrix], [piece], [], torch.device("cpu"))
    wire = torch.zeros(matrix.numel(), dtype=torch.uint8)
    run(codec.encode(matrix.flatten(), [wire]))
    out = torch.empty_like(matrix)
    codec.decode(wire, [0], [out])
    scales = reference_scales(matrix, options)
    expected = reference_bytes(matrix, scales).view(torch.float8_e4m3fn).float() * scales
    assert torch.equal(out, expected)


def test_the_worked_example_is_exact() -> None:
    row = torch.tensor([[0.5, -7.0, 3.5]])
    codec = Float8Codec(Float8("row"))
    codec.prepare([row], [Piece(0, 0, 3, 0)], [], torch.device("cpu"))
    wire = torch.zeros(3, dtype=torch.uint8)
    run(codec.encode(row.flatten(), [wire]))
    assert codec.scales.tolist() == [1 / 64]
    assert wire.view(torch.float8_e4m3fn).float().tolist() == [32.0, -448.0, 224.0]
    out = torch.empty(1, 3)
    codec.decode(wire, [0], [out])
    assert torch.equal(out, row)


class Rounded(nn.Module):
    """One process: computes with quantised copies of ``model``'s matrices; gradients are those of
    the copies."""

    def __init__(self, model: nn.Module, options: Float8) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, *batch: Any) -> Tensor:
        copies = {
            name: param + (quantised(param, self.options) - param.detach())
            if param.ndim >= 2
            else param
            for name, param in self.model.named_parameters()
        }
        return torch.func.functional_call(self.model, copies, batch)


@functools.cache
def trained_alone(options: Float8) -> tuple[Transformer, list[tuple[float, dict[str, Tensor]]]]:
    """The model as it starts; loss and gradients of each step in one process."""
    torch.manual_seed(0)
    start = Transformer(num_blocks=2)
    alone = copy.deepcopy(start)
    rounded = Rounded(alone, options)
    optimizer = reference.sgd(alone.parameters())
    steps = []
    for step in DATA:
        total = 0.0
        for micro in step:
            batch = [torch.cat(parts) for parts in zip(*micro, strict=True)]
            loss = rounded(*batch) / len(step)
            loss.backward()
            total += loss.item()
        steps.append((total, {name: p.grad.clone() for name, p in alone.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return start, steps


DATA = reference.make_data(token_batch, 3, 2, 4)


@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS)
@on_ranks(4)
def test_fp8_param_gather_trains_as_one_process_with_the_same_quantiser(
    inner: str, outer: str
) -> None:
    for options in (None, Float8("tensor"), Float8("block", power_of_two_scales=True)):
        start, expected = trained_alone(options or Float8())
        model = copy.deepcopy(start)
        engine = fe.shard(
            model,
            mesh_of(2, 2),
            inner,
            outer,
            config=Config(fp8_param_gather=True),
            codec_rules=[] if options is None else [options],
        )
        found = reference.train_sharded(model, engine, DATA)
        for (loss, gradients), ours in zip(expected, found, strict=True):
            assert abs(ours.loss - loss) < 2e-5, (inner, outer)
            for name, wanted in gradients.items():
                gradient = ours.gradients[name]
                assert gradient is not None
                # One weight in thousands may round to the other neighbour after a step.
                assert reference.relative_error(gradient, wanted) < 3e-2, name


@on_ranks(2)
def test_fp8_param_gather_halves_the_bytes_of_bf16() -> None:
    sent = {}
    for fp8 in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 256, bias=False) for _ in range(2)))
        model = Wide(model)
        engine = fe.shard(
            model,
            config=Config(fp8_param_gather=fp8),
            mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            codec_rules=[Float8("tensor")] if fp8 else [],
        )
        messages = Messages()
        with messages.counting():
            model(torch.randn(2, 64)).backward()
        group = engine.mesh.inner.gather_group
        assert group is not None
        sent[fp8] = messages.sent[group.group_name]
    assert sent[True] <= sent[False] * 0.505
    assert sent[True] >= sent[False] * 0.5


class Wide(nn.Module):
    """Matrices of one width, one after another."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))[..., :64]
        return x.float().square().mean()


@on_ranks(2)
def test_vectors_and_excluded_names_travel_in_the_compute_dtype() -> None:
    model = Stack()
    engine = fe.shard(model, codec_rules=[Float8(exclude=("blocks.0.*", "last.weight"))])
    kinds = {
        record.name: buffer.kind.codec for buffer in engine.buffers for record in buffer.records
    }
    for name, param in model.named_parameters():
        plain = param.ndim < 2 or name.startswith("blocks.0.") or name == "last.weight"
        if name.startswith("blocks.0."):
            plain = param.ndim < 2  # a star does not cross dots
        assert kinds[name] == ("cast" if plain else "float8 row"), name
    count_step(model, engine, torch.optim.SGD(model.parameters(), lr=0.1), 1)


@pytest.mark.parametrize("field", ["keep_fp8_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag"])
def test_fields_for_transformer_engine_need_its_weights(field: str, ranks: Any) -> None:
    ranks.run(refused_by_name, field, world_size=2)


def refused_by_name(field: str) -> None:
    config = Config(fp8_param_gather=True, **{field: True})  # type: ignore[arg-type]
    model = Stack()
    with pytest.raises(
        ValueError, match=rf"{field}: expected weights that Transformer Engine has quantised"
    ):
        fe.shard(model, config=config)
    assert dist.get_world_size() == 2
    fe.shard(model)  # nothing was changed


def test_unknown_granularities_are_refused() -> None:
    with pytest.raises(ValueError, match="granularity: expected one of tensor, row, block"):
        Float8("column")
    with pytest.raises(TypeError, match="exclude: expected a tuple"):
        Float8(exclude="head")  # type: ignore[arg-type]
