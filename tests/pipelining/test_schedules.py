"""Sharded stages under torch's schedules train as one process does, loss by loss."""

from __future__ import annotations

import pytest
import torch

import fsdp_engine as fe
from tests import reference
from tests.pipelining import scene
from tests.pool import on_ranks


def compare(
    schedule: str,
    level: str,
    outer: str = "no_shard",
    *,
    what: str = "",
    data_shape: tuple[int, ...] = (2,),
    dtype: torch.dtype | None = None,
) -> None:
    """Train on all ranks and alone; the same losses and weights."""
    num_data = 2 if len(data_shape) == 1 else data_shape[0] * data_shape[1]
    options = {} if dtype is None else {"mp_policy": fe.MixedPrecisionPolicy(param_dtype=dtype)}
    pipeline = scene.make_pipeline(
        schedule, level, outer, what=what, data_shape=data_shape, **options
    )
    num_stages = pipeline.schedule._num_stages
    alone = scene.make_stages(num_stages, what)
    losses = scene.train_alone(alone, num_data, dtype)
    scene.train(pipeline, num_data)
    # One weight in many lies on the other side of a rounding boundary after the first step.
    rtol = [2e-5, 2e-5 if dtype is None else 1e-2]
    if num_stages - 1 in pipeline.indices:
        for step, (found, wanted) in enumerate(zip(pipeline.losses, losses, strict=True)):
            assert len(found) == scene.NUM_MICROBATCHES
            mean = mean_over_data_ranks(pipeline, sum(found) / len(found))
            assert mean == pytest.approx(wanted, rel=rtol[step > 0]), f"step {step}"
    tolerance = {"rtol": 2e-4, "atol": 2e-6} if dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    for index, module in zip(pipeline.indices, pipeline.modules, strict=True):
        reference.assert_same_weights(module, alone[index], **tolerance)


def mean_over_data_ranks(pipeline: scene.Pipeline, value: float) -> float:
    mesh = pipeline.engines[0].mesh
    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=mesh.control_group)
    return float(total) / mesh.size


@pytest.mark.parametrize("schedule", scene.SCHEDULES)
@on_ranks(4)
def test_every_level_trains_as_one_process(schedule: str) -> None:
    for level in scene.LEVELS:
        compare(schedule, level)


@pytest.mark.parametrize("what", scene.SPECIAL)
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(each, marks=() if "Zero" in each else pytest.mark.thorough)
        for each in scene.SCHEDULES
    ],
)
@on_ranks(4)
def test_tied_unused_frozen_and_parametrized_weights_in_a_stage(schedule: str, what: str) -> None:
    for level in scene.LEVELS:
        compare(schedule, level, what=what)


@pytest.mark.parametrize("schedule", scene.SCHEDULES)
@on_ranks(4)
def test_low_precision(schedule: str) -> None:
    for level in scene.LEVELS[::3]:
        compare(schedule, level, dtype=torch.bfloat16)
