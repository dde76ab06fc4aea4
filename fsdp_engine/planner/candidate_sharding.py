"""Shards a model as a candidate of a plan says, with its tensor parallelism, over a mesh with the
dimension of its context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_engine.comm.groups import default_group, timeout_of_group
from fsdp_engine.comm.mesh import device_of, ranks_that_meet
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.engine import Engine
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.simulation.ranks import data_mesh_beside
from fsdp_engine.planner.simulation.step_options import Parallelize
from fsdp_engine.planner.simulation.tp_plan import apply_tp_plan, check_tp_plan
from fsdp_engine.sharding import shard

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

    candidate, arguments, device = agreed_candidate("StrategyPlan.shard", select, check)
    if candidate.is_data_parallel:
        return shard(model, candidate.mesh, **arguments)
    tensor = candidate.tensor_parallel
    data = data_mesh_beside(device.type, candidate.mesh, candidate.context_parallel, tensor)
    if tensor > 1:
        (parallelize or apply_tp_plan)(model, data._get_root_mesh()["tp"])
    return shard(model, data, **arguments)


def agreed_candidate(
    what: str, select: Select, check: Callable[[Candidate], None]
) -> tuple[Candidate, Mapping[str, Any], torch.device]:
    """The candidate of all ranks, the arguments of ``shard``, and this rank's device.

    Args:
        what: the caller, for errors.
        select: see :func:`shard_as`.
        check: raises an error for a candidate.

    Raises:
        ValueError: an error of ``select`` or ``check``, or the candidates differ; on all ranks.
    """
    with reporting(what, ranks := ranks_that_meet(None)):
        candidate, arguments = select(len(ranks))
        check(candidate)
    device = device_of(None)
    meet(what, ranks, timeout_of_group(default_group(), device), note=str(candidate))
    return candidate, arguments, device
