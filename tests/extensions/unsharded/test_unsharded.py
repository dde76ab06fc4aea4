"""Edits of full main weights within ``engine.unsharded()`` are written back, or raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.models import LstmLanguage
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS, Place, everywhere
from tests.reference import full_weights


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def value(*shape: int) -> nn.Parameter:
    return nn.Parameter(values(*shape))


def assign_data(model: LstmLanguage) -> None:
    model.blocks[0].weight.data = values(4, 4)
    model.embedding.weight.data = values(7, 4)
    model.lstm.weight_hh_l0.data = values(16, 4)


@torch.no_grad()
def set_memory(model: LstmLanguage) -> None:
    model.blocks[0].weight.set_(values(4, 4).t())


def put_past_hooks(model: LstmLanguage) -> None:
    model.blocks[0]._parameters["weight"] = value(4, 4)
    model.embedding._parameters["weight"] = value(7, 4)
    model.head._parameters["weight"] = model.embedding.weight


@torch.no_grad()
def assign_and_write(model: LstmLanguage) -> None:
    del model.blocks[1].weight
    model.blocks[0].weight, model.blocks[1].weight = new = value(4, 4), value(4, 4)
    new[0].mul_(2)


def swap(model: LstmLanguage) -> None:
    torch.utils.swap_tensors(model.blocks[0].weight, value(4, 4))


def apply(how: str) -> Callable[[LstmLanguage], None]:
    """Every parameter is doubled by ``_apply``, while a flag of torch's is set."""

    def edit(model: LstmLanguage) -> None:
        choose = getattr(torch.__future__, f"set_{how}_module_params_on_conversion")
        choose(True)
        try:
            (model if how == "swap" else model.blocks)._apply(lambda tensor: tensor * 2)
        finally:
            choose(False)

    return edit


def write_through_data(model: LstmLanguage) -> None:
    for param in model.parameters():
        param.data.chunk(2)[0].add_(1)


def freeze(model: LstmLanguage) -> None:
    model.blocks[0].requires_grad_(False)
    model.head.weight.requires_grad_(False)


EDITS: tuple[Callable[[LstmLanguage], object], ...] = (
    assign_data,
    lambda m: setattr(m.blocks[0].weight, "data", values(4, 4).bfloat16()),
    lambda m: setattr(m.blocks[0].weight, "data", m.blocks[0].weight.data.t()),
    set_memory,
    put_past_hooks,
    assign_and_write,
    swap,
    lambda m: m._apply(lambda tensor: tensor * 2),
    apply("swap"),
    apply("overwrite"),
    write_through_data,
    freeze,
)
TOKENS = torch.tensor([[1, 5, 2]])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Values are equal; dtypes may differ."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_dtype=False)


@everywhere
def test_edits_of_any_kind_are_written_back_also_to_fp32_main_weights(place: Place) -> None:
    for edit, dtype in ((edit, dtype) for edit in EDITS for dtype in (None, torch.bfloat16)):
        torch.manual_seed(0)
        model = LstmLanguage(tied=True)
        alone = copy.deepcopy(model)
        engine = place.shard(model, mp_policy=fe.MixedPrecisionPolicy(param_dtype=dtype))
        model(TOKENS).sum().backward()
        params = dict(model.named_parameters())
        with engine.unsharded():
            edit(model)
            inside = {name: param.detach().clone() for name, param in model.named_parameters()}
            state = engine.full_state_dict()
            assert torch.equal(state["blocks.0.weight"], inside["blocks.0.weight"])
        edit(alone)
        assert_same(full_weights(model), full_weights(alone))
        assert_same(full_weights(model), inside)
        for name, param in model.named_parameters():
            assert param is params[name], (edit, name)
            assert param.requires_grad is alone.get_parameter(name).requires_grad, (edit, name)
        torch.testing.assert_close(model(TOKENS), alone.to(dtype or torch.float32)(TOKENS))


def tie_new_memory(model: LstmLanguage) -> None:
    model.blocks[0].weight.data = model.blocks[1].weight.data = torch.ones(4, 4)


def differ_by_rank(model: LstmLanguage) -> None:
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(model.blocks[0].weight)


def on_rank_0(edit: Callable[[LstmLanguage], object]) -> Callable[[LstmLanguage], object]:
    return lambda model: edit(model) if dist.get_rank() == 0 else None


def put(model: LstmLanguage, name: str, value: Any) -> None:
    module, _, key = name.rpartition(".")
    model.get_submodule(module)._parameters[key] = value


REFUSED: dict[Callable[[LstmLanguage], object], str] = {
    lambda m: delattr(m.blocks[0], "weight"): "blocks.0.weight: .* found none",
    on_rank_0(lambda m: delattr(m.blocks[0], "weight")): "blocks.0.weight: .*found none",
    lambda m: setattr(m.blocks[1], "weight", m.blocks[0].weight): "blocks.1.weight: .*another",
    lambda m: put(m, "blocks.1.weight", m.blocks[0].weight): "blocks.1.weight: .*another",
    lambda m: setattr(m.blocks[1].weight, "data", m.blocks[0].weight.data): (
        "blocks.1.weight: .*memory of another"
    ),
    tie_new_memory: "blocks.1.weight: .*memory of blocks.0.weight",
    lambda m: put(m, "head.weight", value(7, 4)): (
        "embedding.weight: .*embedding.weight, head.weight.*which were tied"
    ),
    lambda m: setattr(m.blocks[0].weight, "data", values(2, 8)): "blocks.0.weight: .*shape",
    lambda m: setattr(m.blocks[0].weight, "data", values(4, 4).double()): (
        "blocks.0.weight: .*float64"
    ),
    lambda m: put(m, "blocks.0.scale", value(4)): "blocks.0.scale: .*found a new one",
    lambda m: m.bfloat16(): "conversion of a sharded model: .*unsharded",
    lambda m: setattr(m.blocks[0].weight, "grad", values(4, 4)): "blocks.0.weight: .*gradient",
    lambda m: m.blocks[0].weight.square().sum().backward(): (
        "blocks.0.weight: .*which have no gradients"
    ),
    differ_by_rank: "blocks.0.weight: .*same edits .*on all ranks",
    on_rank_0(lambda m: m.blocks[0].weight.data.zero_()): (
        "blocks.0.weight: .*same edits .*on all ranks"
    ),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_edits_that_cannot_be_written_back_raise_on_all_ranks(
    level: str, dtype: torch.dtype | None
) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
    for edit, message in REFUSED.items():
        torch.manual_seed(0)
        model = LstmLanguage(tied=True)
        engine = fe.shard(model, strategy=level, mp_policy=policy)
        before = full_weights(model)
        with pytest.raises((ValueError, RuntimeError), match=message), engine.unsharded():
            edit(model)
        if level != "no_shard":  # no_shard edits the main weights themselves
            after = full_weights(model)
            assert_same({name: after[name] for name in before}, before)
        model(TOKENS).sum().backward()


@on_ranks(2)
def test_full_main_weights_have_the_attributes_of_their_parameters() -> None:
    for level in LEVELS:
        model = nn.Sequential(nn.Linear(4, 4))
        engine = fe.shard(model, strategy=level)
        model[0].weight.mark = "outside"  # type: ignore[assignment]
        with engine.unsharded():
            assert model[0].weight.mark == "outside"
            model[0].weight.other = "within"  # type: ignore[assignment]
        assert model[0].weight.other == "within"
