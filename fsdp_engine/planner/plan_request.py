"""The checked arguments of a plan."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_engine.planner.candidates import (
    Candidate,
    Mesh,
    candidates,
    check_meshes,
    fitting_meshes,
    is_quick,
    quick_candidates,
)
from fsdp_engine.planner.option_values import AUTO, import_function
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.simulation.causal_lm_stages import (
    CausalLMStages,
    Stages,
    check_stages,
    has_stages,
)
from fsdp_engine.planner.simulation.simulation_error import check_callable, check_count, listed
from fsdp_engine.planner.simulation.tp_plan import check_tp_plan, fitting_degrees

# Largest number of ranks in a pipeline that "auto" tries.
_MOST_IN_PIPELINE = 16


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of :func:`~.strategy_search.plan`, which documents them.

    Attributes:
        is_compared: Whether the plan is one of several in a comparison. If so, no variations of the
            chosen candidate are tried, and a quick plan tries all of its candidates, even if this
            takes long.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    build: Callable[[], nn.Module] | str
    batch: Any
    options: PlanOptions
    is_compared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.build, str):
            check_callable(
                "build", self.build, "a function that returns a torch.nn.Module, or its name"
            )
        self._check_degrees()
        if callable(self.batch):
            self._check_batch_function()

    def _check_batch_function(self) -> None:
        has_sizes = self.options.global_batch is not None or any(
            size is not None for size in self.options.sizes
        )
        has_lengths = any(length is not None for length in self.options.lengths)
        sizes = (1,) if has_sizes else ()
        lengths = {"sequence": 1} if has_lengths else {}
        try:
            inspect.signature(self.batch).bind(*sizes, **lengths)
        except ValueError:
            return  # functions written in C may have no signature
        except TypeError as error:
            shown = ", ".join(["size"] * has_sizes + ["sequence=length"] * has_lengths)
            since = ", since microbatch_sizes, global_batch or sequences are given" * bool(shown)
            raise ValueError(
                f"batch: expected a function that can be called as batch({shown}){since}; found: "
                f"{error}"
            ) from error

    def _check_degrees(self) -> None:
        for name, degrees in (
            ("tensor_parallel", self._degrees),
            ("context_parallel", self._context_degrees(1)),
            ("pipeline", self._given_pipelines),
        ):
            if self.options.formulas and degrees != [1]:
                raise ValueError(
                    f"{name}: expected 1 with formulas, which do not cover this parallelism; "
                    f"found {getattr(self.options, name)!r}"
                )

        if self.options.pipeline != 1:
            from fsdp_engine.planner.simulation.pipeline import (
                schedule_class,  # loads torch's compiler
            )

            for each in self.options.schedule_names:
                schedule_class(each)

    def degrees(self, model: nn.Module) -> list[int]:
        """Returns the degrees of tensor parallelism to try.

        Args:
            model: The job's model, on any device.

        Raises:
            ValueError: The model has no tensor-parallel plan for a degree that was given.
        """
        if self.options.tensor_parallel == AUTO:
            per_node = self.options.where.ranks_per_node
            return [1, *fitting_degrees(model, self.options.world_size, per_node)]
        for each in self._degrees:
            if each > 1 and self.options.parallelize is None:
                check_tp_plan(model, each)
        return self._degrees

    @property
    def _degrees(self) -> list[Any]:
        """The degrees of tensor parallelism that were given. Empty for "auto"."""
        return [] if self.options.tensor_parallel == AUTO else self._divisors("tensor_parallel")

    def pipelines(self, model: nn.Module) -> list[int]:
        """Returns the numbers of pipeline ranks to try.

        Args:
            model: The job's model, on any device.

        Raises:
            ValueError: The model has no stages for a number that was given.
        """
        if self.options.pipeline != AUTO:
            for each in self._given_pipelines:
                if each > 1 and self.options.stages is None:
                    check_stages(model, each)
            return self._given_pipelines
        most = min(self.options.world_size // self.options.where.ranks_per_node, _MOST_IN_PIPELINE)
        powers = [2**power for power in range(1, most.bit_length())]
        powers = [each for each in powers if self.options.world_size % each == 0]
        if self.options.stages is None:
            powers = [each for each in powers if has_stages(model, each)]
        return [1, *powers]

    @property
    def _given_pipelines(self) -> list[Any]:
        """The numbers of pipeline ranks that were given. Empty for "auto"."""
        return [] if self.options.pipeline == AUTO else self._divisors("pipeline")

    @property
    def make_stage(self) -> Stages:
        """A function that builds a stage of a pipeline."""
        return self.options.stages or CausalLMStages(self.make_model)

    def _context_degrees(self, tensor_parallel: int) -> list[int]:
        """Returns the degrees of context parallelism to try with a degree of tensor parallelism.
        For "auto" on GPUs, these are the powers of two whose product with ``tensor_parallel`` fits
        a node and divides the number of ranks; lengths of sequences are checked later. For "auto"
        on CPUs, this is 1."""
        if self.options.context_parallel != AUTO:
            return self._divisors("context_parallel")
        if not self.options.where.host_runs_ahead:
            return [1]
        most = max(self.options.where.ranks_per_node // tensor_parallel, 1)
        powers = [2**power for power in range(most.bit_length())]
        return [each for each in powers if self.options.world_size % (each * tensor_parallel) == 0]

    def _divisors(self, name: str) -> list[int]:
        """Returns the given degrees of one kind of parallelism, without duplicates.

        Raises:
            TypeError: A degree is not an integer.
            ValueError: A degree is less than 1 or does not divide the ranks. In a comparison,
                degrees that do not divide the ranks are left out, and there is an error only if
                none remains.
        """
        given = getattr(self.options, name)
        kinds = "numbers of ranks, such as (1, 8), or 'auto'"
        found = [given] if isinstance(given, int) else listed(name, given, kinds)
        num_ranks = self.options.world_size
        allowed = []
        for each in dict.fromkeys(found):
            check_count(name, each, "1 rank or more")
            if num_ranks % each == 0:
                allowed.append(each)
            elif not self.is_compared:
                raise ValueError(
                    f"{name}: expected a divisor of the {num_ranks} ranks; found {each}"
                )
        if not allowed:
            raise ValueError(f"{name}: expected a divisor of the {num_ranks} ranks; found {given}")
        return allowed

    @property
    def make_model(self) -> Callable[[], nn.Module]:
        """A function that builds the model."""
        return import_function(self.build, "build") if isinstance(self.build, str) else self.build

    def candidates(self, degrees: Iterable[int], pipelines: Iterable[int]) -> list[Candidate]:
        """Returns all candidates. With a global batch they all have the first microbatch size,
        since the size is searched later. The candidates of a quick plan are in the order in which
        it tries them.

        Args:
            degrees: Degrees of tensor parallelism.
            pipelines: Numbers of ranks in a pipeline.

        Raises:
            ValueError: There is no candidate, or no mesh allows a degree of context parallelism.
        """
        sizes = self.options.sizes
        if self.options.global_batch is not None:
            sizes = [each or 1 for each in sizes[:1]]
        given = self.options.offload
        given = None if isinstance(given, str) else given
        axes = self._axes(list(degrees), list(pipelines))
        self._check_inner_sizes({mesh[-1] for meshes in axes.values() for mesh in meshes})
        found = [
            candidate
            for (degree, pipeline), meshes in axes.items()
            for context in self._context_degrees(degree)
            for schedule in (self.options.schedule_names if pipeline > 1 else [None])
            for candidate in candidates(
                [each for each in meshes if each[-1] % context == 0],
                Candidate(
                    (),
                    "",
                    "",
                    None,
                    offload=given,
                    tensor_parallel=degree,
                    context_parallel=context,
                    pipeline=pipeline,
                    schedule=schedule,
                ),
                self.options.activations,
                sizes,
                self.options.lengths,
            )
            if candidate.is_data_parallel or is_quick(candidate)
        ]
        if not found:
            raise ValueError(
                "meshes, checkpointing, microbatch_sizes: expected at least one candidate; found "
                "none"
            )
        found = list(dict.fromkeys(found))  # an option may contain a value twice
        return quick_candidates(found) if self.options.quick else found

    def _check_inner_sizes(self, sizes: Collection[int]) -> None:
        """Check that each given degree of context parallelism divides an inner axis.

        Raises:
            ValueError: A degree divides no inner axis.
        """
        if self.options.context_parallel == AUTO or self.is_compared:
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
        """Returns the meshes of data-parallel ranks, by degrees of tensor and pipeline
        parallelism."""
        num_ranks = {
            (degree, pipeline): self.options.world_size // (degree * pipeline)
            for degree in degrees
            for pipeline in pipelines
            if self.options.world_size % (degree * pipeline) == 0
        }
        if self.options.meshes is None:
            per_node = self.options.where.ranks_per_node
            return {
                degrees: fitting_meshes(
                    count, 1 if per_node % degrees[0] else per_node // degrees[0]
                )
                for degrees, count in num_ranks.items()
            }
        meshes = check_meshes(self.options.meshes, list(num_ranks.values()))
        return {
            degrees: [each for each in meshes if math.prod(each) == count]
            for degrees, count in num_ranks.items()
        }
