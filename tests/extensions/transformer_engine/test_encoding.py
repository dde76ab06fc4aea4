"""The codec for Transformer Engine's weights binds parameters and allocates nothing, and no byte is
written outside of its own shard. ``meetings/test_codec_contract.py`` says what splits give."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.codecs import Piece
from fsdp_engine.extensions.transformer_engine import quantized_codec as codec_module
from fsdp_engine.extensions.transformer_engine.quantized_codec import Recipe
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
from tests.extensions.transformer_engine.te_vectors import GUARD, assert_equal
from tests.pool import on_ranks
from tests.training import mesh_of

KNOWN: dict[str, Recipe] = {each.name: each for each in codec_module.RECIPES}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


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


PAIRS = [("no_shard", "no_shard"), ("optim", "optim"), (CUT, "optim")]


@every_recipe
@pytest.mark.parametrize("levels", PAIRS, ids="-".join)
@on_ranks(4)
def test_modules_have_their_parameter_over_the_engine_s_bytes_and_no_others_are_written(
    recipe: str, levels: tuple[str, str]
) -> None:
    known = KNOWN[recipe]
    model = make_stack(recipe)
    own = {layer: layer.weight for layer in quantised_layers(model).values()}
    scales = [(w, name, getattr(w, name)) for w in own.values() for name in known.scales]
    with Guards() as guards:
        engine = fe.shard(model, mesh_of(2, 2), *levels)
    watch = Watch(model, engine)
    storages = {
        encoding.full.target.tensor.untyped_storage()._cdata
        for buffer in engine.buffers
        for encoding in getattr(buffer.weights, "_encodings", ())
    }

    def look(layer: Any, args: Any) -> None:
        assert layer.weight is own[layer]
        for name in known.encodings:
            assert getattr(layer.weight, name).untyped_storage()._cdata in storages

    for layer in own:
        layer.register_forward_pre_hook(look)
    with guards:
        watch.train(scenario_of(recipe, steps=2, microbatches=1))
    assert all(getattr(weight, name) is scale for weight, name, scale in scales)
    assert len(guards.shards) == 2 * len(known.encodings)  # of each block
    assert guards.are_intact()
    assert all(shard[NUM_GUARDS:-NUM_GUARDS].any() for shard in guards.shards)
    guards.shards[-1][-NUM_GUARDS] += 1
    assert not guards.are_intact()
