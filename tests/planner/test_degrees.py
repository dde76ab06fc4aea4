"""Plans that try tensor and context parallelism beside data parallelism."""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine.planner.candidates import Candidate, is_quick
from fsdp_engine.planner.page import save_page
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.planner.plan_view import TIME_COLOURS
from fsdp_engine.simulation.tp_plan import fitting_degrees
from tests.composition.tensor_parallel import Model, cut
from tests.planner.made_plans import llama_batch, small_llama
from tests.pool import Ranks

pytestmark = pytest.mark.usefixtures("all_candidates")

WORLD = 4
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MACHINE = replace(fe.H100, ranks_per_node=2)
TOKENS = torch.arange(4 * 32).view(4, 32) % 64


def llama() -> nn.Module:
    return small_llama(1)


def plan(**changes: Any) -> fe.StrategyPlan:
    """On one axis, unless ``changes`` say another thing."""
    arguments = {"world_size": WORLD, "machine": MACHINE, "checkpointing": (False,), **changes}
    return fe.plan(llama, arguments.pop("batch", llama_batch), **arguments)


@functools.cache
def planned(*degrees: int) -> fe.StrategyPlan:
    """With these degrees, on one data-parallel axis."""
    meshes = [(WORLD // degree,) for degree in degrees]
    return plan(tensor_parallel=degrees, meshes=meshes)


def degrees_of(planning: fe.StrategyPlan) -> set[int]:
    return {each.candidate.tensor_parallel for each in planning.outcomes}


def test_a_plan_tries_the_degrees_that_fit_a_node_and_the_models_heads() -> None:
    for ranks_per_node, found in ((1, []), (2, [2]), (8, [2])):  # there are two key heads
        assert fitting_degrees(llama(), WORLD, ranks_per_node) == found
    assert fitting_degrees(llama(), 3, 8) == []
    assert fitting_degrees(Model(), WORLD, 8) == []
    quick = plan(tensor_parallel="auto", quick=True, meshes=[(WORLD,), (2,)])
    assert degrees_of(quick) == {1, 2}
    assert degrees_of(plan(quick=True, meshes=[(WORLD,)])) == {1}


def test_each_degree_is_simulated_as_by_itself() -> None:
    """Also a mesh that equals that of an earlier simulation, whose process groups are gone."""
    for outcome in planned(1, 2).outcomes:
        candidate = outcome.candidate
        assert candidate.data_parallel * candidate.tensor_parallel == WORLD
        if candidate.tensor_parallel == 1:
            continue
        alone = fe.simulate(
            llama,
            WORLD,
            batch=llama_batch(),
            mesh=candidate.mesh,
            tensor_parallel=2,
            machine=MACHINE,
            strategy=candidate.strategy,
            outer_strategy=candidate.outer_strategy,
        )
        assert outcome.times is not None
        assert outcome.times.step == pytest.approx(alone.seconds)
        assert outcome.memory == alone.memory
        assert outcome.sent == alone.sent_bytes
        assert outcome.items == TOKENS.numel() * candidate.data_parallel


def test_the_fastest_degrees_have_all_levels() -> None:
    """Without data parallelism alone, two tensor-parallel ranks are the fastest that fit."""
    found = [each.candidate for each in plan(tensor_parallel=2).outcomes]
    assert {each.strategy for each in found} == set(LEVELS)
    assert len(found) == len(set(found))
    quick = [each.candidate for each in plan(tensor_parallel=2, quick=True).outcomes]
    assert set(quick) == set(filter(is_quick, found))


def test_ranks_of_a_node_share_matrices_first() -> None:
    """Four ranks a node: two places of two ranks, so HSDP has nodes x 2."""
    machine = replace(MACHINE, ranks_per_node=4)
    planning = plan(tensor_parallel=2, world_size=8, machine=machine, quick=True)
    assert {each.candidate.mesh for each in planning.outcomes} == {(4,), (2, 2)}
    assert {each.candidate.ranks for each in planning.outcomes} == {"4, TP 2", "2 x 2, TP 2"}


def page_of(planning: fe.StrategyPlan, folder: Path) -> str:
    """The page of a plan with the timeline of its first row."""
    assert planning.simulate is not None
    step = planning.simulate(planning.outcomes[0].candidate)
    save_page(planning, folder / "plan.html", step)
    return (folder / "plan.html").read_text()


def test_waits_for_the_tensor_parallel_link_are_a_part_of_the_step(tmp_path: Path) -> None:
    link = replace(fe.H100.within_node, bandwidth=1e7)
    machine = replace(MACHINE, within_node=link)
    planning = plan(tensor_parallel=2, meshes=[(2,)], machine=machine, quick=True)
    times = planning.outcomes[0].times
    assert times is not None
    assert times.shares()["tensor link"] > 0.5
    assert times.shares().keys() <= TIME_COLOURS.keys()
    assert sum(times.shares().values()) == pytest.approx(1, abs=0.01)
    assert "sent tensor" in str(planning)
    assert "of 2 tensor-parallel ranks each" in str(planning)
    assert "Bottleneck: the tensor-parallel link (within a node)" in str(planning)
    assert "waits for the tensor link" in page_of(planning, tmp_path)


# Context parallelism.

LONG = 2**15


def long_batch(size: int = 1) -> dict[str, Tensor]:
    tokens = torch.zeros(size, LONG, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


@functools.cache
def shared(*degrees: int) -> fe.StrategyPlan:
    """With these degrees of context parallelism, on one axis."""
    return plan(context_parallel=degrees, meshes=[(WORLD,)], quick=True)


def contexts_of(planning: fe.StrategyPlan) -> set[tuple[int, ...]]:
    """Meshes with their degrees of context parallelism."""
    candidates = [each.candidate for each in planning.outcomes]
    return {(*each.mesh, each.context_parallel) for each in candidates}


def test_a_context_parallel_degree_is_simulated_as_by_itself() -> None:
    """Four ranks have two batches, of two ranks each."""
    for outcome in shared(1, 2).outcomes:
        candidate = outcome.candidate
        assert is_quick(candidate)
        assert outcome.items == TOKENS.numel() * WORLD // candidate.context_parallel
        assert outcome.items == TOKENS.numel() * candidate.num_batches
    outcome = next(each for each in shared(2).outcomes if each.times is not None)
    alone = fe.simulate(
        llama,
        WORLD,
        batch=llama_batch(),
        context_parallel=2,
        machine=MACHINE,
        strategy=outcome.candidate.strategy,
    )
    assert outcome.times is not None
    assert outcome.times.step == pytest.approx(alone.seconds)
    assert outcome.memory == alone.memory
    assert outcome.sent == alone.sent_bytes


def request(**changes: Any) -> PlanRequest:
    """Of a plan with all strategies, whose candidates are not simulated."""
    names = inspect.signature(fe.plan).parameters
    defaults = {name: each.default for name, each in names.items() if name != "options"}
    given = {"build": llama, "batch": llama_batch, "world_size": 16, "machine": fe.H100, **changes}
    return PlanRequest(**{**defaults, **given})


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


def test_auto_tries_context_parallelism_for_long_sequences() -> None:
    assert contexts_of(plan(context_parallel="auto", meshes=[(WORLD,)], quick=True)) == {(4, 1)}
    found = plan(
        context_parallel="auto", meshes=[(2, 2)], quick=True, batch=long_batch, checkpointing=[True]
    )
    assert contexts_of(found) == {(2, 2, 1), (2, 2, 2)}


def test_a_global_batch_has_rows_for_groups_of_context_parallel_ranks() -> None:
    """Two rows a step: one for each of two groups of two ranks."""
    with pytest.raises(ValueError, match="global_batch: expected a multiple of 128 tokens"):
        plan(global_batch=64)
    planning = plan(context_parallel=(1, 2), global_batch=64, quick=True, meshes=[(WORLD,)])
    assert contexts_of(planning) == {(4, 2)}
    assert planning.setting.global_batch == 64


def test_waits_for_the_context_parallel_link_are_a_part_of_the_step(tmp_path: Path) -> None:
    link = replace(fe.H100.within_node, bandwidth=1e7)
    machine = replace(MACHINE, within_node=link)
    planning = plan(context_parallel=2, meshes=[(WORLD,)], machine=machine, quick=True)
    times = planning.outcomes[0].times
    assert times is not None
    assert times.shares()["context link"] > 0.3
    assert times.shares().keys() <= TIME_COLOURS.keys()
    assert "sent context" in str(planning)
    assert "4, CP 2" in str(planning)
    assert "on 4 ranks in context-parallel groups of 2" in str(planning)
    assert "the context-parallel link (within a node)" in str(planning)
    assert "waits for the context link" in page_of(planning, tmp_path)


def test_a_plan_where_activations_do_not_fit_names_context_parallelism() -> None:
    hint = "Context parallelism (`context_parallel=`) may be enough."
    assert hint in str(planned(1).within(1000.0))
    assert hint not in str(shared(1, 2).within(1000.0))


def _shared_losses(path: str) -> tuple[list[float], tuple[int, ...], int]:
    """Losses of two steps, sizes of the engine's mesh, and context-parallel ranks."""
    torch.manual_seed(0)
    model = llama()
    engine = fe.StrategyPlan.load(path).shard(model)
    root = engine.mesh.device_mesh._get_root_mesh()
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    sizes = engine.mesh.outer.size, engine.mesh.inner.size
    return _trained(model, optimizer), sizes, root["cp"].size()


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_a_plan_shards_over_ranks_that_share_sequences(
    ranks: Ranks, tmp_path: Path, mesh: tuple[int, ...]
) -> None:
    """Attention of CPUs is not ring attention: all ranks have whole sequences here."""
    planning = plan(context_parallel=2, meshes=[mesh], quick=True)
    planning.save(tmp_path / "plan.json")
    torch.manual_seed(0)
    model = llama()
    expected = _trained(model, torch.optim.AdamW(model.parameters()))
    for losses, sizes, num_context in ranks.run(
        _shared_losses, str(tmp_path / "plan.json"), world_size=WORLD
    ):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert sizes[-1] == mesh[-1]
        assert math.prod(sizes) == WORLD
        assert num_context == 2


def test_a_plan_where_nothing_fits_names_tensor_parallelism() -> None:
    few = planned(1).within(1000.0)
    assert 'Tensor parallelism (`tensor_parallel="auto"`) may be enough.' in str(few)
    assert "Tensor parallelism" not in str(planned(1, 2).within(1000.0))


def test_a_global_batch_too_small_for_data_parallel_ranks_alone() -> None:
    """One row a step for each of two places of two ranks; four ranks cannot share two rows."""
    with pytest.raises(ValueError, match="global_batch: expected a multiple of 128 tokens"):
        plan(global_batch=64)
    planning = plan(tensor_parallel=(1, 2), global_batch=64, quick=True)
    assert degrees_of(planning) == {2}
    assert planning.setting.global_batch == 64
    with pytest.raises(ValueError, match="global_batch: expected a multiple of 64 tokens"):
        plan(tensor_parallel=2, global_batch=32)


def test_hopeless_candidates_are_left_out_with_tensor_parallelism() -> None:
    """Twelve bytes an element on half a rank each: 136 kB of weights and optimizer state."""
    num_elements = sum(each.numel() for each in llama().parameters())
    few = plan(tensor_parallel=2, meshes=[(2,)], memory=12 * num_elements / 2 - 1000, offload=None)
    assert {each.candidate.strategy for each in few.outcomes} == {"optim", "optim_grads_params"}


def test_a_model_without_a_plan_has_one_degree() -> None:
    with pytest.raises(ValueError, match="expected a model of transformers"):
        _linears(tensor_parallel=2)
    found = _linears(tensor_parallel=(1, 2), meshes=[(WORLD,), (2,)], parallelize=cut)
    assert degrees_of(found) == {1, 2}


def _linears(**options: Any) -> fe.StrategyPlan:
    arguments = {"world_size": WORLD, "machine": MACHINE, "checkpointing": (False,), **options}
    return fe.plan(Model, TOKENS, quick=True, **arguments)


def test_other_numbers_of_ranks_leave_out_degrees_that_do_not_divide_them() -> None:
    found = planned(1, 2).scaling([1, 2])
    assert [each.label for each in found.rows] == ["1", "2"]


def test_a_saved_plan_has_its_degrees(tmp_path: Path) -> None:
    planning = planned(1, 2)
    planning.save(tmp_path / "plan.json")
    assert fe.StrategyPlan.load(tmp_path / "plan.json").outcomes == planning.outcomes
    content = json.loads((tmp_path / "plan.json").read_text())
    content["outcomes"][0]["candidate"]["tensor_parallel"] = "two"
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected a plan as written by `save`"):
        fe.StrategyPlan.load(tmp_path / "other.json")


# What a plan says is then trained.


def _losses(path: str, case: str) -> tuple[list[float], tuple[int, ...], bool]:
    """Losses of two steps on the planned ranks, sizes of the engine's mesh, and whether the model
    has DTensors."""
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["fsdp_engine.sharding"], "make_engine", noting)
        engine = planning.shard(model)
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    losses = _trained(model, optimizer)
    return losses, (engine.mesh.outer.size, engine.mesh.inner.size), *has_dtensors


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses of two steps."""
    losses = []
    for _ in range(2):
        loss = _loss(model)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _loss(model: nn.Module) -> Tensor:
    if isinstance(model, Model):
        loss: Tensor = model(TOKENS % 16)
        return loss
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    return loss


@pytest.mark.parametrize(
    ("case", "degree", "sizes"),
    [
        ("llama", 1, (2, 2)),
        ("llama", 2, (2,)),
        ("linears", 2, (2, 1)),
        ("linears", 4, (1,)),
    ],
)
def test_a_planned_model_trains_on_its_ranks(
    ranks: Ranks, tmp_path: Path, case: str, degree: int, sizes: tuple[int, ...]
) -> None:
    planning = (
        plan(tensor_parallel=degree, meshes=[sizes], quick=True)
        if case == "llama"
        else _linears(tensor_parallel=degree, meshes=[sizes], parallelize=cut)
    )
    planning.save(tmp_path / "plan.json")
    torch.manual_seed(0)
    model = llama() if case == "llama" else Model()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = _trained(model, optimizer)
    found = ranks.run(_losses, str(tmp_path / "plan.json"), case, world_size=WORLD)
    for losses, engine_sizes, has_dtensors in found:
        assert losses == pytest.approx(expected, rel=1e-4)
        assert math.prod(engine_sizes) == WORLD // degree
        assert engine_sizes[-1] == sizes[-1]
        assert has_dtensors == (degree > 1)


def test_fe_shard_refuses_what_it_would_not_apply(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found .* 2 tensor-parallel .*planning.shard"):
        _ = planned(2).best


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
    planned(2).save(tmp_path / "plan.json")
    planned(1).save(tmp_path / "other.json")
    planned(2).within(1000.0).save(tmp_path / "none.json")
    plan(world_size=2, quick=True).save(tmp_path / "two.json")
    path = str(tmp_path / "plan.json")
    for other, message in (
        ("other.json", "expected the same on all ranks"),
        ("none.json", "expected a candidate that fits"),
        ("two.json", "expected a plan for 4 ranks; found one for 2"),
    ):
        for told in ranks.run(_refused, path, str(tmp_path / other), world_size=WORLD):
            assert message in told


def _shard_the_data_parallel_ranks(path: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    planning = fe.StrategyPlan.load(path)
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = llama()
    fe.apply_tp_plan(model, mesh["tp"])
    return str(fe.shard(model, mesh["dp"], strategy="auto", plan=planning).strategy)


def test_auto_takes_the_candidates_of_the_meshs_ranks(ranks: Ranks, tmp_path: Path) -> None:
    planning = planned(1, 2)
    planning.save(tmp_path / "plan.json")
    outcomes = [each for each in planning.outcomes if each.candidate.tensor_parallel == 2]
    chosen = outcomes[0].candidate
    found = ranks.run(_shard_the_data_parallel_ranks, str(tmp_path / "plan.json"), world_size=WORLD)
    assert found == [f"({chosen.strategy}, {chosen.outer_strategy})"] * WORLD


def test_a_planned_candidate_names_its_ranks() -> None:
    candidate = Candidate((2, 4), "optim_grads_params", "no_shard", False, tensor_parallel=8)
    assert candidate.ranks == "2 x 4, TP 8"
    assert replace(candidate, context_parallel=4).ranks == "2 x 4, CP 4, TP 8"
    assert str(candidate) == (
        "optim_grads_params + no_shard on 2 x 4 ranks of 8 tensor-parallel ranks each, "
        "no checkpointing"
    )


def test_an_error_has_no_prefix_of_a_rank_after_simulations() -> None:
    hook = sys.excepthook
    plan(tensor_parallel=2, meshes=[(2,)], quick=True)
    assert sys.excepthook is hook
