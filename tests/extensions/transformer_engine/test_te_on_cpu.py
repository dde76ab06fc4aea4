"""Transformer Engine's Python over the stand-ins follows the recipes' definitions, and the
imitated modules compute with its bytes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.extensions.transformer_engine.te_on_cpu import (
    RECIPES,
    QuantisedLinear,
    encodings,
    make_weight,
)
from tests.extensions.transformer_engine.te_reference import dequantise, quantise
from tests.extensions.transformer_engine.te_vectors import assert_equal, quantise_split
from tests.pool import Ranks

ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES)


def test_the_worked_example_is_exact() -> None:
    row = torch.tensor([[0.5, -7.0, 3.5]])
    whole = F.pad(row, (0, 29, 0, 31))  # 32 x 32
    for recipe, scale_inv, values in (
        ("delayed", 0.5, [1.0, -14.0, 7.0]),
        ("current", 1 / 64, [32.0, -448.0, 224.0]),
        ("block", 1 / 64, [32.0, -448.0, 224.0]),
        ("mxfp8", 121, [32.0, -448.0, 224.0]),
    ):
        found = quantise(whole, recipe, torch.float32, 2.0 if recipe == "delayed" else None)
        assert found.row_scale_inv[0, 0].item() == scale_inv
        assert found.row_bytes[0, :3].view(torch.float8_e4m3fn).tolist() == values
        assert found.amax == 7.0
        assert torch.equal(dequantise(found.row_bytes, found.row_scale_inv), whole)
        weight = make_weight(whole, recipe)
        if recipe != "delayed":  # with delayed scaling the weight has another scale
            assert_equal(encodings(weight), found)
        assert torch.equal(weight.dequantize(dtype=torch.float32), whole)  # type: ignore[call-arg]
    # For 7.5, 448 / 7.5 = 59.7 is rounded down to 32, and 7.5 / 448 up to 1 / 32.
    for recipe, scale_inv in (("block", 1 / 32), ("mxfp8", 122)):
        assert quantise(whole * (7.5 / 7), recipe).row_scale_inv[0, 0].item() == scale_inv
    # In a column of MXFP8 each value is alone in its block, and has an exponent of its own.
    assert quantise(whole, "mxfp8").column_scale_inv[0, :4].tolist() == [118, 121, 120, 0]


@ALL_RECIPES
@pytest.mark.parametrize("world", [1, 3, 4])
def test_an_uneven_split_quantises_to_what_no_split_does(
    ranks: Ranks, recipe: str, world: int
) -> None:
    for dtype in (torch.bfloat16, torch.float32)[: 1 if recipe == "mxfp8" else 2]:
        ranks.run(quantise_split, recipe, dtype, list(range(world, 24, 6)), world_size=world)


@ALL_RECIPES
def test_forward_reads_rows_and_backward_columns(recipe: str) -> None:
    layer, fresh = (QuantisedLinear(96, 160, recipe, dtype=torch.float32) for _ in range(2))
    torch.nn.init.normal_(layer.bias)
    master = layer.weight.get_high_precision_init_val()
    expected = quantise(master, recipe, torch.float32, 1.0 if recipe == "delayed" else None)
    rows = dequantise(expected.row_bytes, expected.row_scale_inv)
    columns = dequantise(expected.column_bytes, expected.column_scale_inv)
    assert torch.equal(rows, columns) == (recipe != "mxfp8")
    for is_stale in (False, True):
        x, dy = torch.randn(5, 3, 96, requires_grad=True), torch.randn(5, 3, 160)
        if is_stale:
            name = "_data" if recipe in ("delayed", "current") else "_rowwise_data"
            getattr(layer.weight, name).copy_(getattr(fresh.weight, name))
        layer.zero_grad()
        y = layer(x)
        y.backward(dy)
        assert torch.equal(y, x @ rows.t() + layer.bias) != is_stale
        assert torch.equal(x.grad, dy @ columns)
        assert torch.equal(layer.weight.grad, dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))
        assert torch.equal(layer.bias.grad, dy.sum((0, 1)))
