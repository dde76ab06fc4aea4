"""``fe.simulate_pipeline``: simulates a step of pipeline-parallel training with torch's schedules.

[Note: Simulated pipelines]
Each rank of the pipeline is simulated in turn, with the data-parallel ranks of its stages: the
modules are sharded by the engine and wrapped in :class:`fsdp_engine.pipelining.PipelineStage`, and
torch's schedule runs the rank's steps. The schedule decides the order of forwards and backwards,
the activations that are alive, and the points at which compute posts messages and waits for them.
Received tensors are fake tensors, which are available immediately.

Each rank's calls of the clock are recorded on a tape (``tape.py``). The tapes of all ranks are then
replayed side by side: each one runs until compute waits for a message that the other rank has not
posted. A transfer starts when both ranks have posted it, as with NCCL and gloo.

Ranks are numbered as in a mesh ``("pp", ..., "dp")``: the data-parallel ranks of a stage are
consecutive, and the pipeline is the outermost axis.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from fsdp_engine.kernel_interface import Options, find_module
from fsdp_engine.planner.simulation.causal_lm_stages import Stages
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.operations import OperationCache
from fsdp_engine.planner.simulation.pipeline_job import (
    Action,
    PipelineJob,
    Recorded,
    cross_entropy,
    empty_stages,
    make_schedule,
)
from fsdp_engine.planner.simulation.ranks import simulated_ranks
from fsdp_engine.planner.simulation.simulate import Simulation
from fsdp_engine.planner.simulation.simulation_error import check_callable, check_count, check_type
from fsdp_engine.planner.simulation.stage_costs import MICROBATCHES, costed_rank, stage_costs
from fsdp_engine.planner.simulation.stage_messages import (
    StageMessages,
    check_messages,
    is_stage_lane,
)
from fsdp_engine.planner.simulation.step_options import StepOptions
from fsdp_engine.planner.simulation.tape import Replay
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of, family_of

# Schedules whose rank s holds stages s and n - 1 - s of n.
_V_SCHEDULES = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}


@dataclass(frozen=True)
class PipelineSimulation:
    """A simulated step of a pipeline. Times are in seconds, memory in bytes; tuples have one item
    for each rank of the pipeline.

    Attributes:
        title: Schedule, ranks and strategy.
        machine: The simulated machine.
        seconds: Step time: from the latest end of the previous step on any rank to the latest end
            of this one.
        ranks: The steps of the ranks. Each begins at the end of the rank's previous step.
        starts: The start of each rank's step, relative to the earliest one.
        stages: Indices of each rank's stages.
        actions: Each rank's forwards and backwards in the order of the schedule.
        num_targets: Number of target elements in all microbatches on all data-parallel ranks, or
            on all groups of context-parallel ranks.
    """

    title: str
    machine: Machine
    seconds: float
    ranks: tuple[Simulation, ...]
    starts: tuple[float, ...]
    stages: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    num_targets: int

    @property
    def bubble_seconds(self) -> tuple[float, ...]:
        """Time of each rank in which compute waits for other stages."""
        return tuple(_waited(rank, for_stages=True) for rank in self.ranks)

    @property
    def exposed_seconds(self) -> tuple[float, ...]:
        """Time of each rank in which compute waits for other communication and copies."""
        return tuple(_waited(rank, for_stages=False) for rank in self.ranks)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of each rank."""
        return tuple(rank.peak_bytes for rank in self.ranks)

    @property
    def tokens_per_second(self) -> float:
        """Targets per second. The targets of language models are tokens."""
        return self.num_targets / self.seconds

    @property
    def mfu(self) -> float:
        """Model flops utilization, averaged over the ranks; see ``Simulation.mfu``."""
        return sum(rank.seconds_at_peak for rank in self.ranks) / len(self.ranks) / self.seconds

    def trace(self) -> dict[str, Any]:
        """Returns the timeline in Chrome's trace event format, with one process for each rank of
        the pipeline. Each process has the rows of ``Simulation.trace``."""
        events = []
        for number, (rank, start) in enumerate(zip(self.ranks, self.starts, strict=True)):
            for event in rank.trace()["traceEvents"]:
                event["pid"] = number
                if "ts" in event:
                    event["ts"] += start * 1e6
                events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> None:
        """Write the trace as JSON, for Perfetto (ui.perfetto.dev)."""
        Path(path).write_text(json.dumps(self.trace()))

    def __str__(self) -> str:
        lines = [f"{self.title}, {self.machine.name}"]
        lines.append(f"step        {self.seconds * 1e3:10.3f} ms")
        lines.append("rank   stages         compute ms   bubble ms  exposed ms    peak GiB")
        figures = (self.ranks, self.stages, self.bubble_seconds, self.exposed_seconds)
        for number, (rank, stages, bubble, exposed) in enumerate(zip(*figures, strict=True)):
            row = f"{number:<7}{', '.join(map(str, stages)):<13}"
            row += "".join(f"{1e3 * each:12.3f}" for each in (rank.compute_seconds, bubble))
            lines.append(f"{row}{1e3 * exposed:12.3f}{rank.peak_bytes / 2**30:12.3f}")
        lines.append(accuracy_of(family_of(self.machine)).sentence(self.seconds))
        return "\n".join(lines)


def _waited(rank: Simulation, *, for_stages: bool) -> float:
    return sum(each.seconds for each in rank.exposed if is_stage_lane(each.lane) == for_stages)


def simulate_pipeline(
    stages: Stages,
    world_size: int,
    *,
    pipeline: int,
    batch: Any,
    target: Any,
    schedule: str | type[Any] = "1F1B",
    stages_per_rank: int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    quick: bool = False,
    options: StepOptions | Options | None = None,
    **given: Any,
) -> PipelineSimulation:
    """Simulate a step of pipeline-parallel training; see [Note: Simulated pipelines].

    The simulation runs in this process, like ``fe.simulate``.

    Args:
        stages: Builds the module of one stage, ``stages(index, num_stages)``, on any device. Its
            forward takes the output of the previous stage. For causal language models of
            transformers: ``fe.CausalLMStages``.
        world_size: Number of ranks.
        pipeline: Number of ranks in a pipeline, at least 2. The ``world_size / pipeline`` ranks of
            a stage are consecutive.
        batch: Inputs of the first stage, for one microbatch on one data-parallel rank: a tensor, a
            tuple of tensors, or a function that returns one of these. The first dimension is the
            samples. With context parallelism, sequences are full; stages and their messages have
            one rank's part of them.
        target: The target of the same microbatch, for the loss: a tensor, or a function that
            returns it.
        schedule: The schedule of ``torch.distributed.pipelining``: a name that
            ``get_schedule_class`` accepts, or a class.
        stages_per_rank: Number of stages on each rank. None: 1, or 2 if the schedule takes several.
        loss: Computes the loss, ``loss(output, target)``, on the last stage. None: the
            cross-entropy of logits.
        quick: Simulate each different stage once, with few microbatches, instead of all forwards
            and backwards of all ranks: [Note: Costs of stages] in ``stage_costs.py``. Steps of
            fewer than four microbatches are always simulated in full.
        options: A ``StepOptions`` with the other options. None: they are keyword arguments. An
            ``fe.Options`` is instead passed on as the ``options`` argument of ``fe.shard``.
        **given: Fields of ``StepOptions``, of which ``microbatches`` is required, and arguments of
            ``fe.shard``.

    Raises:
        SimulationError: A stage, the loss or the optimizer cannot run with fake tensors, or raised
            an exception; the message names the line.
        RuntimeError: torch.distributed is initialized in this process.
        TypeError: An argument has a wrong type.
        ValueError: An argument is invalid. ``pipeline`` does not divide ``world_size``;
            ``tensor_parallel`` does not divide the ranks of a stage or the model's heads;
            ``context_parallel`` does not divide the inner axis or the sequences, or the machine is
            a CPU; ``mesh`` does not have the data-parallel ranks; the schedule is unknown or does
            not take this number of microbatches or stages; a stage has no parameter that requires
            grad; or a message of the schedule has no counterpart.
    """
    check_callable("stages", stages, "a function (index, num_stages) -> torch.nn.Module")
    check_count("world_size", world_size, "1 rank or more")
    check_count("pipeline", pipeline, "2 ranks or more")
    check_type("quick", quick, bool, "True or False")
    if loss is not None:
        check_callable("loss", loss, "a function, or None")
    if options is None and "microbatches" not in given:
        raise TypeError("microbatches: expected the number of microbatches per step; found none")
    asked = StepOptions.of(options, given)
    if pipeline < 2 or world_size % pipeline:
        raise ValueError(
            f"pipeline: expected a divisor of the {world_size} ranks, at least 2; found {pipeline}"
        )
    sizes = asked.sizes(world_size // pipeline)
    asked.check_shard(world_size)
    kind = schedule_class(schedule)
    job = PipelineJob(
        stages,
        kind,
        stages_of_ranks(kind, pipeline, stages_per_rank),
        batch,
        target,
        loss or cross_entropy,
        sizes,
        replace(asked, known=asked.known or OperationCache()),
    )
    kinds = job.action_kinds()
    arguments, first = job.infer_arguments()
    if quick and asked.microbatches >= MICROBATCHES:
        known_costs = {
            index: stage_costs(job, index, arguments, kinds) for index in sorted(set(first))
        }
        costs = [known_costs[index] for index in first]
        recorded = [costed_rank(job, rank, arguments, costs) for rank in range(pipeline)]
    else:
        recorded = [job.record(rank, arguments) for rank in range(pipeline)]
    return _composed(job, recorded)


def schedule_class(schedule: str | type[Any]) -> type[Any]:
    """Returns the schedule's class.

    Raises:
        TypeError: ``schedule`` is neither the name nor the class of a schedule.
        ValueError: The name is unknown, or the extension ``pipelines`` is not installed.
    """
    find_module("pipelines", needed_by="pipeline")
    expected = "the name or class of a schedule of torch.distributed.pipelining"
    kind = schedule
    if isinstance(schedule, str):
        try:
            kind = schedules.get_schedule_class(schedule)
        except ValueError as error:
            raise ValueError(
                f"schedule: expected {expected}; found {schedule!r}: {error}"
            ) from None
    bases = (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)
    if not isinstance(kind, type) or not issubclass(kind, bases) or kind in bases:
        raise TypeError(f"schedule: expected {expected}; found {schedule!r}")
    return kind


def stages_of_ranks(
    kind: type[Any], pipeline: int, stages_per_rank: int | None
) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of the stages of each rank of a pipeline.

    Args:
        kind: The class of the schedule.
        pipeline: Number of ranks in the pipeline.
        stages_per_rank: See :func:`simulate_pipeline`.

    Raises:
        TypeError, ValueError: The schedule does not take this number of stages.
    """
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    count = (1 if is_single else 2) if stages_per_rank is None else stages_per_rank
    check_count("stages_per_rank", count, "1 stage or more")
    is_v = kind.__name__ in _V_SCHEDULES
    if (is_single and count != 1) or (is_v and count != 2):
        raise ValueError(
            f"stages_per_rank: expected {1 if is_single else 2} for {kind.__name__}; found {count}"
        )
    style = "v" if is_v else "loop"
    found = generate_rank_to_stage_mapping(pipeline, pipeline * count, style)
    return tuple(tuple(found[rank]) for rank in range(pipeline))


@cache
def takes_microbatches(schedule: str, pipeline: int, microbatches: int) -> bool:
    """Returns whether a schedule takes this number of microbatches.

    Args:
        schedule, pipeline, microbatches: See :func:`simulate_pipeline`.
    """
    kind = schedule_class(schedule)
    stages_of = stages_of_ranks(kind, pipeline, None)
    with simulated_ranks((1,), on_host=True, pipeline=pipeline) as mesh:
        try:
            make_schedule(
                kind, empty_stages(stages_of, mesh), pipeline, microbatches, cross_entropy
            )
        except ValueError:
            return False
    return True


def _composed(job: PipelineJob, recorded: Sequence[Recorded]) -> PipelineSimulation:
    """Replay the steps of all ranks side by side.

    Raises:
        ValueError: A message has no counterpart, or ranks wait for each other in a cycle.
    """
    check_messages([message for each in recorded for message in each.tape.messages])
    messages = StageMessages(cache(job.link))
    replays = [Replay(each.tape, job.world_size, messages.post) for each in recorded]
    for replay in replays:
        replay.run()
    while waiting := {n: each.waits_for for n, each in enumerate(replays) if each.waits_for}:
        ready = [rank for rank, message in waiting.items() if message.is_complete]
        if not ready:
            found = "; ".join(f"rank {n}: {each.label}" for n, each in waiting.items())
            raise ValueError(
                "schedule: expected ranks that do not wait for each other's messages in a cycle; "
                f"found {found}"
            )
        for rank in ready:
            replays[rank].run()
    starts = [each.finishes[-2] for each in replays]
    ends = [each.finishes[-1] for each in replays]
    ranks = tuple(
        each.result(replay, start, end - start)
        for each, replay, start, end in zip(recorded, replays, starts, ends, strict=True)
    )
    sizes = " x ".join(map(str, job.sizes))
    strategy = ranks[0].title.split(", ", 1)[1]
    title = f"{job.schedule.__name__} of {job.step.microbatches} microbatches, {strategy}, "
    title += f"{job.pipeline} pipeline x {sizes} data-parallel ranks"
    if job.step.context_parallel > 1:
        title += f" in context-parallel groups of {job.step.context_parallel}"
    if job.step.tensor_parallel > 1:
        title += f", tensor parallelism over {job.step.tensor_parallel} ranks"
    return PipelineSimulation(
        title,
        job.step.machine,
        max(ends) - max(starts),
        ranks,
        tuple(start - min(starts) for start in starts),
        job.stages_of,
        tuple(each.actions for each in recorded),
        sum(each.num_targets for each in recorded) * job.num_batches,
    )
