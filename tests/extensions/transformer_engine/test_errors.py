"""Unsupported weights and versions of Transformer Engine are refused with a reason, on all ranks,
before anything is changed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import make_weight
from tests.extensions.transformer_engine.te_reference import dequantise
from tests.extensions.transformer_engine.te_training import (
    CUT,
    Watch,
    make_stack,
    quantised_layers,
    scenario_of,
)
from tests.models import Stack
from tests.pool import on_ranks

Config = fe.DistributedDataParallelConfig
KERNELS = "transformer_engine.pytorch.tensor.utils"
KEEPS = Config(fp8_param_gather=True, keep_fp8_transpose_cache=True)
REUSES = Config(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True)
NO_TRANSPOSES = "expected weights that Transformer Engine has quantised by the"


class Holder(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.plain = nn.Parameter(torch.zeros(4))
        self.primary_weights_in_fp8 = weight.is_meta


def refused(
    model: nn.Module, match: str, error: type[Exception] = ValueError, **options: Any
) -> None:
    """``shard`` raises, and has changed nothing."""
    before = dict(model.named_parameters())
    values = {name: [id(v) for v in vars(param).values()] for name, param in before.items()}
    with pytest.raises(error, match=match):
        fe.shard(model, **options)
    for name, param in model.named_parameters():
        assert param is before[name]
        assert [id(v) for v in vars(param).values()] == values[name]


def weight_of(recipe: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return make_weight(torch.randn(128, 64, dtype=dtype), recipe)


def nvfp4() -> nn.Parameter:
    from transformer_engine.pytorch.tensor import NVFP4Quantizer

    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        quantizer = NVFP4Quantizer(with_2d_quantization=True, with_random_sign_mask=False)
    return nn.Parameter(quantizer.make_empty((64, 64), dtype=torch.bfloat16, device="cpu"))


def three_dims() -> nn.Parameter:
    quantizer = weight_of("block")._quantizer
    return nn.Parameter(quantizer.make_empty((2, 64, 64), dtype=torch.bfloat16, device="cpu"))


def rows_of_128() -> nn.Parameter:
    weight = weight_of("block")
    weight._is_2D_scaled = False
    return weight


def without_columns() -> nn.Parameter:
    weight = weight_of("mxfp8")
    weight.update_usage(rowwise_usage=True, columnwise_usage=False)
    return weight


def on_meta() -> nn.Parameter:
    return nn.Parameter(torch.empty(64, 64, device="meta"))


DTYPE = "weight: expected a nominal dtype of torch.bfloat16"
WEIGHTS: dict[Callable[[], nn.Parameter], str] = {
    nvfp4: "weight: expected one of the recipes delayed, current.*found NVFP4, which packs two",
    three_dims: r"weight: expected 2 dimensions.*block recipe.*found shape \(2, 64, 64\)",
    rows_of_128: "weight: expected scales of 128 x 128 blocks; found.*1 x",
    without_columns: "weight: expected a weight of the mxfp8.*found none in _columnwise_data",
    partial(weight_of, "mxfp8", torch.float32): f"{DTYPE}, since.*mxfp8.*found torch.float32",
    partial(weight_of, "block", torch.float16): f"{DTYPE} or torch.float32.*block.*torch.float16",
    on_meta: "weight: expected a module with quantised weights.*found it on the",
}


@on_ranks(2)
def test_a_weight_that_cannot_be_taken_is_refused_with_its_reason() -> None:
    te_on_cpu.load()
    for make, match in WEIGHTS.items():
        model = Holder(make())
        refused(model, match)
        if not model.weight.is_meta:  # such a weight on one rank is an error on all
            other = Holder(make() if dist.get_rank() == 1 else nn.Parameter(torch.zeros(64, 64)))
            with pytest.raises(ValueError, match="" if dist.get_rank() else "failed on data-paral"):
                fe.shard(other)
        fe.shard(Holder(nn.Parameter(torch.zeros(64, 64))))


def policy_of(dtype: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": fe.MixedPrecisionPolicy(param_dtype=dtype)}


def powers_of_two_on_one_rank() -> nn.Module:
    model = make_stack("current")
    for layer in quantised_layers(model).values():
        layer.weight._quantizer.force_pow_2_scales = dist.get_rank() == 1
    return model


def of_two_recipes() -> nn.Module:
    """The same shapes and names: only the encoding differs."""
    return make_stack("block" if dist.get_rank() else "current")


POLICY = "weight: expected mp_policy.param_dtype to be None or torch.bfloat16.*found torch"
SCRATCH = r"through_gradients \(.*reuse_grad_buf_for_mxfp8_param_ag\): expected unsharded grad"
# Model, options of ``shard``, words of the error.
STACKS: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (partial(make_stack, "current"), policy_of(torch.float16), rf"{POLICY}\.float16"),
    (partial(make_stack, "current"), policy_of(torch.float32), rf"{POLICY}\.float32"),
    (
        partial(make_stack, "mxfp8"),
        {"config": KEEPS},
        rf"keep_fp8_transpose_cache\): {NO_TRANSPOSES}",
    ),
    (Stack, {"config": KEEPS}, rf"keep_fp8_transpose_cache\): {NO_TRANSPOSES}"),
    (Stack, {"config": REUSES}, rf"reuse_grad_buf_for_mxfp8_param_ag\): {NO_TRANSPOSES}"),
    (partial(make_stack, "block"), {"config": REUSES, "strategy": "optim"}, "MXFP8.*found none"),
    (partial(make_stack, "mxfp8"), {"config": REUSES, "strategy": "optim_grads"}, SCRATCH),
    (partial(make_stack, "mxfp8"), {"config": REUSES, "strategy": CUT}, SCRATCH),
    (of_two_recipes, {}, r"expected the same parameters.*found on data-parallel rank 0"),
    (powers_of_two_on_one_rank, {}, "expected the same parameters.*force_pow_2_scales"),
]


@on_ranks(2)
def test_options_that_do_not_fit_the_weights_are_refused() -> None:
    for make, options, match in STACKS:
        refused(make(), match, **options)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("current", policy_of(torch.bfloat16)),
        ("mxfp8", {"config": REUSES, "strategy": "optim"}),
        ("block", {"config": KEEPS}),
    ],
)
@on_ranks(2)
def test_options_that_fit_the_weights_are_taken(recipe: str, options: Any) -> None:
    model = make_stack(recipe)
    Watch(model, fe.shard(model, **options)).train(scenario_of(recipe, steps=1))


def older(
    model_weights: Any, master_weights: Any, start_offsets: Any, group: Any, fsdp: Any = None
) -> None:
    raise AssertionError("not to be called")


@on_ranks(2)
def test_another_version_of_transformer_engine_and_none_are_refused_naming_versions() -> None:
    model = make_stack("current")
    expected = "blocks.0.up.weight: expected Transformer Engine 2.20"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setitem(sys.modules, KERNELS, None)
        refused(
            model,
            rf"{expected}, whose type its weight has; found that transformer_engine.pytorch cannot "
            r"be imported.*Install fsdp_engine\[transformer-engine\]",
            ImportError,
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[KERNELS], "quantize_master_weights", older)
        patch.delattr(sys.modules[KERNELS], "post_all_gather_processing")
        refused(
            model,
            rf"{expected}.*found version 2\..*lacks post_all_gather_processing, "
            r"quantize_master_weights\(fsdp_shard_model_weights\), "
            r"quantize_master_weights\(manual_post_all_gather_processing\).*versions: 2.20",
            ImportError,
        )
    Watch(model, fe.shard(model)).train(scenario_of("current", steps=1))


@on_ranks(2)
def test_main_weights_start_from_preserved_values_or_from_the_quantised_ones() -> None:
    for recipe in te_on_cpu.RECIPES:
        model = make_stack(recipe)
        weights = [layer.weight for layer in quantised_layers(model).values()]
        values = [weight.get_high_precision_init_val().float() for weight in weights]
        expected = dict(zip(quantised_layers(model), values, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine = fe.shard(model)
        assert all(torch.equal(engine.full_tensor(name), each) for name, each in expected.items())
        assert [weight.get_high_precision_init_val() for weight in weights] == [None] * len(weights)

        model = make_stack(recipe)
        for name, layer in quantised_layers(model).items():
            layer.weight.clear_high_precision_init_val()
            found = te_on_cpu.encodings(layer.weight)
            expected[name] = dequantise(found.row_bytes, found.row_scale_inv).bfloat16().float()
        with pytest.warns(UserWarning, match="preserve_high_precision") as caught:
            engine = fe.shard(model)
        texts = [str(each.message) for each in caught]
        for name, value in expected.items():
            match = f"{name}: expected quantized_model_init(preserve_high_precision_init_val=True)"
            assert sum(text.startswith(match) for text in texts) == 1, texts
            assert torch.equal(engine.full_tensor(name), value), name
