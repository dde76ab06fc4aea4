"""Plans that try tensor, context and pipeline parallelism beside data parallelism."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine.planner.candidates import Candidate, is_quick
from fsdp_engine.planner.job import BatchSearch, Job, Known
from fsdp_engine.planner.page import page_of
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.planner.plan_view import TIME_COLOURS
from tests.composition.tensor_parallel import Model, cut
from tests.planner.made_plans import (
    TOKENS,
    assert_outcome_of,
    llama_batch,
    noting_dtensors,
    quick_plan,
    simulated_as,
    small_llama,
    times_of,
    trained,
)
from tests.pool import Ranks

WORLD, MICROBATCHES, ROWS = 4, 2, 4
ITEMS = MICROBATCHES * ROWS * 32  # tokens of a data-parallel rank in a step
MACHINE = replace(fe.H100, ranks_per_node=2)

llama = partial(small_llama, 2)
deep_llama = partial(small_llama, 4)


def plan(build: Any = llama, batch: Any = llama_batch, **changes: Any) -> fe.StrategyPlan:
    """Plan the quick levels, with two microbatches."""
    given: dict[str, Any] = {"world_size": WORLD, "machine": MACHINE, "checkpointing": (False,)}
    if "global_batch" not in changes:
        given["microbatches"] = MICROBATCHES
    return quick_plan(build, batch, **given | changes)


@cache
def planned() -> fe.StrategyPlan:
    """A plan with and without two tensor-parallel ranks, and with and without pipelines of two
    ranks."""
    return plan(tensor_parallel=(1, 2), pipeline=(1, 2), meshes=[(4,), (2,)])


def only(tensor: int = 1, pipeline: int = 1) -> fe.StrategyPlan:
    """The rows of these degrees."""
    found = (
        each
        for each in planned().outcomes
        if (each.candidate.tensor_parallel, each.candidate.pipeline) == (tensor, pipeline)
    )
    return replace(planned(), outcomes=tuple(found))


@cache
def shared(*mesh: int) -> fe.StrategyPlan:
    """Level 3 with two context-parallel ranks, on two axes or on ``mesh``."""
    return plan(context_parallel=2, meshes=[mesh or (2, 2)], fitting=1)


def request(**changes: Any) -> PlanRequest:
    """The arguments of a plan whose candidates are not simulated."""
    options = {"world_size": 16, **changes}
    return PlanRequest(options.pop("build", llama), llama_batch, PlanOptions(**options))


def test_auto_tries_degrees_that_fit_the_nodes_and_the_model() -> None:
    """The model has two key heads and two layers."""
    for world_size, per_node, degrees in ((4, 1, [1]), (4, 2, [1, 2]), (4, 8, [1, 2]), (3, 8, [1])):
        machine = replace(MACHINE, ranks_per_node=per_node)
        asked = request(tensor_parallel="auto", world_size=world_size, machine=machine)
        assert asked.degrees(llama()) == degrees
        assert asked.degrees(Model()) == [1]
    assert request().degrees(llama()) == [1]
    with pytest.raises(ValueError, match="expected a model of transformers"):
        request(tensor_parallel=2).degrees(Model())
    assert request(tensor_parallel=(1, 2), parallelize=cut).degrees(Model()) == [1, 2]
    assert request(pipeline="auto").pipelines(llama()) == [1, 2]
    assert request(pipeline="auto").pipelines(nn.Linear(2, 2)) == [1]
    assert request(pipeline="auto", world_size=2).pipelines(llama()) == [1]


def degrees_in(found: PlanRequest, *degrees: int) -> set[tuple[int, ...]]:
    return {
        (*each.mesh, each.context_parallel, each.tensor_parallel)
        for each in found.candidates(degrees, [1])
    }


def test_candidates_have_all_pairs_of_degrees_that_fit() -> None:
    """Sixteen ranks, in two nodes."""
    assert degrees_in(request(context_parallel=(1, 8)), 1) == {
        *((16, 1, 1), (2, 8, 1, 1)),
        *((16, 8, 1), (2, 8, 8, 1)),
    }
    # In a node of 8 ranks, 4 tensor-parallel ranks leave room for 2 context-parallel ones.
    both = degrees_in(request(context_parallel="auto"), 1, 4)
    assert {each for each in both if each[-1] == 4} == {
        *((4, 1, 4), (4, 2, 4)),
        *((2, 2, 1, 4), (2, 2, 2, 4)),
    }
    assert {each[-2] for each in both if each[-1] == 1} == {1, 2, 4, 8}


def contexts_of(planning: fe.StrategyPlan) -> set[tuple[int, ...]]:
    """Meshes with their degrees of context parallelism."""
    candidates = [each.candidate for each in planning.outcomes]
    return {(*each.mesh, each.context_parallel) for each in candidates}


def test_auto_tries_context_parallelism_for_long_sequences(simulated: list[Any]) -> None:
    tokens = torch.zeros(1, 2**15, dtype=torch.long)
    long = {"input_ids": tokens, "labels": tokens}
    assert contexts_of(plan(context_parallel="auto", meshes=[(WORLD,)])) == {(4, 1)}
    found = plan(batch=long, context_parallel="auto", meshes=[(2, 2)])
    assert contexts_of(found) == {(2, 2, 1), (2, 2, 2)}


@pytest.mark.parametrize(("name", "mesh"), [("tensor_parallel", (2,)), ("context_parallel", (4,))])
def test_a_global_batch_too_small_for_data_parallel_ranks_alone(
    name: str, mesh: tuple[int, ...], simulated: list[Any]
) -> None:
    """Two rows a step: one for each of two groups of two ranks; four ranks cannot share them."""
    with pytest.raises(ValueError, match="global_batch: expected a multiple of 128 tokens"):
        plan(global_batch=64)
    planning = plan(**{name: (1, 2)}, global_batch=64, meshes=list({(WORLD,): 1, mesh: 1}))
    found = [each.candidate for each in planning.outcomes]
    assert {(each.mesh, getattr(each, name)) for each in found} == {(mesh, 2)}
    assert planning.setting.global_batch == 64
    with pytest.raises(ValueError, match="global_batch: expected a multiple of 64 tokens"):
        plan(tensor_parallel=2, global_batch=32)


def test_other_numbers_of_ranks_leave_out_degrees_that_do_not_divide_them(
    simulated: list[Any],
) -> None:
    found = plan(tensor_parallel=(1, 2), meshes=[(4,), (2,)]).scaling([1, 2])
    assert [each.label for each in found.rows] == ["1", "2"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: only(tensor=2), id="tensor"),
        pytest.param(shared, id="context"),
        pytest.param(lambda: shared(WORLD), id="one axis", marks=pytest.mark.thorough),
    ],
)
def test_a_degree_is_simulated_as_by_itself(make: Callable[[], fe.StrategyPlan]) -> None:
    """A mesh may equal that of an earlier simulation, whose process groups are destroyed."""
    hook = sys.excepthook
    for outcome in make().outcomes:
        candidate = outcome.candidate
        assert is_quick(candidate)
        assert candidate.data_parallel * candidate.tensor_parallel == WORLD
        options = {"machine": MACHINE, "microbatches": MICROBATCHES}
        assert_outcome_of(simulated_as(candidate, llama, llama_batch(), **options), outcome)
        assert outcome.items == ITEMS * 2 == ITEMS * candidate.num_batches
    assert sys.excepthook is hook  # torch's hook is not installed
    assert {each.items for each in only().outcomes} == {ITEMS * WORLD}


LINKS: list[tuple[str, dict[str, Any], float, list[str]]] = [
    ("inner link", {"meshes": [(2,)], "world_size": 2}, 0.3, ["(within a node)"]),
    ("outer link", {"meshes": [(2, 2)], "fitting": 1}, 0.3, ["(between nodes)"]),
    (
        "tensor link",
        {"tensor_parallel": 2, "meshes": [(2,)]},
        0.5,
        ["sent tensor", ", tensor parallelism over 2 ranks", "the tensor-parallel link (within a"],
    ),
    (
        "context link",
        {"context_parallel": 2, "meshes": [(WORLD,)], "microbatches": 8},
        0.3,
        [
            *("sent context", "4, CP 2", "on 4 ranks in context-parallel groups of 2"),
            "the context-parallel link (within a node)",
        ],
    ),
]


@pytest.mark.parametrize(("name", "options", "least", "texts"), LINKS)
def test_waits_for_a_link_are_a_part_of_the_step_and_the_bottleneck_is_named(
    name: str, options: dict[str, Any], least: float, texts: list[str]
) -> None:
    link = "between_nodes" if name == "outer link" else "within_node"
    bandwidth = 1e6 if name == "outer link" else 1e7
    slow = replace(MACHINE, **{link: replace(getattr(fe.H100, link), bandwidth=bandwidth)})
    planning = plan(machine=slow, **options)
    shares = times_of(planning.outcomes[0]).shares()
    assert shares[name] > least
    assert shares.keys() <= TIME_COLOURS.keys()
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    for text in texts:
        assert text in str(planning)
    assert "Bottleneck: the " + name.split()[0] in str(planning)
    assert planning.simulate is not None
    step = planning.simulate(planning.outcomes[0].candidate)
    assert f"waits for the {name}" in page_of(planning, step)


# Pipelines.


def test_a_plan_tries_pipelines_beside_data_parallelism() -> None:
    of_pipelines = [each.candidate for each in only(pipeline=2).outcomes]
    assert {(each.mesh, each.schedule) for each in of_pipelines} == {((2,), "1F1B")}
    assert len(of_pipelines) == 3
    assert {each.items for each in only(pipeline=2).outcomes} == {2 * ITEMS}
    assert len({each.checkpoint_bytes for each in planned().outcomes}) == 1
    text = " ".join(str(only(pipeline=2)).split())
    assert "2, PP 2" in text
    assert "PP: number of ranks in a pipeline" in text
    assert times_of(only(pipeline=2).outcomes[0]).shares()["other stages"] > 0.05
    assert "Stages wait for each other: more microbatches of fewer" in text


@pytest.mark.parametrize("context", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_row_is_a_quick_simulation_of_the_pipeline(context: int) -> None:
    """The pipeline consists of the model's stages and the cross-entropy of logits."""
    tokens = llama_batch()["input_ids"]
    each = only(pipeline=2).outcomes[0]
    if context == 2:
        planning = plan(pipeline=2, context_parallel=2, meshes=[(2,)], fitting=1)
        assert "2, CP 2, PP 2" in str(planning)
        (each,) = planning.outcomes
        level = each.candidate.strategy
        rows = only(pipeline=2).outcomes
        (whole,) = (other for other in rows if other.candidate.strategy == level)
        assert (each.items * 2, each.model_flops * 2) == (whole.items, whole.model_flops)
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
    times = times_of(each)
    assert (times.step, each.peak_bytes) == (found.seconds, max(found.peak_bytes))
    assert times.exposed["pipeline"] == pytest.approx(sum(found.bubble_seconds) / 2)
    assert times.mfu == pytest.approx(found.mfu)


def stage(index: int = 0, num_stages: int = 1) -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def test_degrees_whose_rows_have_no_given_microbatch_size_are_left_out(
    simulated: list[dict[str, Any]],
) -> None:
    """Four data-parallel ranks share 12 rows. The three rows of a rank cannot be divided into
    microbatches of two."""
    given: dict[str, Any] = {"global_batch": 12 * 32, "microbatch_sizes": (2,), "meshes": None}
    planning = plan(tensor_parallel=(1, 2), **given)
    assert {each.candidate.tensor_parallel for each in planning.outcomes} == {2}
    with pytest.raises(ValueError, match="expected a divisor of a rank's 3 rows in a step"):
        plan(**given)


def test_a_global_batch_has_microbatches_that_the_schedule_takes() -> None:
    """DualPipeV needs four of them with four stages. The number of microbatches is a multiple of
    the pipeline's ranks, and so is a data-parallel rank's number of rows: with a pipeline of two
    ranks it is 16 instead of 15."""

    def search(build: Any, global_batch: int) -> BatchSearch:
        asked = request(build=build, world_size=WORLD, machine=MACHINE)
        return BatchSearch(Job(asked, Known(), 1), global_batch)

    candidate = Candidate((2,), "optim", "no_shard", False, pipeline=2)
    found = search(deep_llama, 2 * 16 * 32)  # 16 rows of a rank
    assert found.sizes(replace(candidate, schedule="1F1B")) == [1, 2, 4, 8]
    assert found.sizes(replace(candidate, schedule="DualPipeV")) == [1, 2, 4]
    found = search(llama, 30 * 32)
    assert found.batch_of(candidate) == 2 * 16 * 32
    assert found.sizes(candidate) == [1, 2, 4, 8]
    assert found.sizes(replace(candidate, pipeline=1)) == [1, 3, 5, 15]
    with pytest.raises(ValueError, match="global_batch: expected a batch that gives a number"):
        plan(
            stage,
            lambda size: (torch.zeros(size, 16), torch.zeros(size, 16)),
            stages=stage,
            stage_loss=F.mse_loss,
            pipeline=2,
            schedules="DualPipeV",
            global_batch=4,
        )


# Training with a plan.


def _train(path: str, build: Callable[[], nn.Module], parallelize: Any) -> tuple[Any, ...]:
    """Losses of two steps on the planned ranks, sizes of the engine's mesh, whether the model had
    DTensors, and the number of context-parallel ranks."""
    planning = replace(fe.StrategyPlan.load(path), parallelize=parallelize)
    torch.manual_seed(0)
    model = build()
    with noting_dtensors() as has_dtensors:
        engine = planning.shard(model)
    root = engine.mesh.device_mesh._get_root_mesh()
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    sizes = engine.mesh.outer.size, engine.mesh.inner.size
    num_context = root["cp"].size() if "cp" in (root.mesh_dim_names or ()) else 1
    return trained(model, optimizer), sizes, all(has_dtensors), num_context


def linears(degree: int, sizes: tuple[int, ...]) -> fe.StrategyPlan:
    options = {"tensor_parallel": degree, "meshes": [sizes], "parallelize": cut}
    return plan(Model, TOKENS % 16, fitting=1, **options)


@pytest.mark.parametrize(
    ("make", "build", "parallelize", "degree", "context", "sizes"),
    [
        pytest.param(lambda: only(tensor=2), llama, None, 2, 1, (2,), id="llama"),
        pytest.param(lambda: linears(2, (2, 1)), Model, cut, 2, 1, (2, 1), id="two axes"),
        pytest.param(lambda: linears(4, (1,)), Model, cut, 4, 1, (1,), id="no data parallelism"),
        # Attention of CPUs is not ring attention: all ranks have whole sequences here.
        pytest.param(shared, llama, None, 1, 2, (2, 2), id="context"),
    ],
)
def test_a_planned_model_trains_on_its_ranks(
    ranks: Ranks,
    tmp_path: Path,
    make: Callable[[], fe.StrategyPlan],
    build: Callable[[], nn.Module],
    parallelize: Any,
    degree: int,
    context: int,
    sizes: tuple[int, ...],
) -> None:
    path = str(tmp_path / "plan.json")
    make().save(path)
    torch.manual_seed(0)
    expected = trained(build())
    for losses, *others in ranks.run(_train, path, build, parallelize, world_size=WORLD):
        engine_sizes, has_dtensors, num_context = others
        assert losses == pytest.approx(expected, rel=1e-4)
        assert math.prod(engine_sizes) == WORLD // degree
        assert engine_sizes[-1] == sizes[-1]
        assert has_dtensors == (degree > 1)
        assert num_context == context


def _refused(paths: list[str], case: str) -> str:
    """The error of a model or of stages, where rank 1 has another plan, or rank 2 no stage."""

    def stages(index: int, num_stages: int) -> nn.Module:
        if case == "no weights here" and dist.get_rank() == 2:
            raise OSError(case)
        return fe.CausalLMStages(llama)(index, num_stages)

    planning, model = fe.StrategyPlan.load(paths[dist.get_rank() == 1]), llama()
    shard = partial(planning.shard, model)
    if case != "model":
        shard = partial(planning.shard_stages, stages)
    with pytest.raises((OSError, RuntimeError, ValueError)) as caught:
        shard()
    assert not any(isinstance(each, DTensor) for each in model.parameters())
    return str(caught.value)


def test_plans_that_do_not_fit_the_ranks_are_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("plan.json", "other.json")]
    of_two = replace(only(tensor=2), setting=replace(planned().setting, world_size=2))
    for planning, other, case, message in (
        (only(tensor=2), only(), "model", "expected the same on all ranks"),
        (only(tensor=2), only(tensor=2).within(1000.0), "model", "expected a candidate that fits"),
        (only(tensor=2), of_two, "model", "expected a plan for 4 ranks; found one for 2"),
        (only(pipeline=2), None, "model", "expected a candidate without a pipeline"),
        (only(), None, "stages", "expected a candidate with a pipeline"),
        (only(pipeline=2), None, "no weights here", "no weights here"),
    ):
        planning.save(paths[0])
        (other or planning).save(paths[1])
        for found in ranks.run(_refused, paths, case, world_size=WORLD):
            assert message in found
    with pytest.raises(ValueError, match=r"found .* pipeline .*planning.shard_stages"):
        _ = only(pipeline=2).best
    with pytest.raises(ValueError, match=r"found .* tensor parallelism over 2 .*planning.shard"):
        _ = only(tensor=2).best  # fe.shard would not apply it
    with pytest.raises(ValueError, match="stages: expected a function"):
        fe.StrategyPlan.load(paths[0]).shard_stages()


def _shard_the_data_parallel_ranks(path: str) -> str:
    planning = fe.StrategyPlan.load(path)
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = llama()
    fe.apply_tp_plan(model, mesh["tp"])
    return str(fe.shard(model, mesh["dp"], strategy=planning).strategy)


def test_auto_takes_the_candidates_of_the_meshs_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    both = (*only().outcomes, *only(tensor=2).outcomes)
    replace(planned(), outcomes=both).save(path)
    chosen = only(tensor=2).outcomes[0].candidate
    found = ranks.run(_shard_the_data_parallel_ranks, path, world_size=WORLD)
    assert found == [f"({chosen.strategy}, {chosen.outer_strategy})"] * WORLD
