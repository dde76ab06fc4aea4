"""The checked arguments of a simulated pipeline, and the ranks that run its stages."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules, stage
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.kernel_interface import Engine, allocator, find_module
from fsdp_engine.planner.simulation.causal_lm_stages import Stages, with_tp_plan
from fsdp_engine.planner.simulation.clock import Clock
from fsdp_engine.planner.simulation.context_parallel import ContextParallel, sequence_length
from fsdp_engine.planner.simulation.device_kernels import device_kernels
from fsdp_engine.planner.simulation.equal_structure import have_equal_structure
from fsdp_engine.planner.simulation.machine import Link
from fsdp_engine.planner.simulation.packed_sequences import masks_of_rows
from fsdp_engine.planner.simulation.simulate import (
    Simulation,
    build_fake_model,
    build_meta_module,
    checkpoint_bytes_of,
    context_of,
    parallelize_model,
    shard_fake,
    sharded,
    simulation_of,
    to_fake,
)
from fsdp_engine.planner.simulation.simulated_process import SimulatedProcess, simulated_process
from fsdp_engine.planner.simulation.simulation_error import SimulationError, as_simulation_error
from fsdp_engine.planner.simulation.stage_messages import Message
from fsdp_engine.planner.simulation.step_options import StepOptions
from fsdp_engine.planner.simulation.tape import RecordingClock, Replay
from fsdp_engine.planner.state_places import offload_of

if TYPE_CHECKING:
    PipelineStage = stage.PipelineStage
else:  # if the extension is missing, `schedule_class` raises an error
    PipelineStage = (find_module("pipelines.pipeline_stage") or stage).PipelineStage

CPU = torch.device("cpu")

# The first step records the order of units. Each rank starts the second step when it has ended the
# first, so the ranks start it at different times. A third step would be like the second.
STEPS = 2

# Kinds of actions of a schedule.
FORWARD, BACKWARD = "forward", "backward"
BACKWARD_OF_INPUTS, BACKWARD_OF_WEIGHTS = "backward of inputs", "backward of weights"
# torch's letters for the kinds.
LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_OF_INPUTS: "I", BACKWARD_OF_WEIGHTS: "W"}


@dataclass(frozen=True)
class Action:
    """A forward or a backward of one microbatch.

    Attributes:
        kind: ``FORWARD`` or ``BACKWARD``, or for a split backward ``BACKWARD_OF_INPUTS`` or
            ``BACKWARD_OF_WEIGHTS``.
        stage: Index of the stage.
        microbatch: Index of the microbatch.
    """

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Recorded:
    """The recorded steps of one rank.

    Attributes:
        tape: The clock of the rank, with a record of its calls.
        result: Takes a replay of ``tape``, and the start and seconds of the last step in it.
            Returns the simulation of this step.
        actions: The actions of a step.
        num_targets: Number of target elements of the rank in a step.
    """

    tape: RecordingClock
    result: Callable[[Replay, float, float], Simulation]
    actions: tuple[Action, ...]
    num_targets: int


@dataclass(frozen=True)
class PipelineJob:
    """The checked arguments of :func:`~.simulation.pipeline.simulate_pipeline`.

    Attributes:
        stages_of: Indices of the stages of each rank.
        sizes: The sizes of the data-parallel axes.
        step: The options of the step.
    """

    stages: Stages
    schedule: type[Any]
    stages_of: tuple[tuple[int, ...], ...]
    batch: Any
    target: Any
    loss: Callable[[Any, Any], Tensor]
    sizes: tuple[int, ...]
    step: StepOptions

    @property
    def pipeline(self) -> int:
        """Number of ranks in a pipeline."""
        return len(self.stages_of)

    @property
    def has_one_stage_per_rank(self) -> bool:
        """Whether the schedule is one of torch's schedules with one stage per rank."""
        return issubclass(self.schedule, schedules.PipelineScheduleSingle)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return sum(map(len, self.stages_of))

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks of a stage."""
        return math.prod(self.sizes)

    @property
    def num_batches(self) -> int:
        """Number of batches that run at the same time, one for each context-parallel group."""
        return self.data_size // self.step.context_parallel

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.pipeline * self.data_size * self.step.tensor_parallel

    def process(self, clock: Clock, rank: int = 0) -> AbstractContextManager[SimulatedProcess]:
        """Returns a context in which this process is a rank of the pipeline."""
        return simulated_process(
            clock,
            self.sizes,
            known=self.step.known,
            context_parallel=self.step.context_parallel,
            tensor_parallel=self.step.tensor_parallel,
            pipeline=self.pipeline,
            pipeline_rank=rank,
        )

    def module(self, index: int, mesh: DeviceMesh) -> nn.Module:
        """Returns the fake module of a stage, with tensor parallelism applied."""
        module = build_fake_model(partial(self.stages, index, self.num_stages))
        if self.step.tensor_parallel > 1:
            model = with_tp_plan(module) if self.step.parallelize is None else module
            parallelize_model(model, self.step.parallelize, mesh._get_root_mesh()["tp"])
        return module

    def action_kinds(self) -> tuple[str, ...]:
        """Returns the kinds of actions in the schedule, in the order of ``LETTERS``.

        Raises:
            ValueError: The schedule does not accept the number of microbatches or of stages.
        """
        with self.process(Clock(self.step.machine)) as process:
            schedule = self.make_schedule(empty_stages(self.stages_of, process.device_mesh))
        if self.has_one_stage_per_rank:
            return FORWARD, BACKWARD
        letters = {
            action.computation_type.value
            for actions in schedule.pipeline_order.values()
            for action in _single_actions(actions)
        }
        return tuple(kind for kind, letter in LETTERS.items() if letter in letters)

    def make_schedule(
        self,
        stages: Sequence[stage.PipelineStage],
        loss: Callable[[Any, Any], Tensor] | None = None,
    ) -> Any:
        """Returns torch's schedule for the stages of a rank.

        Args:
            stages: The stages of the rank.
            loss: The loss function. None: :meth:`loss_of`.

        Raises:
            ValueError: The schedule does not accept the number of microbatches or of stages.
        """
        return make_schedule(
            self.schedule, stages, self.pipeline, self.step.microbatches, loss or self.loss_of
        )

    def loss_of(self, output: Any, target: Any) -> Tensor:
        """Returns the loss of a microbatch.

        Raises:
            SimulationError: The user's function raised an exception.
            ValueError: The function does not return a tensor of one element that requires grad.
        """
        with as_simulation_error("the loss"):
            found = self.loss(output, target)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            raise ValueError(
                "loss: expected a function that returns a tensor of one element that requires "
                f"grad; found {found!r}"
            )
        return found

    def infer_arguments(self) -> tuple[list[tuple[Tensor, ...]], list[int]]:
        """Returns the arguments of each stage, followed by the output of the last one, on the meta
        device, as torch's stages infer them in their first step. Also returns for each stage the
        index of the first stage with equal operations and arguments."""
        equal_stages, first = self._find_equal_stages(), list[int]()
        with self.process(Clock(self.step.machine)) as process, ExitStack() as stack:
            context = context_of(process, self.step)
            if self.step.machine.host_runs_ahead:
                stack.enter_context(device_kernels())
            inputs = self.made("batch", process.fake)
            if context is not None:
                context.check_batch(inputs)
                stack.enter_context(context.shards(inputs))
            found = [tuple(map(_on_meta, inputs))]
            for index in range(self.num_stages):
                # The first stage receives nothing, and the last one has the loss, so they differ.
                ends = [(n == 0, n == self.num_stages - 1) for n in range(len(found))]
                kinds = list(zip(equal_stages, ends, map(_kinds, found), strict=False))
                first.append(kinds.index(kinds[index]))
                if first[index] < index:
                    found.append(found[first[index] + 1])
                    continue
                outputs = self._outputs(index, to_fake(found[index], process.fake), process)
                found.append(tuple(map(_on_meta, outputs)))
        return found, first

    def _find_equal_stages(self) -> list[int]:
        """Returns for each stage the index of the first one with equal modules, or its own index if
        the stages cannot be built on the meta device."""
        first: list[int] = []
        modules: list[nn.Module] = []
        try:
            for index in range(self.num_stages):
                module = build_meta_module(partial(self.stages, index, self.num_stages))
                modules.append(module)
                first.append(
                    next(n for n, each in enumerate(modules) if have_equal_structure(each, module))
                )
        except SimulationError:
            return list(range(self.num_stages))
        return first

    def _outputs(
        self, index: int, inputs: tuple[Tensor, ...], process: SimulatedProcess
    ) -> tuple[Tensor, ...]:
        """Returns the outputs of a stage."""
        module = self.module(index, process.device_mesh)
        engine = shard_fake(module, process.device_mesh, self.step)
        with (
            masks_of_rows(),
            _compiling_nothing(),  # otherwise the process' hooks would be traced
            as_simulation_error(f"forward of stage {index}"),
        ):
            output = engine.model(*inputs)
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        is_last = index == self.num_stages - 1
        if not (is_last or all(map(_is_plain, outputs))):
            raise TypeError(
                f"stages: expected a stage {index} that returns a tensor or a tuple of "
                f"tensors, no DTensors; found {output!r}"
            )
        # Outputs of the last stage may be DTensors, such as logits for ``loss_parallel``.
        local = [each.to_local() if isinstance(each, DTensor) else each for each in outputs]
        return tuple(_detached(each) for each in local if isinstance(each, Tensor))

    def made(self, name: str, fake: Any) -> tuple[Tensor, ...]:
        """Returns the fake tensors of "batch" or "target" for one microbatch.

        Raises:
            SimulationError: The user's function raised an exception.
            TypeError: The batch or target contains other values than tensors, or the target is not
                a single tensor.
        """
        given = getattr(self, name)
        with as_simulation_error(f"making the {name}"):
            found = to_fake(given() if callable(given) else given, fake)
        found = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(each, Tensor) for each in found) or (
            name == "target" and len(found) != 1
        ):
            expected = "a tensor" if name == "target" else "a tensor or a tuple of tensors"
            kinds = ", ".join(type(each).__name__ for each in found)
            raise TypeError(f"{name}: expected {expected}; found {kinds or 'an empty tuple'}")
        return found

    def of_step(self, name: str, fake: Any) -> tuple[Tensor, ...]:
        """Returns the fake tensors of "batch" or "target" for all microbatches."""
        return tuple(torch.cat([each] * self.step.microbatches) for each in self.made(name, fake))

    def link(self, first: int, second: int) -> Link:
        """Returns the link between two ranks of the pipeline. This is the link between nodes if any
        pair of corresponding ranks of their stages is on different nodes."""
        machine, size = self.step.machine, self.data_size * self.step.tensor_parallel
        nodes = [
            {(rank * size + each) // machine.ranks_per_node for rank in (first, second)}
            for each in range(size)
        ]
        is_far = any(len(each) > 1 for each in nodes)
        return machine.between_nodes if is_far else machine.within_node

    @contextmanager
    def rank(
        self,
        rank: int,
        arguments: Sequence[tuple[Tensor, ...]],
        clock: RecordingClock,
        keep: Callable[[Tensor], object] | None = None,
    ) -> Iterator[PipelineRank]:
        """Simulate a rank of the pipeline, with its sharded stages, in this context.

        Args:
            rank: The pipeline rank.
            arguments: See :meth:`infer_arguments`.
            clock: The clock of the rank. Messages of other ranks arrive on it immediately.
            keep: See :func:`messages_recorded`.
        """
        indices = self.stages_of[rank]
        with self.process(clock, rank) as process, ExitStack() as stack:
            mesh, memory = process.device_mesh, process.memory
            modules = [self.module(index, mesh) for index in indices]
            of_rank = nn.ModuleDict(
                {f"stage {i}": each for i, each in zip(indices, modules, strict=True)}
            )
            stack.enter_context(masks_of_rows())
            engines, optimizer = sharded(process, stack, of_rank, modules, mesh, self.step)
            inputs = self.of_step("batch", process.fake) if 0 in indices else ()
            last = self.num_stages - 1
            targets = self.of_step("target", process.fake) if last in indices else ()
            memory.made([*inputs, *targets])
            context = context_of(process, self.step)
            sequences = (*inputs, *targets)
            if context is not None and not sequences:
                # torch's context manager reads the sequence length from a tensor.
                length = sequence_length(self.made("batch", process.fake))
                sequences = (allocator.empty((1, length or 0), torch.uint8, CPU),)
            group = mesh._get_root_mesh().get_group("pp")
            stages = []
            for module, index in zip(modules, indices, strict=True):
                made = SimulatedStage(
                    module,
                    index,
                    self.num_stages,
                    CPU,
                    input_args=arguments[index],
                    output_args=arguments[index + 1],
                    group=group,
                )
                made.clock = clock
                stages.append(made)
            stack.enter_context(messages_recorded(clock, rank, keep))
            yield PipelineRank(
                self,
                rank,
                clock,
                process,
                of_rank,
                engines,
                optimizer,
                stages,
                inputs,
                targets,
                context,
                sequences,
            )

    def record(self, rank: int, arguments: Sequence[tuple[Tensor, ...]]) -> Recorded:
        """Simulate the steps of one rank of the pipeline, without the others."""
        clock = RecordingClock(self.step.machine, self.world_size)
        actions: list[Action] = []
        with self.rank(rank, arguments, clock) as found:
            memory = found.process.memory
            memory.now = clock.sample_number
            schedule = self.make_schedule(found.stages)
            for stage in found.stages:
                stage.begins = actions.append
            for _ in range(STEPS + found.overlaps_forward):
                clock.finish()
                found.process.restart()
                actions.clear()
                found.step(schedule)
            clock.finish()

        def result(replay: Replay, start: float, seconds: float) -> Simulation:
            replay.clock.model_flops = clock.model_flops
            replay.clock.seconds_at_peak = clock.seconds_at_peak
            memory.series = [(replay.samples[int(number)], n) for number, n in memory.series]
            return found.result(replay.clock, start, seconds)

        return Recorded(clock, result, tuple(actions), found.num_targets)


@dataclass(frozen=True)
class PipelineRank:
    """A rank of a simulated pipeline.

    Attributes:
        job: The job.
        number: The number of the rank.
        clock: The clock of the rank.
        process: The process of the rank.
        modules: The modules of the rank's stages, by name.
        engines: The engines of these modules.
        optimizer: The optimizer of all these modules.
        stages: The stages of the rank, for a schedule.
        inputs: The inputs of a step, if the rank has the first stage.
        targets: The targets of a step, if the rank has the last stage.
        context: The context-parallel group of the rank; None: sequences are not sharded.
        sequences: The inputs and targets. If the rank has neither, a tensor of their length.
    """

    job: PipelineJob
    number: int
    clock: RecordingClock
    process: SimulatedProcess
    modules: nn.ModuleDict
    engines: list[Engine]
    optimizer: Optimizer
    stages: list[SimulatedStage]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    context: ContextParallel | None
    sequences: tuple[Tensor, ...]

    @property
    def overlaps_forward(self) -> bool:
        """Whether the optimizer step overlaps with the next forward."""
        return any(offload_of(engine).overlap_forward for engine in self.engines)

    @property
    def num_targets(self) -> int:
        """Number of target elements in a step."""
        return sum(each.numel() for each in self.targets)

    def step(self, schedule: Any) -> None:
        """Run a step of torch's ``schedule``."""
        self.run(schedule)
        self.process.step(self.optimizer)

    def run(self, schedule: Any) -> None:
        """Run the forwards and backwards of a step."""
        target, context = next(iter(self.targets), None), self.context
        shards: AbstractContextManager[None] = nullcontext()
        if context is not None:  # some stages may have no attention
            shards = context.shards(self.sequences, needs_attention=False)
        with shards:
            schedule.step(*self.inputs, target=target, return_outputs=False)

    def result(self, clock: Clock, start: float, seconds: float) -> Simulation:
        """Returns the simulation of the last step; see :func:`~.simulate.simulation_of`."""
        title = f"pipeline rank {self.number}, {self.engines[0].strategy}"
        num_bytes = checkpoint_bytes_of(self.modules, self.optimizer)
        memory = self.process.memory
        return simulation_of(title, clock, memory, self.engines, start, seconds, num_bytes)


def empty_stages(stages_of: Sequence[Sequence[int]], mesh: DeviceMesh) -> list[stage.PipelineStage]:
    """Returns the stages of the first rank of a pipeline, with identity modules.

    Args:
        stages_of: Indices of the stages of each rank.
        mesh: The mesh of the simulated ranks.
    """
    group, count = mesh._get_root_mesh().get_group("pp"), sum(map(len, stages_of))
    return [
        stage.PipelineStage(nn.Identity(), index, count, CPU, group=group) for index in stages_of[0]
    ]


def make_schedule(
    schedule: type[Any],
    stages: Sequence[stage.PipelineStage],
    pipeline: int,
    microbatches: int,
    loss: Callable[[Any, Any], Tensor],
) -> Any:
    """Returns torch's schedule for the stages of a rank.

    Args:
        schedule, pipeline, microbatches, loss: See
            :func:`~.simulation.pipeline.simulate_pipeline`.
        stages: The stages of the rank.

    Raises:
        ValueError: The schedule does not accept the number of microbatches or of stages.
    """
    is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
    try:
        return schedule(stages[0] if is_single else list(stages), microbatches, loss_fn=loss)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"microbatches: expected a number that {schedule.__name__} accepts with "
            f"{stages[0].num_stages} stages on {pipeline} ranks; found {microbatches}: {error}"
        ) from error


def _single_actions(actions: Iterable[Any]) -> Iterator[Any]:
    """Yields torch's actions without idle ones. Overlapping actions are split into their parts."""
    for action in actions:
        if action is not None and action.sub_actions:
            yield from _single_actions(action.sub_actions)
        elif action is not None:
            yield action


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _compiling_nothing() -> AbstractContextManager[object]:
    """Returns a context in which compiled modules run eagerly."""
    is_loaded = "torch._dynamo" in sys.modules  # true if a module was compiled
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, bool]]:
    return [(each.shape, each.dtype, each.requires_grad) for each in tensors]


def _on_meta(tensor: Tensor) -> Tensor:
    found = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
    )
    return found.requires_grad_(tensor.requires_grad)


def cross_entropy(logits: Any, target: Any) -> Tensor:
    """Returns the loss of a language model from logits ``[..., vocab]`` and targets ``[...]``."""
    return F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


class SimulatedStage(PipelineStage):
    """A stage that sets the phase of the clock and labels its messages.

    Attributes:
        clock: The clock of the rank.
        begins: Called with each forward and backward at its start.
        received_bytes: See :class:`fsdp_engine.pipelining.PipelineStage`.
    """

    clock: RecordingClock
    received_bytes: int
    begins: Callable[[Action], object] = staticmethod(lambda action: None)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch's stage.

        Raises:
            SimulationError: The forward raised an exception.
        """
        self.begin(FORWARD, "forward", fwd_chunk_id)
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:  # torch wraps the error of the forward
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
        self.begin(BACKWARD if is_full else BACKWARD_OF_INPUTS, "backward", bwd_chunk_id)
        with as_simulation_error(f"backward of stage {self.stage_index}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See torch's stage."""
        self.begin(BACKWARD_OF_WEIGHTS, "backward", bwd_chunk_id)
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
        return []  # torch 2.11 opens connections by empty messages

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        # All stages already have the shapes of their arguments.
        return SimpleNamespace(item=lambda: 1)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)

    def begin(self, kind: str, phase: str, microbatch: int) -> None:
        """Set the phase, and report the start of a forward or backward."""
        self.clock.phase = phase
        self.begins(Action(kind, self.stage_index, microbatch))


def _label(what: str, stage: int, microbatch: int) -> str:
    return f"{what} of stage {stage}, microbatch {microbatch}"


def _labelled(operations: list[Any], label: str) -> list[Any]:
    for each in operations:
        each.label = label
    return operations


class _Work:
    """A message in flight, which replaces torch's ``Work``. It holds the tensor as torch does: with
    NCCL until compute waits for the message, with gloo as long as the work exists."""

    def __init__(self, clock: RecordingClock, number: int, tensor: Tensor | None) -> None:
        self._clock, self._number, self._tensor = clock, number, tensor

    def wait(self) -> bool:
        """Make compute wait for the message."""
        if self._clock.machine.host_runs_ahead:
            self._tensor = None
        self._clock.wait_for_message(self._number)
        return True


@contextmanager
def messages_recorded(
    clock: RecordingClock, rank: int, keep: Callable[[Tensor], object] | None = None
) -> Iterator[None]:
    """Record the messages of torch's schedules on the clock of a pipeline rank in this context.

    Args:
        clock: The clock of the rank.
        rank: The pipeline rank.
        keep: Called with each sent tensor, which is then not held by its message. None: messages
            hold their tensors.
    """

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
        works = []
        for number, message, each in zip(numbers, messages, operations, strict=True):
            is_given = keep is not None and message.is_send
            works.append(_Work(clock, number, None if is_given else each.tensor))
            if keep is not None and message.is_send:
                keep(each.tensor)
        return works

    replaced: Any = schedules
    original = replaced._batch_p2p
    replaced._batch_p2p = post
    try:
        yield
    finally:
        replaced._batch_p2p = original
