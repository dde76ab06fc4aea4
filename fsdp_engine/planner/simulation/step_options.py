"""Options that all simulations of a step share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.kernel_interface import allocator, checked_arguments
from fsdp_engine.planner.simulation.context_parallel import check_context_parallel
from fsdp_engine.planner.simulation.given_options import GivenOptions
from fsdp_engine.planner.simulation.machine import H100, Machine
from fsdp_engine.planner.simulation.operations import OperationCache
from fsdp_engine.planner.simulation.simulation_error import (
    check_callable,
    check_count,
    check_sizes,
    check_type,
    listed,
)
from fsdp_engine.planner.state_places import DISK, places_among

# A function that applies tensor parallelism to a model over a mesh of one axis.
Parallelize = Callable[[nn.Module, DeviceMesh], object]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class StepOptions(GivenOptions):
    """Options of ``fe.simulate`` and ``fe.simulate_pipeline``.

    Attributes:
        mesh: Number of ranks that parameters are sharded over on each axis, (inner,) or (outer,
            inner): the data-parallel ranks (of a stage), including context-parallel ones. None: one
            axis.
        context_parallel: Number of consecutive ranks of the inner axis that share each sequence.
            Forward and backward, or the step of a schedule, run within torch's
            ``context_parallel``, which shards all tensors of the batch whose dimension 1 is the
            sequence.
        tensor_parallel: Number of consecutive tensor-parallel ranks. The remaining factor of the
            ranks is data-parallel.
        parallelize: Applies tensor parallelism to the model or stage in place,
            ``parallelize(model, tp_mesh)``. None: ``fe.apply_tp_plan``.
        machine: The simulated machine.
        optimizer: Returns the optimizer for the sharded parameters of a rank. None: AdamW.
        microbatches: Number of forwards and backwards per step, all but the last under ``no_sync``.
        known: A cache of operations, which this simulation extends. Many simulations take less time
            if they share a cache. None: a new cache.
        compile: Call ``compile()`` of each block before sharding, as for training with
            ``torch.compile``. Blocks that are already compiled are always simulated as compiled.

    Raises:
        TypeError, ValueError: An option is invalid.
    """

    functions: ClassVar[str] = "simulate() or simulate_pipeline()"

    mesh: Sequence[int] | None = None
    context_parallel: int = 1
    tensor_parallel: int = 1
    parallelize: Parallelize | None = None
    machine: Machine = H100
    optimizer: MakeOptimizer | None = None
    microbatches: int = 1
    known: OperationCache | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        check_count("microbatches", self.microbatches, "at least 1")
        check_count("tensor_parallel", self.tensor_parallel, "1 rank or more")
        check_type("machine", self.machine, Machine, "a Machine, such as fe.H100")
        check_type("compile", self.compile, bool, "True or False")
        if self.known is not None:
            check_type("known", self.known, OperationCache, "an OperationCache, or None")
        for name in ("optimizer", "parallelize"):
            if (function := getattr(self, name)) is not None:
                check_callable(name, function, "a function, or None")

    def sizes(self, num_ranks: int) -> tuple[int, ...]:
        """Returns the sizes of the data-parallel axes.

        Args:
            num_ranks: Number of ranks of the model, or of a stage.

        Raises:
            TypeError, ValueError: ``tensor_parallel`` does not divide ``num_ranks``, ``mesh`` does
                not have the data-parallel ranks, or ``context_parallel`` is invalid for the inner
                axis.
        """
        if num_ranks % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel: expected a divisor of the {num_ranks} ranks; "
                f"found {self.tensor_parallel}"
            )
        count = num_ranks // self.tensor_parallel
        expected = f"one or two sizes of {count} ranks"
        sizes = (count,) if self.mesh is None else tuple(listed("mesh", self.mesh, expected))
        check_sizes("mesh", sizes, expected)
        if math.prod(sizes) != count or len(sizes) not in (1, 2) or min(sizes) < 1:
            raise ValueError(f"mesh: expected {expected}; found {sizes}")
        check_context_parallel(self.context_parallel, sizes[-1], self.machine)
        return sizes

    def check_shard(self, world_size: int) -> None:
        """Check options of ``shard`` that simulations restrict or that need figures of the machine.

        Raises:
            TypeError: ``extensions`` has an object that is not an extension.
            ValueError: An extension checks the values of gradients, or the machine's link to
                offloaded tensors is unknown.
        """
        machine = self.machine
        given = checked_arguments(self.shard, self.functions)
        extensions = given.get("extensions", ())
        for each in extensions:
            name = type(each).__name__
            if name == "GradientChecks":
                raise ValueError(
                    "extensions: expected no checks of gradients, which have no values in a "
                    f"simulation; found {each!r}"
                )
            if name == "OffloadActivations" and machine.host_runs_ahead:
                machine.link_to_state(allocator.HOST, world_size)
        offload = places_among(extensions)
        for place in sorted(set(offload.places.values())):
            if machine.host_runs_ahead or place == DISK:
                machine.link_to_state(place, world_size)
        if machine.host_runs_ahead and offload.main_weights == allocator.HOST:
            machine.host_rate(world_size)
