"""Shards a model as a candidate of a plan says, with its tensor parallelism, over a mesh with the
dimension of its context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fsdp_engine.comm.groups import default_group, timeout_of_group
from fsdp_engine.comm.mesh import data_mesh_beside, device_of, ranks_that_meet
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.engine import Engine
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.sharding import shard
from fsdp_engine.simulation.simulate import Parallelize
from fsdp_engine.simulation.tp_plan import apply_tp_plan, check_tp_plan

WHAT = "StrategyPlan.shard"


def shard_as(
    select: Callable[[int], tuple[Candidate, Mapping[str, Any]]],
    model: nn.Module,
    parallelize: Parallelize | None,
) -> Engine:
    """Apply tensor parallelism, and shard the model over the other ranks. Collective over all.

    Args:
        select: returns, for the number of all ranks, the candidate and the arguments of
            :func:`~fsdp_engine.shard`.
        model: sharded in place.
        parallelize: applies tensor parallelism. None: by the model's own plan.

    Raises:
        ValueError: an error of ``select``, the model has no tensor-parallel plan, or the candidates
            differ between ranks; on all ranks, before anything is changed.
    """
    with reporting(WHAT, ranks := ranks_that_meet(None)):
        candidate, arguments = select(len(ranks))
        tensor = candidate.tensor_parallel
        if tensor > 1 and parallelize is None:
            check_tp_plan(model, tensor)
    device = device_of(None)
    meet(WHAT, ranks, timeout_of_group(default_group(), device), note=str(candidate))
    if candidate.is_data_parallel:
        return shard(model, candidate.mesh, **arguments)
    data = data_mesh_beside(device.type, candidate.mesh, candidate.context_parallel, tensor)
    if tensor > 1:
        (parallelize or apply_tp_plan)(model, data._get_root_mesh()["tp"])
    return shard(model, data, **arguments)
