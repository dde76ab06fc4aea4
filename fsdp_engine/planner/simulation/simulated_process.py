"""The process of one simulated rank: its process groups, its lanes, and fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_engine.extras import kept_random_state
from fsdp_engine.planner.simulation.clock import Clock
from fsdp_engine.planner.simulation.compiled import free_traces, kept_rules, simulated_compiler
from fsdp_engine.planner.simulation.memory_tracker import MemoryTracker
from fsdp_engine.planner.simulation.meshes import meshes_with_values
from fsdp_engine.planner.simulation.module_names import ModuleNames
from fsdp_engine.planner.simulation.operations import OperationCache, Operations
from fsdp_engine.planner.simulation.ranks import simulated_ranks
from fsdp_engine.planner.simulation.simulation_error import as_simulation_error


@dataclass(frozen=True)
class SimulatedProcess:
    """The process of one rank of a simulated job.

    Attributes:
        clock: The clock of the rank.
        device_mesh: The mesh of the data-parallel axes.
        fake: The mode in which all tensors are fake.
        operations: The mode whose operations advance the clock.
        memory: The memory tracker of the rank.
        names: The names of the modules whose operations run.
    """

    clock: Clock
    device_mesh: DeviceMesh
    fake: FakeTensorMode
    operations: Operations
    memory: MemoryTracker
    names: ModuleNames

    def restart(self) -> None:
        """Clear the record of the previous step."""
        free_traces()
        self.memory.restart()
        self.clock.restart()
        self.names.restart()

    def step(self, optimizer: Optimizer) -> None:
        """Run the optimizer step, and clear gradients.

        Raises:
            SimulationError: The step raised an exception.
        """
        self.clock.phase = "step"
        before = self.memory.known()
        with as_simulation_error("the optimizer's step"):
            optimizer.step()
        self.memory.assign_kind("optimizer", but=before)
        optimizer.zero_grad()


@contextmanager
def simulated_process(
    clock: Clock,
    sizes: Sequence[int],
    *,
    known: OperationCache | None = None,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    pipeline_rank: int = 0,
) -> Iterator[SimulatedProcess]:
    """Make this process one rank of a job in this context: its operations advance ``clock``.

    Args:
        clock: The clock of the rank.
        sizes: The sizes of the data-parallel axes.
        known: A cache of operations, which the simulation extends. None: a new cache.
        context_parallel, tensor_parallel, pipeline, pipeline_rank: See
            :func:`~.simulation.ranks.simulated_ranks`.

    Raises:
        RuntimeError: torch.distributed is initialized in this process.
    """
    memory, names = MemoryTracker(), ModuleNames()
    clock.memory_changed, clock.module = memory.sample, names.current
    memory.now = lambda: clock.now
    memory.place = lambda: (clock.phase, names.last())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        kept_random_state(),  # torch's registrations of collectives draw
        kept_rules(),
        simulated_ranks(
            sizes,
            on_host=not clock.machine.host_runs_ahead,
            clock=clock,
            moved=memory.moved,
            context_parallel=context_parallel,
            tensor_parallel=tensor_parallel,
            pipeline=pipeline,
            pipeline_rank=pipeline_rank,
        ) as device_mesh,
        meshes_with_values(),
        fake,
        Operations(clock, memory, fake, known or OperationCache()) as operations,
        names.recording(),
        simulated_compiler(),
    ):
        yield SimulatedProcess(clock, device_mesh, fake, operations, memory, names)
