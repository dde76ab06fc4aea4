"""Transformer Engine's Python over the stand-ins is what the recipes' definitions say, and the
harness itself: what it imitates can be seen, and what it must catch it catches."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.extensions.transformer_engine import te_kernels, te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import (
    RECIPES,
    QuantisedLinear,
    encodings,
    make_weight,
)
from tests.extensions.transformer_engine.te_reference import dequantise, quantise
from tests.extensions.transformer_engine.te_vectors import (
    FILLS,
    GUARD,
    assert_equal,
    matrix,
    quantise_split,
    shapes,
)
from tests.pool import Ranks, on_ranks

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES)


@ALL_RECIPES
@DTYPES
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_a_new_weight_has_the_bytes_scales_and_values_of_the_reference(
    recipe: str, dtype: torch.dtype, data: Any
) -> None:
    fills = data.draw(st.lists(st.sampled_from(FILLS), min_size=1, max_size=4))
    values = matrix(data.draw(shapes(recipe)), fills, data.draw(st.integers(0, 99))).to(dtype)
    weight = make_weight(values, recipe)
    expected = quantise(values, recipe, dtype, 1.0 if recipe == "delayed" else None)
    assert_equal(encodings(weight), expected)
    rows = dequantise(expected.row_bytes, expected.row_scale_inv)
    assert torch.equal(weight.dequantize(dtype=torch.float32), rows)  # type: ignore[call-arg]
    assert torch.equal(te_on_cpu.row_values(weight), rows.to(dtype))
    assert weight.dtype == dtype
    if recipe == "delayed":
        assert weight._quantizer.amax.item() == expected.amax


def test_the_reference_s_worked_example_is_exact() -> None:
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
    # 7.5 has 448 / 7.5 = 59.7: down to 32, and 7.5 / 448 up to 1 / 32.
    for recipe, scale_inv in (("block", 1 / 32), ("mxfp8", 122)):
        assert quantise(whole * (7.5 / 7), recipe).row_scale_inv[0, 0].item() == scale_inv
    # In a column of MXFP8 each value is alone: -7 is 448 and 0.5 too.
    assert quantise(whole, "mxfp8").column_scale_inv[0, :4].tolist() == [118, 121, 120, 0]


@ALL_RECIPES
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_uneven_split_quantises_to_what_no_split_does(
    ranks: Ranks, recipe: str, world: int
) -> None:
    for dtype in (torch.bfloat16, torch.float32)[: 1 if recipe == "mxfp8" else 2]:
        ranks.run(quantise_split, recipe, dtype, list(range(world, 24, 4)), world_size=world)


@on_ranks(1)
def test_mxfp8_weights_of_nominal_fp32_cannot_be_quantised_from_main_weights() -> None:
    te_on_cpu.load()
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    main = torch.randn(64, 32)
    weight = make_weight(main, "mxfp8")
    with torch.no_grad(), pytest.raises(RuntimeError, match="amax should be bf16"):
        quantize_master_weights([weight], [main.view(-1)], [0], dist.group.WORLD, None, True)


def cast_part(recipe: str, main: Tensor, start: int, stop: int, out: Tensor) -> None:
    """One rank's cast of part of a weight into ``out``; scales as if it held everything."""
    te_on_cpu.load()
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    rows, columns = main.shape
    part, weight = main.view(-1)[start:stop], make_weight(main, recipe)
    if isinstance(weight, Float8Tensor):
        weight._quantizer.set_usage(columnwise=False)
        fragment = weight._quantizer.create_tensor_from_data(out.view(1, -1), main.dtype)
        te_kernels.quantize(part.view(1, -1), weight._quantizer, fragment)
    elif recipe == "block":
        te_kernels.fp8_block_scaling_partial_cast(
            part, out, 1 / weight._rowwise_scale_inv, rows, columns, start, 128, te_kernels.DType(7)
        )
    else:
        scales = weight._rowwise_scale_inv, weight._columnwise_scale_inv
        te_kernels.mxfp8_scaling_partial_cast(
            part, out, torch.empty_like(out), *scales, rows, columns, start
        )


@ALL_RECIPES
def test_only_the_block_recipe_s_cast_spoils_the_tiles_around_its_range(recipe: str) -> None:
    main, (start, stop) = torch.randn(320, 160), (130 * 160 + 5, 131 * 160)
    flat = torch.full((64 + main.numel() + 64,), GUARD, dtype=torch.uint8)
    flat[64:-64] = quantise(
        main, recipe, torch.float32, 1.0 if recipe == "delayed" else None
    ).row_bytes.view(-1)
    before = flat.clone()
    if recipe == "current":
        main.view(-1)[start] = main.abs().max()  # Or the part's scale would be its own.
        before[64 + start] = 0x7E * (main.view(-1)[start] > 0) or 0xFE
    cast_part(recipe, main, start, stop, flat[64 + start : 64 + stop])
    spoiled = torch.zeros_like(main, dtype=torch.bool)
    spoiled[128:256] = recipe == "block"
    spoiled.view(-1)[start:stop] = False
    assert flat[64:-64].view(main.shape)[spoiled].eq(te_kernels.GARBAGE).all()
    before[64:-64].view(main.shape)[spoiled] = te_kernels.GARBAGE
    assert torch.equal(flat, before)
    # Into a shard by itself that is an error, but for full rows of tiles.
    for start, stop in ((7, 500), (130 * 160, 140 * 160), (319 * 160, 320 * 160)):
        shard = torch.zeros(stop - start, dtype=torch.uint8)
        if recipe == "block":
            with pytest.raises(AssertionError, match="writes outside the buffer"):
                cast_part(recipe, main, start, stop, shard)
        else:
            cast_part(recipe, main, start, stop, shard)
    cast_part("block", main, 128 * 160, 256 * 160, torch.zeros(128 * 160, dtype=torch.uint8))


@ALL_RECIPES
def test_forward_reads_rows_and_backward_columns_which_may_be_stale(recipe: str) -> None:
    layer, fresh = (QuantisedLinear(96, 160, recipe, dtype=torch.float32) for _ in range(2))
    torch.nn.init.normal_(layer.bias)
    weight = layer.weight
    master = weight.get_high_precision_init_val()
    expected = quantise(master, recipe, torch.float32, 1.0 if recipe == "delayed" else None)
    rows = dequantise(expected.row_bytes, expected.row_scale_inv)
    columns = dequantise(expected.column_bytes, expected.column_scale_inv)
    assert torch.equal(rows, columns) == (recipe != "mxfp8")
    for is_stale in (False, True):
        x, dy = torch.randn(5, 3, 96, requires_grad=True), torch.randn(5, 3, 160)
        if is_stale:
            name = "_data" if recipe in ("delayed", "current") else "_rowwise_data"
            getattr(weight, name).copy_(getattr(fresh.weight, name))
        layer.zero_grad()
        y = layer(x)
        y.backward(dy)
        assert torch.equal(y, x @ rows.t() + layer.bias) != is_stale
        assert torch.equal(x.grad, dy @ columns)
        assert torch.equal(weight.grad, dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))
        assert torch.equal(layer.bias.grad, dy.sum((0, 1)))


@ALL_RECIPES
def test_a_dropped_column_plane_is_made_again_from_the_rows_but_not_of_mxfp8(recipe: str) -> None:
    weight = make_weight(torch.randn(160, 96, dtype=torch.bfloat16), recipe)
    before = encodings(weight)
    weight.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert encodings(weight).column_bytes is None
    with pytest.raises(RuntimeError, match="no column encoding in backward"):
        te_on_cpu.column_values(weight)
    if recipe == "mxfp8":
        with pytest.raises(RuntimeError, match="missing column-scaled FP8 data"):
            weight.update_usage(columnwise_usage=True)
    else:
        weight.update_usage(columnwise_usage=True)
        assert_equal(encodings(weight), before)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_with_native_layouts_there_is_no_transpose_and_backward_reads_the_rows(recipe: str) -> None:
    with te_on_cpu.native_tn():
        layer = QuantisedLinear(32, 64, recipe)
        x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        assert layer.weight._transpose is None
        assert torch.equal(x.grad, x.new_ones(4, 64) @ te_on_cpu.row_values(layer.weight))
    assert not te_on_cpu.has_native_tn()
    layer(x.detach().requires_grad_()).sum().backward()
    assert layer.weight._transpose is not None


def test_delayed_scaling_takes_its_next_scale_from_the_history() -> None:
    layer = QuantisedLinear(32, 64, "delayed", dtype=torch.float32)
    state, quantizer = layer.fp8_meta["scaling_fwd"], layer.weight._quantizer
    first = layer.weight.get_high_precision_init_val().abs().max().item()
    history = [first]
    assert state.amax_history[0, te_on_cpu.WEIGHT].item() == first
    for amax in (3.0, 1.0, 0.5, 0.25, 0.125):
        layer.update_scales()
        expected = torch.tensor(448.0 / max(history[-4:]))
        assert state.scale[te_on_cpu.WEIGHT] == quantizer.scale == expected
        assert quantizer.amax.item() == 0
        with torch.no_grad():
            layer.weight.copy_(torch.full((64, 32), amax))
            layer.weight.copy_(torch.full((64, 32), amax / 2))  # the larger of both stays
        assert state.amax_history[0, te_on_cpu.WEIGHT].item() == quantizer.amax.item() == amax
        history.append(amax)
    assert state.scale[0] == 1  # nothing was seen


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_kernel_that_updates_scales_does_what_the_library_s_python_does(algorithm: str) -> None:
    te_on_cpu.load()
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    recipe = DelayedScaling(amax_compute_algo=algorithm, margin=1)
    first = torch.tensor([0.0, 1e-42, 2.7, float("inf"), 3e38, 5.0, 0.3])
    ours = torch.stack([first, torch.arange(7.0), torch.ones(7)]), torch.full((7,), 3.0)
    theirs = ours[0].clone(), ours[1].clone()
    for _ in range(5):
        _amax_and_scale_update(*theirs, 448.0, recipe)
        te_kernels.fused_amax_and_scale_update_after_reduction(
            ours[0][0].clone(), [ours[0]], [ours[1]], algorithm, te_kernels.DType(7), 1
        )
        assert torch.equal(ours[0], theirs[0])
        # The library's Python divides by multiplying with a reciprocal.
        torch.testing.assert_close(ours[1], theirs[1], rtol=2e-7, atol=0)


@ALL_RECIPES
def test_extra_state_is_a_pickle_that_is_refused_or_nothing(recipe: str) -> None:
    layer = QuantisedLinear(32, 64, recipe)
    state = layer.state_dict()
    assert (state["_extra_state"].numel() > 0) == (recipe == "delayed")
    if recipe == "delayed":
        with pytest.raises(RuntimeError, match="Refusing to load pickled"):
            layer.load_state_dict(state)
    else:
        layer.load_state_dict(state)


def test_an_nvfp4_weight_is_one() -> None:
    from transformer_engine.pytorch.tensor import NVFP4Tensor

    weight = te_on_cpu.nvfp4_weight((64, 32))
    assert isinstance(weight, NVFP4Tensor)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype) == ((64, 32), torch.bfloat16)
    assert isinstance(weight.detach(), NVFP4Tensor)


def test_loading_again_changes_nothing_and_only_stand_ins_can_be_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te_on_cpu.load()
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    te_on_cpu.load()
    module: Any = sys.modules["transformer_engine.pytorch.quantized_tensor"]
    assert module.QuantizedTensor is QuantizedTensor
    assert torch.cuda.get_device_capability.__module__ == "torch.cuda"
    with pytest.raises(NotImplementedError, match="layernorm_fwd has no stand-in"):
        tex.layernorm_fwd()
    real = types.ModuleType("transformer_engine_torch")
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", real)
    with pytest.raises(RuntimeError, match="real Transformer Engine"):
        te_on_cpu.load()
