"""Builds and shards the stages of a pipeline as a candidate of a plan says."""

from __future__ import annotations

from fsdp_engine.comm.mesh import data_mesh_beside
from fsdp_engine.pipelining import PipelineStage
from fsdp_engine.planner.candidate_sharding import Select, agreed_candidate
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.sharding import shard
from fsdp_engine.simulation.causal_lm_stages import Stages, with_tp_plan
from fsdp_engine.simulation.pipeline import schedule_class, stages_of_ranks
from fsdp_engine.simulation.simulate import Parallelize
from fsdp_engine.simulation.tp_plan import apply_tp_plan


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
            between ranks; on all ranks, before anything is changed.
    """

    def check(candidate: Candidate) -> None:
        if candidate.schedule is None:
            raise ValueError(
                f"plan: expected a candidate with a pipeline; found {candidate}. Call "
                "planning.shard(model) instead"
            )

    candidate, arguments, device = agreed_candidate("StrategyPlan.shard_stages", select, check)
    tensor, pipeline = candidate.tensor_parallel, candidate.pipeline
    data = data_mesh_beside(device.type, candidate.mesh, tensor_parallel=tensor, pipeline=pipeline)
    root = data._get_root_mesh()
    of_ranks = stages_of_ranks(schedule_class(candidate.schedule or ""), pipeline, None)
    num_stages = sum(map(len, of_ranks))
    found = []
    for index in of_ranks[root.get_local_rank("pp")]:
        module = stages(index, num_stages)
        if tensor > 1 and parallelize is None:
            apply_tp_plan(with_tp_plan(module), root["tp"])
        elif tensor > 1 and parallelize is not None:
            parallelize(module, root["tp"])
        shard(module, data, **arguments)
        group = root.get_group("pp")
        found.append(PipelineStage(module, index, num_stages, device, group=group))
    return found
