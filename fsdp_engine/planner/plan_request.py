"""The arguments of a plan, checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fsdp_engine.offload import HOST, Offload
from fsdp_engine.planner.candidates import (
    SELECTIVE,
    Activations,
    Candidate,
    Mesh,
    candidates,
    check_checkpointing,
    check_meshes,
    fitting_meshes,
    is_quick,
    quick_candidates,
)
from fsdp_engine.planner.command_inputs import import_function
from fsdp_engine.planner.outcome import USABLE
from fsdp_engine.simulation.causal_lm_stages import (
    CausalLMStages,
    Stages,
    check_stages,
    has_stages,
)
from fsdp_engine.simulation.machine import Machine
from fsdp_engine.simulation.simulate import MakeOptimizer, Parallelize
from fsdp_engine.simulation.simulation_error import (
    check_callable,
    check_count,
    check_positive,
    check_type,
    listed,
)
from fsdp_engine.simulation.tp_plan import check_tp_plan, fitting_degrees

# Everything that can be on the host.
EVERYTHING = Offload(optimizer_state=HOST, main_weights=HOST, gradients=HOST)
# As `offload`: only if nothing fits without; as `tensor_parallel`: all that the model has a plan
# for; as `context_parallel`: all that fit a node, for long sequences; as `pipeline`: up to the
# number of nodes.
AUTO = "auto"
# Ranks of a pipeline that "auto" tries.
_MOST_IN_PIPELINE = 16
# The offloads that are tried, until some fit.
_AUTO_OFFLOADS = (Offload(optimizer_state=HOST), EVERYTHING)


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of :func:`~.strategy_search.plan`, which describes them.

    Attributes:
        options: of ``fe.shard``.
        is_compared: the plan is one of several: the choice is not varied, and a quick plan tries
            all of its candidates, whatever time they take.
        only: the candidates to try, with their sizes of microbatches. Empty: all.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    build: Callable[[], nn.Module] | str
    batch: Any
    world_size: int
    machine: Machine | str
    memory: float | None
    meshes: Iterable[Sequence[int]] | None
    checkpointing: Iterable[Activations] | None
    microbatch_sizes: Sequence[int] | None
    microbatches: int
    loss: Callable[[Any], Tensor] | None
    optimizer: MakeOptimizer | None
    formulas: bool
    progress: bool
    offload: Offload | str | None
    global_batch: float | None
    sequences: Sequence[int] | None
    quick: bool
    cache: bool
    compile: bool
    context_parallel: int | Sequence[int] | str
    tensor_parallel: int | Sequence[int] | str
    parallelize: Parallelize | None
    pipeline: int | Sequence[int] | str
    schedules: str | Sequence[str]
    stages: Stages | None
    stage_loss: Callable[[Any, Any], Tensor] | None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_compared: bool = False
    only: tuple[Candidate, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            *("meshes", "checkpointing", "microbatch_sizes", "sequences"),
            *("context_parallel", "tensor_parallel", "pipeline", "schedules"),
        ):
            value = getattr(self, name)
            if isinstance(value, Iterator):  # the request is used again for other plans
                object.__setattr__(self, name, list(value))
        if not isinstance(self.machine, Machine):
            object.__setattr__(self, "machine", Machine.named(self.machine))
        check_count("world_size", self.world_size, "1 rank or more")
        check_count("microbatches", self.microbatches, "at least 1")
        if self.memory is not None:
            check_positive("memory", self.memory, "a number of bytes, such as 80e9")
        if self.offload is not None and self.offload != AUTO:
            check_type("offload", self.offload, Offload, "an fe.Offload, 'auto' or None")
        if not isinstance(self.build, str):
            check_callable(
                "build", self.build, "a function that returns a torch.nn.Module, or its name"
            )
        for name in ("loss", "optimizer", "parallelize", "stages", "stage_loss"):
            if (function := getattr(self, name)) is not None:
                check_callable(name, function, "a function, or None")
        for each in self.activations:
            check_checkpointing(each)
        for each in self._sizes:
            if each is not None:
                check_count("microbatch_sizes", each, "sizes of 1 or more")
        for each in self._lengths:
            if each is not None:
                check_count("sequences", each, "lengths of 1 or more")
        self._check_global_batch()
        self._check_degrees()
        if callable(self.batch):
            self._check_batch_function()
        for name in ("formulas", "progress", "quick", "cache", "compile"):
            check_type(name, getattr(self, name), bool, "True or False")

    def _check_global_batch(self) -> None:
        if self.global_batch is None:
            return
        check_positive("global_batch", self.global_batch, "tokens or samples of a step")
        if self.formulas:
            raise ValueError(
                "global_batch: expected a plan that runs the model, since formulas do not know the "
                "memory of a microbatch; found formulas"
            )
        if self.microbatches != 1:
            raise ValueError(
                "microbatches: expected none with global_batch, from which their number follows; "
                f"found {self.microbatches}"
            )

    def _check_batch_function(self) -> None:
        has_sizes = self.global_batch is not None or any(size is not None for size in self._sizes)
        has_lengths = any(length is not None for length in self._lengths)
        sizes = (1,) if has_sizes else ()
        lengths = {"sequence": 1} if has_lengths else {}
        try:
            inspect.signature(self.batch).bind(*sizes, **lengths)
        except ValueError:
            return  # a function in C, which has no signature
        except TypeError as error:
            shown = ", ".join(["size"] * has_sizes + ["sequence=length"] * has_lengths)
            raise ValueError(
                f"batch: expected a function that can be called as batch({shown}), with what "
                f"microbatch_sizes, global_batch and sequences ask for; found: {error}"
            ) from error

    def _check_degrees(self) -> None:
        if self.tensor_parallel == AUTO and self.parallelize is not None:
            raise ValueError(
                "tensor_parallel: expected numbers of ranks with parallelize, since 'auto' asks "
                "the plan that a model of transformers has; found 'auto'"
            )
        for name, degrees in (
            ("tensor_parallel", self._degrees),
            ("context_parallel", self._context_degrees(1)),
            ("pipeline", self._given_pipelines),
        ):
            if self.formulas and degrees != [1]:
                raise ValueError(
                    f"{name}: expected 1 with formulas, which do not know what it shards; "
                    f"found {getattr(self, name)!r}"
                )

        if self.pipeline != 1:
            from fsdp_engine.simulation.pipeline import schedule_class  # loads torch's compiler

            for each in self.schedule_names:
                schedule_class(each)

    def degrees(self, model: nn.Module) -> list[int]:
        """Degrees of tensor parallelism to try.

        Args:
            model: the job's, on any device.

        Raises:
            ValueError: the model has no tensor-parallel plan for one that was given.
        """
        if self.tensor_parallel == AUTO:
            return [1, *fitting_degrees(model, self.world_size, self.where.ranks_per_node)]
        for each in self._degrees:
            if each > 1 and self.parallelize is None:
                check_tp_plan(model, each)
        return self._degrees

    @property
    def _degrees(self) -> list[Any]:
        """Those that were given; "auto" has none yet."""
        return [] if self.tensor_parallel == AUTO else self._divisors("tensor_parallel")

    def pipelines(self, model: nn.Module) -> list[int]:
        """Numbers of ranks of a pipeline to try.

        Args:
            model: the job's, on any device.

        Raises:
            ValueError: the model has no stages for one that was given.
        """
        if self.pipeline != AUTO:
            for each in self._given_pipelines:
                if each > 1 and self.stages is None:
                    check_stages(model, each)
            return self._given_pipelines
        most = min(self.world_size // self.where.ranks_per_node, _MOST_IN_PIPELINE)
        powers = [2**power for power in range(1, most.bit_length())]
        powers = [each for each in powers if self.world_size % each == 0]
        if self.stages is None:
            powers = [each for each in powers if has_stages(model, each)]
        return [1, *powers]

    @property
    def _given_pipelines(self) -> list[Any]:
        """Those that were given; "auto" has none yet."""
        return [] if self.pipeline == AUTO else self._divisors("pipeline")

    @property
    def schedule_names(self) -> list[Any]:
        """Schedules of pipelines to try."""
        if isinstance(self.schedules, str):
            return [self.schedules]
        return listed("schedules", self.schedules, "names, such as '1F1B' and 'Interleaved1F1B'")

    @property
    def make_stage(self) -> Stages:
        """Builds a stage of a pipeline."""
        return CausalLMStages(self.make_model) if self.stages is None else self.stages

    def _context_degrees(self, tensor_parallel: int) -> list[int]:
        """Degrees of context parallelism to try beside one of tensor parallelism; with "auto" all
        that fit a node, whatever the length of sequences."""
        if self.context_parallel != AUTO:
            return self._divisors("context_parallel")
        if not self.where.host_runs_ahead:
            return [1]
        most = max(self.where.ranks_per_node // tensor_parallel, 1)
        powers = [2**power for power in range(most.bit_length())]
        return [each for each in powers if self.world_size % (each * tensor_parallel) == 0]

    def _divisors(self, name: str) -> list[int]:
        """Degrees that were given.

        Raises:
            TypeError, ValueError: one does not divide the ranks; of a plan that is compared, all.
        """
        given = getattr(self, name)
        kinds = "numbers of ranks, such as (1, 8), or 'auto'"
        found = [given] if isinstance(given, int) else listed(name, given, kinds)
        allowed = []
        for each in dict.fromkeys(found):
            check_count(name, each, "1 rank or more")
            if self.world_size % each == 0:
                allowed.append(each)
            elif not self.is_compared:
                raise ValueError(
                    f"{name}: expected a divisor of the {self.world_size} ranks; found {each}"
                )
        if not allowed:
            raise ValueError(
                f"{name}: expected a divisor of the {self.world_size} ranks; found {given}"
            )
        return allowed

    @property
    def where(self) -> Machine:
        """The machine."""
        assert isinstance(self.machine, Machine)
        return self.machine

    @property
    def limit(self) -> float:
        """Memory of a rank, in bytes."""
        return USABLE * self.where.processor.memory_bytes if self.memory is None else self.memory

    @property
    def make_model(self) -> Callable[[], nn.Module]:
        """Builds the model."""
        return import_function(self.build, "build") if isinstance(self.build, str) else self.build

    @property
    def activations(self) -> list[Any]:
        """Values of ``checkpointing`` to try."""
        if self.checkpointing is None:
            return [False, SELECTIVE, True]
        kinds = "True, False, 'selective' ..., in a tuple"
        return listed("checkpointing", self.checkpointing, kinds)

    @property
    def tries_offloads(self) -> bool:
        """Whether candidates may be tried with more on the host than ``offload`` says."""
        has_host = self.where.host_runs_ahead and self.where.host_link is not None
        return has_host and not self.quick

    @property
    def tries_offloaded_activations(self) -> bool:
        """Whether candidates may be tried with activations on the host."""
        return self.tries_offloads and self.checkpointing is None and self.offload is not None

    @property
    def more_offloads(self) -> tuple[Offload, ...]:
        """Offloads that are tried where nothing fits."""
        if self.offload != AUTO or not self.tries_offloads:
            return ()
        if self.where.host_memory_bandwidth is None:  # which the host needs to cast main weights
            return tuple(each for each in _AUTO_OFFLOADS if each.main_weights != HOST)
        return _AUTO_OFFLOADS

    def candidates(self, degrees: Iterable[int], pipelines: Iterable[int]) -> list[Candidate]:
        """All candidates, of a global batch with the first size; those of a quick plan in its
        order.

        Args:
            degrees: of tensor parallelism.
            pipelines: numbers of ranks of a pipeline.

        Raises:
            ValueError: there are none, or none with a degree of context parallelism.
        """
        sizes = self._sizes
        if self.global_batch is not None:
            sizes = [each or 1 for each in sizes[:1]]
        given = self.offload if isinstance(self.offload, Offload) else None
        axes = self._axes(list(degrees), list(pipelines))
        self._check_inner_sizes({mesh[-1] for meshes in axes.values() for mesh in meshes})
        found = [
            candidate
            for (degree, pipeline), meshes in axes.items()
            for context in self._context_degrees(degree)
            for schedule in (self.schedule_names if pipeline > 1 else [None])
            for candidate in candidates(
                [each for each in meshes if each[-1] % context == 0],
                self.activations,
                sizes,
                given,
                self._lengths,
                degree,
                context,
                pipeline,
                schedule,
            )
            if candidate.is_data_parallel or is_quick(candidate)
        ]
        if not found:
            raise ValueError(
                "meshes, checkpointing, microbatch_sizes: expected at least one candidate; found "
                "none"
            )
        return quick_candidates(found) if self.quick else found

    def _check_inner_sizes(self, sizes: Collection[int]) -> None:
        """Check that each degree of context parallelism that was given divides an inner axis.

        Raises:
            ValueError: one does not.
        """
        if self.context_parallel == AUTO or self.is_compared:
            return
        for context in self._context_degrees(1):
            if sizes and all(size % context for size in sizes):
                raise ValueError(
                    "context_parallel: expected a divisor of the inner axis of a mesh, which has "
                    f"{' or '.join(map(str, sorted(sizes)))} ranks; found {context}"
                )

    def _axes(
        self, degrees: Sequence[int], pipelines: Sequence[int]
    ) -> dict[tuple[int, int], list[Mesh]]:
        """Meshes of the data-parallel ranks, by degrees of tensor and pipeline parallelism."""
        num_ranks = {
            (degree, pipeline): self.world_size // (degree * pipeline)
            for degree in degrees
            for pipeline in pipelines
            if self.world_size % (degree * pipeline) == 0
        }
        if self.meshes is None:
            per_node = self.where.ranks_per_node
            return {
                degrees: fitting_meshes(
                    count, 1 if per_node % degrees[0] else per_node // degrees[0]
                )
                for degrees, count in num_ranks.items()
            }
        meshes = check_meshes(self.meshes, list(num_ranks.values()))
        return {
            degrees: [each for each in meshes if math.prod(each) == count]
            for degrees, count in num_ranks.items()
        }

    @property
    def _sizes(self) -> list[Any]:
        if self.microbatch_sizes is None:
            return [None]
        return listed("microbatch_sizes", self.microbatch_sizes, "sizes, such as (1, 2)")

    @property
    def _lengths(self) -> list[Any]:
        if self.sequences is None:
            return [None]
        return listed("sequences", self.sequences, "lengths, such as (4096, 8192)")
