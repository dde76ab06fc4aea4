"""Shards a model for a candidate of a plan: applies its tensor parallelism, and shards parameters
over a mesh with a dimension for its context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fsdp_engine.kernel_interface import Engine, Hardware, on_all_ranks, shard
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.simulation.ranks import data_mesh_beside
from fsdp_engine.planner.simulation.step_options import Parallelize
from fsdp_engine.planner.simulation.tp_plan import apply_tp_plan, check_tp_plan

Select = Callable[[int], tuple[Candidate, Mapping[str, Any]]]


def shard_as(select: Select, model: nn.Module, parallelize: Parallelize | None) -> Engine:
    """Apply the candidate's tensor parallelism, and shard the model over its data-parallel ranks.
    Collective over all ranks.

    Args:
        select: Takes the number of ranks of the job, and returns the candidate and the arguments
            of ``fe.shard``.
        model: The model, which is sharded in place.
        parallelize: Applies tensor parallelism. None: the model's ``tp_plan`` is applied.

    Raises:
        ValueError: ``select`` raised an error, the model has no tensor-parallel plan, the candidate
            has a pipeline, or the candidates differ between ranks. The error is raised on all
            ranks, before the model is changed.
    """

    def check(candidate: Candidate) -> None:
        if candidate.pipeline > 1:
            raise ValueError(
                "plan: expected a candidate without a pipeline, since a pipeline's rank has only "
                f"some stages; found {candidate}. Call planning.shard_stages instead"
            )
        if candidate.tensor_parallel > 1 and parallelize is None:
            check_tp_plan(model, candidate.tensor_parallel)

    candidate, arguments = agreed_candidate("StrategyPlan.shard", select, check)
    if candidate.is_data_parallel:
        return shard(model, candidate.mesh, **arguments)
    tensor, device = candidate.tensor_parallel, Hardware.of_process().device
    data = data_mesh_beside(device.type, candidate.mesh, candidate.context_parallel, tensor)
    if tensor > 1:
        (parallelize or apply_tp_plan)(model, data._get_root_mesh()["tp"])
    return shard(model, data, **arguments)


def agreed_candidate(
    what: str, select: Select, check: Callable[[Candidate], None]
) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate, after a check that it is equal on all ranks, and the arguments of
    ``shard``.

    Args:
        what: The caller, for errors.
        select: See :func:`shard_as`.
        check: Raises an error if the caller does not support a candidate.

    Raises:
        ValueError: ``select`` or ``check`` raised an error, or the candidates differ; on all ranks.
    """

    def checked(num_ranks: int) -> tuple[Candidate, Mapping[str, Any]]:
        candidate, arguments = select(num_ranks)
        check(candidate)
        return candidate, arguments

    return on_all_ranks(what, checked, note=lambda found: str(found[0]))
