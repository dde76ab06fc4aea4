"""Plans that try tensor and context parallelism beside data parallelism."""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine.planner.candidates import is_quick
from fsdp_engine.planner.page import page_of
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.planner.plan_view import TIME_COLOURS
from fsdp_engine.planner.simulation.tp_plan import fitting_degrees
from tests.composition.tensor_parallel import Model, cut
from tests.planner.made_plans import llama_batch, quick_plan, small_llama
from tests.planner.made_plans import simulated as one_step
from tests.pool import Ranks

WORLD = 4
MACHINE = replace(fe.H100, ranks_per_node=2)
TOKENS = torch.arange(4 * 32).view(4, 32) % 64


def llama() -> nn.Module:
    return small_llama(1)


def plan(batch: Any = llama_batch, make: Any = quick_plan, **changes: Any) -> fe.StrategyPlan:
    """On one axis, unless ``changes`` say another thing."""
    arguments = {"world_size": WORLD, "machine": MACHINE, "checkpointing": (False,), **changes}
    return make(arguments.pop("build", llama), batch, **arguments)


@functools.cache
def both() -> fe.StrategyPlan:
    """With and without tensor parallelism, on one data-parallel axis."""
    return plan(tensor_parallel=(1, 2), meshes=[(4,), (2,)])


def only(degree: int) -> fe.StrategyPlan:
    """The rows of one degree."""
    found = (each for each in both().outcomes if each.candidate.tensor_parallel == degree)
    return replace(both(), outcomes=tuple(found))


@functools.cache
def shared(*mesh: int) -> fe.StrategyPlan:
    """Level 3 with two context-parallel ranks, on two axes or on ``mesh``."""
    return plan(context_parallel=2, meshes=[mesh or (2, 2)], fitting=1)


def degrees_of(planning: fe.StrategyPlan) -> set[int]:
    return {each.candidate.tensor_parallel for each in planning.outcomes}


def linears(**options: Any) -> fe.StrategyPlan:
    return plan(TOKENS, build=Model, **options)


def request(**changes: Any) -> PlanRequest:
    """Of a plan whose candidates are not simulated."""
    return PlanRequest(llama, llama_batch, PlanOptions(world_size=16, **changes))


def test_degrees_are_those_that_fit_a_node_and_the_models_heads(simulated: list[Any]) -> None:
    for ranks_per_node, found in ((1, []), (2, [2]), (8, [2])):  # there are two key heads
        assert fitting_degrees(llama(), WORLD, ranks_per_node) == found
    assert fitting_degrees(llama(), 3, 8) == []
    assert fitting_degrees(Model(), WORLD, 8) == []
    assert degrees_of(plan(tensor_parallel="auto", meshes=[(WORLD,), (2,)])) == {1, 2}
    assert degrees_of(plan(meshes=[(WORLD,)])) == {1}
    # A model without a plan has one degree.
    with pytest.raises(ValueError, match="expected a model of transformers"):
        linears(tensor_parallel=2)
    found = linears(tensor_parallel=(1, 2), meshes=[(WORLD,), (2,)], parallelize=cut)
    assert degrees_of(found) == {1, 2}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("tensor_parallel", ()),
        ("context_parallel", ()),
        pytest.param("context_parallel", (WORLD,), marks=pytest.mark.thorough),
    ],
)
def test_a_degree_is_simulated_as_by_itself(name: str, mesh: tuple[int, ...]) -> None:
    """Also a mesh that equals that of an earlier simulation, whose process groups are gone."""
    hook = sys.excepthook
    for outcome in only(2).outcomes if name == "tensor_parallel" else shared(*mesh).outcomes:
        candidate = outcome.candidate
        assert is_quick(candidate)
        assert candidate.data_parallel * candidate.tensor_parallel == WORLD
        assert getattr(candidate, name) == 2
        alone = one_step(llama, candidate, llama_batch(), machine=MACHINE)
        assert outcome.times is not None
        assert outcome.times.step == pytest.approx(alone.seconds)
        assert outcome.memory == alone.memory
        assert outcome.sent == alone.sent_bytes
        assert outcome.items == TOKENS.numel() * 2 == TOKENS.numel() * candidate.num_batches
    assert sys.excepthook is hook  # no prefix of a rank
    assert {each.items for each in only(1).outcomes} == {TOKENS.numel() * WORLD}


TENSOR = ["sent tensor", "of 2 tensor-parallel ranks each", "the tensor-parallel link (within a"]
CONTEXT = ["sent context", "4, CP 2", "on 4 ranks in context-parallel groups of 2"]
CONTEXT += ["the context-parallel link (within a node)"]


@pytest.mark.parametrize(
    ("name", "mesh", "least", "texts"),
    [("tensor", (2,), 0.5, TENSOR), ("context", (WORLD,), 0.3, CONTEXT)],
)
def test_waits_for_a_link_are_a_part_of_the_step(
    name: str, mesh: tuple[int], least: float, texts: list[str]
) -> None:
    slow = replace(MACHINE, within_node=replace(fe.H100.within_node, bandwidth=1e7))
    planning = plan(machine=slow, **{f"{name}_parallel": 2}, meshes=[mesh])
    times = planning.outcomes[0].times
    assert times is not None
    assert times.shares()[f"{name} link"] > least
    assert times.shares().keys() <= TIME_COLOURS.keys()
    assert sum(times.shares().values()) == pytest.approx(1, abs=0.01)
    for text in texts:
        assert text in str(planning)
    assert planning.simulate is not None
    step = planning.simulate(planning.outcomes[0].candidate)
    assert f"waits for the {name} link" in page_of(planning, step)


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
    # With tensor parallelism a node has half as many places.
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
    found = plan(long, context_parallel="auto", meshes=[(2, 2)])
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


# What a plan says is then trained.


def cut_linears(degree: int, sizes: tuple[int, ...]) -> Any:
    options = {"tensor_parallel": degree, "meshes": [sizes]}
    return functools.cache(lambda: linears(parallelize=cut, fitting=1, **options))


def _losses(path: str, case: str) -> tuple[list[float], tuple[int, ...], bool, int]:
    """Losses of two steps on the planned ranks, sizes of the engine's mesh, whether the model has
    DTensors, and context-parallel ranks."""
    planning = fe.StrategyPlan.load(path)
    if case == "linears":
        planning = replace(planning, parallelize=cut)
    torch.manual_seed(0)
    model = llama() if case == "llama" else Model()
    has_dtensors: list[bool] = []
    original = fe.sharding.make_engine

    def noting(model: nn.Module, *args: Any, **kwargs: Any) -> fe.Engine:
        has_dtensors.append(any(isinstance(each, DTensor) for each in model.parameters()))
        return original(model, *args, **kwargs)

    with patch.object(sys.modules["fsdp_engine.sharding"], "make_engine", noting):
        engine = planning.shard(model)
    root = engine.mesh.device_mesh._get_root_mesh()
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    sizes = engine.mesh.outer.size, engine.mesh.inner.size
    num_context = root["cp"].size() if "cp" in (root.mesh_dim_names or ()) else 1
    return _trained(model, optimizer), sizes, *has_dtensors, num_context


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses of two steps."""
    losses = []
    for _ in range(2):
        loss: Tensor
        if isinstance(model, Model):
            loss = model(TOKENS % 16)
        else:
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("make", "degree", "context", "sizes"),
    [
        pytest.param(lambda: only(2), 2, 1, (2,), id="llama"),
        pytest.param(cut_linears(2, (2, 1)), 2, 1, (2, 1), id="two axes"),
        pytest.param(cut_linears(4, (1,)), 4, 1, (1,), id="no data parallelism"),
        # Attention of CPUs is not ring attention: all ranks have whole sequences here.
        pytest.param(shared, 1, 2, (2, 2), id="context"),
    ],
)
def test_a_planned_model_trains_on_its_ranks(
    ranks: Ranks, tmp_path: Path, make: Any, degree: int, context: int, sizes: tuple[int, ...]
) -> None:
    make().save(tmp_path / "plan.json")
    case = "llama" if make().setting.model == "LlamaForCausalLM" else "linears"
    torch.manual_seed(0)
    model = llama() if case == "llama" else Model()
    expected = _trained(model, torch.optim.AdamW(model.parameters()))
    found = ranks.run(_losses, str(tmp_path / "plan.json"), case, world_size=WORLD)
    for losses, engine_sizes, has_dtensors, num_context in found:
        assert losses == pytest.approx(expected, rel=1e-4)
        assert math.prod(engine_sizes) == WORLD // degree
        assert engine_sizes[-1] == sizes[-1]
        assert has_dtensors == (degree > 1)
        assert num_context == context


def _refused(path: str, other: str) -> str:
    planning = fe.StrategyPlan.load(other if dist.get_rank() == 1 else path)
    model = llama()
    try:
        planning.shard(model)
    except (ValueError, RuntimeError) as error:
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        return str(error)
    return ""


def test_plans_that_differ_between_ranks_are_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found .* 2 tensor-parallel .*planning.shard"):
        _ = only(2).best  # fe.shard would not apply it
    path, other = str(tmp_path / "plan.json"), str(tmp_path / "other.json")
    only(2).save(path)
    for planning, message in (
        (only(1), "expected the same on all ranks"),
        (only(2).within(1000.0), "expected a candidate that fits"),
        (
            replace(only(2), setting=replace(both().setting, world_size=2)),
            "expected a plan for 4 ranks; found one for 2",
        ),
    ):
        planning.save(other)
        for told in ranks.run(_refused, path, other, world_size=WORLD):
            assert message in told


def _shard_the_data_parallel_ranks(path: str) -> str:
    planning = fe.StrategyPlan.load(path)
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = llama()
    fe.apply_tp_plan(model, mesh["tp"])
    return str(fe.shard(model, mesh["dp"], strategy=planning).strategy)


def test_auto_takes_the_candidates_of_the_meshs_ranks(ranks: Ranks, tmp_path: Path) -> None:
    both().save(tmp_path / "plan.json")
    chosen = only(2).outcomes[0].candidate
    found = ranks.run(_shard_the_data_parallel_ranks, str(tmp_path / "plan.json"), world_size=WORLD)
    assert found == [f"({chosen.strategy}, {chosen.outer_strategy})"] * WORLD


def test_other_numbers_of_ranks_leave_out_degrees_that_do_not_divide_them(
    simulated: list[Any],
) -> None:
    found = plan(tensor_parallel=(1, 2), meshes=[(4,), (2,)]).scaling([1, 2])
    assert [each.label for each in found.rows] == ["1", "2"]


def test_a_saved_plan_has_its_degrees(tmp_path: Path) -> None:
    both().save(tmp_path / "plan.json")
    assert fe.StrategyPlan.load(tmp_path / "plan.json").outcomes == both().outcomes
    content = json.loads((tmp_path / "plan.json").read_text())
    content["outcomes"][0]["candidate"]["tensor_parallel"] = "two"
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected a plan as written by `save`"):
        fe.StrategyPlan.load(tmp_path / "other.json")
