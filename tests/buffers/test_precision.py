"""Dtypes of compute, of main weights, of collectives and of sums."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.models import Transformer, token_batch, vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import on_ranks
from tests.reference import full_gradients, full_weights
from tests.scenario import assert_trains_alike

BF16 = torch.bfloat16


class Spy(nn.Module):
    """A linear that notes the dtypes it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.linear.weight.dtype, x.dtype))
        return self.linear(x.to(self.linear.weight.dtype))


def spies() -> models.Chain:
    return models.Chain(Spy(), Spy())


@on_ranks(2)
def test_units_compute_in_param_dtype_and_keep_fp32_main_weights() -> None:
    for strategy in LEVELS:
        model = spies()
        fe.shard(model, strategy=strategy, mp_policy=fe.MixedPrecisionPolicy(param_dtype=BF16))
        model(*vector_batch(2, seed=1)).backward()
        for block in model.blocks:
            assert block.seen == [(BF16, BF16)]
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32, f"{strategy}: {name}"
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32, f"{strategy}: {name}"


@on_ranks(2)
def test_inputs_are_left_alone_when_told_so() -> None:
    for strategy in LEVELS:
        policy = fe.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
        model = spies()
        fe.shard(model, strategy=strategy, mp_policy=policy)
        model(*vector_batch(2, seed=1)).backward()
        assert model.blocks[0].seen == [(BF16, torch.float32)]


@on_ranks(2)
def test_outputs_of_the_root_are_cast_to_output_dtype() -> None:
    for strategy, dtype in itertools.product(LEVELS, (torch.float32, torch.float64)):
        policy = fe.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=dtype)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        fe.shard(model, strategy=strategy, mp_policy=policy)
        out = model(torch.randn(4, 3))
        assert out.dtype == dtype
        out.sum().backward()


@on_ranks(2)
def test_a_low_precision_model_gets_fp32_main_weights_by_default() -> None:
    for strategy, dtype in itertools.product(LEVELS, (BF16, torch.float16)):
        model = spies().to(dtype)
        fe.shard(model, strategy=strategy)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        x, y = vector_batch(2, seed=1)
        model(x.to(dtype), y).backward()
        assert model.blocks[0].seen == [(dtype, dtype)]


@on_ranks(2)
def test_main_weights_may_have_the_compute_dtype() -> None:
    for strategy in LEVELS:
        policy = fe.MixedPrecisionPolicy(main_params_dtype=BF16)
        model = spies().bfloat16()
        engine = fe.shard(model, strategy=strategy, mp_policy=policy)
        assert {parameter.dtype for parameter in model.parameters()} == {BF16}
        x, y = vector_batch(2, seed=1)
        model(x.bfloat16(), y).backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {BF16}
        assert isinstance(next(model.parameters()), fe.FlatDTensor) == (strategy != "no_shard")
        assert engine.clip_grad_norm_(1.0) > 0


@on_ranks(2)
def test_parameters_at_the_first_level_are_plain_unless_there_is_a_main_copy() -> None:
    plain, with_copy = Transformer(num_blocks=1), Transformer(num_blocks=1)
    fe.shard(plain, strategy="no_shard")
    policy = fe.MixedPrecisionPolicy(param_dtype=BF16)
    fe.shard(with_copy, strategy="no_shard", mp_policy=policy)
    assert not any(isinstance(p, fe.FlatDTensor) for p in plain.parameters())
    assert all(isinstance(p, fe.FlatDTensor) for p in with_copy.parameters())


@on_ranks(2)
def test_updates_too_small_for_bf16_are_not_lost() -> None:
    for strategy in LEVELS:
        model = nn.Linear(4, 3, bias=False)
        nn.init.ones_(model.weight)
        policy = fe.MixedPrecisionPolicy(param_dtype=BF16)
        fe.shard(model, strategy=strategy, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        outputs = []
        for _ in range(8):
            out = model(torch.ones(1, 4))
            outputs.append(out[0, 0].item())
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(full_weights(model)["weight"], torch.full((3, 4), 1 - 2.0**-7))
        # One step is below the resolution of bf16 at 1, and rounds back; eight are seen.
        assert outputs[1] == 4.0
        assert model(torch.ones(1, 4))[0, 0].item() == 4 * (1 - 2.0**-7)


@on_ranks(2)
def test_fp64_weights_stay_fp64() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = models.Chain(models.Mlp(), models.Mlp()).double()

        def batch(rows: int, seed: int) -> reference.Batch:
            x, y = vector_batch(rows, seed)
            return x.double(), y

        assert_trains_alike(model, batch, strategy, tolerance=1e-6)
        assert {p.dtype for p in model.parameters()} == {torch.float64}


class BigAndSmall(nn.Module):
    """A weight whose gradient on a rank is what the rank feeds in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradient_of_big_and_small(
    strategy: str,
    outer: str,
    policy: fe.MixedPrecisionPolicy,
    config: fe.DistributedDataParallelConfig | None = None,
    num_microbatches: int = 1,
    big: float = 4096.0,
    small: float = 4.0,
) -> Tensor:
    """The reduced gradient where one of four ranks has ``big`` and the others ``small``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = BigAndSmall()
    engine = fe.shard(model, mesh, strategy, outer, mp_policy=policy, config=config)
    x = torch.full((64,), big if dist.get_rank() == 0 else small)
    for _ in range(num_microbatches - 1):
        with engine.no_sync():
            model(x).backward()
    model(x).backward()
    gradient = full_gradients(model)["weight"]
    assert gradient is not None
    return gradient


# In bf16 1024 + 1 is 1024: eight bits. The mean of 4096, 4, 4, 4 is 1027.
EXACT, LOST = 1027.0, {1024.0, 1026.0, 1028.0}


@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_gradients_of_bf16_units_are_summed_in_fp32_by_default(strategy: str, outer: str) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=BF16)
    gradient = gradient_of_big_and_small(strategy, outer, policy)
    assert torch.equal(gradient, torch.full((64,), EXACT))


@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_reduce_dtype_is_the_dtype_of_the_sum(strategy: str, outer: str) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    gradient = gradient_of_big_and_small(strategy, outer, policy)
    assert gradient.dtype == torch.float32, "gradients are kept in the main dtype all the same"
    assert set(gradient.tolist()) <= LOST


@pytest.mark.parametrize("way", ["grad_comm_dtype", "reduce_scatter_with_fp32_accumulation"])
@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_gradients_may_travel_in_bf16_and_be_summed_in_fp32(
    strategy: str, outer: str, way: str
) -> None:
    if way == "grad_comm_dtype":
        policy, config = fe.MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16), None
    else:
        policy = fe.MixedPrecisionPolicy(param_dtype=BF16)
        config = fe.DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)
    gradient = gradient_of_big_and_small(strategy, outer, policy, config)
    # Each axis' sum is fp32; between two axes the wire rounds it: 1025 becomes 1024.
    assert gradient.dtype == torch.float32
    assert (gradient - EXACT).abs().max() <= 3.0


@pytest.mark.parametrize("way", ["grad_comm_dtype", "reduce_scatter_with_fp32_accumulation"])
@on_ranks(4)
def test_on_one_axis_a_bf16_wire_with_fp32_sums_rounds_once_at_most(way: str) -> None:
    for strategy in LEVELS:
        policy = fe.MixedPrecisionPolicy(
            param_dtype=BF16, grad_comm_dtype=BF16 if way == "grad_comm_dtype" else None
        )
        options = fe.Options(sum_in_fp32=way != "grad_comm_dtype")
        model = BigAndSmall()
        fe.shard(model, strategy=strategy, mp_policy=policy, options=options)
        model(torch.full((64,), 4096.0 if dist.get_rank() == 0 else 4.0)).backward()
        gradient = full_gradients(model)["weight"]
        assert gradient is not None
        # Also if nothing is sharded: only summands are sent in the narrow dtype, not the sums.
        assert torch.equal(gradient, torch.full((64,), EXACT)), strategy


# In fp16 the next power of two to be a zero is 2 ** -25.
SMALL = 2.0**-23


@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_division_by_the_ranks_makes_no_zeros_of_what_fp16_can_send(
    strategy: str, outer: str
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for reduce_dtype, fused in itertools.product((torch.float16, torch.float32), (True, False)):
        policy = fe.MixedPrecisionPolicy(grad_comm_dtype=torch.float16, reduce_dtype=reduce_dtype)
        options = fe.Options(scale_while_copying=fused)
        model = BigAndSmall()
        engine = fe.shard(model, mesh, strategy, outer, mp_policy=policy, options=options)
        for _ in range(2):  # the second is added to the reduced gradient
            with engine.no_sync():
                model(torch.full((64,), SMALL)).backward()
            model(torch.full((64,), SMALL)).backward()
        gradient = full_gradients(model)["weight"]
        assert gradient is not None
        assert torch.equal(gradient, torch.full((64,), 4 * SMALL)), (reduce_dtype, fused)


FP16 = torch.float16


@pytest.mark.parametrize(
    ("policy", "big"),
    [
        # Autograd's gradient is in fp16, of which 2 ** -24 is the smallest number.
        (fe.MixedPrecisionPolicy(param_dtype=FP16), 2.0**-24),
        # Gradients are sent with a factor of 1/2 before the sum, and again after it.
        (fe.MixedPrecisionPolicy(reduce_dtype=FP16), 2.0**-23),
        (fe.MixedPrecisionPolicy(reduce_dtype=FP16, main_grads_dtype=BF16), 2.0**-23),
    ],
    ids=["computed in fp16", "sent in fp16", "sent in fp16, kept in bf16"],
)
@pytest.mark.parametrize(("strategy", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_gradients_in_fp16_are_not_divided_in_fp16(
    strategy: str, outer: str, policy: fe.MixedPrecisionPolicy, big: float
) -> None:
    for num_microbatches in (1, 2):
        gradient = gradient_of_big_and_small(
            strategy, outer, policy, num_microbatches=num_microbatches, big=big, small=0.0
        )
        expected = torch.full((64,), num_microbatches * big / 4)
        assert torch.equal(gradient.float(), expected), num_microbatches


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(3)
def test_gradients_that_are_reduced_in_fp32_are_divided_in_fp32(strategy: str) -> None:
    """Also where main weights and gradients are in bf16."""
    policy = fe.MixedPrecisionPolicy(
        param_dtype=BF16, main_params_dtype=BF16, reduce_dtype=torch.float32
    )
    model = BigAndSmall()
    fe.shard(model, strategy=strategy, mp_policy=policy)
    # In bf16 a third of each is rounded, and the sum is -1/512.
    model(torch.full((64,), (1.0, 3.0, -4.0)[dist.get_rank()])).backward()
    gradient = full_gradients(model)["weight"]
    assert gradient is not None
    assert gradient.dtype == BF16
    assert gradient.abs().max() < 1e-6


@on_ranks(4)
def test_microbatches_are_added_in_fp32() -> None:
    for strategy, outer in FEW_PAIRS:
        policy = fe.MixedPrecisionPolicy(param_dtype=BF16)
        gradient = gradient_of_big_and_small(strategy, outer, policy, num_microbatches=3)
        assert torch.equal(gradient, torch.full((64,), 3 * EXACT)), (strategy, outer)


@on_ranks(2)
def test_main_grads_dtype_is_the_dtype_of_grad() -> None:
    for strategy in LEVELS:
        policy = fe.MixedPrecisionPolicy(param_dtype=BF16, main_grads_dtype=BF16)
        model = Transformer(num_blocks=1)
        engine = fe.shard(model, strategy=strategy, mp_policy=policy)
        model(*token_batch(2, dist.get_rank())).backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {BF16}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert torch.isfinite(engine.clip_grad_norm_(1.0))


POLICIES: dict[str, dict[str, Any]] = {
    "reduce_bf16": {"reduce_dtype": BF16},
    "comm_bf16": {"grad_comm_dtype": BF16},
    "main_bf16": {"main_params_dtype": BF16, "main_grads_dtype": torch.float32},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", LEVELS)
@on_ranks(2)
def test_low_precision_policies_stay_close_to_one_process(policy: str, strategy: str) -> None:
    options = POLICIES[policy]
    model = Transformer(num_blocks=2)
    alone = copy.deepcopy(model)
    mp_policy = fe.MixedPrecisionPolicy(param_dtype=BF16, **options)
    engine = fe.shard(model, strategy=strategy, mp_policy=mp_policy)
    data = reference.make_data(token_batch, 1, 2, dist.get_world_size())
    (found,) = reference.train_sharded(model, engine, data)
    (expected,) = reference.train(alone, data, compute_dtype=BF16)
    for name, gradient in found.gradients.items():
        other = expected.gradients[name]
        assert gradient is not None
        assert other is not None
        assert reference.relative_error(gradient, other) < 3e-2, name
    for name, weight in found.weights.items():
        assert reference.relative_error(weight, expected.weights[name]) < 2e-2, name


@on_ranks(2)
def test_frozen_weights_of_any_dtype_stay_bit_for_bit() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = models.Chain(Quantised(), Quantised())
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        alone = copy.deepcopy(model)
        engine = fe.shard(model, strategy=strategy)
        data = reference.make_data(vector_batch, 2, 2, dist.get_world_size())
        found = reference.train_sharded(model, engine, data)
        assert not reference.differences(found, reference.train(alone, data), 2e-5), strategy
        for name, weight in full_weights(model).items():
            if "adapter" not in name:
                assert weight.dtype == before[name].dtype
                assert torch.equal(weight, before[name]), name


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


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "grad_comm_dtype"])
@pytest.mark.parametrize("value", [torch.int8, "bf16", 16])
def test_a_policy_of_something_else_than_float_dtypes_is_refused(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{field}: expected a floating-point torch.dtype"):
        fe.MixedPrecisionPolicy(**{field: value})


def test_a_wire_wider_than_the_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grad_comm_dtype: expected .*bfloat16.*found.*float32"):
        fe.MixedPrecisionPolicy(reduce_dtype=BF16, grad_comm_dtype=torch.float32)
