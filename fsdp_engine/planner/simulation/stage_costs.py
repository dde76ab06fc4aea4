"""Simulates steps of pipelines from the costs of single forwards and backwards.

[Note: Costs of stages]
A schedule runs the same forward and backward of a stage once for each microbatch. Schedules that
split backwards compute the gradients of inputs and of weights separately. Three things make actions
of one kind differ: the first backward of a step finds no accumulated gradients; the last one
reduces gradients that are not sharded; and parameters that the previous action left gathered are
not gathered again. So each stage is simulated alone, for one or two steps of few microbatches that
have all of these cases (``_ORDERS``), and stages with equal operations are simulated once. This
gives the time of each action, its peak memory, and the memory that it allocates or frees. torch's
schedule then runs stages that compute nothing and take these times (``tape.py``), and their memory
is added up.

Received tensors stay in memory as long as their microbatch is in flight (``pipeline_stage.py``).
The same holds for tensors that are passed on, without a message, between adjacent stages on one
rank (V-schedules). The number of these tensors depends on the schedule, so stages are measured
without them.

The result differs from a simulation of all forwards and backwards: communication of a stage counts
as exposed even if it could overlap with the stage's waits for other stages. ``test_pipelines.py``
compares both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.utils._pytree import tree_leaves

from fsdp_engine.kernel_interface import allocator
from fsdp_engine.planner.simulation.clock import Clock, Mark, StepPart
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.planner.simulation.pipeline_job import (
    BACKWARD,
    BACKWARD_OF_INPUTS,
    BACKWARD_OF_WEIGHTS,
    CPU,
    FORWARD,
    LETTERS,
    STEPS,
    Action,
    PipelineJob,
    PipelineRank,
    Recorded,
    SimulatedStage,
    messages_recorded,
)
from fsdp_engine.planner.simulation.ranks import simulated_ranks
from fsdp_engine.planner.simulation.records import add_all, combined
from fsdp_engine.planner.simulation.simulate import Simulation, part_between, since
from fsdp_engine.planner.simulation.tape import RecordingClock, Replay

# Steps of fewer microbatches are simulated in full.
MICROBATCHES = 4

# Orders of the actions that a stage runs alone, by the kinds of actions of its schedule: forwards
# F, backwards B, and the parts I (inputs) and W (weights) of split backwards. In the orders of a
# schedule, every pair of kinds occurs in succession, and each kind that computes gradients of
# weights occurs as the first and as the last such action of a step.
_ORDERS = {
    "FB": ("F0 F1 F2 B0 F3 B1 B2 B3",),
    "FIW": ("F0 F1 F2 I0 W0 F3 I1 F4 W1 I2 I3 I4 W2 W3 W4",),
    "FBIW": (
        "F0 F1 F2 B0 B1 F3 I2 I3 F4 I4 F5 W2 I5 W3 W4 W5",
        "F0 F1 F2 I0 W0 B1 F3 F4 B2 I3 B4 W3 F5 B5",
    ),
}

Case = tuple[str, str]  # kind of an action; kind before it, or "first" or "last"

Sizes = tuple[int, ...]  # bytes by kind, in the order of KINDS


@dataclass(frozen=True)
class Cost:
    """The cost of an action of a stage, or of an optimizer step.

    Attributes:
        part: Time, bytes and flops of the action, if the host takes no time to issue work.
        host_seconds: Seconds that the host needs to issue the action.
        peak: Peak memory of the action, minus the memory at its start.
        change: Memory at the end of the action, minus the memory at its start.
    """

    part: StepPart
    host_seconds: float
    peak: Sizes
    change: Sizes


@dataclass(frozen=True)
class StageCosts:
    """The costs of a stage.

    Attributes:
        of_case: The costs of the stage's actions, by case.
        sent: For each kind of action, the change of memory when the tensors that it has sent are
            released.
        step: The cost of the optimizer step.
        held: Memory at the start of a step, without inputs and targets.
        per_microbatch: Bytes of inputs and targets, which a schedule holds for the whole step.
        num_targets: Number of target elements of a microbatch.
        alone: The simulation of the stage's step, without other stages.
    """

    of_case: Mapping[Case, Cost]
    sent: Mapping[str, Sizes]
    step: Cost
    held: Sizes
    per_microbatch: int
    num_targets: int
    alone: Simulation


class _Cases:
    """Finds the case of each action of a stage, in the order of a step.

    Args:
        stage: Index of the stage. torch's first stage computes nothing in a backward of inputs.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._before = ""
        self._has_gradients = False

    def of(self, kind: str, *, is_last: bool) -> Case:
        """Returns the case of the next action.

        Args:
            kind: The kind of the action.
            is_last: Whether no later action of the step computes gradients of weights.
        """
        before = self._before
        if self._stage > 0 or kind != BACKWARD_OF_INPUTS:
            self._before = kind
        is_first = not before
        if kind in (BACKWARD, BACKWARD_OF_WEIGHTS) and not self._has_gradients:
            self._has_gradients = is_first = True
        return kind, "last" if is_last else "first" if is_first else before


class _InOrder(schedules._PipelineScheduleRuntime):
    """A schedule that runs the actions of one stage on each rank in a given order.

    Args:
        stage: The stage of this rank.
        order: One of ``_ORDERS``.
        loss_fn: The loss.
    """

    def __init__(self, stage: Any, order: str, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__([stage], order.count("F"), loss_fn=loss_fn)  # type: ignore[no-untyped-call]
        self.pipeline_order = {
            rank: [schedules._Action.from_str(f"{rank}{each}") for each in order.split()]
            for rank in range(stage.num_stages)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


def stage_costs(
    job: PipelineJob, index: int, arguments: Sequence[tuple[Tensor, ...]], kinds: Sequence[str]
) -> StageCosts:
    """Simulate a stage without the others, and return its costs.

    Args:
        job: The job.
        index: The index of the stage.
        arguments: See :meth:`PipelineJob.infer_arguments`.
        kinds: See :meth:`PipelineJob.action_kinds`.
    """
    orders = _ORDERS["".join(LETTERS[kind] for kind in kinds)]
    count = orders[0].count("F")
    stages_of = tuple((number,) for number in range(job.num_stages))
    alone = replace(job, stages_of=stages_of, step=replace(job.step, microbatches=count))
    clock = RecordingClock(job.step.machine, job.world_size)
    # Schedules with several stages per rank wait for their sends at the end of a step.
    kept = _Kept(newest_alone=job.has_one_stage_per_rank)
    of_case: dict[Case, Cost] = {}
    sent: dict[str, Sizes] = {}
    with alone.rank(index, arguments, clock, kept.keep) as rank:
        stage = rank.stages[0]
        for order in orders:
            schedule = _InOrder(stage, order, alone.loss_of)
            stage.begins = kept.begin
            rank.step(schedule)
            for kind in kinds:
                kept.release(kind)
            for _ in range(1 + rank.overlaps_forward):
                start = clock.finish()
                rank.process.restart()
                meter = _Meter(rank, kept)
                stage.begins = meter.begin
                rank.run(schedule)
                kept.end()
                for kind in kinds:
                    meter.next_part()
                    kept.release(kind)
                meter.next_part()
                rank.process.step(rank.optimizer)
                seconds = clock.finish() - start
                meter.next_part()
            costs, cases = iter(meter.costs()), _Cases(index)
            for action in meter.actions:
                is_last = action is meter.actions[-1]
                of_case.setdefault(cases.of(action.kind, is_last=is_last), next(costs))
            for kind in kinds:
                times = sum(action.kind == kind for action in meter.actions)
                sent[kind] = tuple(each // times for each in next(costs).change)
            step = next(costs)
        found = rank.result(clock, start, seconds)
    per_microbatch = sum(each.nbytes for each in (*rank.inputs, *rank.targets)) // count
    if rank.context is not None:
        per_microbatch *= 2  # torch's context manager keeps a copy of tensors that it shards
    return StageCosts(
        of_case,
        sent,
        step,
        _with_activations(meter.held, -count * per_microbatch),
        per_microbatch,
        rank.num_targets // count,
        found,
    )


class _Kept:
    """Holds sent tensors, by the kind of the action that computed them.

    Args:
        newest_alone: Whether tensors of an action are held only until the next action of its kind
            sends tensors.
    """

    def __init__(self, *, newest_alone: bool) -> None:
        self._newest_alone = newest_alone
        self._action: Action | None = None
        self._tensors: dict[str, list[tuple[Action, Tensor]]] = {}

    def begin(self, action: Action) -> None:
        """Set the action that begins."""
        self._action = action

    def keep(self, tensor: Tensor) -> None:
        """Hold a tensor that the current action sends."""
        assert self._action is not None
        before = self._tensors.get(self._action.kind, [])
        if self._newest_alone:
            before = [each for each in before if each[0] is self._action]
        self._tensors[self._action.kind] = [*before, (self._action, tensor)]

    def end(self) -> None:
        """Release all tensors at the end of a schedule, if only the newest ones are held."""
        if self._newest_alone:
            self._tensors.clear()

    def release(self, kind: str) -> None:
        """Release the tensors of this kind of action."""
        self._tensors.pop(kind, None)


class _Meter:
    """Measures the parts of a rank's step, each from its start to the start of the next one.

    Memory excludes received tensors, since their number depends on the schedule.

    Args:
        rank: The rank.
        kept: The rank's sent tensors.

    Attributes:
        actions: The actions of the first parts, one for each part. Later parts have no action.
    """

    def __init__(self, rank: PipelineRank, kept: _Kept) -> None:
        self.actions: list[Action] = []
        self._clock, self._memory, self._kept = rank.clock, rank.process.memory, kept
        self._stage = rank.stages[0]
        self._marks: list[tuple[Mark, Sizes]] = []
        self._received: list[int] = []
        self._memory.place = lambda: (str(len(self._marks)), "")

    @property
    def held(self) -> Sizes:
        """Memory at the start of the first part."""
        return self._marks[0][1]

    def begin(self, action: Action) -> None:
        """Record the start of an action."""
        self.actions.append(action)
        self._kept.begin(action)
        self.next_part()

    def next_part(self) -> None:
        """Record the start of the next part, or the end of the last one."""
        self._marks.append((self._clock.mark(), ()))
        self._memory.sample()
        self._received.append(self._stage.received_bytes)
        held = _with_activations(self._memory.series[-1][1], -self._received[-1])
        self._marks[-1] = self._marks[-1][0], held

    def costs(self) -> list[Cost]:
        """Returns the cost of each part."""
        tape = self._clock
        clock: Clock = tape
        marks = [mark for mark, _ in self._marks]
        if tape.machine.host_runs_ahead:
            for message in tape.messages:
                message.interval = (0.0, 0.0)
            machine = replace(tape.machine, host_seconds=0.0)
            replay = Replay(tape, tape.num_ranks, lambda message, time: None, machine)
            replay.run()
            clock, marks = replay.clock, replay.marks[-len(marks) :]
        found = []
        for number, (start, held) in enumerate(self._marks[:-1]):
            end, then = self._marks[number + 1]
            place = self._memory.by_place[str(number + 1), ""]
            peak = _with_activations(place, -self._received[number])
            part = replace(
                part_between(clock, *marks[number : number + 2]),
                model_flops=end.part.model_flops - start.part.model_flops,
                seconds_at_peak=end.part.seconds_at_peak - start.part.seconds_at_peak,
            )
            host = end.host - start.host
            found.append(Cost(part, host, _less(peak, held), _less(then, held)))
        return found


def _less(one: Sizes, other: Sizes) -> Sizes:
    return tuple(map(sub, one, other))


def _sum(one: Sizes, other: Sizes) -> Sizes:
    return tuple(map(add, one, other))


def _with_activations(sizes: Sizes, more: int) -> Sizes:
    return (*sizes[:-1], sizes[-1] + more)


class _CostedStage(SimulatedStage):
    """A stage that computes nothing, but spends the time and memory of its costs.

    Attributes:
        costs: The costs of the stage.
        outputs: The outputs of each forward.
        gradients: The gradients of the inputs in each backward.
        rank: The rank, which adds up the costs.
    """

    costs: StageCosts
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    rank: _CostedRank

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        found = super().get_fwd_recv_ops(fwd_chunk_id)
        self.rank.receive([each.tensor for each in found], self.stage_index, fwd_chunk_id)
        return found

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        found = super().get_bwd_recv_ops(bwd_chunk_id)
        self.rank.receive([each.tensor for each in found], self.stage_index, bwd_chunk_id)
        return found

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch's stage."""
        self.begin(FORWARD, "forward", fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (self.outputs, [])
        self.rank.run(self.costs)
        return self.outputs[0]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See torch's stage."""
        is_full = kwargs.get("full_backward", True)
        self.begin(BACKWARD if is_full else BACKWARD_OF_INPUTS, "backward", bwd_chunk_id)
        del self.fwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = self.gradients
        self.rank.run(self.costs, is_last=kwargs.get("last_backward", False))
        self.rank.release(self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See torch's stage."""
        self.begin(BACKWARD_OF_WEIGHTS, "backward", bwd_chunk_id)
        self.rank.run(self.costs, is_last=kwargs.get("last_backward", False))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """See torch's stage."""
        super().set_local_fwd_input(prev_stage_outputs, mb_index)
        # The previous stage holds its results until its backward.
        self.rank.pass_on(tree_leaves(prev_stage_outputs), self.stage_index - 1, mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """See torch's stage."""
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
        passed = [each for each in next_stage_bwd_outputs if each is not None]
        self.rank.pass_on(passed, self.stage_index, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See torch's stage. The cost of the last backward includes this."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """See torch's stage. The cost of the last backward includes this."""


class _CostedRank:
    """Adds up the costs of a rank's stages.

    Args:
        clock: The clock of the rank.
        held: Memory at the start of a step.

    Attributes:
        actions: The actions of the step.
    """

    def __init__(self, clock: RecordingClock, held: Sizes) -> None:
        self.clock = clock
        self.actions: list[Action] = []
        self._held = self._now = held
        self.restart()

    def restart(self) -> None:
        """Start a step with the initial memory."""
        self.actions.clear()
        self._cases: dict[int, _Cases] = {}  # by stage
        self._sent: list[Sizes] = []
        self._until_backward = Counter[tuple[int, int]]()  # bytes by stage and microbatch
        self._now = self.peak = self._held
        self.parts: list[StepPart] = []
        self.series = [(self.clock.sample_number(), self._now)]

    def run(self, costs: StageCosts, *, is_last: bool = False) -> None:
        """Spend the cost of the action that has begun.

        Args:
            costs: The costs of the action's stage.
            is_last: See :meth:`_Cases.of`.
        """
        action = self.actions[-1]
        cases = self._cases.setdefault(action.stage, _Cases(action.stage))
        case = cases.of(action.kind, is_last=is_last)
        self._sent.append(costs.sent[action.kind])
        self.spend(f"microbatch {action.microbatch}", costs.of_case[case])

    def receive(self, tensors: Sequence[Tensor], stage: int, microbatch: int) -> None:
        """Hold received tensors until the backward of a stage and microbatch."""
        num_bytes = sum(each.nbytes for each in tensors)
        self._now = _with_activations(self._now, num_bytes)
        self._until_backward[stage, microbatch] += num_bytes

    def pass_on(self, tensors: Sequence[Tensor], stage: int, microbatch: int) -> None:
        """Hold the last action's results until the backward of a stage and microbatch. The results
        are not sent, but passed on to another stage of this rank."""
        self._sent.pop()
        self._until_backward[stage, microbatch] += sum(each.nbytes for each in tensors)

    def release(self, stage: int, microbatch: int) -> None:
        """Release the tensors held until this backward. Call it after the backward, or after its
        part for inputs if it is split."""
        num_bytes = self._until_backward.pop((stage, microbatch), 0)
        self._now = _with_activations(self._now, -num_bytes)

    def release_sent(self) -> None:
        """Release the sent tensors of all actions."""
        for each in self._sent:
            self._now = _sum(self._now, each)

    def spend(self, label: str, cost: Cost) -> None:
        """Add the time and memory of an action."""
        highest = _sum(self._now, cost.peak)
        self.peak = max(self.peak, highest, key=sum)
        self.series.append((self.clock.sample_number(), highest))
        self.clock.spend(label, cost.part, cost.host_seconds)
        self._now = _sum(self._now, cost.change)
        self.series.append((self.clock.sample_number(), self._now))
        self.parts.append(cost.part)

    def result(
        self,
        alone: Sequence[Simulation],
        title: str,
        replay: Replay,
        start: float,
        seconds: float,
    ) -> Simulation:
        """Returns the simulation of the step; see :func:`~.simulate.simulation_of`.

        Args:
            alone: The simulations of the rank's single stages.
            title, start, seconds: Title, start and duration of the step.
            replay: The replay of the rank's tape.
        """
        clock, part = replay.clock, combined(add_all, *self.parts)
        spans, exposed = since(start, clock)
        series = [(replay.samples[number] - start, sizes) for number, sizes in self.series]
        return replace(
            alone[0],
            title=title,
            seconds=seconds,
            spans=spans,
            exposed=exposed,
            memory=dict(zip(KINDS, self.peak, strict=True)),
            sent_bytes=part.sent_bytes,
            copied_bytes=part.copied_bytes,
            budget=sum(each.budget for each in alone),
            elsewhere=combined(add_all, *(each.elsewhere for each in alone)),
            memory_series=(*series, (seconds, self._now)),
            memory_by_place={},
            model_flops=part.model_flops,
            seconds_at_peak=part.seconds_at_peak,
            checkpoint_bytes=sum(each.checkpoint_bytes for each in alone),
        )


def costed_rank(
    job: PipelineJob,
    rank: int,
    arguments: Sequence[tuple[Tensor, ...]],
    costs: Sequence[StageCosts],
) -> Recorded:
    """Run the steps of a rank with stages that spend their costs instead of computing.

    Args:
        job: The job.
        rank: The pipeline rank.
        arguments: See :meth:`PipelineJob.infer_arguments`.
        costs: The costs of all stages.
    """
    clock, indices = RecordingClock(job.step.machine, job.world_size), job.stages_of[rank]
    of_rank = [costs[index] for index in indices]
    held: Sizes = (0,) * len(KINDS)
    for each in of_rank:
        more = job.step.microbatches * each.per_microbatch
        held = _sum(held, _with_activations(each.held, more))
    found = _CostedRank(clock, held)
    with (
        simulated_ranks(
            job.sizes,
            on_host=not job.step.machine.host_runs_ahead,
            tensor_parallel=job.step.tensor_parallel,
            pipeline=job.pipeline,
            pipeline_rank=rank,
        ) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        messages_recorded(clock, rank),
    ):
        group = mesh._get_root_mesh().get_group("pp")
        stages = [_costed_stage(job, index, arguments, costs, found, group) for index in indices]
        schedule = job.make_schedule(stages, loss=lambda output, target: output)
        # One row for each microbatch.
        rows = allocator.empty((job.step.microbatches,), torch.float32, CPU)
        inputs = [rows] * len(arguments[0]) if 0 in indices else []
        target = rows if job.num_stages - 1 in indices else None
        for _ in range(STEPS):
            clock.finish()
            clock.restart()
            found.restart()
            schedule.step(*inputs, target=target, return_outputs=False)
            clock.phase = "step"
            found.release_sent()
            for each in of_rank:
                found.spend("optimizer", each.step)
        clock.finish()
    num_targets = job.step.microbatches * sum(each.num_targets for each in of_rank)

    def result(replay: Replay, start: float, seconds: float) -> Simulation:
        title = f"pipeline rank {rank}, {of_rank[0].alone.title.split(', ', 1)[1]}"
        return found.result([each.alone for each in of_rank], title, replay, start, seconds)

    return Recorded(clock, result, tuple(found.actions), num_targets)


def _costed_stage(
    job: PipelineJob,
    index: int,
    arguments: Sequence[tuple[Tensor, ...]],
    costs: Sequence[StageCosts],
    rank: _CostedRank,
    group: Any,
) -> _CostedStage:
    inputs, outputs = arguments[index], arguments[index + 1]
    stage = _CostedStage(
        nn.Identity(),
        index,
        job.num_stages,
        CPU,
        input_args=inputs,
        output_args=outputs,
        group=group,
    )
    stage.clock, stage.begins = rank.clock, rank.actions.append
    stage.rank, stage.costs = rank, costs[index]
    stage.outputs = tuple(allocator.empty_like(each, CPU) for each in outputs)
    stage.gradients = tuple(
        allocator.empty_like(each, CPU) if each.requires_grad else None for each in inputs
    )
    return stage
