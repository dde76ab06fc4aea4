"""Dtypes of compute, of main weights, of collectives and of sums."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.models import vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import on_ranks
from tests.reference import full_gradients, full_weights
from tests.scenario import Scenario
from tests.training import mesh_of

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
Policy = fe.MixedPrecisionPolicy
pairs = pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)


class Spy(nn.Module):
    """A linear that notes the dtypes it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.linear.weight.dtype, x.dtype))
        return self.linear(x.to(self.linear.weight.dtype))


# Each row: dtype of the model, policy, dtype of the input; dtypes of weights and inputs in blocks,
# of parameters, of gradients; whether parameters are sharded tensors even at the first level.
DTYPES: list[tuple[torch.dtype, Policy, torch.dtype, Any, Any, Any, bool]] = [
    (FP32, Policy(), FP32, (FP32, FP32), FP32, FP32, False),
    (FP32, Policy(param_dtype=BF16), FP32, (BF16, BF16), FP32, FP32, True),
    (FP32, Policy(BF16, cast_forward_inputs=False), FP32, (BF16, FP32), FP32, FP32, True),
    (BF16, Policy(), BF16, (BF16, BF16), FP32, FP32, True),
    (FP16, Policy(), FP16, (FP16, FP16), FP32, FP32, True),
    (BF16, Policy(main_params_dtype=BF16), BF16, (BF16, BF16), BF16, BF16, False),
    (FP32, Policy(BF16, main_grads_dtype=BF16), FP32, (BF16, BF16), FP32, BF16, True),
]


@pytest.mark.parametrize("row", DTYPES)
@on_ranks(2)
def test_units_compute_in_one_dtype_and_keep_weights_and_gradients_in_others(row: Any) -> None:
    dtype, policy, of_input, seen, of_params, of_grads, is_always_sharded = row
    for strategy in LEVELS:
        model = models.Chain(Spy(), Spy()).to(dtype)
        engine = fe.shard(model, strategy=strategy, mp_policy=policy)
        x, y = vector_batch(2, seed=1)
        model(x.to(of_input), y).backward()
        assert model.blocks[0].seen == [seen]
        params = list(model.parameters())
        assert {param.dtype for param in params} == {of_params}, strategy
        assert {param.grad.dtype for param in params} == {of_grads}, strategy  # type: ignore[union-attr]
        is_sharded = is_always_sharded or strategy != "no_shard"
        assert {isinstance(param, fe.FlatDTensor) for param in params} == {is_sharded}
        norm = engine.clip_grad_norm_(1.0)
        assert norm > 0
        assert torch.isfinite(norm)


@on_ranks(2)
def test_outputs_of_the_root_are_cast_to_output_dtype() -> None:
    for strategy, dtype in itertools.product(LEVELS, (FP32, FP64)):
        policy = Policy(param_dtype=BF16, output_dtype=dtype)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        fe.shard(model, strategy=strategy, mp_policy=policy)
        out = model(torch.randn(4, 3))
        assert out.dtype == dtype
        out.sum().backward()


@on_ranks(2)
def test_updates_too_small_for_bf16_are_not_lost() -> None:
    for strategy in LEVELS:
        model = nn.Linear(4, 3, bias=False)
        nn.init.ones_(model.weight)
        fe.shard(model, strategy=strategy, mp_policy=Policy(param_dtype=BF16))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        outputs = []
        for _ in range(8):
            out = model(torch.ones(1, 4))
            outputs.append(out[0, 0].item())
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(full_weights(model)["weight"], torch.full((3, 4), 1 - 2.0**-7))
        # One update is too small to change a bf16 weight of 1; eight together change it.
        assert outputs[1] == 4.0
        assert model(torch.ones(1, 4))[0, 0].item() == 4 * (1 - 2.0**-7)


@on_ranks(2)
def test_fp64_weights_stay_fp64() -> None:
    def batch(rows: int, seed: int) -> reference.Batch:
        x, y = vector_batch(rows, seed)
        return x.double(), y

    def model() -> nn.Module:
        return models.Chain(models.Mlp(), models.Mlp()).double()

    for strategy in LEVELS:
        pair = (strategy, "no_shard")
        run = Scenario(model=model, batch=batch, pair=pair, tolerance=1e-6).check()
        assert {p.dtype for p in run.model.parameters()} == {FP64}


def gradient_of_big_and_small(
    strategy: str,
    outer: str | None,
    policy: Policy,
    num_microbatches: int = 1,
    big: float = 4096.0,
    small: float = 4.0,
    num_reduced: int = 1,
    num_elements: int = 64,
    **options: Any,
) -> Tensor:
    """The reduced gradient where one of four ranks has ``big`` and the others ``small``."""
    model = models.Dot(num_elements)
    mesh = mesh_of(4) if outer is None else mesh_of(2, 2)
    engine = fe.shard(model, mesh, strategy, outer, mp_policy=policy, options=fe.Options(**options))
    x = torch.full((num_elements,), big if dist.get_rank() == 0 else small)
    for _ in range(num_reduced):
        with engine.no_sync():
            for _ in range(num_microbatches - 1):
                model(x).backward()
        model(x).backward()
    gradient = full_gradients(model)["weight"]
    assert gradient is not None
    return gradient


# In bf16, with 8 significant bits, 1024 + 1 is 1024. The mean of 4096, 4, 4, 4 is 1027.
EXACT, LOST = 1027.0, {1024.0, 1026.0, 1028.0}
# Two ways to send gradients in bf16 and sum them in fp32: a dtype, or a flag.
WIRES: dict[str, tuple[Policy, dict[str, bool]]] = {
    "grad_comm_dtype": (Policy(param_dtype=BF16, grad_comm_dtype=BF16), {}),
    "sum_in_fp32": (Policy(param_dtype=BF16), {"sum_in_fp32": True}),
}


@pairs
@on_ranks(4)
def test_gradients_of_bf16_units_are_summed_in_fp32_by_default(strategy: str, outer: str) -> None:
    for num in (1, 3):
        gradient = gradient_of_big_and_small(strategy, outer, Policy(param_dtype=BF16), num)
        assert torch.equal(gradient, torch.full((64,), num * EXACT))


@pairs
@on_ranks(4)
def test_reduce_dtype_is_the_dtype_of_the_sum(strategy: str, outer: str) -> None:
    policy = Policy(param_dtype=BF16, reduce_dtype=BF16)
    gradient = gradient_of_big_and_small(strategy, outer, policy)
    assert gradient.dtype == FP32, "gradients are kept in the main dtype all the same"
    assert set(gradient.tolist()) <= LOST


@pytest.mark.parametrize("way", WIRES)
@pairs
@on_ranks(4)
def test_gradients_may_travel_in_bf16_and_be_summed_in_fp32(
    strategy: str, outer: str, way: str
) -> None:
    policy, options = WIRES[way]
    gradient = gradient_of_big_and_small(strategy, outer, policy, **options)
    # Each axis sums in fp32; the send along the second axis rounds to bf16: 1025 becomes 1024.
    assert gradient.dtype == FP32
    assert (gradient - EXACT).abs().max() <= 3.0


@pytest.mark.parametrize("way", WIRES)
@on_ranks(4)
def test_on_one_axis_a_bf16_wire_with_fp32_sums_rounds_once_at_most(way: str) -> None:
    policy, options = WIRES[way]
    for strategy in LEVELS:
        for num_elements in (64, 66, 3):  # also sizes that the number of ranks does not divide
            gradient = gradient_of_big_and_small(
                strategy, None, policy, num_elements=num_elements, **options
            )
            # Exact even if nothing is sharded: summands are sent in the narrow dtype, sums are not.
            assert torch.equal(gradient, torch.full((num_elements,), EXACT)), strategy


# In fp16 2 ** -24 is the smallest number; 2 ** -25 rounds to zero.
SMALL = 2.0**-23


@pairs
@on_ranks(4)
def test_division_by_the_ranks_makes_no_zeros_of_what_fp16_can_send(
    strategy: str, outer: str
) -> None:
    of_small = partial(gradient_of_big_and_small, strategy, outer, big=SMALL, small=SMALL)
    for reduce_dtype, fused in itertools.product((FP16, FP32), (True, False)):
        policy = Policy(grad_comm_dtype=FP16, reduce_dtype=reduce_dtype)
        # The second sum is added to the reduced gradient.
        gradient = of_small(policy, 2, num_reduced=2, scale_while_copying=fused)
        assert torch.equal(gradient, torch.full((64,), 4 * SMALL)), (reduce_dtype, fused)


@pytest.mark.parametrize(
    ("policy", "big"),
    [
        # Autograd's gradient is in fp16, of which 2 ** -24 is the smallest number.
        (Policy(param_dtype=FP16), 2.0**-24),
        # Gradients are halved before the sum, and the sum is halved.
        (Policy(reduce_dtype=FP16), 2.0**-23),
        (Policy(reduce_dtype=FP16, main_grads_dtype=BF16), 2.0**-23),
    ],
    ids=["computed in fp16", "sent in fp16", "sent in fp16, kept in bf16"],
)
@pairs
@on_ranks(4)
def test_gradients_in_fp16_are_not_divided_in_fp16(
    strategy: str, outer: str, policy: Policy, big: float
) -> None:
    for num in (1, 2):
        gradient = gradient_of_big_and_small(strategy, outer, policy, num, big, small=0.0)
        assert torch.equal(gradient.float(), torch.full((64,), num * big / 4)), num


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(3)
def test_gradients_that_are_reduced_in_fp32_are_divided_in_fp32(strategy: str) -> None:
    """Also where main weights and gradients are in bf16."""
    policy = Policy(param_dtype=BF16, main_params_dtype=BF16, reduce_dtype=FP32)
    model = models.Dot(64)
    fe.shard(model, strategy=strategy, mp_policy=policy)
    # In bf16 a third of each is rounded, and the sum is -1/512.
    model(torch.full((64,), (1.0, 3.0, -4.0)[dist.get_rank()])).backward()
    gradient = full_gradients(model)["weight"]
    assert gradient is not None
    assert gradient.dtype == BF16
    assert gradient.abs().max() < 1e-6


@on_ranks(3)
def test_sums_in_fp32_of_gradients_in_bf16_do_not_depend_on_the_size() -> None:
    policies = {
        "narrow gradients": (Policy(param_dtype=BF16, main_grads_dtype=BF16), True),
        "copied": (Policy(param_dtype=BF16, grad_comm_dtype=BF16), False),
    }
    for strategy, num, name in itertools.product(LEVELS, (63, 64, 2), policies):
        policy, in_fp32 = policies[name]
        model = nn.Sequential(models.Dot(num))
        options = fe.Options(sum_in_fp32=in_fp32, min_unit_size=0)
        fe.shard(model, strategy=strategy, units="*", mp_policy=policy, options=options)
        summand = (256.0, 1.0, 1.0)[dist.get_rank()]
        model(torch.full((num,), 3 * summand)).backward()
        gradient = full_gradients(model)["0.weight"]
        assert gradient is not None
        # In bf16 256 + 1 is 256.
        assert set(gradient.tolist()) == {258.0}, (strategy, num, name)


class Quantised(nn.Module):
    """An int8 weight and its bf16 scale, both frozen, with a trainable adapter."""

    def __init__(self) -> None:
        super().__init__()
        dim = models.DIM
        codes = torch.randint(-127, 128, (dim, dim), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((dim, 1), 0.01, dtype=BF16), requires_grad=False)
        self.adapter = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * self.scale.to(x.dtype)
        return x + torch.tanh(x @ weight.t()) + self.adapter(x)


@on_ranks(2)
def test_frozen_weights_of_any_dtype_stay_bit_for_bit() -> None:
    for strategy in LEVELS:
        scenario = Scenario(
            model=lambda: models.Chain(Quantised(), Quantised()),
            batch=vector_batch,
            pair=(strategy, "no_shard"),
        )
        before = dict(scenario.made().named_parameters())
        for name, weight in full_weights(scenario.check().model).items():
            if "adapter" not in name:
                assert weight.dtype == before[name].dtype
                assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "grad_comm_dtype"])
@pytest.mark.parametrize("value", [torch.int8, "bf16", 16])
def test_a_policy_of_something_else_than_float_dtypes_is_refused(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{field}: expected a floating-point torch.dtype"):
        Policy(**{field: value})


def test_a_wire_wider_than_the_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grad_comm_dtype: expected .*bfloat16.*found.*float32"):
        Policy(reduce_dtype=BF16, grad_comm_dtype=FP32)
