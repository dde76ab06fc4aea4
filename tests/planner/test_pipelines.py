"""Plans that try pipelines beside data, tensor and context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
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
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.planner.simulation import pipeline
from tests.extensions.pipelines.scene import passes_on_to_itself
from tests.planner.made_plans import llama_batch, quick_plan, small_llama
from tests.pool import Ranks

WORLD, MICROBATCHES, WIDTH = 4, 2, 16
MACHINE = replace(fe.H100, ranks_per_node=2)
TOKENS = torch.arange(8 * 32).view(8, 32) % 64


def llama() -> nn.Module:
    return small_llama(2)


def deep_llama() -> nn.Module:
    return small_llama(4)


def plan(build: Any = llama, batch: Any = llama_batch, **changes: Any) -> fe.StrategyPlan:
    """Plan the quick levels, with two microbatches."""
    given: dict[str, Any] = {"world_size": WORLD, "machine": MACHINE, "checkpointing": (False,)}
    return quick_plan(build, batch, **{**given, "microbatches": MICROBATCHES, **changes})


@functools.cache
def planned() -> fe.StrategyPlan:
    """With and without pipelines of two ranks."""
    return plan(pipeline=(1, 2), meshes=[(4,), (2,)])


def only(degree: int) -> fe.StrategyPlan:
    """The rows of one degree."""
    found = tuple(each for each in planned().outcomes if each.candidate.pipeline == degree)
    return replace(planned(), outcomes=found)


# A model whose stages have few operations.


def stage(index: int, num_stages: int, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))


def rows(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, WIDTH), torch.zeros(size, WIDTH)


def product(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def plan_linears(batch: Any = rows, make: Any = stage, **changes: Any) -> fe.StrategyPlan:
    of_stages = {"pipeline": 2, "meshes": [(2,)], "stages": make, "stage_loss": product}
    return plan(lambda: stage(0, 1), batch, **{**of_stages, **changes})


def test_a_plan_tries_pipelines_beside_data_parallelism() -> None:
    of_pipelines = [each.candidate for each in only(2).outcomes]
    assert {each.mesh for each in of_pipelines} == {(2,)}
    assert {each.schedule for each in of_pipelines} == {"1F1B"}
    assert len(of_pipelines) == 3
    tokens = MICROBATCHES * 4 * 32
    found = {(each.candidate.pipeline, each.items) for each in planned().outcomes}
    assert found == {(1, WORLD * tokens), (2, 2 * tokens)}
    assert len({each.checkpoint_bytes for each in planned().outcomes}) == 1
    assert "2, PP 2" in str(planned())
    assert "PP: ranks of a pipeline" in " ".join(str(planned()).split())


@pytest.mark.parametrize("context", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_row_is_a_quick_simulation_of_the_pipeline(context: int) -> None:
    """Of the model's stages and the cross-entropy of logits; with context parallelism, too."""
    tokens = llama_batch()["input_ids"]
    each = only(2).outcomes[0]
    if context == 2:
        planning = plan(pipeline=2, context_parallel=2, meshes=[(2,)], fitting=1)
        assert "2, CP 2, PP 2" in str(planning)
        (each,) = planning.outcomes
        level = each.candidate.strategy
        (whole,) = (other for other in only(2).outcomes if other.candidate.strategy == level)
        assert each.items * 2 == whole.items
        assert each.model_flops * 2 == whole.model_flops
        assert each.sent["context"] > 0
    found = fe.simulate_pipeline(
        fe.CausalLMStages(llama),
        WORLD,
        pipeline=2,
        context_parallel=context,
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


def job(**changes: Any) -> Job:
    """A job that is not simulated."""
    given = {"build": llama, "batch": llama_batch, "world_size": WORLD, "machine": MACHINE}
    given |= changes
    build, batch = given.pop("build"), given.pop("batch")
    return Job(PlanRequest(build, batch, PlanOptions(**given)), Known(), 1)


def test_a_global_batch_has_microbatches_that_the_schedule_takes() -> None:
    """DualPipeV needs four of them with four stages. A rank's rows are a multiple of the ranks of
    the pipeline: 15 rows of two data-parallel ranks could not be cut into an even number."""
    candidate = Candidate((2,), "optim", "no_shard", False, pipeline=2)
    search = BatchSearch(job(build=deep_llama), 2 * 16 * 32)  # 16 rows of a rank
    assert search.sizes(replace(candidate, schedule="1F1B")) == [1, 2, 4, 8]
    assert search.sizes(replace(candidate, schedule="DualPipeV")) == [1, 2, 4]
    search = BatchSearch(job(), 30 * 32)
    assert search.batch_of(candidate) == 2 * 16 * 32
    assert search.sizes(candidate) == [1, 2, 4, 8]
    assert search.sizes(replace(candidate, pipeline=1)) == [1, 3, 5, 15]
    with pytest.raises(ValueError, match="global_batch: expected a size whose microbatches"):
        plan_linears(schedules="DualPipeV", microbatches=1, global_batch=4)


def test_waits_for_other_stages_are_a_part_of_the_step() -> None:
    planning = only(2)
    first = planning.outcomes[0]
    assert first.times is not None
    assert first.times.shares()["other stages"] > 0.05
    assert "Stages wait for each other: more microbatches, of fewer" in " ".join(
        str(planning).split()
    )


def test_rows_of_other_stages_are_not_taken_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    options = {"pipeline": 2, "batch": rows()[0], "target": rows()[1], "loss": product}
    made = fe.simulate_pipeline(stage, WORLD, microbatches=2, quick=True, **options)

    def noted(*args: Any, **options: Any) -> fe.PipelineSimulation:
        tried.append(options["loss"])
        return made

    monkeypatch.setattr(pipeline, "simulate_pipeline", noted)
    monkeypatch.setattr(plan_cache, "loaded_sources", dict)  # as if none were newer
    for count, changes in (
        (1, {}),
        (1, {}),
        (2, {"stage_loss": _loss}),
        (3, {"stages": lambda index, num_stages: stage(0, 1)}),
    ):
        plan_linears(cache=True, fitting=1, **changes)
        assert len(tried) == count


def test_auto_tries_pipelines_over_nodes() -> None:
    found = job(world_size=16, pipeline="auto").request
    assert found.pipelines(llama()) == [1, 2]  # it has two layers
    assert found.pipelines(nn.Linear(2, 2)) == [1]
    one_node = replace(found.options, world_size=2)
    assert replace(found, options=one_node).pipelines(llama()) == [1]


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _losses(path: str, build: Callable[[], nn.Module]) -> tuple[list[float], bool]:
    """Losses of two steps of the planned stages, where this rank has the last one, and whether
    there are DTensors."""
    stages = fe.StrategyPlan.load(path).shard_stages(fe.CausalLMStages(build))
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = fe.shard_optimizer(torch.optim.AdamW(params))
    count = 2 * len(stages)
    schedule: Any = Schedule1F1B(stages[0], count, loss_fn=_loss)
    if len(stages) > 1:
        schedule = ScheduleZBVZeroBubble(list(stages), count, loss_fn=_loss)
    inputs = (TOKENS,) if stages[0].is_first else ()
    is_last = any(each.is_last for each in stages)
    losses: list[float] = []
    for _ in range(2):
        found: list[Tensor] = []
        schedule.step(*inputs, **({"target": TOKENS, "losses": found} if is_last else {}))
        losses += [sum(each.item() for each in found) / count] if is_last else []
        optimizer.step()
        optimizer.zero_grad()
    return losses, any(isinstance(each, DTensor) for each in params)


def _expected(build: Callable[[], nn.Module]) -> list[float]:
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = _loss(model(TOKENS).logits, TOKENS)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {}),
        pytest.param(llama, {"tensor_parallel": 2, "meshes": [(1,)]}, marks=pytest.mark.thorough),
        pytest.param(llama, {"meshes": [(2,)], "context_parallel": 2}, marks=pytest.mark.thorough),
        pytest.param(
            deep_llama,
            {"meshes": [(2,)], "schedules": "ZBVZeroBubble", "microbatches": 4},
            marks=[pytest.mark.thorough, passes_on_to_itself],
        ),
    ],
    ids=["data parallel", "tensor parallel", "context parallel", "split backwards"],
)
def test_planned_stages_train_on_their_ranks(
    ranks: Ranks, tmp_path: Any, build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    """All data-parallel ranks have the same sequences, whole ones."""
    path = str(tmp_path / "plan.json")
    planning = plan(build, pipeline=2, fitting=1, **options) if options else only(2)
    planning.save(path)
    assert fe.StrategyPlan.load(path).outcomes == planning.outcomes
    found = ranks.run(_losses, path, build, world_size=WORLD)
    last = [losses for losses, _ in found if losses]
    assert [bool(losses) for losses, _ in found].count(True) == 2
    for losses in last:
        assert losses == pytest.approx(_expected(build), rel=1e-4)
    assert {has_dtensors for _, has_dtensors in found} == {"tensor_parallel" in options}


def _refused(path: str, case: str) -> str:
    """The error of stages or of a whole model; or of stages of which rank 2 cannot build its."""

    def stages(index: int, num_stages: int) -> nn.Module:
        if case == "fails" and dist.get_rank() == 2:
            raise OSError("no weights here")
        return fe.CausalLMStages(llama)(index, num_stages)

    planning = fe.StrategyPlan.load(path)
    try:
        if case == "whole":
            planning.shard(llama())
        else:
            planning.shard_stages(stages)
    except (OSError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_other_ways_to_shard_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Any) -> None:
    path = str(tmp_path / "plan.json")
    for degree, case, message in (
        (2, "whole", "expected a candidate without a pipeline"),
        (1, "stages", "expected a candidate with a pipeline"),
        (2, "fails", "no weights here"),
    ):
        only(degree).save(path)
        for told in ranks.run(_refused, path, case, world_size=WORLD):
            assert message in told
    with pytest.raises(ValueError, match=r"found .* pipeline .*planning.shard_stages"):
        _ = only(2).best
    with pytest.raises(ValueError, match="stages: expected a function"):
        fe.StrategyPlan.load(path).shard_stages()
