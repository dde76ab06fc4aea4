"""Shards a model, or the stages of a pipeline, as a candidate of a plan says, with its tensor
parallelism, over a mesh with the dimension of its context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_engine.comm.groups import default_group, timeout_of_group
from fsdp_engine.comm.mesh import data_mesh_beside, device_of, ranks_that_meet
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.engine import Engine
from fsdp_engine.pipelining import PipelineStage
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.sharding import shard
from fsdp_engine.simulation.causal_lm_stages import with_tp_plan
from fsdp_engine.simulation.pipeline import schedule_class, stages_of_ranks
from fsdp_engine.simulation.pipeline_job import Stages
from fsdp_engine.simulation.simulate import Parallelize
from fsdp_engine.simulation.tp_plan import apply_tp_plan, check_tp_plan

Select = Callable[[int], tuple[Candidate, Mapping[str, Any]]]


def shard_as(select: Select, model: nn.Module, parallelize: Parallelize | None) -> Engine:
    """Apply tensor parallelism, and shard the model over the other ranks. Collective over all.

    Args:
        select: returns, for the number of all ranks, the candidate and the arguments of
            :func:`~fsdp_engine.shard`.
        model: sharded in place.
        parallelize: applies tensor parallelism. None: by the model's own plan.

    Raises:
        ValueError: an error of ``select``, the model has no tensor-parallel plan, the candidate has
            a pipeline, or the candidates differ between ranks; on all ranks, before anything is
            changed.
    """

    def check(candidate: Candidate) -> None:
        if candidate.pipeline > 1:
            raise ValueError(
                "plan: expected a candidate without a pipeline, of which a rank has some stages; "
                f"found {candidate}. Call planning.shard_stages instead"
            )
        if candidate.tensor_parallel > 1 and parallelize is None:
            check_tp_plan(model, candidate.tensor_parallel)

    candidate, arguments, device = _agreed("StrategyPlan.shard", select, check)
    if candidate.is_data_parallel:
        return shard(model, candidate.mesh, **arguments)
    tensor = candidate.tensor_parallel
    data = data_mesh_beside(device.type, candidate.mesh, candidate.context_parallel, tensor)
    if tensor > 1:
        (parallelize or apply_tp_plan)(model, data._get_root_mesh()["tp"])
    return shard(model, data, **arguments)


def shard_stages_as(
    select: Select, stages: Stages, parallelize: Parallelize | None
) -> list[PipelineStage]:
    """Build the stages of this rank, apply tensor parallelism, and shard each over its
    data-parallel ranks. Collective over all.

    Args:
        select, parallelize: see :func:`shard_as`.
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

    candidate, arguments, device = _agreed("StrategyPlan.shard_stages", select, check)
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


def _agreed(
    what: str, select: Select, check: Callable[[Candidate], None]
) -> tuple[Candidate, Mapping[str, Any], torch.device]:
    """The candidate of all ranks, the arguments of ``shard``, and this rank's device."""
    with reporting(what, ranks := ranks_that_meet(None)):
        candidate, arguments = select(len(ranks))
        check(candidate)
    device = device_of(None)
    meet(what, ranks, timeout_of_group(default_group(), device), note=str(candidate))
    return candidate, arguments, device
