"""Steps of pipelines from the costs of single forwards and backwards.

[Note: Costs of stages]
A schedule runs the same forward and backward of a stage once for each microbatch. What differs are
the first ones of a step, which find no gradients, the last backward, which reduces gradients that
are not sharded, and what the stage has run before: parameters that are still gathered are not
gathered again. So each stage is simulated alone, for a step of four microbatches that has all of
these cases, and stages that do the same are simulated once. This gives the time of each forward and
backward, and the memory that it needs and leaves. torch's schedule then runs stages that compute
nothing, and take these times (``tape.py``), and memory is added up.

Compared with a simulation of all forwards and backwards, communication of a stage that could run
beside its waits for other stages counts as exposed. ``tests/simulation/test_stage_costs.py``
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

from fsdp_engine.comm.mesh import simulated_ranks
from fsdp_engine.memory.allocator import empty, empty_like
from fsdp_engine.simulation.clock import Clock, Mark, StepPart
from fsdp_engine.simulation.memory_tracker import KINDS
from fsdp_engine.simulation.pipeline_job import (
    CPU,
    STEPS,
    Action,
    PipelineJob,
    PipelineRank,
    Recorded,
    SimulatedStage,
    messages_recorded,
    sums,
)
from fsdp_engine.simulation.simulate import Simulation, part_between, since
from fsdp_engine.simulation.tape import RecordingClock, Replay

# Of the step that a stage runs alone. A schedule of fewer is simulated as it is.
MICROBATCHES = 4

_F, _B = "forward", "backward"

Sizes = tuple[int, ...]  # bytes by kind, in the order of KINDS


@dataclass(frozen=True)
class Cost:
    """The cost of a forward, a backward, or the optimizer's step.

    Attributes:
        part: its time, bytes and flops, where the host issues work in no time.
        host_seconds: that the host needs to issue it.
        peak: its memory at the peak, less that at its start.
        change: its memory at the end, less that at its start.
    """

    part: StepPart
    host_seconds: float
    peak: Sizes
    change: Sizes


@dataclass(frozen=True)
class StageCosts:
    """The costs of a stage.

    Attributes:
        first: the first forward and the first backward of a step.
        further: other forwards and backwards, by their kind and the kind before them.
        last: the last backward.
        sent: change of memory, for each microbatch, when sent tensors are no longer kept.
        step: of the optimizer.
        held: memory at the start of a step of no microbatches.
        per_microbatch: bytes of inputs and targets, which a schedule holds for the whole step.
        num_targets: elements of the targets of a microbatch.
        alone: the record of the stage's step.
    """

    first: Mapping[str, Cost]
    further: Mapping[tuple[str, str], Cost]
    last: Cost
    sent: Sizes
    step: Cost
    held: Sizes
    per_microbatch: int
    num_targets: int
    alone: Simulation


class _ThreeAlive(schedules.Schedule1F1B):
    """Forwards and backwards of a stage alone: f0 f1 f2 b0 f3 b1 b2 b3."""

    def __init__(self, stage: Any, n_microbatches: int, loss_fn: Callable[..., Tensor]) -> None:
        # Not that of 1F1B, which asks for as many microbatches as stages.
        schedules.PipelineScheduleSingle.__init__(self, stage, n_microbatches, loss_fn=loss_fn)
        self._num_stages = stage.stage_index + 3  # the stage is the last but two


def stage_costs(
    job: PipelineJob, index: int, arguments: Sequence[tuple[Tensor, ...]]
) -> StageCosts:
    """Simulate a stage alone.

    Args:
        job: the job.
        index: of the stage.
        arguments: see :meth:`PipelineJob.infer_arguments`.
    """
    alone = replace(
        job,
        schedule=_ThreeAlive,
        stages_of=tuple((number,) for number in range(job.num_stages)),
        microbatches=MICROBATCHES,
    )
    clock, kept = RecordingClock(job.machine, job.world_size), list[Tensor]()
    # Schedules of several stages wait for what they have sent at the end of a step.
    keeps = None if job.has_one_stage_per_rank else kept
    with alone.rank(index, arguments, clock, keeps) as rank:
        schedule = alone.make_schedule(rank.stages)
        rank.step(schedule)
        for _ in range(1 + rank.overlaps_forward):
            kept.clear()
            start = clock.finish()
            rank.process.restart()
            meter = _Meter(rank)
            rank.stages[0].begins = meter.begin
            rank.run(schedule)
            meter.begin()
            kept.clear()
            meter.begin()
            rank.process.step(rank.optimizer)
            seconds = clock.finish() - start
            meter.begin()
        f0, f1, _, b0, f3, b1, b2, b3, sent, step = meter.costs()
        found = rank.result(clock, start, seconds)
    per_microbatch = sum(each.nbytes for each in (*rank.inputs, *rank.targets)) // MICROBATCHES
    return StageCosts(
        {_F: f0, _B: b0},
        {(_F, _F): f1, (_F, _B): f3, (_B, _F): b1, (_B, _B): b2},
        b3,
        tuple(each // MICROBATCHES for each in sent.change),
        step,
        _with_activations(meter.held, -MICROBATCHES * per_microbatch),
        per_microbatch,
        rank.num_targets // MICROBATCHES,
        found,
    )


class _Meter:
    """Measures forwards and backwards of a rank, from the start of each to the next one's.

    Memory is that without received tensors, of which other schedules have more or fewer at a time.
    """

    def __init__(self, rank: PipelineRank) -> None:
        self._clock, self._memory = rank.clock, rank.process.memory
        self._stage = rank.stages[0]
        self._marks: list[tuple[Mark, Sizes]] = []
        self._received: list[int] = []
        self._memory.place = lambda: (str(len(self._marks)), "")

    @property
    def held(self) -> Sizes:
        """Memory at the first one's start."""
        return self._marks[0][1]

    def begin(self, action: Action | None = None) -> None:
        """The next one begins, or the last one has ended."""
        self._marks.append((self._clock.mark(), ()))
        self._memory.sample()
        self._received.append(self._stage.received_bytes)
        held = _with_activations(self._memory.series[-1][1], -self._received[-1])
        self._marks[-1] = self._marks[-1][0], held

    def costs(self) -> list[Cost]:
        """The cost of each."""
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
                model_flops=end.model_flops - start.model_flops,
                seconds_at_peak=end.seconds_at_peak - start.seconds_at_peak,
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
    """A stage that computes nothing, and takes the time and memory of its costs.

    Attributes:
        costs: of the stage.
        outputs: of each forward.
        gradients: of the inputs of each backward.
        rank: adds up the costs.
    """

    costs: StageCosts
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    rank: _CostedRank

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._received = Counter[int]()  # bytes by microbatch

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        return self._received_by(fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        return self._received_by(bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch's stage."""
        self.begin(_F, "forward", fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (self.outputs, [])
        self.rank.run(self.costs)
        return self.outputs[0]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See torch's stage.

        Raises:
            ValueError: it is the first part of a backward.
        """
        if not kwargs.get("full_backward", True):
            raise ValueError(
                "schedule: expected one that runs backwards in one, for a quick simulation; found "
                "one with backwards of inputs and of weights, such as zero-bubble schedules"
            )
        self.begin(_B, "backward", bwd_chunk_id)
        del self.fwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = self.gradients
        self.rank.run(self.costs, is_last=kwargs.get("last_backward", False))
        self.rank.hold(-self._received.pop(bwd_chunk_id, 0))

    def _received_by(self, microbatch: int, operations: list[Any]) -> list[Any]:
        num_bytes = sum(each.tensor.nbytes for each in operations)
        self._received[microbatch] += num_bytes
        self.rank.hold(num_bytes)
        return operations

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See torch's stage: a part of the optimizer's step."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """See torch's stage: a part of the optimizer's step."""


class _CostedRank:
    """Adds up the costs of a rank's stages.

    Args:
        clock: of the rank.
        held: memory at the start of a step.

    Attributes:
        actions: of the step.
    """

    def __init__(self, clock: RecordingClock, held: Sizes) -> None:
        self.clock = clock
        self.actions: list[Action] = []
        self._last_kinds: dict[int, str] = {}  # of actions by stage
        self._begun: set[tuple[int, str]] = set()
        self._held = self._now = held
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.actions.clear()
        self._last_kinds.clear()
        self._begun.clear()
        self._now = self.peak = self._held
        self.parts: list[StepPart] = []
        self.series = [(self.clock.sample_number(), self._now)]

    def run(self, costs: StageCosts, *, is_last: bool = False) -> None:
        """Run the action that has begun.

        Args:
            costs: of its stage.
            is_last: it is the stage's last one.
        """
        stage, kind = self.actions[-1].stage, self.actions[-1].kind
        if is_last:
            cost = costs.last
        elif (stage, kind) in self._begun:
            cost = costs.further[kind, self._last_kinds[stage]]
        else:
            cost = costs.first[kind]
        self._begun.add((stage, kind))
        self._last_kinds[stage] = kind
        self.spend(f"microbatch {self.actions[-1].microbatch}", cost)

    def spend(self, label: str, cost: Cost) -> None:
        """Take the time and memory of an action."""
        highest = _sum(self._now, cost.peak)
        self.peak = max(self.peak, highest, key=sum)
        self.series.append((self.clock.sample_number(), highest))
        self.clock.spend(label, cost.part, cost.host_seconds)
        self._now = _sum(self._now, cost.change)
        self.series.append((self.clock.sample_number(), self._now))
        self.parts.append(cost.part)

    def hold(self, num_bytes: int) -> None:
        """Hold so many bytes of received tensors more."""
        self._now = _with_activations(self._now, num_bytes)

    def release(self, sizes: Sizes, times: int) -> None:
        """Change memory so many times."""
        self._now = _sum(self._now, tuple(times * each for each in sizes))

    def result(
        self,
        alone: Sequence[Simulation],
        title: str,
        replay: Replay,
        start: float,
        seconds: float,
    ) -> Simulation:
        """The record of the step; see :func:`~.simulate.simulation_of`.

        Args:
            alone: the stages' own.
            title, start, seconds: of the step.
            replay: of the rank's tape.
        """
        clock, parts = replay.clock, self.parts
        spans, exposed = since(start, clock)
        series = [(replay.samples[number] - start, sizes) for number, sizes in self.series]
        return replace(
            alone[0],
            title=title,
            seconds=seconds,
            spans=spans,
            exposed=exposed,
            memory=dict(zip(KINDS, self.peak, strict=True)),
            sent_bytes=sums(part.sent_bytes for part in parts),
            copied_bytes=sums(part.copied_bytes for part in parts),
            budget=sum(each.budget for each in alone),
            elsewhere=sums(each.elsewhere for each in alone),
            memory_series=(*series, (seconds, self._now)),
            memory_by_place={},
            model_flops=sum(part.model_flops for part in parts),
            seconds_at_peak=sum(part.seconds_at_peak for part in parts),
            checkpoint_bytes=sum(each.checkpoint_bytes for each in alone),
        )


def costed_rank(
    job: PipelineJob,
    rank: int,
    arguments: Sequence[tuple[Tensor, ...]],
    costs: Sequence[StageCosts],
) -> Recorded:
    """Run the steps of a rank with the costs of its stages.

    Args:
        job: the job.
        rank: of the pipeline.
        arguments: see :meth:`PipelineJob.infer_arguments`.
        costs: of all stages.

    Raises:
        ValueError: the schedule splits backwards.
    """
    clock, indices = RecordingClock(job.machine, job.world_size), job.stages_of[rank]
    of_rank = [costs[index] for index in indices]
    held: Sizes = (0,) * len(KINDS)
    for each in of_rank:
        more = job.microbatches * each.per_microbatch
        held = _sum(held, _with_activations(each.held, more))
    found = _CostedRank(clock, held)
    with (
        simulated_ranks(
            job.sizes,
            on_host=not job.machine.host_runs_ahead,
            tensor_parallel=job.tensor_parallel,
            pipeline=job.pipeline,
            pipeline_rank=rank,
        ) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        messages_recorded(clock, rank),
    ):
        group = mesh._get_root_mesh().get_group("pp")
        stages = [_costed_stage(job, index, arguments, costs, found, group) for index in indices]
        schedule = job.make_schedule(stages, loss=lambda output, target: output)
        rows = empty((job.microbatches,), torch.float32, CPU)  # a row for each microbatch
        inputs = [rows] * len(arguments[0]) if 0 in indices else []
        target = rows if job.num_stages - 1 in indices else None
        for _ in range(STEPS):
            clock.finish()
            clock.restart()
            found.restart()
            schedule.step(*inputs, target=target, return_outputs=False)
            clock.phase = "step"
            for each in of_rank:
                found.release(each.sent, job.microbatches)
            for each in of_rank:
                found.spend("optimizer", each.step)
        clock.finish()
    num_targets = job.microbatches * sum(each.num_targets for each in of_rank)

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
    stage.outputs = tuple(empty_like(each, CPU) for each in outputs)
    stage.gradients = tuple(
        empty_like(each, CPU) if each.requires_grad else None for each in inputs
    )
    return stage
