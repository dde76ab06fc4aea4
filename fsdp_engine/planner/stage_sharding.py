"""Builds and shards the stages of a pipeline for a candidate of a plan."""

from __future__ import annotations

from torch import nn
from torch.distributed.pipelining import PipelineStage

from fsdp_engine.kernel_interface import Hardware, find_module, on_all_ranks, shard
from fsdp_engine.planner.candidate_sharding import Select, agreed_candidate
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.simulation.causal_lm_stages import Stages, with_tp_plan
from fsdp_engine.planner.simulation.pipeline import schedule_class, stages_of_ranks
from fsdp_engine.planner.simulation.ranks import data_mesh_beside
from fsdp_engine.planner.simulation.step_options import Parallelize
from fsdp_engine.planner.simulation.tp_plan import apply_tp_plan

_WHAT = "StrategyPlan.shard_stages"


def shard_stages_as(
    select: Select, stages: Stages, parallelize: Parallelize | None
) -> list[PipelineStage]:
    """Build the stages of this rank, apply tensor parallelism, and shard each stage over its
    data-parallel ranks. Collective over all ranks.

    Args:
        select, parallelize: See :func:`~.candidate_sharding.shard_as`.
        stages: Builds the module of one stage.

    Raises:
        ValueError: ``select`` raised an error, the candidate has no pipeline, or the candidates
            differ between ranks. The error is raised on all ranks, before a stage is built. Errors
            of ``stages`` are also raised on all ranks.
    """

    def check(candidate: Candidate) -> None:
        if candidate.schedule is None:
            raise ValueError(
                f"plan: expected a candidate with a pipeline; found {candidate}. Call "
                "planning.shard(model) instead"
            )

    device = Hardware.of_process().device
    candidate, arguments = agreed_candidate(_WHAT, select, check)
    tensor, pipeline = candidate.tensor_parallel, candidate.pipeline
    data = data_mesh_beside(
        device.type, candidate.mesh, candidate.context_parallel, tensor, pipeline
    )
    root = data._get_root_mesh()
    of_ranks = stages_of_ranks(schedule_class(candidate.schedule or ""), pipeline, None)
    num_stages = sum(map(len, of_ranks))
    indices = of_ranks[root.get_local_rank("pp")]

    def build(_: int) -> list[nn.Module]:
        return [_built(stages, index, num_stages) for index in indices]

    modules = on_all_ranks(_WHAT, build, note=lambda _: "")
    stage = find_module("pipelines.pipeline_stage", needed_by="pipeline").PipelineStage
    found: list[PipelineStage] = []
    for index, module in zip(indices, modules, strict=True):
        if tensor > 1 and parallelize is None:
            apply_tp_plan(with_tp_plan(module), root["tp"])
        elif tensor > 1 and parallelize is not None:
            parallelize(module, root["tp"])
        shard(module, data, **arguments)
        group = root.get_group("pp")
        found.append(stage(module, index, num_stages, device, group=group))
    return found


def _built(stages: Stages, index: int, num_stages: int) -> nn.Module:
    module = stages(index, num_stages)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"stages: expected a function that returns a torch.nn.Module; found for stage {index} "
            f"a {type(module).__name__}"
        )
    return module
