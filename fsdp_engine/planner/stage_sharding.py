"""Builds and shards the stages of a pipeline as a candidate of a plan says."""

from __future__ import annotations

from torch import nn
from torch.distributed.pipelining import PipelineStage

from fsdp_engine.comm.groups import default_group, timeout_of_group
from fsdp_engine.comm.mesh import ranks_that_meet
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.extension_list import required_module
from fsdp_engine.planner.candidate_sharding import Select, agreed_candidate
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.simulation.causal_lm_stages import Stages, with_tp_plan
from fsdp_engine.planner.simulation.pipeline import schedule_class, stages_of_ranks
from fsdp_engine.planner.simulation.ranks import data_mesh_beside
from fsdp_engine.planner.simulation.step_options import Parallelize
from fsdp_engine.planner.simulation.tp_plan import apply_tp_plan
from fsdp_engine.sharding import shard

_WHAT = "StrategyPlan.shard_stages"


def shard_stages_as(
    select: Select, stages: Stages, parallelize: Parallelize | None
) -> list[PipelineStage]:
    """Build the stages of this rank, apply tensor parallelism, and shard each over its
    data-parallel ranks. Collective over all.

    Args:
        select, parallelize: see :func:`~.candidate_sharding.shard_as`.
        stages: builds the module of one stage.

    Raises:
        ValueError: an error of ``select``, the candidate has no pipeline, or the candidates differ
            between ranks; on all ranks, before anything is built. Errors of ``stages`` are raised
            on all ranks, too.
    """

    def check(candidate: Candidate) -> None:
        if candidate.schedule is None:
            raise ValueError(
                f"plan: expected a candidate with a pipeline; found {candidate}. Call "
                "planning.shard(model) instead"
            )

    candidate, arguments, device = agreed_candidate(_WHAT, select, check)
    tensor, pipeline = candidate.tensor_parallel, candidate.pipeline
    data = data_mesh_beside(
        device.type, candidate.mesh, candidate.context_parallel, tensor, pipeline
    )
    root = data._get_root_mesh()
    of_ranks = stages_of_ranks(schedule_class(candidate.schedule or ""), pipeline, None)
    num_stages = sum(map(len, of_ranks))
    indices = of_ranks[root.get_local_rank("pp")]
    with reporting(_WHAT, ranks := ranks_that_meet(None)):
        modules = [_built(stages, index, num_stages) for index in indices]
    meet(_WHAT, ranks, timeout_of_group(default_group(), device))
    stage = required_module("pipelines.pipeline_stage", "pipeline").PipelineStage
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
