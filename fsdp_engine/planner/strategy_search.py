"""``plan``: simulates every strategy and selects the fastest one that fits."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp_engine.kernel_interface import Options
from fsdp_engine.planner.candidates import Candidate, candidates, is_quick
from fsdp_engine.planner.estimates import Estimate, OffloadLevelError, estimate
from fsdp_engine.planner.fewer_blocks import find_repeated
from fsdp_engine.planner.job import BatchSearch, Job, Known
from fsdp_engine.planner.option_values import AUTO, OFFLOAD, SELECTIVE
from fsdp_engine.planner.outcome import (
    ACTIVATIONS,
    Outcome,
    Setting,
    is_faster,
    sorted_outcomes,
)
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.plan_request import PlanRequest
from fsdp_engine.planner.progress import PlanProgress, plan_progress
from fsdp_engine.planner.simulation.compiled import simulated_compiler
from fsdp_engine.planner.simulation.context_parallel import sequence_length
from fsdp_engine.planner.simulation.simulate import build_meta_module
from fsdp_engine.planner.simulation.simulation_error import SimulationError
from fsdp_engine.planner.simulation.time_accuracy import family_of
from fsdp_engine.planner.simulation.tp_plan import fitting_degrees
from fsdp_engine.planner.state_places import KIND_OF_OFFLOADED, StatePlaces
from fsdp_engine.planner.strategy_plan import StrategyPlan

_FORMULAS_ALONE = "the plan was made by formulas only, which do not run the model."

# Number of tokens in a sequence from which "auto" tries context parallelism.
_LONG_SEQUENCE = 2**15

# A quick plan stops once this many candidates fit. For most models these are level 3 with each of
# the three ways to handle activations, and the first candidate of HSDP.
QUICK_FITTING = 4


def plan(
    build: Callable[[], nn.Module] | str,
    batch: Any,
    options: PlanOptions | Options | None = None,
    **given: Any,
) -> StrategyPlan:
    """Simulate a step of the model under each strategy and select the fastest that fits. The
    simulations run in this process with fake tensors, so the machine does not have to be available.

    Args:
        build: A function that returns the model, or its name as ``module:function``.
        batch: The inputs of the model on one data-parallel rank (or one group of context-parallel
            ranks), or a function that returns them. With ``microbatch_sizes`` or ``global_batch``
            the function takes the microbatch size as its argument; with ``sequences`` it takes the
            length as ``sequence=``. See ``fe.simulate``.
        options: A ``PlanOptions`` with all other arguments. None: they are keyword arguments. An
            ``fe.Options`` is instead passed on as the ``options`` argument of ``fe.shard``.
        **given: Fields of ``PlanOptions``, of which ``world_size`` is required, and arguments of
            ``fe.shard`` for all candidates: ``units``, ``mp_policy``, ``options``, ...

    Returns:
        The plan. If the model depends on values of tensors (``if x.sum() > 0``), the plan is made
        by formulas, as with ``formulas=True``, and names the line that reads a value.

    Raises:
        SimulationError: The model, the loss or the optimizer raised an exception; the message
            names the line.
        RuntimeError: torch.distributed is initialized in this process.
        TypeError: ``build`` does not return a module, its forward does not accept ``batch``, or an
            argument has a wrong type.
        ValueError: An argument is invalid, including arguments of ``fe.shard``.
    """
    asked, known = PlanOptions.of(options, given), Known()

    def replan(*, is_compared: bool = False, **changes: Any) -> StrategyPlan:
        """Make the plan again with changed arguments."""
        request = PlanRequest(build, batch, replace(asked, **changes), is_compared)
        return _Planning(request, known).plan(replan)

    return replan()


# Options of ``shard`` that may name single blocks, so that not all blocks are equal.
_BY_NAME = ("units", "extensions", "expert_mesh")


class _Planning:
    """The computation of one plan.

    Args:
        request: The arguments of the plan.
        known: Results of other plans, which this plan reuses and extends.

    Raises:
        SimulationError, TypeError, ValueError: See :func:`plan`.
    """

    def __init__(self, request: PlanRequest, known: Known) -> None:
        self._request = request
        self._options = options = request.options
        self._model = model = build_meta_module(request.make_model)
        self._job = job = Job(request, known, options.microbatches)
        has_granule = getattr(options.shard.get("options"), "granule", None) is not None
        if not (has_granule or any(options.shard.get(name) for name in _BY_NAME)):
            repeated = find_repeated(model)
            job.repeated = repeated if repeated is not None and repeated.is_deep else None
        total = options.global_batch
        self._search = None if total is None else BatchSearch(job, total)
        degrees = request.degrees(model)
        self._candidates = self._all_candidates(model, degrees)
        first = self._candidates[0]
        others = fitting_degrees(model, options.world_size, options.where.ranks_per_node)
        self._setting = Setting(
            model=type(model).__name__,
            num_elements=sum(param.numel() for param in model.parameters()),
            machine=options.where.name,
            world_size=options.world_size,
            ranks_per_node=options.where.ranks_per_node,
            memory=options.limit,
            item=job.unit(first)[0],
            microbatches=options.microbatches,
            machine_memory=options.where.processor.memory_bytes,
            machine_family=family_of(options.where),
            is_quick=options.quick,
            is_compiled=options.compile,
            more_degrees=degrees == [1] and others != [],
            more_contexts=options.context_parallel == 1 and options.where.host_runs_ahead,
            dtype=_compute_dtype(model, options.shard.get("mp_policy")),
        )
        if self._search is not None:
            batch = self._search.batch_of(first)
            self._setting = replace(self._setting, global_batch=batch)
        if options.cache and not options.formulas:
            job.use_cache(model)

    def _all_candidates(self, model: nn.Module, degrees: Sequence[int]) -> list[Candidate]:
        """Returns the candidates that may fit. With a global batch they all have the first
        microbatch size, since the size is searched later."""
        request, options = self._request, self._options
        every = self._with_long_sequences(request.candidates(degrees, request.pipelines(model)))
        if self._search is not None:
            every = _with_batch(every, self._search)
        if not every:
            raise ValueError(
                "global_batch: expected a batch that gives a number of microbatches that a "
                f"pipeline's schedule accepts; found {options.global_batch}"
            )
        found = self._without_hopeless(self._allowed(every))
        if not found:
            self._estimate(every[-1])  # raises the error
        return found

    def plan(self, replan: Callable[..., StrategyPlan]) -> StrategyPlan:
        """Try all candidates; use formulas if the model reads values of tensors.

        Args:
            replan: Makes the plan again with changed arguments.
        """
        if self._options.formulas:
            return self._by_formulas(_FORMULAS_ALONE, replan)
        try:
            with simulated_compiler():  # so that each block is traced only once
                return self._by_simulations(replan)
        except SimulationError as error:
            if not error.needs_values or not self._data_parallel:
                raise
            why = str(error)
            if not self._options.has_state_of_adamw:
                why += ". Formulas count the optimizer state of AdamW, not of the given optimizer"
            return self._by_formulas(why, replan)

    def _by_simulations(self, replan: Callable[..., StrategyPlan]) -> StrategyPlan:
        outcomes = self._simulated()
        options, job, search = self._options, self._job, self._search
        is_varied = not (self._request.is_compared or options.quick or search) and outcomes[0].fits
        trials = job.trials(outcomes[0], options.limit) if is_varied else ()
        row_items = 1 if search is None else search.row_items(self._candidates[0])
        return StrategyPlan(
            self._setting,
            outcomes,
            trials,
            dict(options.shard),
            job.simulate,
            replan,
            options.where,
            row_items,
            options.parallelize,
            self._request.make_stage,
        )

    def _simulated(self) -> tuple[Outcome, ...]:
        with plan_progress(self._options.progress) as shown, _frozen_objects():
            self._job.progress = shown
            try:
                return self._all_outcomes()
            finally:
                self._job.progress = PlanProgress()

    def _all_outcomes(self) -> tuple[Outcome, ...]:
        options = self._options
        found = self._outcomes(self._candidates)
        if options.quick:
            found += self._outcomes(self._without_recomputation(found))
        else:
            found += self._outcomes(self._more_levels(found))
        if options.tries_offloaded_activations:
            found += self._outcomes(_with_offloaded_activations(found, options.more_offloads))
        return sorted_outcomes(self._with_offloads(found, self._outcomes))

    def _by_formulas(self, why_unknown: str, replan: Callable[..., StrategyPlan]) -> StrategyPlan:
        setting = replace(self._setting, why_unknown=why_unknown, global_batch=0)
        tried = self._estimates(self._data_parallel)
        found = self._with_offloads(tried, self._estimates)
        options = dict(self._options.shard)
        return StrategyPlan(setting, sorted_outcomes(found), options=options, replan=replan)

    def _outcomes(self, tried: Sequence[Candidate]) -> list[Outcome]:
        """Simulate candidates in order; a quick plan stops when ``QUICK_FITTING`` of them fit."""
        options, job = self._options, self._job
        most = QUICK_FITTING if options.quick and not self._request.is_compared else None
        found: list[Outcome] = []
        job.progress.add(len(tried))
        for number, each in enumerate(tried):
            if most is not None and sum(bool(other.fits) for other in found) >= most:
                job.progress.add(number - len(tried))
                break
            try:
                chosen = each if self._search is None else self._search.sized(each)
                found.append(job.outcome(chosen, options.limit))
            except SimulationError as error:
                is_default = options.checkpointing is None and each.checkpointing == SELECTIVE
                if error.needs_values or not is_default:
                    raise
                warnings.warn(f"plan: left out {each}: {error}", stacklevel=6)
            else:
                job.progress.found(found[-1], self._setting.item)
        return found

    def _with_offloads(
        self,
        outcomes: list[Outcome],
        outcomes_of: Callable[[Sequence[Candidate]], list[Outcome]],
    ) -> list[Outcome]:
        """Returns ``outcomes``. While no candidate fits, also returns outcomes of the candidates
        that might fit with a further offload.

        Args:
            outcomes: Outcomes of the candidates tried so far.
            outcomes_of: Computes outcomes of further candidates.
        """
        kept = list(outcomes)
        for offload in self._options.more_offloads:
            if any(each.fits is not False for each in outcomes):
                break
            kinds = [KIND_OF_OFFLOADED[role] for role in offload.places]
            might = self._allowed(
                [
                    replace(each.candidate, offload=offload)
                    for each in kept
                    if each.lacking <= sum(each.memory.get(kind, 0) for kind in kinds)
                ]
            )
            if might:
                outcomes = outcomes + outcomes_of(might)
        return outcomes

    @property
    def _data_parallel(self) -> list[Candidate]:
        return [each for each in self._candidates if each.is_data_parallel]

    def _estimates(self, tried: Sequence[Candidate]) -> list[Outcome]:
        """Returns outcomes by formulas. Candidates that differ only in fields that formulas ignore
        share one outcome."""
        return [
            Outcome.of_estimate(each, self._estimate(each), self._options.limit)
            for each in dict.fromkeys(map(_in_formulas, tried))
        ]

    def _estimate(self, candidate: Candidate) -> Estimate:
        options = self._options
        known = ("units", "mp_policy", "options")
        shard = {name: value for name, value in options.shard.items() if name in known}
        is_offloaded = candidate.offload is not None and options.where.host_runs_ahead
        offload = [candidate.offload] if is_offloaded else []
        return estimate(
            self._model,
            world_size=candidate.data_parallel,
            outer_size=candidate.mesh[0] if len(candidate.mesh) == 2 else 1,
            strategy=candidate.strategy,
            outer_strategy=candidate.outer_strategy,
            optimizer_bytes_per_element=None,  # AdamW
            num_microbatches=options.microbatches,
            extensions=[*(options.shard.get("extensions") or ()), *offload],
            **shard,
        )

    def _without_hopeless(self, tried: list[Candidate]) -> list[Candidate]:
        """Returns the candidates whose weights and optimizer state may fit, by formulas, or the
        first candidate if none may fit. A full plan also keeps all purely data-parallel
        candidates. Tensor and pipeline parallelism divide these bytes by at most their number of
        ranks. State of an optimizer other than the default is not counted, since its size is
        unknown."""
        options = self._options

        @functools.cache
        def held(candidate: Candidate) -> float:
            found = self._estimate(candidate)
            state = found.weight_bytes + found.optimizer_bytes * (options.optimizer is None)
            return state / (candidate.tensor_parallel * candidate.pipeline)

        return [
            each
            for each in tried
            if (each.is_data_parallel and not options.quick)
            or held(_in_formulas(each)) <= options.limit
        ] or tried[:1]

    def _without_recomputation(self, outcomes: Sequence[Outcome]) -> list[Candidate]:
        """Returns the candidates without recomputation that a quick plan has not tried, since they
        are the fastest if they fit. Empty unless a tried candidate without recomputation fits."""
        kept = [each for each in outcomes if each.fits and each.candidate.checkpointing is False]
        if not kept:
            return []
        like = sorted_outcomes(kept)[0].candidate

        def without_batch(each: Candidate) -> Candidate:
            if self._search is None:
                return each
            return replace(each, microbatch_size=None, microbatches=None)

        tried = [without_batch(each.candidate) for each in outcomes]
        return [
            each
            for each in self._candidates
            if each.degrees == like.degrees
            and each.checkpointing is False
            and each.sequence == like.sequence
            and without_batch(each).microbatch_size == without_batch(like).microbatch_size
            and without_batch(each) not in tried
        ]

    def _more_levels(self, outcomes: Sequence[Outcome]) -> list[Candidate]:
        """Returns candidates with the degrees of parallelism of the fastest one that fits, at the
        levels that a quick plan does not try. Returns no candidates if the fastest one is purely
        data-parallel."""
        best = sorted_outcomes(outcomes)[0]
        like = best.candidate
        if like.is_data_parallel or best.fits is not True:
            return []
        tried = [each.candidate for each in outcomes if each.candidate.degrees == like.degrees]
        meshes = dict.fromkeys(each.mesh for each in tried)
        found = candidates(
            meshes, like, [like.checkpointing], [like.microbatch_size], [like.sequence]
        )
        return self._allowed([each for each in found if not is_quick(each)])

    def _with_long_sequences(self, tried: list[Candidate]) -> list[Candidate]:
        """Returns the candidates. If ``context_parallel`` is "auto", leaves out those with context
        parallelism whose sequences are too short or cannot be sharded."""
        if self._options.context_parallel != AUTO:
            return tried

        @functools.cache
        def length(like: Candidate) -> int:
            return sequence_length(self._job.inputs(like)) or 0

        def is_long(each: Candidate) -> bool:
            like = Candidate((1,), "", "", False, each.microbatch_size, sequence=each.sequence)
            found = length(like)
            return found >= _LONG_SEQUENCE and found % (2 * each.context_parallel) == 0

        return [each for each in tried if each.context_parallel == 1 or is_long(each)]

    def _allowed(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates whose levels allow their offload."""

        @functools.cache
        def is_allowed(candidate: Candidate) -> bool:
            try:
                self._estimate(candidate)
            except OffloadLevelError:
                return False
            return True

        def may_be_refused(candidate: Candidate) -> bool:
            return bool(candidate.places.keys() - {"optimizer_state"})

        return [
            each for each in tried if not may_be_refused(each) or is_allowed(_in_formulas(each))
        ]


def _compute_dtype(model: nn.Module, policy: Any) -> str:
    """Returns the name of the dtype in which most of the model's elements compute.

    Args:
        model: The model, on any device.
        policy: The ``MixedPrecisionPolicy`` of the job, or None.
    """
    if policy is not None and policy.param_dtype is not None:
        return str(policy.param_dtype).removeprefix("torch.")
    counts: Counter[str] = Counter()
    for param in model.parameters():
        counts[str(param.dtype).removeprefix("torch.")] += param.numel()
    return max(counts, key=counts.__getitem__, default="")


def _with_batch(tried: Sequence[Candidate], search: BatchSearch) -> list[Candidate]:
    """Returns the candidates that can share the global batch equally, with a microbatch size that
    is allowed and a number of microbatches that their schedule accepts.

    Raises:
        ValueError: For one of the sequence lengths, no candidate can share the global batch
            equally in microbatches of an allowed size.
    """

    def kind(each: Candidate) -> tuple[int, int, str | None, int | None]:
        return each.num_batches, each.pipeline, each.schedule, each.sequence

    sizes: dict[tuple[int, int, str | None, int | None], list[int]] = {}
    refused: dict[int | None, ValueError] = {}
    for each in {kind(each): each for each in tried}.values():
        try:
            search.batch_of(each)
            sizes[kind(each)] = search.sizes(each)
        except ValueError as error:
            refused.setdefault(each.sequence, error)
    sequences = {sequence for *_, sequence in sizes}
    for sequence, refusal in refused.items():
        if sequence not in sequences:
            raise refusal
    return [each for each in tried if sizes.get(kind(each))]


def _with_offloaded_activations(
    outcomes: Sequence[Outcome], offloads: Iterable[StatePlaces]
) -> list[Candidate]:
    """Returns candidates that may become the fastest that fits if activations are on the host. If
    no candidate fits so far, the returned ones may also need one of ``offloads``. A step with
    activations on the host is assumed to take at least as long as one with activations on the
    device."""
    fitting = [each for each in outcomes if each.fits]
    roles = dict.fromkeys(role for offload in offloads for role in offload.places)
    kinds = [ACTIVATIONS, *(KIND_OF_OFFLOADED[role] for role in roles if not fitting)]
    return [
        replace(each.candidate, checkpointing=OFFLOAD)
        for each in outcomes
        if 0 < each.lacking <= sum(each.memory[kind] for kind in kinds)
        and each.candidate.checkpointing is False
        and each.candidate.pipeline == 1
        and all(is_faster(each, other) for other in fitting)
    ]


def _in_formulas(candidate: Candidate) -> Candidate:
    """Returns the candidate without the fields that formulas ignore."""
    return replace(
        candidate,
        checkpointing=False,
        microbatch_size=None,
        microbatches=None,
        sequence=None,
        context_parallel=1,
    )


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Hide the objects that exist now, mainly of imported libraries, from Python's garbage
    collector while models are simulated. Without this, visiting them takes a tenth of the planning
    time."""
    if gc.get_freeze_count():
        yield  # keep the objects that the caller froze
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
