"""Simulates the candidates of one plan, and remembers their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.offload import HOST
from fsdp_engine.planner.batch_search import divisors, largest_fitting, rows_of_rank
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.fewer_blocks import Repeated, of_all_blocks
from fsdp_engine.planner.outcome import Outcome, Trial
from fsdp_engine.planner.plan_cache import JobCache, cache_of, digest
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.planner.progress import PlanProgress
from fsdp_engine.simulation.operations import OperationCache
from fsdp_engine.simulation.simulate import Simulation, simulate
from fsdp_engine.simulation.simulation_error import SimulationError

# Microbatches of a step that are simulated; see [Note: Steps of many microbatches] in
# ``batch_search.py``.
MOST_SIMULATED = 3
# Factor of the number of microbatches in a trial of the chosen candidate.
_MORE_MICROBATCHES = 4


@dataclass
class Known:
    """Results that the plans of one call share.

    Attributes:
        operations: results of operations.
        rows: outcomes by machine, ranks, candidate, microbatches, factor of the batch and whether
            blocks are compiled, without a memory limit.
    """

    operations: OperationCache = field(default_factory=OperationCache)
    rows: dict[tuple[str, int, Candidate, int, int, bool], Outcome] = field(default_factory=dict)


@dataclass
class Job:
    """Simulates candidates.

    Attributes:
        request: the arguments that all candidates share.
        known: results of other plans.
        microbatches: per step, of candidates that do not say it.
        progress: shows the candidate that is being simulated.
        cache: results on disk; None: there are none.
        repeated: the model's blocks that are alike; None: all blocks are simulated.
    """

    request: PlanRequest
    known: Known
    microbatches: int
    progress: PlanProgress = field(default_factory=PlanProgress)
    cache: JobCache | None = None
    repeated: Repeated | None = None

    def use_cache(self, model: nn.Module) -> None:
        """Take outcomes from disk, and keep them there."""
        request = self.request
        names = ("loss", "optimizer", "options", "machine", "world_size", "compile", "parallelize")
        self.cache = cache_of({"model": model, **{name: getattr(request, name) for name in names}})

    def inputs(self, candidate: Candidate) -> Any:
        """A rank's batch."""
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
        """The unit of a rank's microbatch, and its size."""
        return number_of_items(self.inputs(candidate))

    def simulate(
        self, candidate: Candidate, *, inputs: Any = None, depth: int | None = None
    ) -> Simulation:
        """Simulate a step of ``candidate``, with so many of the blocks that are alike, or all."""
        request = self.request

        def build() -> nn.Module:
            model = request.make_model()
            if depth is not None:
                assert self.repeated is not None
                self.repeated.shorten(model, depth)
            return model

        return simulate(
            build,
            request.world_size,
            batch=self.inputs(candidate) if inputs is None else inputs,
            mesh=candidate.mesh,
            context_parallel=candidate.context_parallel,
            tensor_parallel=candidate.tensor_parallel,
            parallelize=request.parallelize,
            machine=request.where,
            loss=request.loss,
            optimizer=request.optimizer,
            microbatches=candidate.microbatches or self.microbatches,
            strategy=candidate.strategy,
            outer_strategy=candidate.outer_strategy,
            checkpointing=candidate.checkpointing,
            offload=candidate.offload,
            known=self.known.operations,
            compile=request.compile,
            **request.options,
        )

    def outcome(self, candidate: Candidate, limit: float, factor: int = 1) -> Outcome:
        """The result of ``candidate``, with ``factor`` times its batch."""
        machine, ranks = repr(self.request.where), self.request.world_size
        key = machine, ranks, candidate, self.microbatches, factor, self.request.compile
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
            row = digest((repr(candidate), self.microbatches, inputs))
        if self.cache is not None and row is not None:
            found = self.cache.get(row)
            if found is not None:
                return found
        self.progress.trying(str(candidate))
        found = self._with_fewer_blocks(candidate, inputs)
        if found is None:
            found = self._outcome_of(candidate, inputs, self._simulate(candidate, inputs))
        if self.cache is not None and row is not None:
            self.cache.put(row, found)
        return found

    def _with_fewer_blocks(self, candidate: Candidate, inputs: Any) -> Outcome | None:
        """The outcome by simulations of fewer blocks, if there are many that are alike; None if
        there are not."""
        repeated = self.repeated
        if repeated is None:
            return None
        try:
            found = [self._simulate(candidate, inputs, depth) for depth in repeated.depths]
        except SimulationError as error:
            if error.needs_values:
                raise
            self.repeated = None  # the model does not run with fewer
            return None
        outcomes = [self._outcome_of(candidate, inputs, each) for each in found]
        return of_all_blocks(repeated, found, outcomes)

    def _simulate(self, candidate: Candidate, inputs: Any, depth: int | None = None) -> Simulation:
        count = min(candidate.microbatches or self.microbatches, MOST_SIMULATED)
        fewer = replace(candidate, microbatches=count)
        return self.simulate(fewer, inputs=inputs, depth=depth)

    def _outcome_of(self, candidate: Candidate, inputs: Any, simulation: Simulation) -> Outcome:
        count = candidate.microbatches or self.microbatches
        items = number_of_items(inputs)[1] * count * candidate.num_batches
        more = max(count - MOST_SIMULATED, 0)
        return Outcome.of_simulation(candidate, simulation, items, math.inf, more)

    def trials(self, chosen: Outcome, limit: float) -> tuple[Trial, ...]:
        """Variations of ``chosen``: a larger batch, more microbatches, and offloaded state that is
        stepped beside forward, which asks more of a program."""
        candidate = chosen.candidate
        more = _MORE_MICROBATCHES * (candidate.microbatches or self.microbatches)
        longer = replace(candidate, microbatches=more)
        tries: dict[str, Callable[[], Outcome]] = {
            "a microbatch twice as large": lambda: self.outcome(candidate, limit, 2),
            f"{more} microbatches a step": lambda: self.outcome(longer, limit),
        }
        offload = candidate.offload
        if offload is not None and offload.places == {"optimizer_state": HOST}:
            beside = replace(candidate, offload=replace(offload, overlap_forward=True))
            if self.request.where.host_runs_ahead and beside != candidate:
                tries["steps beside forward (`overlap_forward=True`)"] = lambda: self.outcome(
                    beside, limit
                )
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
    """The search for microbatches of a global batch; see ``batch_search.py``.

    Attributes:
        job: simulates.
        global_batch: tokens or samples of a step on all ranks.
    """

    job: Job
    global_batch: float

    def batch_of(self, candidate: Candidate) -> int:
        """Tokens or samples of a step, nearest to those that were asked for.

        Raises:
            ValueError: none is near.
        """
        _, items = self._row(candidate)
        return self._rows(candidate) * items * candidate.num_batches

    def row_items(self, candidate: Candidate) -> int:
        """Tokens or samples of a row."""
        return self._row(candidate)[1]

    def sized(self, candidate: Candidate) -> Candidate:
        """The candidate with the largest microbatch that fits."""
        rows, limit = self._rows(candidate), self.job.request.limit
        sizes, given = divisors(rows), self.job.request.microbatch_sizes
        if given is not None:
            sizes = [each for each in sizes if each in given]
            if not sizes:
                raise ValueError(
                    f"microbatch_sizes: expected a divisor of a rank's {rows} rows in a step; "
                    f"found {list(given)}"
                )

        def outcome_of(tried: Candidate) -> Outcome:
            return self.job.outcome(tried, limit)

        return largest_fitting(candidate, rows, sizes, limit, outcome_of)

    def _row(self, candidate: Candidate) -> tuple[str, int]:
        return self.job.unit(replace(candidate, microbatch_size=1))

    def _rows(self, candidate: Candidate) -> int:
        item, items = self._row(candidate)
        return rows_of_rank(self.global_batch, candidate.num_batches, items, item)


def number_of_items(inputs: Any) -> tuple[str, int]:
    """The unit of a rank's batch, and its size. The elements of the first 2-D integer tensor are
    tokens; if there is none, the rows of the first tensor are samples.

    Raises:
        ValueError: there is no tensor.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim == 2:
            return "tokens", tensor.numel()
    for tensor in tensors:
        return "samples", tensor.shape[0] if tensor.ndim else 1
    raise ValueError("batch: expected tensors; found none")


def _doubled(inputs: Any) -> Any:
    """The batch, concatenated with itself along rows."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = tensors[0].shape[0] if tensors else 0

    def twice(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and tensor.shape[0] == rows
        return torch.cat([tensor, tensor]) if has_rows else tensor

    return tree_map_only(Tensor, twice, inputs)
