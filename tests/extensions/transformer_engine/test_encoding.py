"""The codec for Transformer Engine's weights by itself, over stand-ins of its kernels: a split has
the bytes and scales of the whole, parameters are bound and nothing is allocated, and no byte is
written outside of its own slice."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.codecs import Piece, TransformerEngineCodec
from fsdp_engine.codecs import transformer_engine as codec_module
from fsdp_engine.memory.allocator import Memory
from tests.extensions.transformer_engine.te_on_cpu import RECIPES, encodings, make_weight
from tests.extensions.transformer_engine.te_reference import quantise
from tests.extensions.transformer_engine.te_training import (
    Watch,
    make_codec,
    make_stack,
    quantised_layers,
    train_watched,
)
from tests.extensions.transformer_engine.te_vectors import (
    FILLS,
    GUARD,
    assert_equal,
    matrix,
    shapes,
)
from tests.pool import on_ranks
from tests.training import mesh_of

ENCODINGS = {
    "delayed": ("_data",),
    "current": ("_data",),
    "block": ("_rowwise_data",),
    "mxfp8": ("_rowwise_data", "_columnwise_data"),
}
SCALES = {
    "delayed": ("_scale_inv",),
    "current": ("_scale_inv",),
    "block": ("_rowwise_scale_inv",),
    "mxfp8": ("_rowwise_scale_inv", "_columnwise_scale_inv"),
}


class Part:
    """One of the ranks that share weights: its codec, its weights, and full lines of bytes of which
    it holds ``low`` to ``high``.

    Args:
        starts: where each weight begins in a line.
    """

    def __init__(
        self,
        recipe: str,
        dtype: torch.dtype,
        mains: list[Tensor],
        starts: list[int],
        numel: int,
        low: int,
        high: int,
        scales: list[float],
    ) -> None:
        self.low, self.high, self.starts, self.shapes = low, high, starts, [m.shape for m in mains]
        self.weights: list[Any] = [
            make_weight(torch.zeros(main.shape, dtype=dtype), recipe) for main in mains
        ]
        line = torch.full((numel,), float("nan"))
        pieces = []
        for index, (main, start) in enumerate(zip(mains, starts, strict=True)):
            line[start : start + main.numel()] = main.flatten()
            begin = min(max(low - start, 0), main.numel())
            end = max(min(max(high - start, 0), main.numel()), begin)
            pieces.append(Piece(index, begin, end, max(start + begin - low, 0)))
        self.main = line[low:high]
        if recipe == "delayed":
            for weight, scale in zip(self.weights, scales, strict=True):
                weight._quantizer.scale.fill_(scale)
        self.codec = make_codec(recipe)
        self.codec.prepare(self.weights, pieces, ["the ranks"], torch.device("cpu"))
        self.lines = [torch.full((numel,), GUARD, dtype=torch.uint8) for _ in ENCODINGS[recipe]]
        views = [self.full(index) for index in range(len(mains))]
        for weight, full in zip(self.weights, views, strict=True):
            assert self.codec.bind(weight, full) is weight

    def full(self, index: int) -> list[Tensor]:
        start, shape = self.starts[index], self.shapes[index]
        return [line[start : start + shape.numel()].view(shape) for line in self.lines]

    def encode(self) -> None:
        for line in self.lines:
            for start, shape in zip(self.starts, self.shapes, strict=True):
                line[start : start + shape.numel()] = 0x77
        for _ in self.codec.encode(self.main, [line[self.low : self.high] for line in self.lines]):
            raise AssertionError("Transformer Engine waits by itself")

    def guards(self) -> Tensor:
        """The bytes that belong to no weight."""
        free = torch.ones(self.lines[0].numel(), dtype=torch.bool)
        for start, shape in zip(self.starts, self.shapes, strict=True):
            free[start : start + shape.numel()] = False
        return torch.cat([line[free] for line in self.lines])


def encode_and_gather(parts: list[Part]) -> None:
    """All parts encode and get each other's bytes. There is no process group: what each would send
    is recorded first, and the largest of it handed to all the second time."""
    sent: list[list[Tensor]] = []

    def record(tensor: Tensor, group: Any, op: str) -> None:
        assert (group, op) == ("the ranks", "max")
        sent[-1].append(tensor.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_engine.comm.collectives.all_reduce_", record)
        for part in parts:
            sent.append([])
            part.encode()
        assert {len(messages) for messages in sent} == {1}  # for all weights together
        most = torch.stack([messages[0] for messages in sent]).amax(0)
        patch.setattr(
            "fsdp_engine.comm.collectives.all_reduce_",
            lambda tensor, group, op: tensor.copy_(most),
        )
        for part in parts:
            part.encode()
    for lines in zip(*(part.lines for part in parts), strict=True):
        whole = torch.cat([line[p.low : p.high] for line, p in zip(lines, parts, strict=True)])
        for line in lines:
            line.copy_(whole)


@pytest.mark.parametrize("recipe", RECIPES)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_any_split_has_the_bytes_and_scales_of_the_whole(recipe: str, data: Any) -> None:
    dtypes = [torch.bfloat16] if recipe == "mxfp8" else [torch.bfloat16, torch.float32]
    dtype = data.draw(st.sampled_from(dtypes))
    mains, starts, numel = [], [], 64
    for shape in data.draw(st.lists(shapes(recipe), min_size=1, max_size=3)):
        fills = data.draw(st.lists(st.sampled_from(FILLS), min_size=1, max_size=3))
        mains.append(matrix(shape, fills, data.draw(st.integers(0, 99))))
        starts.append(numel)
        numel += -(-mains[-1].numel() // 64) * 64 + 64
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=7)))
    scales = [data.draw(st.sampled_from([0.5, 1.0, 3.0, 1e5])) for _ in mains]
    parts = [
        Part(recipe, dtype, mains, starts, numel, low, high, scales)
        for low, high in itertools.pairwise([0, *cuts, numel])
    ]
    scale_tensors = [[id(each) for each in part.codec.state] for part in parts]
    encode_and_gather(parts)
    for part in parts:
        part.codec.after_gather(for_backward=True)
    for index, (main, scale) in enumerate(zip(mains, scales, strict=True)):
        whole: Any = make_weight(torch.zeros(main.shape, dtype=dtype), recipe)
        if recipe == "delayed":
            whole._quantizer.scale.fill_(scale)
        with torch.no_grad():
            whole.copy_(main.to(dtype))
        expected = quantise(main, recipe, dtype, scale if recipe == "delayed" else None)
        assert_equal(encodings(whole), expected)
        for part in parts:
            weight = part.weights[index]
            assert_equal(encodings(weight), expected)
            if recipe == "delayed":
                assert weight._quantizer.amax.item() == expected.amax
            for name, view in zip(ENCODINGS[recipe], part.full(index), strict=True):
                assert getattr(weight, name).data_ptr() == view.data_ptr()
    for part, before in zip(parts, scale_tensors, strict=True):
        assert [id(each) for each in part.codec.state] == before
        assert part.guards().eq(GUARD).all()


# Binding.


class NoOperations(TorchDispatchMode):
    """Within it, no tensor is computed, copied or allocated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} while weights are bound")


@pytest.mark.parametrize("recipe", RECIPES)
def test_binding_keeps_the_parameter_and_its_scales_and_allocates_nothing(recipe: str) -> None:
    weight: Any = make_weight(torch.randn(64, 96, dtype=torch.bfloat16), recipe)
    codec = make_codec(recipe)
    codec.prepare([weight], [Piece(0, 0, weight.numel(), 0)], [], torch.device("cpu"))
    scales = [getattr(weight, name) for name in SCALES[recipe]]
    places = [scale.data_ptr() for scale in scales]
    before = [weakref.ref(getattr(weight, name)) for name in ENCODINGS[recipe]]
    lines = [torch.zeros(weight.numel(), dtype=torch.uint8) for _ in ENCODINGS[recipe]]
    views = [line.view(weight.shape) for line in lines]
    main = weight.get_high_precision_init_val().flatten().float()
    with NoOperations():
        bound = codec.bind(weight, views)
    assert bound is weight
    assert [each() for each in before] == [None] * len(before)  # its own bytes have gone
    assert weight.get_high_precision_init_val() is None
    for _ in range(2):
        list(codec.encode(main, lines))
        with NoOperations():
            codec.after_gather(for_backward=False)
        codec.after_gather(for_backward=True)
        with NoOperations():
            codec.before_release()
        main.mul_(1.5)
        assert [id(getattr(weight, name)) for name in SCALES[recipe]] == [id(s) for s in scales]
        assert [scale.data_ptr() for scale in scales] == places
        for name, view in zip(ENCODINGS[recipe], views, strict=True):
            assert getattr(weight, name) is view


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_that_modules_dropped_are_bound_again(recipe: str) -> None:
    weight: Any = make_weight(torch.randn(64, 96, dtype=torch.bfloat16), recipe)
    codec = make_codec(recipe)
    codec.prepare([weight], [Piece(0, 0, weight.numel(), 0)], [], torch.device("cpu"))
    main = weight.get_high_precision_init_val().flatten().float()
    lines = [torch.zeros(weight.numel(), dtype=torch.uint8) for _ in ENCODINGS[recipe]]
    codec.bind(weight, [line.view(weight.shape) for line in lines])
    list(codec.encode(main, lines))
    for name in (*ENCODINGS[recipe], *SCALES[recipe]):
        setattr(weight, name, None)
    codec.after_gather(for_backward=True)
    expected = quantise(main.view(64, 96), recipe, scale=1.0 if recipe == "delayed" else None)
    assert_equal(encodings(weight), expected)
    for name in (*ENCODINGS[recipe], *SCALES[recipe]):
        setattr(weight, name, None)
    list(codec.encode(2 * main, lines))
    codec.after_gather(for_backward=True)
    scale = weight._quantizer.scale.item() if recipe == "delayed" else None
    assert_equal(encodings(weight), quantise(2 * main.view(64, 96), recipe, scale=scale))


@on_ranks(4)
def test_modules_compute_with_the_parameter_that_they_had_over_the_engine_s_bytes() -> None:
    for recipe, pair in itertools.product(
        RECIPES, [("no_shard", "no_shard"), ("optim", "optim"), ("optim_grads_params", "optim")]
    ):
        model = make_stack(recipe)
        layers = quantised_layers(model)
        own = {name: layer.weight for name, layer in layers.items()}
        scales = {
            (name, each): getattr(weight, each)
            for name, weight in own.items()
            for each in SCALES[recipe]
        }
        engine = fe.shard(model, mesh_of(2, 2), *pair)
        storages = {
            encoding.target.tensor.untyped_storage()._cdata
            for buffer in engine.buffers
            for encoding in buffer.weights._encodings
        }
        seen = []

        def look(
            layer: Any,
            args: Any,
            own: Any = own,
            layers: Any = layers,
            recipe: str = recipe,
            storages: Any = storages,
            seen: Any = seen,
        ) -> None:
            name = next(name for name, each in layers.items() if each is layer)
            assert layer.weight is own[name]
            for encoding in ENCODINGS[recipe]:
                assert getattr(layer.weight, encoding).untyped_storage()._cdata in storages
            seen.append(name)

        for layer in layers.values():
            layer.register_forward_pre_hook(look)
        train_watched(model, engine, None, num_steps=3)
        assert len(seen) == 3 * 2 * len(layers)
        for (name, each), scale in scales.items():
            assert getattr(own[name], each) is scale


# Bytes of others.

NUM_GUARDS = 32768  # more than a weight has


def guarded(shards: list[Tensor]) -> Any:
    """``Memory.persistent`` with guard bytes around; what it made goes to ``shards``."""
    real = Memory.persistent

    def persistent(
        memory: Memory, numel: int, dtype: torch.dtype, role: str, *, sent: bool = False
    ) -> Tensor:
        if dtype != torch.uint8:
            return real(memory, numel, dtype, role, sent=sent)
        whole = real(memory, numel + 2 * NUM_GUARDS, dtype, role, sent=sent)
        whole[:NUM_GUARDS] = GUARD
        whole[-NUM_GUARDS:] = GUARD
        shards.append(whole)
        return whole[NUM_GUARDS:-NUM_GUARDS]

    return persistent


def intact(shards: list[Tensor]) -> bool:
    ends = [each for s in shards for each in (s[:NUM_GUARDS], s[-NUM_GUARDS:])]
    return all(bool(each.eq(GUARD).all()) for each in ends)


def encode_into_shards(codec: Any, main: Tensor, wires: list[Tensor]) -> Any:
    """What would be natural: weights over the shard by itself, as if the rest lay around it."""
    (wire,) = wires
    for weight, piece in zip(codec._weights, codec._pieces, strict=True):
        start = wire.storage_offset() + piece.offset - piece.start
        full = torch.empty(0, dtype=torch.uint8)
        full.set_(wire.untyped_storage(), start, weight.shape, (weight.shape[1], 1))
        weight._rowwise_data = full
    masters, offsets = codec_module._shards(codec._pieces, main)
    with torch.no_grad():
        codec._api.quantize_master_weights(
            codec._weights,
            masters,
            offsets,
            codec._group,
            manual_post_all_gather_processing=True,
        )
    yield from ()


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
@on_ranks(4)
def test_no_byte_beside_a_shard_is_written(recipe: str) -> None:
    for pair in (
        ("optim_grads_params", "no_shard"),
        ("optim_grads_params", "optim"),
        ("optim_grads_params", "optim_grads_params"),
        ("optim", "optim"),
        ("no_shard", "no_shard"),
    ):
        shards: list[Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Memory, "persistent", guarded(shards))
            model = make_stack(recipe)
            engine = fe.shard(model, mesh_of(2, 2), *pair)
            watch = Watch(model, engine)
            train_watched(model, engine, watch)
        assert len(shards) == (4 if recipe == "mxfp8" else 2)  # for each block's encodings
        assert intact(shards), pair
        for shard in shards:
            assert shard[NUM_GUARDS:-NUM_GUARDS].any()


@on_ranks(4)
def test_encoding_into_a_shard_by_itself_would_write_beside_it() -> None:
    shards: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "persistent", guarded(shards))
        patch.setattr(TransformerEngineCodec, "needs_whole_line", False)
        patch.setattr(TransformerEngineCodec, "encode", encode_into_shards)
        model = make_stack("block")
        engine = fe.shard(model, mesh_of(2, 2), "optim_grads_params", "optim_grads_params")
        with torch.no_grad():
            model(torch.randn(2, 7))
    assert engine.buffers
    assert not intact(shards)
