"""The codec for Transformer Engine's weights binds parameters and allocates nothing.
``meetings/test_codec_contract.py`` tests split parameters."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_engine.codecs import Piece
from fsdp_engine.extensions.transformer_engine import quantized_codec as codec_module
from tests.extensions.transformer_engine.te_on_cpu import RECIPES, encodings, make_weight
from tests.extensions.transformer_engine.te_reference import quantise
from tests.extensions.transformer_engine.te_training import make_codec
from tests.extensions.transformer_engine.te_vectors import assert_equal


class NoOperations(TorchDispatchMode):
    """A context in which no tensor may be computed, copied or allocated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} while weights are bound")


@pytest.mark.parametrize("recipe", RECIPES)
def test_binding_keeps_the_parameter_and_its_scales_and_allocates_nothing(recipe: str) -> None:
    weight: Any = make_weight(torch.randn(64, 96, dtype=torch.bfloat16), recipe)
    known = next(each for each in codec_module.RECIPES if each.name == recipe)
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
