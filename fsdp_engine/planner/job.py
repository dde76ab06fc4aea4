"""Simulates the candidates of one plan, and stores their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.kernel_interface import allocator
from fsdp_engine.planner.batch_search import (
    divisors,
    fastest_fitting,
    largest_fitting,
    rows_of_rank,
)
from fsdp_engine.planner.candidates import Candidate, merged_extensions
from fsdp_engine.planner.fewer_blocks import Repeated, of_all_blocks
from fsdp_engine.planner.outcome import Outcome, Trial
from fsdp_engine.planner.plan_cache import (
    JobCache,
    cache_of,
    compiler_settings,
    digest,
    metadata_of,
)
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.planner.progress import PlanProgress
from fsdp_engine.planner.simulation.operations import OperationCache
from fsdp_engine.planner.simulation.simulate import Simulation, simulate
from fsdp_engine.planner.simulation.simulation_error import SimulationError
from fsdp_engine.planner.simulation.step_options import StepOptions

if TYPE_CHECKING:  # this import loads torch's compiler
    from fsdp_engine.planner.simulation.pipeline import PipelineSimulation

# Largest number of microbatches of a step to simulate; see [Note: Steps of many microbatches] in
# ``batch_search.py``.
MOST_SIMULATED = 3
# Factor by which a trial increases the number of microbatches of the chosen candidate.
_MORE_MICROBATCHES = 4


@dataclass
class Known:
    """Results that the plans of one call of ``fe.plan`` share.

    Attributes:
        operations: Results of operations.
        rows: Outcomes without a memory limit. The keys are machine, ranks, candidate, microbatches,
            factor of the batch and whether blocks are compiled.
    """

    operations: OperationCache = field(default_factory=OperationCache)
    rows: dict[tuple[str, int, Candidate, int, int, bool], Outcome] = field(default_factory=dict)


@dataclass
class Job:
    """Simulates the candidates of a job.

    Attributes:
        request: The arguments that all candidates share.
        known: Results of other plans.
        microbatches: Number of microbatches per step, for candidates that do not set it.
        progress: Shows the candidate that is being simulated.
        cache: The cache of results on disk; None: no cache is used.
        repeated: The model's equal blocks, of which a few are simulated; None: simulate all blocks.
    """

    request: PlanRequest
    known: Known
    microbatches: int
    progress: PlanProgress = field(default_factory=PlanProgress)
    cache: JobCache | None = None
    repeated: Repeated | None = None

    def use_cache(self, model: nn.Module) -> None:
        """Read outcomes from the cache on disk, and write new ones to it."""
        options = self.request.options
        names = ["loss", "optimizer", "shard", "machine", "world_size", "compile", "parallelize"]
        names += ["stages", "stage_loss"]
        parts = {name: getattr(options, name) for name in names}
        parts["compiler"] = compiler_settings(model, options.compile)
        self.cache = cache_of({"model": model, **parts})

    def inputs(self, candidate: Candidate) -> Any:
        """Returns the batch of one rank, or of one context-parallel group.

        Raises:
            ValueError: ``candidate`` has a microbatch size or a sequence length, and the batch is
                not a function.
        """
        size, sequence, batch = candidate.microbatch_size, candidate.sequence, self.request.batch
        if not callable(batch):
            if size is not None or sequence is not None:
                raise ValueError(
                    "batch: expected a function of the microbatch size, since microbatch_sizes, "
                    f"sequences or global_batch are given; found {type(batch).__name__}"
                )
            return batch
        sizes = () if size is None else (size,)
        return batch(*sizes) if sequence is None else batch(*sizes, sequence=sequence)

    def unit(self, candidate: Candidate) -> tuple[str, int]:
        """Returns "tokens" or "samples", and the number of them in a rank's microbatch."""
        return number_of_items(self.inputs(candidate))

    def simulate(
        self, candidate: Candidate, *, inputs: Any = None, depth: int | None = None
    ) -> Simulation:
        """Simulate a step of ``candidate``. ``depth`` is the number of equal blocks to simulate;
        None: all. For a pipeline, returns the simulation of the rank with the highest peak."""
        request = self.request
        if candidate.pipeline > 1:
            ranks = self.simulate_pipeline(candidate, inputs).ranks
            return max(ranks, key=lambda rank: rank.peak_bytes)

        def build() -> nn.Module:
            model = request.make_model()
            if depth is not None:
                assert self.repeated is not None
                self.repeated.shorten(model, depth)
            return model

        return simulate(
            build,
            request.options.world_size,
            batch=self.inputs(candidate) if inputs is None else inputs,
            loss=request.options.loss,
            options=self._step(candidate),
        )

    def simulate_pipeline(self, candidate: Candidate, inputs: Any = None) -> PipelineSimulation:
        """Simulate a step of a candidate that has a pipeline."""
        from fsdp_engine.planner.simulation.pipeline import simulate_pipeline

        request = self.request
        given = self.inputs(candidate) if inputs is None else inputs
        batch, target = inputs_and_targets(given)
        return simulate_pipeline(
            request.make_stage,
            request.options.world_size,
            pipeline=candidate.pipeline,
            batch=batch,
            target=target,
            schedule=candidate.schedule or "",
            loss=request.options.stage_loss,
            quick=True,
            options=self._step(candidate),
        )

    def _step(self, candidate: Candidate) -> StepOptions:
        """Returns the options of the candidate's simulations."""
        options = self.request.options
        return StepOptions(
            mesh=candidate.mesh,
            context_parallel=candidate.context_parallel,
            tensor_parallel=candidate.tensor_parallel,
            parallelize=options.parallelize,
            machine=options.where,
            optimizer=options.optimizer,
            microbatches=candidate.microbatches or self.microbatches,
            known=self.known.operations,
            compile=options.compile,
            shard={
                **options.shard,
                "strategy": candidate.strategy,
                "outer_strategy": candidate.outer_strategy,
                "extensions": merged_extensions(candidate, options.shard.get("extensions")),
            },
        )

    def outcome(self, candidate: Candidate, limit: float, factor: int = 1) -> Outcome:
        """Returns the outcome of ``candidate``, with ``factor`` times its batch."""
        options = self.request.options
        machine, ranks = repr(options.where), options.world_size
        key = machine, ranks, candidate, self.microbatches, factor, options.compile
        found = self.known.rows.get(key)
        if found is None:
            found = self.known.rows[key] = self._stored(candidate, factor)
        return replace(found, lacking=max(found.peak_bytes - limit, 0.0))

    def _stored(self, candidate: Candidate, factor: int) -> Outcome:
        inputs = self.inputs(candidate)
        if factor > 1:
            inputs = _doubled(inputs)
        row = None
        if self.cache is not None and not candidate.has_own_policy:
            shapes = tree_map_only(Tensor, metadata_of, inputs)  # simulations read no values
            row = digest((repr(candidate), self.microbatches, shapes))
        if self.cache is not None and row is not None:
            found = self.cache.get(row)
            if found is not None:
                return found
        self.progress.trying(str(candidate))
        found = self._simulated(candidate, inputs)
        if self.cache is not None and row is not None:
            self.cache.put(row, found)
        return found

    def _simulated(self, candidate: Candidate, inputs: Any) -> Outcome:
        if candidate.pipeline > 1:
            pipeline = self.simulate_pipeline(candidate, inputs)
            return Outcome.of_pipeline(
                candidate, pipeline, self._items(candidate, inputs), math.inf
            )
        found = self._with_fewer_blocks(candidate, inputs)
        if found is None:
            found = self._outcome_of(candidate, inputs, self._simulate(candidate, inputs))
        return found

    def _with_fewer_blocks(self, candidate: Candidate, inputs: Any) -> Outcome | None:
        """Returns the outcome of the full model, extrapolated from simulations of fewer blocks. If
        the model does not run with fewer blocks, returns the outcome of a simulation of all blocks.
        None if the model has no repeated blocks, or if its figures are not linear in the number of
        blocks."""
        repeated = self.repeated
        if repeated is None:
            return None
        try:
            found = [self._simulate(candidate, inputs, depth) for depth in repeated.depths]
        except SimulationError as error:
            if error.needs_values:
                raise
            # If the candidate also fails with all blocks, this simulation raises the error, and the
            # other candidates are still simulated with fewer blocks.
            whole = self._outcome_of(candidate, inputs, self._simulate(candidate, inputs))
            self.repeated = None
            return whole
        outcomes = [self._outcome_of(candidate, inputs, each) for each in found]
        return of_all_blocks(repeated, found, outcomes)

    def _simulate(self, candidate: Candidate, inputs: Any, depth: int | None = None) -> Simulation:
        count = min(candidate.microbatches or self.microbatches, MOST_SIMULATED)
        fewer = replace(candidate, microbatches=count)
        return self.simulate(fewer, inputs=inputs, depth=depth)

    def _outcome_of(self, candidate: Candidate, inputs: Any, simulation: Simulation) -> Outcome:
        more = max((candidate.microbatches or self.microbatches) - MOST_SIMULATED, 0)
        items = self._items(candidate, inputs)
        return Outcome.of_simulation(candidate, simulation, items, math.inf, more)

    def _items(self, candidate: Candidate, inputs: Any) -> int:
        """Returns the tokens or samples of a step on all ranks."""
        count = candidate.microbatches or self.microbatches
        return number_of_items(inputs)[1] * count * candidate.num_batches

    def trials(self, chosen: Outcome, limit: float) -> tuple[Trial, ...]:
        """Returns variations of ``chosen``: a larger microbatch, more microbatches, and, if only
        optimizer state is on the host, an optimizer step that overlaps with the next forward. The
        last one restricts the user's program; see ``overlap_forward`` of ``fe.Offload``."""
        candidate = chosen.candidate
        more = _MORE_MICROBATCHES * (candidate.microbatches or self.microbatches)
        longer = replace(candidate, microbatches=more)
        tries: dict[str, Callable[[], Outcome]] = {
            "a microbatch twice as large": lambda: self.outcome(candidate, limit, 2),
            f"{more} microbatches a step": lambda: self.outcome(longer, limit),
        }
        offload: Any = candidate.offload
        if candidate.places == {"optimizer_state": allocator.HOST}:
            beside = replace(candidate, offload=replace(offload, overlap_forward=True))
            if self.request.options.where.host_runs_ahead and beside != candidate:
                change = "optimizer steps during the next forward (`overlap_forward=True`)"
                tries[change] = lambda: self.outcome(beside, limit)
        found = []
        for change, run in tries.items():
            try:
                outcome = run()
            except SimulationError:
                continue  # for example a model that only accepts one batch size
            found.append(Trial(change, outcome.rate / chosen.rate, outcome.lacking))
        return tuple(found)


@dataclass(frozen=True)
class BatchSearch:
    """The search for the microbatches that give a global batch; see ``batch_search.py``.

    Attributes:
        job: The job that simulates candidates.
        global_batch: Tokens or samples of a step on all ranks.
    """

    job: Job
    global_batch: float

    def batch_of(self, candidate: Candidate) -> int:
        """Returns the tokens or samples of a step, nearest to the requested global batch.

        Raises:
            ValueError: No multiple of one row per rank is near the requested batch.
        """
        _, items = self._row(candidate)
        return self._rows(candidate) * items * candidate.num_batches

    def row_items(self, candidate: Candidate) -> int:
        """Returns the tokens or samples of a row of the batch."""
        return self._row(candidate)[1]

    def sizes(self, candidate: Candidate) -> list[int]:
        """Returns the microbatch sizes to try, in ascending order. With a pipeline, each size
        gives a number of microbatches that is a multiple of the pipeline's ranks and that the
        schedule accepts; the list may be empty.

        Raises:
            ValueError: There is no pipeline, and no size of ``microbatch_sizes`` divides the rows
                of a rank.
        """
        rows, given = self._rows(candidate), self.job.request.options.microbatch_sizes
        found = [each for each in divisors(rows) if rows // each % candidate.pipeline == 0]
        if candidate.schedule is not None:
            from fsdp_engine.planner.simulation.pipeline import takes_microbatches

            taken = partial(takes_microbatches, candidate.schedule, candidate.pipeline)
            found = [each for each in found if taken(rows // each)]
        if given is not None:
            found = [each for each in found if each in given]
            if not found and candidate.pipeline == 1:
                raise ValueError(
                    f"microbatch_sizes: expected a divisor of a rank's {rows} rows in a step; "
                    f"found {list(given)}"
                )
        return found

    def sized(self, candidate: Candidate) -> Candidate:
        """Returns the candidate with the largest microbatch that fits. For a pipeline, returns the
        fastest one that fits, since smaller microbatches shorten the waits for other stages."""
        rows, limit, sizes = (
            self._rows(candidate),
            self.job.request.options.limit,
            self.sizes(candidate),
        )

        def outcome_of(tried: Candidate) -> Outcome:
            return self.job.outcome(tried, limit)

        if candidate.pipeline > 1:
            return fastest_fitting(candidate, rows, sizes, outcome_of)
        return largest_fitting(candidate, rows, sizes, limit, outcome_of)

    def _row(self, candidate: Candidate) -> tuple[str, int]:
        return self.job.unit(replace(candidate, microbatch_size=1))

    def _rows(self, candidate: Candidate) -> int:
        item, items = self._row(candidate)
        pipeline = candidate.pipeline  # the number of rows must be a multiple of its ranks
        least = candidate.num_batches * pipeline
        return pipeline * rows_of_rank(self.global_batch, least, items, item)


def number_of_items(inputs: Any) -> tuple[str, int]:
    """Returns "tokens" or "samples", and the number of them in a rank's batch. The elements of the
    first 2-D integer tensor are tokens; without such a tensor, the rows of the first tensor are
    samples.

    Raises:
        ValueError: The batch contains no tensor, or no token or sample.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("batch: expected tensors; found none")
    integers = [each for each in tensors if each.dtype in (torch.int64, torch.int32)]
    tokens = next((each for each in integers if each.ndim == 2), None)
    if tokens is not None:
        item, shape, count = "tokens", tokens.shape, tokens.numel()
    else:
        item, shape = "samples", tensors[0].shape
        count = shape[0] if shape else 1
    if not count:
        raise ValueError(f"batch: expected 1 or more {item}; found shape {tuple(shape)}")
    return item, count


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Returns the input of a pipeline's first stage, and the targets of its last stage.

    Raises:
        ValueError: The batch does not have the expected form.
    """
    if isinstance(batch, Mapping) and {"input_ids", "labels"} <= batch.keys():
        return batch["input_ids"], batch["labels"]
    if isinstance(batch, tuple) and len(batch) == 2:
        return batch
    found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(
        "batch: expected a dict with input_ids and labels, or a tuple of the first stage's input "
        f"and the targets, since the plan has pipelines; found {found}"
    )


def _doubled(inputs: Any) -> Any:
    """Returns the batch concatenated with itself along rows."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = tensors[0].shape[0] if tensors else 0

    def twice(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and tensor.shape[0] == rows
        return torch.cat([tensor, tensor]) if has_rows else tensor

    return tree_map_only(Tensor, twice, inputs)
