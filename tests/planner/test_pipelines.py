"""Plans that try pipelines beside data and tensor parallelism."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine.planner import plan_cache
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.job import BatchSearch, Job, Known
from fsdp_engine.planner.page import save_page
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.simulation import pipeline
from fsdp_engine.simulation.machine import Link
from fsdp_engine.simulation.pipeline import simulate_pipeline
from tests.extensions.pipelines.scene import passes_on_to_itself
from tests.planner.made_plans import llama_batch, small_llama
from tests.pool import Ranks

pytestmark = pytest.mark.usefixtures("all_candidates")

WORLD, MICROBATCHES = 4, 4
MACHINE = replace(fe.H100, ranks_per_node=2)
FREE = Link(math.inf, 0.0)
TOKENS = torch.arange(8 * 32).view(8, 32) % 64


def llama() -> nn.Module:
    return small_llama(2)


def deep_llama() -> nn.Module:
    return small_llama(4)


def plan(**changes: Any) -> fe.StrategyPlan:
    """With four microbatches, of quick levels."""
    given: dict[str, Any] = {
        "world_size": WORLD,
        "machine": MACHINE,
        "checkpointing": (False,),
        "microbatches": MICROBATCHES,
        "quick": True,
        **changes,
    }
    return fe.plan(given.pop("build", llama), given.pop("batch", llama_batch), **given)


@functools.cache
def planned(*degrees: int) -> fe.StrategyPlan:
    """With pipelines of so many ranks."""
    return plan(pipeline=degrees, meshes=[(WORLD // degree,) for degree in degrees])


def test_a_plan_tries_pipelines_beside_data_parallelism() -> None:
    outcomes = planned(1, 2).outcomes
    of_pipelines = [each for each in outcomes if each.candidate.pipeline > 1]
    assert {each.candidate.mesh for each in of_pipelines} == {(2,)}
    assert {each.candidate.schedule for each in of_pipelines} == {"1F1B"}
    assert len(of_pipelines) == 3
    tokens = MICROBATCHES * 4 * 32
    assert {(each.candidate.pipeline, each.items) for each in outcomes} == {
        (1, WORLD * tokens),
        (2, 2 * tokens),
    }
    assert len({each.checkpoint_bytes for each in outcomes}) == 1
    assert "2, PP 2" in str(planned(1, 2))
    assert "PP: ranks of a pipeline" in " ".join(str(planned(1, 2)).split())


def test_a_row_is_a_quick_simulation_of_the_pipeline() -> None:
    for each in planned(2).outcomes:
        tokens = llama_batch()["input_ids"]
        found = fe.simulate_pipeline(
            fe.CausalLMStages(llama),
            WORLD,
            pipeline=2,
            microbatches=MICROBATCHES,
            batch=tokens,
            target=tokens,
            strategy=each.candidate.strategy,
            machine=MACHINE,
            quick=True,
        )
        assert each.times is not None
        assert each.times.step == found.seconds
        assert each.peak_bytes == max(found.peak_bytes)
        assert each.times.exposed["pipeline"] == pytest.approx(sum(found.bubble_seconds) / 2)
        assert each.times.mfu == pytest.approx(found.mfu)


def test_schedules_that_split_backwards_have_no_bubble() -> None:
    """Of linears of equal stages on a machine whose messages and host take no time."""
    free = replace(fe.H100, host_seconds=0.0, within_node=FREE, between_nodes=FREE)
    x = torch.zeros(512, 1024)
    planning = fe.plan(
        lambda: nn.Sequential(*(stage(index, 4) for index in range(4))),
        (x, x),
        world_size=2,
        machine=free,
        checkpointing=(False,),
        microbatches=8,
        quick=True,
        pipeline=2,
        schedules=("Interleaved1F1B", "ZBVZeroBubble"),
        stages=stage,
        stage_loss=lambda output, target: (output * target).sum(),
    )
    waits = {
        each.candidate.schedule: each.times.shares()["other stages"]
        for each in planning.outcomes
        if each.times is not None and each.candidate.strategy == "no_shard"
    }
    assert waits["Interleaved1F1B"] > 0.05
    assert waits["ZBVZeroBubble"] < 0.02  # the first stage has no gradient of its input
    assert planning.outcomes[0].candidate.schedule == "ZBVZeroBubble"


def stage(index: int, num_stages: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))


def test_a_global_batch_has_microbatches_that_the_schedule_takes() -> None:
    """DualPipeV needs four of them with four stages."""
    names = fe.plan.__kwdefaults__
    given = {"build": deep_llama, "batch": llama_batch, "world_size": WORLD, "machine": MACHINE}
    job = Job(PlanRequest(**{**names, **given}), Known(), 1)
    search = BatchSearch(job, 2 * 16 * 32)  # 16 rows of a rank
    candidate = Candidate((2,), "optim", "no_shard", False, pipeline=2)
    assert search.sizes(replace(candidate, schedule="1F1B")) == [1, 2, 4, 8]
    assert search.sizes(replace(candidate, schedule="DualPipeV")) == [1, 2, 4]
    sized = {"build": deep_llama, "pipeline": 2, "meshes": [(2,)], "schedules": "DualPipeV"}
    with pytest.raises(ValueError, match="global_batch: expected a size whose microbatches"):
        plan(**sized, microbatches=1, global_batch=4 * 32)


def test_waits_for_other_stages_are_a_part_of_the_step(tmp_path: Path) -> None:
    planning = planned(2)
    times = planning.outcomes[0].times
    assert times is not None
    assert times.shares()["other stages"] > 0.05
    assert "other stages of the pipeline" in str(planning)
    advised = {
        "1F1B": "of fewer rows, and schedules such as Interleaved1F1B and ZBVZeroBubble shorten",
        "Interleaved1F1B": "of fewer rows, and the schedule ZBVZeroBubble shorten",
        "ZBVZeroBubble": "of fewer rows, shorten",
    }
    first = planning.outcomes[0]
    for schedule, text in advised.items():
        chosen = replace(first, candidate=replace(first.candidate, schedule=schedule))
        found = " ".join(str(replace(planning, outcomes=(chosen,))).split())
        assert f"Stages wait for each other: more microbatches, {text}" in found
    save_page(planning, tmp_path / "plan.html")
    assert "waits for the other stages" in (tmp_path / "plan.html").read_text()
    planning.save(tmp_path / "plan.json")
    assert fe.StrategyPlan.load(tmp_path / "plan.json").outcomes == planning.outcomes


def test_a_global_batch_takes_the_fastest_microbatch() -> None:
    """A step of a rank has 16 rows. Two microbatches of 8 would wait for each other the longest."""
    sizes = {"pipeline": 2, "microbatch_sizes": (1, 8), "machine": fe.H100}
    sized = plan(**sizes, global_batch=32 * 32, microbatches=1, memory=80e9)
    largest = plan(**{**sizes, "microbatch_sizes": (8,)}, microbatches=2)
    for each in sized.outcomes:
        candidate = each.candidate
        assert (candidate.microbatch_size, candidate.microbatches) in {(1, 16), (8, 2)}
        assert each.rate >= max(other.rate for other in largest.outcomes if _alike(each, other))


def _alike(one: Any, other: Any) -> bool:
    return bool(one.candidate.strategy == other.candidate.strategy)


def test_a_rank_has_a_multiple_of_the_pipelines_rows() -> None:
    """15 rows of each of two data-parallel ranks could not be cut into an even number."""
    names = fe.plan.__kwdefaults__
    given = {"build": llama, "batch": llama_batch, "world_size": WORLD, "machine": MACHINE}
    job = Job(PlanRequest(**{**names, **given}), Known(), 1)
    candidate = Candidate((2,), "optim", "no_shard", False, pipeline=2)
    assert BatchSearch(job, 30 * 32).batch_of(candidate) == 2 * 16 * 32
    assert BatchSearch(job, 30 * 32).sizes(candidate) == [1, 2, 4, 8]
    whole = replace(candidate, pipeline=1)
    assert BatchSearch(job, 30 * 32).sizes(whole) == [1, 3, 5, 15]


def test_rows_of_other_stages_are_not_taken_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def noted(stages: Any, *args: Any, **options: Any) -> fe.PipelineSimulation:
        tried.append(options["loss"])
        return simulate_pipeline(stages, *args, **options)

    monkeypatch.setattr(pipeline, "simulate_pipeline", noted)
    monkeypatch.setattr(plan_cache, "_STARTED_NS", 2**63)  # whatever files were loaded since
    options = {"pipeline": 2, "meshes": [(2,)], "cache": True}
    for loss, count in ((None, 3), (None, 3), (_loss, 6), (_loss, 6)):
        plan(stage_loss=loss, **options)
        assert len(tried) == count
    plan(stages=fe.CausalLMStages(llama), stage_loss=_loss, **options)
    assert len(tried) == 9


def test_pipelines_of_compiled_blocks_are_compiled() -> None:
    steps = [
        each.times.step if each.times else 0.0
        for is_compiled in (False, True)
        for each in plan(pipeline=2, meshes=[(2,)], compile=is_compiled).outcomes
        if each.candidate.strategy == "optim"
    ]
    assert 0 < steps[1] < steps[0]


def test_auto_tries_pipelines_over_nodes() -> None:
    names = fe.plan.__kwdefaults__
    given = {"build": llama, "batch": llama_batch(), "world_size": 16, "machine": MACHINE}
    found = PlanRequest(**{**names, **given, "pipeline": "auto"})
    assert found.pipelines(llama()) == [1, 2]  # it has two layers
    assert found.pipelines(nn.Linear(2, 2)) == [1]
    one_node = replace(found, world_size=2)
    assert one_node.pipelines(llama()) == [1]


def _losses(path: str) -> tuple[list[float], bool]:
    """Losses of two steps of the planned stages, where this rank has the last one, and whether
    there are DTensors."""
    planning = fe.StrategyPlan.load(path)
    stages = planning.shard_stages(fe.CausalLMStages(llama))
    module = stages[0].submod
    has_dtensors = any(isinstance(each, DTensor) for each in module.parameters())
    optimizer = fe.shard_optimizer(torch.optim.AdamW(module.parameters()))
    schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=_loss)
    losses = []
    for _ in range(2):
        found: list[Tensor] = []
        if stages[0].is_first:
            schedule.step(TOKENS)
        else:
            schedule.step(target=TOKENS, losses=found)
            losses.append(sum(each.item() for each in found) / MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return losses, has_dtensors


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _expected(build: Callable[[], nn.Module] = llama) -> list[float]:
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = _loss(model(TOKENS).logits, TOKENS)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_plan_tries_context_parallelism_in_stages() -> None:
    planning = plan(pipeline=2, context_parallel=(1, 2), meshes=[(2,)])
    outcomes = {
        (each.candidate.context_parallel, each.candidate.strategy): each
        for each in planning.outcomes
    }
    assert len(outcomes) == 6
    assert "2, CP 2, PP 2" in str(planning)
    tokens = llama_batch()["input_ids"]
    for strategy in ("no_shard", "optim", "optim_grads_params"):
        whole, part = (outcomes[size, strategy] for size in (1, 2))
        assert part.items * 2 == whole.items
        assert part.model_flops * 2 == whole.model_flops
        assert part.sent["context"] > 0
    found = fe.simulate_pipeline(
        fe.CausalLMStages(llama),
        WORLD,
        pipeline=2,
        context_parallel=2,
        microbatches=MICROBATCHES,
        batch=tokens,
        target=tokens,
        strategy="optim",
        machine=MACHINE,
        quick=True,
    )
    times = outcomes[2, "optim"].times
    assert times is not None
    assert times.step == found.seconds


@pytest.mark.parametrize(
    ("degree", "context"),
    [
        pytest.param(1, 1, marks=pytest.mark.thorough),
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.thorough),
    ],
)
def test_planned_stages_train_on_their_ranks(
    ranks: Ranks, tmp_path: Path, degree: int, context: int
) -> None:
    """All data-parallel ranks have the same sequences, whole ones."""
    planning = plan(
        pipeline=2, tensor_parallel=degree, context_parallel=context, meshes=[(2 // degree,)]
    )
    planning.save(tmp_path / "plan.json")
    found = ranks.run(_losses, str(tmp_path / "plan.json"), world_size=WORLD)
    assert [losses for losses, _ in found[:2]] == [[], []]
    for losses, has_dtensors in found[2:]:
        assert losses == pytest.approx(_expected(), rel=1e-4)
        assert has_dtensors == (degree > 1)


def _losses_of_zero_bubble(path: str) -> list[float]:
    """Losses of two steps, where this rank has the last one of four stages."""
    stages = fe.StrategyPlan.load(path).shard_stages(fe.CausalLMStages(deep_llama))
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = fe.shard_optimizer(torch.optim.AdamW(params))
    schedule = ScheduleZBVZeroBubble(list(stages), MICROBATCHES, loss_fn=_loss)
    losses = []
    for _ in range(2):
        found: list[Tensor] = []
        if stages[0].is_first:
            schedule.step(TOKENS, target=TOKENS, losses=found)
            losses.append(sum(each.item() for each in found) / MICROBATCHES)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.thorough
@passes_on_to_itself
def test_planned_stages_train_with_split_backwards(ranks: Ranks, tmp_path: Path) -> None:
    plan(
        build=deep_llama,
        pipeline=2,
        meshes=[(2,)],
        schedules="ZBVZeroBubble",
    ).save(tmp_path / "plan.json")
    found = ranks.run(_losses_of_zero_bubble, str(tmp_path / "plan.json"), world_size=WORLD)
    assert found[2:] == [[], []]
    for losses in found[:2]:
        assert losses == pytest.approx(_expected(deep_llama), rel=1e-4)


def test_other_ways_to_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found .* pipeline .*planning.shard_stages"):
        _ = planned(2).best
    planned(2).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="stages: expected a function"):
        fe.StrategyPlan.load(tmp_path / "plan.json").shard_stages()


def _failed(path: str) -> str:
    """The error where the stages of rank 2 alone cannot be built."""

    def stages(index: int, num_stages: int) -> nn.Module:
        if dist.get_rank() == 2:
            raise OSError("no weights here")
        return fe.CausalLMStages(llama)(index, num_stages)

    try:
        fe.StrategyPlan.load(path).shard_stages(stages)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def test_an_error_of_a_stage_is_raised_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    planned(2).save(tmp_path / "plan.json")
    for told in ranks.run(_failed, str(tmp_path / "plan.json"), world_size=WORLD):
        assert "no weights here" in told


def _refused(path: str, of_stages: bool) -> str:
    planning = fe.StrategyPlan.load(path)
    try:
        if of_stages:
            planning.shard_stages(fe.CausalLMStages(llama))
        else:
            planning.shard(llama())
    except ValueError as error:
        return str(error)
    return ""


def test_stages_and_whole_models_are_not_mixed_up(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    for degree, of_stages, message in (
        (2, False, "expected a candidate without a pipeline"),
        (1, True, "expected a candidate with a pipeline"),
    ):
        planned(degree).save(path)
        for told in ranks.run(_refused, path, of_stages, world_size=WORLD):
            assert message in told
