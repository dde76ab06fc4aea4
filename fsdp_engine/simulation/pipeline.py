"""``simulate_pipeline``: a step of pipeline-parallel training, with torch's schedules.

[Note: Simulated pipelines]
Each rank of the pipeline is simulated in turn, with the data-parallel ranks of its stages: the
modules are sharded by the engine and wrapped in :class:`fsdp_engine.pipelining.PipelineStage`, and
torch's schedule runs the rank's steps. The schedule decides the order of forwards and backwards,
the activations that are alive, and the points at which compute posts messages and waits for them.
Received tensors are fake ones, and arrive at once.

The calls of each rank's clock are on a tape (``tape.py``). Replays of all tapes run side by side:
each one until compute waits for a message whose other side is not posted. A transfer starts when
both ranks have posted it, as with NCCL and gloo.

Ranks are numbered as in a mesh ``("pp", ..., "dp")``: the data-parallel ranks of a stage are
consecutive, pipelines are the outermost axis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.tensor import DTensor

from fsdp_engine.comm.groups import members_of
from fsdp_engine.pipelining import PipelineStage
from fsdp_engine.sharding import shard
from fsdp_engine.simulation.causal_lm_stages import CausalLMStage
from fsdp_engine.simulation.clock import Clock
from fsdp_engine.simulation.compiled import compiled_modules
from fsdp_engine.simulation.device_kernels import device_kernels
from fsdp_engine.simulation.machine import H100, Link, Machine
from fsdp_engine.simulation.operations import OperationCache
from fsdp_engine.simulation.packed_sequences import one_sequence_a_row
from fsdp_engine.simulation.simulate import (
    MakeOptimizer,
    Parallelize,
    Simulation,
    build_fake_model,
    check_options,
    checkpoint_bytes_of,
    data_parallel_size,
    held_bytes,
    make_adamw,
    mesh_sizes,
    parallelize_model,
    shard_optimizer_of,
    simulation_of,
    to_fake,
)
from fsdp_engine.simulation.simulated_process import SimulatedProcess, simulated_process
from fsdp_engine.simulation.simulation_error import (
    SimulationError,
    as_simulation_error,
    check_callable,
    check_count,
    check_type,
)
from fsdp_engine.simulation.stage_messages import (
    Message,
    StageMessages,
    check_messages,
    is_stage_lane,
)
from fsdp_engine.simulation.tape import RecordingClock, Replay
from fsdp_engine.simulation.time_accuracy import accuracy_of, family_of

_CPU = torch.device("cpu")
# Their ranks hold stages s and n - 1 - s of n.
_V_SCHEDULES = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}

# The first step records the order of units, and ranks begin the second one as far apart as they end
# the first. A third step is like the second: `test_a_third_step_is_like_the_second`.
STEPS = 2

Stages = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Action:
    """A forward or a backward of one microbatch.

    Attributes:
        kind: "forward", "backward", or, of a split backward, "backward of inputs" and
            "backward of weights".
        stage: its index.
        microbatch: its number.
    """

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class PipelineSimulation:
    """A simulated step of a pipeline. Times are in seconds, memory in bytes; sequences have one
    item for each rank of the pipeline.

    Attributes:
        title: schedule, ranks and strategy.
        machine: the simulated machine.
        seconds: from the end of the previous step on the last rank that ends it to the end of this
            one.
        ranks: the steps of the ranks. Each begins at the end of the rank's previous step.
        starts: the beginnings of these steps, from the first of them on.
        stages: indices of the rank's stages.
        actions: forwards and backwards in the order of the schedule.
        num_targets: elements of the targets of all microbatches on all data-parallel ranks.
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
        """Time in which compute waits for other stages."""
        return tuple(_waited(rank, for_stages=True) for rank in self.ranks)

    @property
    def exposed_seconds(self) -> tuple[float, ...]:
        """Time in which compute waits for other communication and copies."""
        return tuple(_waited(rank, for_stages=False) for rank in self.ranks)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory."""
        return tuple(rank.peak_bytes for rank in self.ranks)

    @property
    def tokens_per_second(self) -> float:
        """Targets per second; those of language models are tokens."""
        return self.num_targets / self.seconds

    @property
    def mfu(self) -> float:
        """Model flops utilization; see :attr:`Simulation.mfu`."""
        return sum(rank.seconds_at_peak for rank in self.ranks) / len(self.ranks) / self.seconds

    def trace(self) -> dict[str, Any]:
        """The timeline in Chrome's trace event format, with one process for each rank of the
        pipeline, which has the rows of :meth:`Simulation.trace`."""
        events = []
        for number, (rank, start) in enumerate(zip(self.ranks, self.starts, strict=True)):
            for event in rank.trace()["traceEvents"]:
                event["pid"] = number
                if "ts" in event:
                    event["ts"] += start * 1e6
                events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> None:
        """Write :meth:`trace` as JSON, for Perfetto (ui.perfetto.dev)."""
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
    microbatches: int,
    batch: Any,
    target: Any,
    schedule: str | type[Any] = "1F1B",
    stages_per_rank: int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    mesh: Sequence[int] | None = None,
    tensor_parallel: int = 1,
    parallelize: Parallelize | None = None,
    machine: Machine = H100,
    optimizer: MakeOptimizer | None = None,
    known: OperationCache | None = None,
    **options: Any,
) -> PipelineSimulation:
    """Simulate a step of pipeline-parallel training; see [Note: Simulated pipelines].

    Runs in one process, as :func:`~fsdp_engine.simulate`.

    Args:
        stages: builds the module of one stage, ``stages(index, num_stages)``, on any device. Its
            forward takes the output of the previous stage. For causal language models of
            transformers: :class:`~fsdp_engine.CausalLMStages`.
        world_size: all ranks.
        pipeline: ranks of a pipeline, at least 2. The ``world_size / pipeline`` ranks of a stage
            are consecutive.
        microbatches: of a step.
        batch: inputs of the first stage, of one microbatch on one data-parallel rank: a tensor, a
            tuple of tensors, or a function that returns one of these. The first dimension is that
            of samples.
        target: of the same microbatch, for the loss: a tensor, or a function that returns it.
        schedule: of ``torch.distributed.pipelining``: a name that ``get_schedule_class`` accepts,
            or a class.
        stages_per_rank: None: 1, or 2 if the schedule takes several stages.
        loss: ``loss(output, target)`` of the last stage. None: the cross-entropy of logits.
        mesh: data-parallel ranks on each axis, (inner,) or (outer, inner). None: one axis.
        tensor_parallel: consecutive ranks of a stage that share its matrices. The others are
            data-parallel.
        parallelize: applies tensor parallelism to a stage in place,
            ``parallelize(module, tp_mesh)``. None: :func:`~fsdp_engine.apply_tp_plan`.
        machine: the simulated machine.
        optimizer: returns the optimizer for the sharded parameters of a rank. None: AdamW.
        known: see :func:`~fsdp_engine.simulate`.
        **options: of :func:`~fsdp_engine.sharding.shard`.

    Raises:
        SimulationError: a stage, the loss or the optimizer cannot run with fake tensors, or raised
            an exception; names the line.
        RuntimeError: torch.distributed is initialized in this process.
        TypeError: an argument has another type.
        ValueError: ``pipeline`` does not divide ``world_size``, ``tensor_parallel`` does not divide
            the ranks of a stage or the model's heads, ``mesh`` does not have the
            data-parallel ranks, the schedule is unknown or does not take this number of
            microbatches or stages, a stage has no parameter that requires grad, or a message of
            the schedule has no other side.
    """
    check_callable("stages", stages, "a function (index, num_stages) -> torch.nn.Module")
    check_count("world_size", world_size, "1 rank or more")
    check_count("pipeline", pipeline, "2 ranks or more")
    check_count("microbatches", microbatches, "at least 1")
    check_type("machine", machine, Machine, "a Machine, such as fe.H100")
    for name, function in (("loss", loss), ("optimizer", optimizer), ("parallelize", parallelize)):
        if function is not None:
            check_callable(name, function, "a function, or None")
    if pipeline < 2 or world_size % pipeline:
        raise ValueError(
            f"pipeline: expected a divisor of the {world_size} ranks, at least 2; found {pipeline}"
        )
    if known is not None:
        check_type("known", known, OperationCache, "an OperationCache, or None")
    sizes = mesh_sizes(mesh, data_parallel_size(world_size // pipeline, tensor_parallel))
    check_options(machine, options, world_size)
    kind = _schedule_class(schedule)
    job = _Job(
        stages,
        kind,
        _stages_of_ranks(kind, pipeline, stages_per_rank),
        microbatches,
        batch,
        target,
        loss or _cross_entropy,
        sizes,
        tensor_parallel,
        parallelize,
        machine,
        optimizer or make_adamw,
        known or OperationCache(),
        options,
    )
    job.check_schedule()
    arguments = job.infer_arguments()
    recorded = [job.record(rank, arguments) for rank in range(pipeline)]
    return _composed(job, recorded)


def _schedule_class(schedule: str | type[Any]) -> type[Any]:
    """Returns the schedule's class.

    Raises:
        TypeError: ``schedule`` is no name and no class of a schedule.
        ValueError: the name is unknown.
    """
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


def _stages_of_ranks(
    kind: type[Any], pipeline: int, stages_per_rank: int | None
) -> tuple[tuple[int, ...], ...]:
    """Indices of the stages of each rank.

    Raises:
        TypeError, ValueError: the schedule does not take this number of stages.
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


@dataclass(frozen=True)
class _Recorded:
    """The steps of one rank.

    Attributes:
        tape: its clock.
        result: returns the record of the last step, with the times of a replay of ``tape``, whose
            start and seconds are given.
        actions: of a step.
        num_targets: elements of the rank's targets in a step.
    """

    tape: RecordingClock
    result: Callable[[Replay, float, float], Simulation]
    actions: tuple[Action, ...]
    num_targets: int


@dataclass(frozen=True)
class _Job:
    """The arguments of :func:`simulate_pipeline`, checked.

    Attributes:
        stages_of: indices of the stages of each rank.
    """

    stages: Stages
    schedule: type[Any]
    stages_of: tuple[tuple[int, ...], ...]
    microbatches: int
    batch: Any
    target: Any
    loss: Callable[[Any, Any], Tensor]
    sizes: tuple[int, ...]
    tensor_parallel: int
    parallelize: Parallelize | None
    machine: Machine
    optimizer: MakeOptimizer
    known: OperationCache
    options: dict[str, Any]

    @property
    def pipeline(self) -> int:
        """Ranks of a pipeline."""
        return len(self.stages_of)

    @property
    def num_stages(self) -> int:
        """All stages."""
        return sum(map(len, self.stages_of))

    @property
    def data_size(self) -> int:
        """Data-parallel ranks."""
        return math.prod(self.sizes)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self.data_size * self.tensor_parallel

    def process(self, clock: Clock, rank: int = 0) -> AbstractContextManager[SimulatedProcess]:
        """The process of a rank of the pipeline."""
        return simulated_process(
            clock,
            self.sizes,
            known=self.known,
            tensor_parallel=self.tensor_parallel,
            pipeline=self.pipeline,
            pipeline_rank=rank,
        )

    def module(self, index: int, mesh: DeviceMesh) -> nn.Module:
        """Returns the fake module of a stage, with its tensor parallelism."""
        module = build_fake_model(partial(self.stages, index, self.num_stages))
        if self.tensor_parallel > 1:
            with_plan: nn.Module = module
            if self.parallelize is None and isinstance(module, CausalLMStage):
                with_plan = module.causal_lm
            tp_mesh = mesh._get_root_mesh()["tp"]
            parallelize_model(with_plan, self.parallelize, tp_mesh)
        return module

    def check_schedule(self) -> None:
        """Raises:
        ValueError: the schedule does not take the number of microbatches or of stages.
        """
        with self.process(Clock(self.machine)) as process:
            group = process.device_mesh._get_root_mesh().get_group("pp")
            stages = [
                PipelineStage(nn.Identity(), index, self.num_stages, _CPU, group=group)
                for index in self.stages_of[0]
            ]
            self.make_schedule(stages)

    def make_schedule(self, stages: Sequence[PipelineStage]) -> Any:
        """Returns torch's schedule of a rank's stages.

        Raises:
            ValueError: it does not take the number of microbatches or of stages.
        """
        is_single = issubclass(self.schedule, schedules.PipelineScheduleSingle)
        try:
            return self.schedule(
                stages[0] if is_single else list(stages), self.microbatches, loss_fn=self.loss_of
            )
        except (ValueError, AssertionError) as error:
            raise ValueError(
                f"microbatches: expected a number that {self.schedule.__name__} takes with "
                f"{self.num_stages} stages on {self.pipeline} ranks; found {self.microbatches}: "
                f"{error}"
            ) from error

    def loss_of(self, output: Any, target: Any) -> Tensor:
        """The loss of a microbatch.

        Raises:
            SimulationError: the user's function raised an exception.
            ValueError: it returns no tensor of one element that requires grad.
        """
        with as_simulation_error("the loss"):
            found = self.loss(output, target)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            raise ValueError(
                "loss: expected a function that returns a tensor of one element that requires "
                f"grad; found {found!r}"
            )
        return found

    def infer_arguments(self) -> list[tuple[Tensor, ...]]:
        """Returns the arguments of each stage, and the output of the last one, on the meta device,
        as torch's stages infer them in their first step."""
        found = []
        with self.process(Clock(self.machine)) as process, ExitStack() as stack:
            if self.machine.host_runs_ahead:
                stack.enter_context(device_kernels())
            inputs = self.made("batch", process.fake)
            for index in range(self.num_stages):
                found.append(inputs)
                module = self.module(index, process.device_mesh)
                # Fake tensors have no values to compare between ranks.
                engine = shard(module, process.device_mesh, **self.options, initial_values="rank0")
                with one_sequence_a_row(), as_simulation_error(f"forward of stage {index}"):
                    output = engine.model(*inputs)
                outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
                is_last = index == self.num_stages - 1
                if not (is_last or all(map(_is_plain, outputs))):
                    raise TypeError(
                        f"stages: expected a stage {index} that returns a tensor or a tuple of "
                        f"tensors, no DTensors; found {output!r}"
                    )
                inputs = tuple(_detached(each) for each in outputs if _is_plain(each))
                del output, outputs, engine, module
            found.append(inputs)
            return [tuple(map(_on_meta, each)) for each in found]

    def made(self, name: str, fake: Any) -> tuple[Tensor, ...]:
        """The fake tensors of "batch" or "target", of one microbatch.

        Raises:
            SimulationError: the user's function raised an exception.
            TypeError: there are other values than tensors.
        """
        given = getattr(self, name)
        with as_simulation_error(f"making the {name}"):
            found = to_fake(given() if callable(given) else given, fake)
        found = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(each, Tensor) for each in found) or (
            name == "target" and len(found) != 1
        ):
            expected = "a tensor" if name == "target" else "a tensor or a tuple of tensors"
            raise TypeError(f"{name}: expected {expected}; found {given!r}")
        return found

    def of_step(self, name: str, fake: Any) -> tuple[Tensor, ...]:
        """The fake tensors of "batch" or "target", of all microbatches."""
        return tuple(torch.cat([each] * self.microbatches) for each in self.made(name, fake))

    def link(self, first: int, second: int) -> Link:
        """The link between two ranks of the pipeline: that between nodes if it is for any of the
        ranks of their stages."""
        machine, size = self.machine, self.data_size * self.tensor_parallel
        nodes = [
            {(rank * size + each) // machine.ranks_per_node for rank in (first, second)}
            for each in range(size)
        ]
        is_far = any(len(each) > 1 for each in nodes)
        return machine.between_nodes if is_far else machine.within_node

    def record(self, rank: int, arguments: Sequence[tuple[Tensor, ...]]) -> _Recorded:
        """Simulate the steps of a rank of the pipeline alone."""
        clock = RecordingClock(self.machine, self.world_size)
        indices = self.stages_of[rank]
        with (
            self.process(clock, rank) as process,
            ExitStack() as stack,
        ):
            mesh, memory, names = process.device_mesh, process.memory, process.names
            memory.now = clock.sample_number
            modules = [self.module(index, mesh) for index in indices]
            of_rank = nn.ModuleDict(
                {f"stage {i}": each for i, each in zip(indices, modules, strict=True)}
            )
            names.set_model(of_rank)
            on_device = self.machine.host_runs_ahead
            stack.enter_context(compiled_modules(of_rank, names, on_device=on_device))
            if on_device:
                stack.enter_context(device_kernels())
            stack.enter_context(one_sequence_a_row())
            engines = [
                shard(module, mesh, **self.options, initial_values="rank0") for module in modules
            ]
            process.operations.data_ranks = frozenset(members_of(mesh))
            memory.watch(lambda: _sums([held_bytes(engine) for engine in engines]))
            with as_simulation_error("making the optimizer"):
                optimizer = self.optimizer(of_rank.parameters())
            shard_optimizer_of(optimizer)
            memory.settle("optimizer")
            inputs = self.of_step("batch", process.fake) if 0 in indices else ()
            last = self.num_stages - 1
            targets = self.of_step("target", process.fake) if last in indices else ()
            memory.made([*inputs, *targets])
            group = mesh._get_root_mesh().get_group("pp")
            actions: list[Action] = []
            stages = []
            for module, index in zip(modules, indices, strict=True):
                made = _SimulatedStage(
                    module,
                    index,
                    self.num_stages,
                    _CPU,
                    input_args=arguments[index],
                    output_args=arguments[index + 1],
                    group=group,
                )
                made.clock, made.actions = clock, actions
                stages.append(made)
            schedule = self.make_schedule(stages)
            stack.enter_context(_messages_recorded(clock, rank))
            for _ in range(STEPS + any(engine.offload.overlap_forward for engine in engines)):
                clock.finish()
                process.restart()
                actions.clear()
                schedule.step(*inputs, target=next(iter(targets), None), return_outputs=False)
                process.step(optimizer)
            clock.finish()
            num_bytes = checkpoint_bytes_of(of_rank, optimizer)
        title = f"pipeline rank {rank}, {engines[0].strategy}"

        def result(replay: Replay, start: float, seconds: float) -> Simulation:
            replay.clock.model_flops = clock.model_flops
            replay.clock.seconds_at_peak = clock.seconds_at_peak
            memory.series = [(replay.samples[int(number)], n) for number, n in memory.series]
            return simulation_of(title, replay.clock, memory, engines, start, seconds, num_bytes)

        num_targets = sum(each.numel() for each in targets)
        return _Recorded(clock, result, tuple(actions), num_targets)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _on_meta(tensor: Tensor) -> Tensor:
    found = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
    )
    return found.requires_grad_(tensor.requires_grad)


def _sums(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {role: sum(each.get(role, 0) for each in counts) for role in counts[0]}


def _cross_entropy(logits: Any, target: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


class _SimulatedStage(PipelineStage):
    """A stage that sets the phase of the clock, and whose messages have labels.

    Attributes:
        clock: of the rank.
        actions: forwards and backwards so far.
    """

    clock: RecordingClock
    actions: list[Action]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch's stage.

        Raises:
            SimulationError: the forward raised an exception.
        """
        self._begin("forward", "forward", fwd_chunk_id)
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:  # torch's, from the error of the forward
            if isinstance(error.__cause__, SimulationError):
                raise error.__cause__ from error.__cause__.__cause__
            raise

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's stage."""
        with as_simulation_error(f"forward of stage {self.stage_index}"):
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See torch's stage."""
        is_full = kwargs.get("full_backward", True)
        self._begin("backward" if is_full else "backward of inputs", "backward", bwd_chunk_id)
        with as_simulation_error(f"backward of stage {self.stage_index}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See torch's stage."""
        self._begin("backward of weights", "backward", bwd_chunk_id)
        with as_simulation_error(f"backward of stage {self.stage_index}"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        label = _label("activations", self.stage_index - 1, fwd_chunk_id)
        return _labelled(super().get_fwd_recv_ops(fwd_chunk_id), label)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        label = _label("activations", self.stage_index, fwd_chunk_id)
        return _labelled(super().get_fwd_send_ops(fwd_chunk_id), label)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        label = _label("gradients", self.stage_index, bwd_chunk_id)
        return _labelled(super().get_bwd_recv_ops(bwd_chunk_id), label)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """See torch's stage."""
        label = _label("gradients", self.stage_index - 1, bwd_chunk_id)
        return _labelled(super().get_bwd_send_ops(bwd_chunk_id), label)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []  # torch 2.11 opens connections by messages without contents

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        # All stages know the shapes of their arguments.
        return SimpleNamespace(item=lambda: 1)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)

    def _begin(self, kind: str, phase: str, microbatch: int) -> None:
        self.clock.phase = phase
        self.actions.append(Action(kind, self.stage_index, microbatch))


def _label(what: str, stage: int, microbatch: int) -> str:
    return f"{what} of stage {stage}, microbatch {microbatch}"


def _labelled(operations: list[Any], label: str) -> list[Any]:
    for each in operations:
        each.label = label
    return operations


class _Work:
    """A message in flight, in place of torch's ``Work``, which keeps the tensor: that of NCCL until
    compute waits for it, that of gloo as long as it exists."""

    def __init__(self, clock: RecordingClock, number: int, tensor: Tensor) -> None:
        self._clock, self._number = clock, number
        self._tensor: Tensor | None = tensor

    def wait(self) -> bool:
        """Make compute wait for it."""
        if self._clock.machine.host_runs_ahead:
            self._tensor = None
        self._clock.wait_for_message(self._number)
        return True


@contextmanager
def _messages_recorded(clock: RecordingClock, rank: int) -> Iterator[None]:
    """Within it, messages of torch's schedules are recorded by the clock of a pipeline's rank."""

    def post(operations: Sequence[Any], desc: str | None = None) -> list[_Work]:
        del desc
        messages = [
            Message(
                rank,
                each.group_peer,
                each.op.__name__ == "isend",
                each.label,
                each.tensor.numel() * each.tensor.itemsize,
            )
            for each in operations
        ]
        numbers = clock.post(messages)
        return [
            _Work(clock, number, each.tensor)
            for number, each in zip(numbers, operations, strict=True)
        ]

    replaced: Any = schedules
    original = replaced._batch_p2p
    replaced._batch_p2p = post
    try:
        yield
    finally:
        replaced._batch_p2p = original


def _composed(job: _Job, recorded: Sequence[_Recorded]) -> PipelineSimulation:
    """Replay the steps of all ranks side by side.

    Raises:
        ValueError: a message has no other side, or ranks wait for each other.
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
                "schedule: expected ranks that do not wait for each other's messages in a circle; "
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
    title = f"{job.schedule.__name__} of {job.microbatches} microbatches, {strategy}, "
    title += f"{job.pipeline} pipeline x {sizes} data-parallel ranks"
    if job.tensor_parallel > 1:
        title += f" of {job.tensor_parallel} tensor-parallel ranks each"
    return PipelineSimulation(
        title,
        job.machine,
        max(ends) - max(starts),
        ranks,
        tuple(start - min(starts) for start in starts),
        job.stages_of,
        tuple(each.actions for each in recorded),
        sum(each.num_targets for each in recorded) * job.data_size,
    )
