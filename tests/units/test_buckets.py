"""Buckets: their boundaries, and when their gradients are reduced and their weights are awaited."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.strategies import Axis, Strategy
from fsdp_engine.units.assignment import bucket_multiple, split_by_count
from fsdp_engine.units.plan import AxisPlan, AxisPlans, PlannedBuffer, PlanSettings, make_plan
from tests import reference
from tests.comm.timeline import Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Config, Layers, config_of, train_wrapped
from tests.models import (
    DIM,
    Block,
    Chain,
    NestedUnits,
    Recurrent,
    Regression,
    Transformer,
    shared_model,
    vector_batch,
)
from tests.pool import on_ranks
from tests.scenario import Scenario

# A bucket: its parameters with their offsets, and its elements, padding included.
Bucket = tuple[dict[str, int], int]

# By bucket size: the number of layers in each bucket, for ten layers of 95 x 95 = 9025 weights,
# with or without biases.
COUNTS = {
    None: [10],
    9000: [1] * 10,
    9025: [1] * 10,
    18000: [2] * 5,
    18050: [2] * 5,
    20000: [3, 3, 3, 1],
}
WITH_BIAS, WITHOUT_BIAS = {**COUNTS, 9050: [1] * 10}, {**COUNTS, 9050: [2] * 5}
CASES = [
    (bias, size, counts)
    for bias, table in ((True, WITH_BIAS), (False, WITHOUT_BIAS))
    for size, counts in table.items()
]


def boundaries(
    model: nn.Module, bucket_size: int | None, multiple: int, block: int = 64
) -> list[Bucket]:
    """Megatron-Core's rule for boundaries, in one pass over its buffer.

    Parameters come in reverse order of registration and start at multiples of 64; the one that
    reaches the size closes its bucket, which ends at a multiple of ``multiple``. Those of at least
    4,096 elements start at multiples of ``block``.
    """
    found: list[Bucket] = []
    places: dict[str, int] = {}
    bucket_start = at = held = 0
    params = [(name, param.numel()) for name, param in model.named_parameters()][::-1]
    for position, (name, numel) in enumerate(params):
        step = block if numel >= 4096 else 64
        at = math.ceil((at - bucket_start) / step) * step + bucket_start
        places[name] = at - bucket_start
        at += numel
        held += numel
        is_full = bucket_size is not None and held >= bucket_size
        if is_full or position == len(params) - 1:
            length = math.ceil((at - bucket_start) / multiple) * multiple
            found.append((places, length))
            bucket_start = at = bucket_start + length
            places, held = {}, 0
    return found


def buckets_of(buffers: Sequence[Any]) -> list[Bucket]:
    """Buckets of an engine or a plan, the last registered parameters first."""
    found = [
        ({slot.name: slot.offset for slot in buffer.layout.slots}, buffer.layout.numel)
        for buffer in buffers
    ]
    names = [slot.name for buffer in buffers for slot in buffer.layout.slots]
    order = sorted(names, key=lambda name: (int(name.split(".")[1]), "bias" in name))
    return sorted(found, key=lambda bucket: -min(order.index(name) for name in bucket[0]))


def planned(model: nn.Module, config: Config, level: str, dp: int) -> list[PlannedBuffer]:
    axes = AxisPlan({Axis.INNER: dp, Axis.OUTER: 1}, Strategy.from_names(level))
    plan = make_plan(
        model, (), PlanSettings(fe.MixedPrecisionPolicy(), config.to_options(), AxisPlans(axes))
    )
    return [buffer for unit in plan.units for buffer in unit.buffers]


@pytest.mark.parametrize(("bias", "size", "counts"), CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_buckets_end_where_megatron_core_ends_them(
    bias: bool, size: int | None, counts: list[int], padded: bool
) -> None:
    model = Layers(bias=bias)
    config = Config(bucket_size=size, pad_buckets_for_high_nccl_busbw=padded)
    for dp in (1, 2, 3):
        multiple = dp * 2**16 if padded else math.lcm(dp, 128)
        expected = boundaries(model, size, multiple)
        assert [len(places) // (1 + bias) for places, _ in expected] == counts
        # If gradients are sharded, each block of 256 elements is on one rank, unlike in
        # Megatron-Core.
        blocks = boundaries(model, size, math.lcm(multiple, 256 * dp), 256)
        for level in LEVEL_NAMES:
            found = buckets_of(planned(model, config, level, dp))
            assert found == (blocks if dp > 1 and level != "no_shard" else expected), (dp, level)


@on_ranks(world_size=2)
def test_num_buckets_splits_evenly_and_disabled_bucketing_not_at_all() -> None:
    # Ten equal layers: each bucket closes with the layer that reaches its share of the rest.
    for number, counts in ((1, [10]), (4, [3, 3, 2, 2]), (10, [1] * 10), (20, [1] * 10)):
        config = config_of("optim", num_buckets=number)
        ddp = fe.DistributedDataParallel(Layers(8, bias=False), config)
        assert [len(places) for places, _ in buckets_of(ddp.engine.buffers)] == counts
        labels = {unit.label for unit in ddp.engine.units if unit.buffers}
        alone = {"the root module"}
        assert labels == (alone if number == 1 else {f"(bucket {i})" for i in range(len(counts))})
    for fields in ({"bucket_size": 9000}, {"num_buckets": 5}, {}):
        model = Layers(8)
        model.layers[3].weight.requires_grad_(False)
        config = config_of("optim", **fields)
        ddp = fe.DistributedDataParallel(model, config, disable_bucketing=True)
        assert sorted(len(buffer.records) for buffer in ddp.engine.buffers) == [1, 19]
        assert (ddp.ddp_config.bucket_size, ddp.ddp_config.num_buckets) == (None, 1)


@pytest.mark.parametrize("mark", ["shared_embedding", "position_embedding", "pipeline_parallel"])
def test_a_parameter_that_pipeline_stages_share_has_a_bucket_of_its_own(mark: str) -> None:
    model = Layers(8, 4)
    setattr(model.layers[1].weight, mark, True)
    for level in LEVEL_NAMES:
        buckets = buckets_of(planned(model, Config(), level, 2))
        names = sorted(sorted(places) for places, _ in buckets)
        others = sorted({name for name, _ in model.named_parameters()} - {"layers.1.weight"})
        assert names == sorted([["layers.1.weight"], others])


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 4096), st.booleans())
def test_equal_tensors_are_split_evenly_and_buckets_over_ranks(
    count: int, num_buckets: int, num_ranks: int, padded: bool
) -> None:
    lengths = [len(bucket) for bucket in split_by_count([7] * count, num_buckets)]
    assert len(lengths) == min(count, num_buckets)
    assert max(lengths) - min(lengths) <= 1
    multiple = bucket_multiple(num_ranks, padded=padded)
    assert multiple % num_ranks == 0
    assert multiple % (num_ranks * 2**16 if padded else 128) == 0


# When gradients are reduced.


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads"])
def test_reductions_of_buckets_start_in_backward_in_one_order(level: str) -> None:
    config = config_of(level, overlap=True, bucket_size=2 * 72)
    model = Layers(8, 6)
    timeline = Timeline(model, gradients=True)
    ddp = fe.DistributedDataParallel(model, config)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    what = "all-reduce" if level == "no_shard" else "reduce-scatter"
    expected: list[str] = []
    for number in range(3):
        label = f"(bucket {number})"
        expected += [f"gradient of {label}"] * 4 + [f"{what} of {label}"]
    for number in range(3):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        timed_step(ddp, optimizer, timeline, (x,))
        assert timeline.in_phase("backward") == expected


@on_ranks(world_size=2)
def test_a_bucket_whose_gradients_do_not_all_come_is_reduced_when_backward_ends() -> None:
    class Partly(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The middle layer's bias gets no gradient.
            x = torch.tanh(self.layers[0](x))
            x = torch.tanh(F.linear(x, self.layers[1].weight))
            return self.layers[2](x).square().mean()

    ddp = fe.DistributedDataParallel(Partly(8, 3), config_of("optim", overlap=True, bucket_size=65))
    timeline = Timeline(gradients=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    timed_step(ddp, optimizer, timeline, (torch.ones(2, 8),))
    backward = timeline.in_phase("backward")
    assert [each for each in backward if "reduce" in each] == [
        f"reduce-scatter of (bucket {number})" for number in range(3)
    ]
    # Later buckets wait for bucket 0, so that all ranks have one order.
    assert backward[3:] == [
        "gradient of (bucket 1)",
        "gradient of (bucket 2)",
        "gradient of (bucket 2)",
        "reduce-scatter of (bucket 1)",
        "reduce-scatter of (bucket 2)",
    ]
    grads = {name: param.grad is not None for name, param in ddp.module.named_parameters()}
    assert not grads.pop("layers.1.bias")
    assert all(grads.values())


# When weights are waited for.


class Three(Regression):
    """Three linears, and how they are used."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.use, self.num_calls = use, int(use is skips_at_first)
        self.first, self.read, self.last = (nn.Linear(DIM, DIM) for _ in range(3))

    def predict(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.use(self, x)


def reads(model: Three, x: Tensor) -> Tensor:
    """A weight, without calling its module."""
    x = torch.tanh(F.linear(x, model.read.weight, model.read.bias))
    return model.last(torch.tanh(model.first(x)))


def skips(model: Three, x: Tensor) -> Tensor:
    """A module in every second forward."""
    x = torch.tanh(model.first(x))
    if model.num_calls % 2:
        x = torch.tanh(model.read(x))
    return model.last(x)


def skips_at_first(model: Three, x: Tensor) -> Tensor:
    return skips(model, x)


def chooses(model: Three, x: Tensor) -> Tensor:
    """Ranks call different modules."""
    x = model.first(x)
    return model.read(x) if x.sum() > 0 else model.last(x)


def checkpoints(model: Three, x: Tensor) -> Tensor:
    for layer in (model.first, model.read, model.last):
        x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
    return x


HABITS: dict[str, Callable[[], nn.Module]] = {
    use.__name__: partial(Three, use)
    for use in (reads, skips, skips_at_first, chooses, checkpoints)
} | {
    "owns": NestedUnits,
    "ties": shared_model,
    # The weights of the LSTM are in several buckets.
    "recurs": lambda: Chain(Recurrent(), nn.Linear(DIM, DIM)),
}


@on_ranks(world_size=2)
@pytest.mark.parametrize("habit", HABITS)
def test_buckets_of_models_with_habits_train_as_one_process(habit: str) -> None:
    def run(train: Any, model: nn.Module) -> tuple[list[reference.Step], list[Tensor]]:
        """The steps, and after each a loss computed with its updated weights."""
        optimizer, steps, losses = reference.once(reference.sgd), [], []
        for step in reference.make_data(vector_batch, 3, 2, 2):
            steps += train(model, [step], optimizer)
            with torch.no_grad():
                losses.append(model(*vector_batch(3, 77)))
        return steps, losses

    start = HABITS[habit]()
    # A module that decides by its input must see each rank's part by itself.
    alone = partial(reference.train, split=habit == "chooses")
    expected, expected_losses = run(alone, copy.deepcopy(start))
    if habit.startswith("skips"):
        assert expected[0].gradients["read.weight"] is not None
    for level in ("optim", "optim_grads"):
        for fields in ({}, {"suggested_communication_unit_size": 0}):
            size = 60 if habit == "recurs" else DIM * DIM + DIM
            config = config_of(level, overlap=True, bucket_size=size, **fields)
            ddp = fe.DistributedDataParallel(copy.deepcopy(start), config)
            assert len(ddp.engine.buffers) > 1
            found, losses = run(train_wrapped, ddp)
            assert not reference.differences(found, expected, 2e-5), (level, fields)
            torch.testing.assert_close(losses, expected_losses)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", ["optim", "optim_grads"])
def test_the_first_module_that_needs_a_bucket_waits_for_it(level: str) -> None:
    config = config_of(
        level, overlap=True, bucket_size=DIM * DIM + DIM, suggested_communication_unit_size=0
    )
    gathers = [f"all-gather of (bucket {number})" for number in range(3)]
    for use, events in (
        # A bucket with a module that was not called is waited for before the first call; so it is
        # gathered first.
        (reads, [*gathers[1:], "call first", gathers[0], "call last"]),
        (checkpoints, [gathers[2], "call first", gathers[1], "call read", gathers[0], "call last"]),
    ):
        model = Three(use)
        timeline = Timeline(model)
        ddp = fe.DistributedDataParallel(model, config)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(3):
            timed_step(ddp, optimizer, timeline, vector_batch(2, number))
        assert timeline.in_phase("forward") == events


# Units beside buckets.


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_units_and_a_root_larger_than_a_bucket_train_as_one_process(level: str) -> None:
    run = Scenario(
        model=partial(Transformer, 2),
        pair=(level, "no_shard"),
        options={"units": Block, "config": Config(bucket_size=250)},
        steps=3,
    ).check()
    of_root = [
        {record.name for record in buffer.records}
        for buffer in run.engine.buffers
        if not any(record.name.startswith("blocks") for record in buffer.records)
    ]
    # The root's parameters have 276, 12, 12 and 276 elements, in reverse order of registration.
    assert len(of_root) == 2
    assert {"head.weight"} in of_root
    assert {"embedding.weight", "norm.weight", "norm.bias"} in of_root


@on_ranks(world_size=4)
@pytest.mark.parametrize("pair", [("optim", "optim"), ("optim_grads_params", "optim")])
def test_buckets_on_two_axes_of_a_model_with_tied_weights_train_as_one_process(
    pair: tuple[str, str],
) -> None:
    options = {"config": Config(num_buckets=2)}
    model = partial(Transformer, num_blocks=2, tied=True)
    Scenario(model=model, pair=pair, mesh=(2, 2), options=options).check()
