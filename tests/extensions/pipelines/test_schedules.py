"""Sharded stages under torch's schedules train as one process does, loss by loss."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.pipelining import PipelineStage
from tests import reference
from tests.extensions.pipelines import scene
from tests.pairs import FEW_PAIRS
from tests.pool import on_ranks

every_level = pytest.mark.parametrize("level", scene.LEVELS)


def compare(
    schedule: str,
    level: str,
    outer: str = "no_shard",
    *,
    what: str = "",
    data_shape: tuple[int, ...] = (2,),
    dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    if dtype is not None:
        options["mp_policy"] = fe.MixedPrecisionPolicy(param_dtype=dtype)
    options = {"what": what, "data_shape": data_shape, **options}
    pipeline = scene.make_pipeline(schedule, level, outer, **options)
    scene.train(pipeline, math.prod(data_shape))
    assert_trained(pipeline, what, dtype)


def assert_trained(
    pipeline: scene.Pipeline, what: str = "", dtype: torch.dtype | None = None
) -> None:
    mesh, num_stages = pipeline.engines[0].mesh, pipeline.schedule._num_stages
    alone, losses = scene.trained_alone(num_stages, mesh.size, what, dtype)
    # One weight in many lies on the other side of a rounding boundary after the first step.
    rtol = [2e-5, 2e-5 if dtype is None else 1e-2]
    if num_stages - 1 in pipeline.indices:
        for step, (found, wanted) in enumerate(zip(pipeline.losses, losses, strict=True)):
            assert len(found) == scene.NUM_MICROBATCHES
            mean = torch.tensor(sum(found) / len(found), dtype=torch.float64)
            torch.distributed.all_reduce(mean, group=mesh.control_group)
            assert float(mean) / mesh.size == pytest.approx(wanted, rel=rtol[step > 0]), step
    tolerance = {"rtol": 2e-4, "atol": 2e-6} if dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    for index, module in zip(pipeline.indices, pipeline.modules, strict=True):
        reference.assert_same_weights(module, alone[index], **tolerance)


@pytest.mark.parametrize(
    "schedule", scene.marked(scene.SCHEDULES, default=["1F1B", "ZBVZeroBubble"])
)
@every_level
@on_ranks(4)
def test_every_level_trains_as_one_process(schedule: str, level: str) -> None:
    compare(schedule, level)


@pytest.mark.parametrize("schedule", scene.SINGLE)
@every_level
@on_ranks(4)
def test_a_stage_of_torch_trains_as_one_process(schedule: str, level: str) -> None:
    compare(schedule, level, stage_class=pipelining.PipelineStage)


# How a weight is used matters most in a backward in two parts.
@pytest.mark.parametrize("what", scene.marked(scene.SPECIAL, default=["tied"]))
@pytest.mark.parametrize(
    "schedule", scene.marked(scene.SCHEDULES, default=["InterleavedZeroBubble"])
)
@pytest.mark.parametrize(
    "levels", [scene.LEVELS[::3], pytest.param(scene.LEVELS[1:3], marks=pytest.mark.thorough)]
)
@on_ranks(4)
def test_tied_unused_frozen_and_parametrized_weights_in_a_stage(
    schedule: str, what: str, levels: tuple[str, ...]
) -> None:
    for level in levels:
        compare(schedule, level, what=what)


@pytest.mark.parametrize("schedule", scene.marked(scene.SCHEDULES, default=["ZBVZeroBubble"]))
@on_ranks(4)
def test_low_precision(schedule: str) -> None:
    for level in scene.LEVELS[::3]:
        compare(schedule, level, dtype=torch.bfloat16)


@pytest.mark.parametrize("schedule", scene.marked(scene.LOOPED, default=[]))
@scene.passes_on_to_itself
@on_ranks(4)
def test_two_data_parallel_axes(schedule: str) -> None:
    # All stages on each rank, which pass activations on among themselves.
    for level, outer in FEW_PAIRS:
        compare(schedule, level, outer, data_shape=(2, 2))


@pytest.mark.parametrize(
    "level", [pytest.param("no_shard", marks=pytest.mark.thorough), "optim_grads_params"]
)
@on_ranks(4)
def test_steps_of_a_schedule_accumulate_within_no_sync(level: str) -> None:
    pipeline = scene.make_pipeline("InterleavedZeroBubble", level)
    once = scene.make_pipeline("InterleavedZeroBubble", level)
    first, second = itertools.islice(scene.batches(2), 2)
    with contextlib.ExitStack() as stack:
        for engine in pipeline.engines:
            stack.enter_context(engine.no_sync())
        pipeline.schedule.scale_grads = False
        pipeline.step(*first)
    pipeline.step(*second)
    once.schedule.scale_grads = False
    once.step(*first)
    found = [p.grad for module in once.modules for p in module.parameters()]
    found = [None if each is None else each.clone() for each in found]
    for engine in once.engines:
        engine.zero_grad_buffer(zero=False)
    once.step(*second)
    wanted = [p.grad for module in once.modules for p in module.parameters()]
    total = [p.grad for module in pipeline.modules for p in module.parameters()]
    for one, two, both in zip(found, wanted, total, strict=True):
        torch.testing.assert_close(reference.held(one + two), reference.held(both))


@on_ranks(4)
def test_a_module_may_be_evaluated_checkpointed_and_sharded_after_the_stage_was_constructed() -> (
    None
):
    for level in scene.LEVELS[::3]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
        rank = mesh.get_local_rank("pipeline")
        module = scene.make_stages(2)[rank]
        group, device = mesh.get_group("pipeline"), torch.device("cpu")
        stage = PipelineStage(module, rank, 2, device, group=group)
        schedule = pipelining.Schedule1F1B(stage, scene.NUM_MICROBATCHES, loss_fn=scene.loss_of)
        for block in module.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        engine = fe.shard(module, mesh["data"], level, min_unit_size=0)
        pipeline = scene.Pipeline([rank], [module], [engine], schedule, engine.mesh.rank, [])
        scene.train(pipeline, 2)
        x, y = next(scene.batches(2))
        with torch.no_grad():
            schedule.eval(x[engine.mesh.rank]) if rank == 0 else schedule.eval(target=y[0])
        assert_trained(pipeline)
