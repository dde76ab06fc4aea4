"""What cannot be taken of Transformer Engine is refused with its reason, on all ranks, before
anything is changed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import make_weight
from tests.extensions.transformer_engine.te_reference import dequantise
from tests.extensions.transformer_engine.te_training import (
    make_stack,
    quantised_layers,
    train_watched,
)
from tests.pool import on_ranks

Config = fe.DistributedDataParallelConfig
KERNELS = "transformer_engine.pytorch.tensor.utils"


class Holder(nn.Module):
    """One weight by itself, and a plain one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.plain = nn.Parameter(torch.zeros(4))


def refused(model: nn.Module, error: type[Exception], match: str, **options: Any) -> None:
    """``shard`` raises, and has changed nothing."""
    before = {name: (param, id(param)) for name, param in model.named_parameters()}
    values = {name: [id(v) for v in vars(param).values()] for name, (param, _) in before.items()}
    with pytest.raises(error, match=match):
        fe.shard(model, **options)
    for name, param in model.named_parameters():
        assert id(param) == before[name][1]
        assert [id(v) for v in vars(param).values()] == values[name]


def fp32(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape)


def three_dims() -> nn.Parameter:
    weight = make_weight(torch.randn(128, 64, dtype=torch.bfloat16), "block")
    quantizer: Any = weight._quantizer
    tensor = quantizer.make_empty((2, 64, 64), dtype=torch.bfloat16, device="cpu")
    return nn.Parameter(tensor)


def rows_of_128() -> nn.Parameter:
    weight: Any = make_weight(torch.randn(128, 64, dtype=torch.bfloat16), "block")
    weight._is_2D_scaled = False
    return weight


def without_columns() -> nn.Parameter:
    weight: Any = make_weight(torch.randn(64, 64, dtype=torch.bfloat16), "mxfp8")
    weight.update_usage(rowwise_usage=True, columnwise_usage=False)
    return weight


WEIGHTS: dict[str, tuple[Callable[[], nn.Parameter], str]] = {
    "nvfp4": (
        lambda: te_on_cpu.nvfp4_weight((64, 64)),
        "weight: expected one of the recipes delayed, current, block, mxfp8; found NVFP4, which "
        "packs two elements into a byte",
    ),
    "block of three dims": (
        three_dims,
        r"weight: expected 2 dimensions.*block recipe support no others; found shape \(2, 64, 64\)",
    ),
    "blocks of 1 x 128": (rows_of_128, "weight: expected scales of 128 x 128 blocks; found.*1 x"),
    "mxfp8 without columns": (
        without_columns,
        "weight: expected a weight of the mxfp8 recipe with its bytes and scales; found none in "
        "_columnwise_data",
    ),
    "mxfp8 of fp32": (
        lambda: make_weight(fp32((64, 64)), "mxfp8"),
        "weight: expected a nominal dtype of torch.bfloat16, since the kernels of the mxfp8 "
        "recipe support no others; found torch.float32",
    ),
    "block of fp16": (
        lambda: make_weight(fp32((64, 64)).half(), "block"),
        "weight: expected a nominal dtype of torch.bfloat16 or torch.float32, since the kernels of "
        "the block recipe support no others; found torch.float16",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
@on_ranks(2)
def test_a_weight_that_cannot_be_taken_is_refused_with_its_reason(case: str) -> None:
    make, match = WEIGHTS[case]
    te_on_cpu.load()
    model = Holder(make())
    refused(model, ValueError, match)
    # Of one rank only: all raise.
    other = Holder(make() if dist.get_rank() == 1 else nn.Parameter(torch.zeros(64, 64)))
    with pytest.raises(ValueError, match="" if dist.get_rank() else "failed on data-parallel"):
        fe.shard(other)
    model.weight = nn.Parameter(torch.zeros(64, 64))
    fe.shard(model)


@on_ranks(2)
def test_another_compute_dtype_than_the_nominal_one_is_refused() -> None:
    for dtype in (torch.float16, torch.float32):
        refused(
            make_stack("current"),
            ValueError,
            rf"weight: expected mp_policy.param_dtype to be None or torch.bfloat16.*found {dtype}",
            mp_policy=fe.MixedPrecisionPolicy(param_dtype=dtype),
        )
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = make_stack("current")
    train_watched(model, fe.shard(model, mp_policy=policy), None, num_steps=1)


@on_ranks(2)
def test_a_quantised_module_on_the_meta_device_is_refused() -> None:
    model = Holder(nn.Parameter(torch.empty(64, 64, device="meta")))
    model.primary_weights_in_fp8 = True
    refused(model, ValueError, "weight: expected a module with quantised weights.*found it on the")


@on_ranks(2)
def test_fields_about_transposes_and_mxfp8_need_the_weights_that_have_them() -> None:
    keeps = Config(fp8_param_gather=True, keep_fp8_transpose_cache=True)
    reuses = Config(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True)
    match = "expected weights that Transformer Engine has quantised by the"
    refused(make_stack("mxfp8"), ValueError, f"keep_fp8_transpose_cache: {match}", config=keeps)
    refused(make_stack("block"), ValueError, f"param_ag: {match} MXFP8", config=reuses)
    for recipe, config in (("mxfp8", reuses), ("block", keeps)):
        model = make_stack(recipe)
        level = "optim" if config is reuses else None
        engine = fe.shard(model, strategy=level, config=config)
        train_watched(model, engine, None, num_steps=1)


@on_ranks(2)
def test_ranks_with_different_recipes_are_refused_on_all() -> None:
    model = make_stack("block" if dist.get_rank() else "current")
    # The same shapes, and names: only how they are encoded differs.
    refused(model, ValueError, r"expected the same parameters.*found on data-parallel rank 0")


@on_ranks(2)
def test_ranks_with_other_options_of_one_recipe_are_refused_on_all() -> None:
    model = make_stack("current")
    for layer in quantised_layers(model).values():
        layer.weight._quantizer.force_pow_2_scales = dist.get_rank() == 1
    refused(model, ValueError, "expected the same parameters.*force_pow_2_scales")


@on_ranks(2)
def test_without_transformer_engine_its_weights_are_refused_naming_versions() -> None:
    model = make_stack("current")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setitem(sys.modules, KERNELS, None)
        refused(
            model,
            ImportError,
            r"blocks.0.up.weight: expected Transformer Engine 2.20, whose type its weight has; "
            r"found that transformer_engine.pytorch cannot be imported.*Install "
            r"fsdp_engine\[transformer-engine\]",
        )
    train_watched(model, fe.shard(model), None, num_steps=1)


@on_ranks(2)
def test_another_version_of_transformer_engine_is_refused_naming_what_it_lacks() -> None:
    model = make_stack("current")
    utils = sys.modules[KERNELS]
    real = utils.quantize_master_weights  # type: ignore[attr-defined]

    def older(
        model_weights: Any,
        master_weights: Any,
        start_offsets: Any,
        group: Any,
        fsdp_shard_model_weights: Any = None,
    ) -> None:
        raise AssertionError("not to be called")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "quantize_master_weights", older)
        patch.delattr(utils, "post_all_gather_processing")
        refused(
            model,
            ImportError,
            r"weight: expected Transformer Engine 2.20.*found version 2\..*lacks "
            r"post_all_gather_processing, "
            r"quantize_master_weights\(manual_post_all_gather_processing\).*versions: 2.20",
        )
    assert utils.quantize_master_weights is real  # type: ignore[attr-defined]
    train_watched(model, fe.shard(model), None, num_steps=1)


@on_ranks(2)
def test_without_preserved_values_main_weights_start_from_the_quantised_ones() -> None:
    for recipe in te_on_cpu.RECIPES:
        model = make_stack(recipe)
        expected = {}
        for name, layer in quantised_layers(model).items():
            layer.weight.clear_high_precision_init_val()
            found = te_on_cpu.encodings(layer.weight)
            expected[name] = dequantise(found.row_bytes, found.row_scale_inv)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = fe.shard(model)
        texts = [str(each.message) for each in caught]
        for name, value in expected.items():
            match = f"{name}: expected quantized_model_init(preserve_high_precision_init_val=True)"
            assert sum(text.startswith(match) for text in texts) == 1, texts
            assert torch.equal(engine.full_tensor(name), value.bfloat16().float()), name


@on_ranks(2)
def test_preserved_values_are_taken_without_a_warning_and_cleared() -> None:
    model = make_stack("block")
    layers = quantised_layers(model)
    values = {name: layer.weight.get_high_precision_init_val() for name, layer in layers.items()}
    weights = [layer.weight for layer in layers.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = fe.shard(model)
    for name, value in values.items():
        assert torch.equal(engine.full_tensor(name), value.float())
    assert [weight.get_high_precision_init_val() for weight in weights] == [None] * len(weights)
