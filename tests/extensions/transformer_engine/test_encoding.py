"""The codec for Transformer Engine's weights by itself, over stand-ins of its kernels: a split has
the bytes and scales of the unsplit weights, parameters are bound and nothing is allocated, and no
byte is written outside of its own shard."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.buffers.weights import KeptWeights
from fsdp_engine.codecs import Piece
from fsdp_engine.extensions.transformer_engine import quantized_codec as codec_module
from fsdp_engine.extensions.transformer_engine.quantized_codec import Recipe, TransformerEngineCodec
from fsdp_engine.memory.allocator import Memory
from tests.extensions.transformer_engine.te_on_cpu import RECIPES, encodings, make_weight
from tests.extensions.transformer_engine.te_reference import quantise
from tests.extensions.transformer_engine.te_training import (
    CUT,
    Watch,
    make_codec,
    make_stack,
    quantised_layers,
    scenario_of,
)
from tests.extensions.transformer_engine.te_vectors import (
    FILLS,
    GUARD,
    Buffer,
    assert_equal,
    matrix,
    shapes,
)
from tests.pool import on_ranks
from tests.training import mesh_of

KNOWN: dict[str, Recipe] = {each.name: each for each in codec_module.RECIPES}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


class Part:
    """One of the ranks that share weights: its codec, its weights, and full lines of bytes of which
    it holds ``low`` to ``high``."""

    def __init__(
        self,
        recipe: str,
        dtype: torch.dtype,
        mains: list[Tensor],
        scales: list[float],
        low: int,
        high: int | None = None,
    ) -> None:
        self.weights: list[Any] = [
            make_weight(torch.zeros(main.shape, dtype=dtype), recipe) for main in mains
        ]
        self.buffer = Buffer(self.weights)
        self.lines = list(self.buffer.flat.values())
        self.low, self.high = low, self.lines[0].numel() if high is None else high
        line = torch.full(self.lines[0].shape, float("nan"))
        pieces = []
        for index, (main, start) in enumerate(zip(mains, self.buffer.starts, strict=True)):
            line[start : start + main.numel()] = main.flatten()
            begin = min(max(low - start, 0), main.numel())
            end = max(min(max(self.high - start, 0), main.numel()), begin)
            pieces.append(Piece(index, begin, end, max(start + begin - low, 0)))
        self.main = line[low : self.high]
        if recipe == "delayed":
            for weight, scale in zip(self.weights, scales, strict=True):
                weight._quantizer.scale.fill_(scale)
        self.codec = make_codec(recipe)
        self.codec.prepare(self.weights, pieces, ["the ranks"], torch.device("cpu"))
        for index, weight in enumerate(self.weights):
            assert self.codec.bind(weight, self.full(index)) is weight

    def full(self, index: int) -> list[Tensor]:
        """Views of a weight's bytes."""
        start, shape = self.buffer.starts[index], self.weights[index].shape
        return [line[start : start + shape.numel()].view(shape) for line in self.lines]

    def encode(self) -> None:
        for view in itertools.chain(*map(self.full, range(len(self.weights)))):
            view.fill_(0x77)
        for _ in self.codec.encode(self.main, [line[self.low : self.high] for line in self.lines]):
            raise AssertionError("Transformer Engine waits by itself")


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


@every_recipe
@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_any_split_has_the_bytes_and_scales_of_the_whole(recipe: str, data: Any) -> None:
    dtypes = [torch.bfloat16] if recipe == "mxfp8" else [torch.bfloat16, torch.float32]
    dtype = data.draw(st.sampled_from(dtypes))
    mains = []
    for shape in data.draw(st.lists(shapes(recipe), min_size=1, max_size=3)):
        fills = data.draw(st.lists(st.sampled_from(FILLS), min_size=1, max_size=3))
        mains.append(matrix(shape, fills, data.draw(st.integers(0, 99))))
    scales = [data.draw(st.sampled_from([0.5, 1.0, 3.0, 1e5])) for _ in mains]
    numel = Part(recipe, dtype, mains, scales, 0).high
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=7)))
    parts = [
        Part(recipe, dtype, mains, scales, low, high)
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
            for name, view in zip(KNOWN[recipe].encodings, part.full(index), strict=True):
                assert getattr(weight, name).data_ptr() == view.data_ptr()
    for part, before in zip(parts, scale_tensors, strict=True):
        assert [id(each) for each in part.codec.state] == before
        assert part.buffer.guards().eq(GUARD).all()


# Binding.


class NoOperations(TorchDispatchMode):
    """Within it, no tensor is computed, copied or allocated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} while weights are bound")


@every_recipe
def test_binding_keeps_the_parameter_and_its_scales_and_allocates_nothing(recipe: str) -> None:
    weight: Any = make_weight(torch.randn(64, 96, dtype=torch.bfloat16), recipe)
    known = KNOWN[recipe]
    codec = make_codec(recipe)
    codec.prepare([weight], [Piece(0, 0, weight.numel(), 0)], [], torch.device("cpu"))
    scales = [getattr(weight, name) for name in known.scales]
    places = [scale.data_ptr() for scale in scales]
    before = [weakref.ref(getattr(weight, name)) for name in known.encodings]
    lines = [torch.zeros(weight.numel(), dtype=torch.uint8) for _ in known.encodings]
    views = [line.view(weight.shape) for line in lines]
    main = weight.get_high_precision_init_val().flatten().float()
    with NoOperations():
        bound = codec.bind(weight, views)
    assert bound is weight
    assert [each() for each in before] == [None] * len(before)  # its own bytes are freed
    assert weight.get_high_precision_init_val() is None
    for _ in range(2):
        list(codec.encode(main, lines))
        with NoOperations():
            codec.after_gather(for_backward=False)
        for name in (*known.encodings, *known.scales):
            setattr(weight, name, None)  # as modules do, after use
        codec.after_gather(for_backward=True)
        scale = weight._quantizer.scale.item() if recipe == "delayed" else None
        assert_equal(encodings(weight), quantise(main.view(64, 96), recipe, scale=scale))
        with NoOperations():
            codec.before_release()
        main.mul_(1.5)
        assert all(getattr(weight, n) is s for n, s in zip(known.scales, scales, strict=True))
        assert [scale.data_ptr() for scale in scales] == places
        assert all(getattr(weight, n) is v for n, v in zip(known.encodings, views, strict=True))
        for name in (*known.encodings, *known.scales):
            setattr(weight, name, None)


# Engines.

NUM_GUARDS = 32768  # more than a weight has


class Guards:
    """Within it, persistent memory of bytes has guard bytes around it; it may be entered again."""

    def __init__(self) -> None:
        self.shards: list[Tensor] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Guards:
        real = Memory.persistent

        def persistent(
            memory: Memory, numel: int, dtype: torch.dtype, role: str, *, sent: bool = False
        ) -> Tensor:
            if dtype != torch.uint8:
                return real(memory, numel, dtype, role, sent=sent)
            whole = real(memory, numel + 2 * NUM_GUARDS, dtype, role, sent=sent)
            whole[:NUM_GUARDS] = whole[-NUM_GUARDS:] = GUARD
            self.shards.append(whole)
            return whole[NUM_GUARDS:-NUM_GUARDS]

        self._patch.setattr(Memory, "persistent", persistent)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def are_intact(self) -> bool:
        ends = [each for s in self.shards for each in (s[:NUM_GUARDS], s[-NUM_GUARDS:])]
        return all(bool(each.eq(GUARD).all()) for each in ends)


PAIRS = [
    ("no_shard", "no_shard"),
    ("optim", "optim"),
    (CUT, "optim"),
    (CUT, "no_shard"),
    (CUT, CUT),
]


@every_recipe
@on_ranks(4)
def test_modules_have_their_parameter_over_the_engine_s_bytes_and_no_others_are_written(
    recipe: str,
) -> None:
    known = KNOWN[recipe]
    for pair in PAIRS[: 5 if recipe in ("block", "mxfp8") else 3]:
        model = make_stack(recipe)
        own = {layer: layer.weight for layer in quantised_layers(model).values()}
        scales = [(w, name, getattr(w, name)) for w in own.values() for name in known.scales]
        with Guards() as guards:
            engine = fe.shard(model, mesh_of(2, 2), *pair)
        watch = Watch(model, engine)
        storages = {
            encoding.full.target.tensor.untyped_storage()._cdata
            for buffer in engine.buffers
            for encoding in getattr(buffer.weights, "_encodings", ())
        }

        def look(layer: Any, args: Any, own: Any = own, storages: Any = storages) -> None:
            assert layer.weight is own[layer]
            for name in known.encodings:
                assert getattr(layer.weight, name).untyped_storage()._cdata in storages

        for layer in own:
            layer.register_forward_pre_hook(look)
        with guards:
            watch.train(scenario_of(recipe, steps=2, microbatches=1))
        assert all(getattr(weight, name) is scale for weight, name, scale in scales)
        assert len(guards.shards) == 2 * len(known.encodings)  # of each block
        assert guards.are_intact(), pair
        assert all(shard[NUM_GUARDS:-NUM_GUARDS].any() for shard in guards.shards)


def encode_into_shards(codec: Any, main: Tensor, wires: list[Tensor]) -> Iterator[None]:
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


@on_ranks(4)
def test_encoding_into_a_shard_by_itself_would_write_beside_it() -> None:
    with pytest.MonkeyPatch.context() as patch, Guards() as guards:
        patch.setattr(TransformerEngineCodec, "weights_class", KeptWeights)
        patch.setattr(TransformerEngineCodec, "encode", encode_into_shards)
        model = make_stack("block")
        fe.shard(model, mesh_of(2, 2), CUT, CUT)
        with torch.no_grad():
            model(torch.randn(2, 7))
    assert not guards.are_intact()
