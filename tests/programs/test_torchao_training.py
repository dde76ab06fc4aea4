"""torchao's float8, int8 and BitNet training of linear layers, beside the same under FSDP2."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_engine as fe
from fsdp_engine import fsdp2
from tests.integrations.trainer_scene import LEVELS
from tests.pool import Ranks
from tests.programs.packages import PROGRAM, with_torchao

pytestmark = PROGRAM
WIDTH, HIDDEN, STEPS, RANKS = 32, 48, 6, 2
# "float8" and "int8 swap": plain weights. The other kinds have weights of a class with FSDP2's
# all-gather hooks.
KINDS = ("float8", "float8 gather", "float8 precomputed", "int8 swap", "int8", "bitnet")
WAYS = ("fully_shard", *LEVELS)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-3}


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False))
        for _ in range(2)
    )
    model = nn.Sequential(*blocks)
    if kind == "plain":
        return model
    if kind.startswith("float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        gathers = kind != "float8"
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
        convert_to_float8_training(model, config=config)
        return model
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    if kind == "bitnet":
        quantize_(model, quantized_training.bitnet_training())
        return model
    swaps = kind == "int8 swap"
    quantize_(model, quantized_training.int8_mixed_precision_training(module_swap=swaps))
    # torchao 0.18 registers this class's linear among aten functions, but linear is not dispatched
    # as one: without this change layers would not be quantised.
    weight_class: Any = quantized_training.Int8MixedPrecisionTrainingLinearWeight
    linear = weight_class._ATEN_OP_TABLE[weight_class][nn.functional.linear]
    weight_class._TORCH_FN_TABLE[weight_class].setdefault(nn.functional.linear, linear)
    return model


def _batch(rank: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank))


def _train(model: nn.Module, kind: str, ranks: list[int]) -> list[float]:
    """The mean loss of each step over ``ranks``, each of which has a microbatch."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for rank in ranks:
            loss = (model(_batch(rank)) - _batch(rank)).float().square().mean() / len(ranks)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "float8 precomputed":
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(total)
    return losses


@functools.cache
def _under_fsdp2(kind: str, dtype: torch.dtype) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = _model(kind)
    for block in model.children():
        fully_shard(block, mp_policy=policy)
    return _train(fully_shard(model, mp_policy=policy), kind, [dist.get_rank()])


@functools.cache
def _in_one_process(kind: str) -> list[float]:
    return _train(_model(kind), kind, list(range(RANKS)))


def _under_both(kind: str, way: str, dtype: torch.dtype) -> dict[str, list[float]]:
    with with_torchao():
        model = _model(kind)
        if way == "fully_shard":
            policy = fsdp2.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for block in model.children():
                fsdp2.fully_shard(block, mp_policy=policy)
            fsdp2.fully_shard(model, mp_policy=policy)
        else:
            of_shard = fe.MixedPrecisionPolicy(param_dtype=dtype, main_grads_dtype=torch.float32)
            fe.shard(model, strategy=way, mp_policy=of_shard, options=fe.Options(min_unit_size=0))
        return {
            "found": _train(model, kind, [dist.get_rank()]),
            "fsdp2": _under_fsdp2(kind, dtype),
            "one process": _in_one_process(kind),
            "plain": _in_one_process("plain"),
        }


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_under_fsdp2_and_in_one_process(
    ranks: Ranks, kind: str, way: str, dtype: torch.dtype
) -> None:
    results = ranks.run(_under_both, kind, way, dtype, world_size=RANKS)
    close = functools.partial(pytest.approx, rel=TOLERANCES[dtype])
    for losses in results:
        assert losses["found"] == close(losses["fsdp2"])
    losses = [sum(each) / RANKS for each in zip(*(r["found"] for r in results), strict=True)]
    assert losses[-1] < 0.98 * losses[0]
    if dtype == torch.float32:
        assert losses == close(results[0]["one process"])
        # The layers are quantised.
        assert losses != pytest.approx(results[0]["plain"], rel=1e-5)


def _from_meta(kind: str, way: str, level: str) -> dict[str, list[float]]:
    """Losses of a program that builds on the meta device, shards, and then assigns values."""
    with with_torchao():
        values = _model("plain")
        with torch.device("meta"):
            model = _model(kind)
        if way == "fully_shard":
            for block in model.children():
                fsdp2.fully_shard(block, strategy=level)
            fsdp2.fully_shard(model, strategy=level)
        else:
            fe.shard(model, strategy=level, options=fe.Options(min_unit_size=0))
        if way != "shard":
            model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, values.state_dict(), options=options)
        return {
            "found": _train(model, kind, [dist.get_rank()]),
            "one process": _in_one_process(kind),
        }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", ["fully_shard", "shard"])
@pytest.mark.parametrize("kind", ["float8 gather", "float8 precomputed", "int8", "bitnet"])
def test_it_trains_from_the_meta_device(ranks: Ranks, kind: str, way: str, level: str) -> None:
    results = ranks.run(_from_meta, kind, way, level, world_size=RANKS)
    losses = [sum(each) / RANKS for each in zip(*(r["found"] for r in results), strict=True)]
    assert losses == pytest.approx(results[0]["one process"], rel=TOLERANCES[torch.float32])
