"""Every strategy trains as one process does on all ranks' data, from the first step on.

Ten pairs of levels on a 2 x 2 mesh, four levels on one axis of two, and one rank alone; one and
three microbatches; fp32, and bf16 with fp32 main weights; SGD, because Adam hides a gradient that
is wrong by a factor, and AdamW. Losses, gradients, their norm and the weights are compared.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from functools import partial
from typing import Any

import pytest
import torch

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.megatron.configs import config_of, train_wrapped
from tests.models import Chain, Mlp, Transformer, odd_model, token_batch, vector_batch
from tests.pairs import EVERY_PAIR, FEW_PAIRS, PAIRS_AND_WAYS
from tests.pool import Ranks, on_ranks
from tests.scenario import Run, Scenario
from tests.training import OPTIMIZERS, mesh_of

# [Note: Tolerances]
# One process and many ranks sum in different orders, which changes fp32 values by 1e-6. AdamW
# divides by the root of the square and so enlarges this for the smallest gradients. In bf16 the
# same holds for the first step, in which the compute weights are equal. Then one weight in many
# thousands is on the other side of a rounding boundary, and changes all later values by a part of
# 2^-9.
LATER = {"fp32": {"sgd": 2e-5, "adamw": 2e-5}, "bf16": {"sgd": 1e-2, "adamw": 5e-2}}
# Microbatches, dtypes, optimizers. In FEW_WAYS any two values occur together once.
Way = tuple[int, str, str]
ALL_WAYS: list[Way] = list(itertools.product((1, 3), LATER, OPTIMIZERS))
FEW_WAYS: list[Way] = [
    (1, "fp32", "sgd"),
    (1, "bf16", "adamw"),
    (3, "fp32", "adamw"),
    (3, "bf16", "sgd"),
]


def scenario_of(way: Way) -> Scenario:
    num_microbatches, name, optimizer = way
    dtype = None if name == "fp32" else torch.bfloat16
    return Scenario(
        model=partial(Transformer, num_blocks=2, tied=True),
        options={"mp_policy": fe.MixedPrecisionPolicy(param_dtype=dtype)},
        optimizer=OPTIMIZERS[optimizer],
        steps=3,
        microbatches=num_microbatches,
        compute_dtype=dtype,
        later=LATER[name][optimizer],
    )


@functools.cache
def alone(way: Way, num_ranks: int) -> Run:
    """One process's run, shared by all pairs of levels."""
    return scenario_of(way).alone()


def compare(
    pair: tuple[str, str], shape: tuple[int, ...], all_ways: bool, wrap: Any = reference.nothing
) -> None:
    mesh = mesh_of(*shape)
    for way in ALL_WAYS if all_ways else FEW_WAYS:
        scenario = scenario_of(way).but(pair=pair, mesh=mesh, wrap=wrap)
        scenario.check(alone(way, mesh.size()))


@pytest.mark.parametrize(("strategy", "outer", "all_ways"), PAIRS_AND_WAYS)
def test_a_pair_of_levels_on_two_axes_trains_as_one_process(
    ranks: Ranks, strategy: str, outer: str, all_ways: bool
) -> None:
    ranks.run(compare, (strategy, outer), (2, 2), all_ways)


@pytest.mark.parametrize("all_ways", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("strategy", LEVELS)
def test_a_level_trains_on_one_axis_with_a_sharded_optimizer_and_on_one_rank_alone(
    ranks: Ranks, strategy: str, all_ways: bool
) -> None:
    ranks.run(compare, (strategy, "no_shard"), (2,), all_ways, fe.shard_optimizer, world_size=2)
    ranks.run(compare, (strategy, strategy), (1, 1), all_ways, world_size=1)


@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_an_axis_of_size_one_changes_nothing(strategy: str, outer: str) -> None:
    """Tested with parameters of odd sizes."""
    odd = Scenario(model=odd_model, batch=partial(vector_batch, width=7), pair=(strategy, outer))
    for shape in ((4, 1), (1, 4)):
        run = odd.but(mesh=shape).check()
        assert (run.engine.mesh.outer.size, run.engine.mesh.inner.size) == shape
        for name, param in run.model.named_parameters():
            assert torch.equal(reference.full(pickle.loads(pickle.dumps(param))), run.weights[name])


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(4)
def test_the_wrapper_trains_on_two_axes_as_one_process(overlap: bool) -> None:
    start = Chain(Mlp(), Mlp())
    data = reference.make_data(vector_batch, 2, 3, 4)
    expected = reference.train(copy.deepcopy(start), data)
    # At no_shard, the config allows one optimizer instance only, so the mesh sets the outer size.
    for number, pair in enumerate(FEW_PAIRS):
        mesh = None if number else mesh_of(2, 2)
        fields = {"num_distributed_optimizer_instances": 2} if number else {}
        config = config_of(*pair, overlap=overlap, **fields)
        ddp = fe.DistributedDataParallel(copy.deepcopy(start), config, mesh)
        assert (ddp.engine.mesh.outer.size, ddp.engine.mesh.inner.size) == (2, 2)
        found = train_wrapped(ddp, data)
        assert not reference.differences(found, expected, 2e-5), pair


def corrupt(steps: list[reference.Step], change: str) -> list[reference.Step]:
    steps = copy.deepcopy(steps)
    gradients: dict[str, Any] = steps[0].gradients
    if change == "scale":
        gradients["head.weight"] = gradients["head.weight"] * 1.001
    elif change == "missing":
        gradients["head.weight"] = None
    elif change == "loss":
        steps[2].loss *= 1.001
    elif change == "norm":
        steps[1].norm *= 1.001
    else:
        steps[1].weights["norm.weight"][0] += 1e-3
    return steps


def test_the_comparison_sees_a_change_of_one_in_a_thousand() -> None:
    data = reference.make_data(token_batch, 3, 1, 2)
    steps = reference.train(Transformer(num_blocks=1), data, reference.adamw)
    assert reference.differences(steps, steps, 0.0) == []
    for change in ("scale", "missing", "loss", "norm", "weight"):
        assert len(reference.differences(corrupt(steps, change), steps, 2e-5)) == 1, change


def test_parts_one_after_another_train_as_the_concatenated_batch() -> None:
    model = Transformer(num_blocks=2, tied=True)
    data = reference.make_data(token_batch, 3, 3, 4)
    together = reference.train(copy.deepcopy(model), data, reference.adamw, max_norm=1.0)
    parts = reference.train(model, data, reference.adamw, max_norm=1.0, split=True)
    assert reference.differences(parts, together, 2e-5) == []
