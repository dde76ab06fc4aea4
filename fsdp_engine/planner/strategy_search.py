"""``plan``: simulates every strategy and selects the fastest that fits."""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fsdp_engine.offload import Offload
from fsdp_engine.planner.candidates import (
    OFFLOAD,
    SELECTIVE,
    Activations,
    Candidate,
    candidates,
    is_quick,
)
from fsdp_engine.planner.estimates import Estimate, OffloadLevelError, estimate
from fsdp_engine.planner.fewer_blocks import find_repeated
from fsdp_engine.planner.job import BatchSearch, Job, Known
from fsdp_engine.planner.outcome import (
    ACTIVATIONS,
    KIND_OF_OFFLOADED,
    Outcome,
    Setting,
    is_faster,
    sorted_outcomes,
)
from fsdp_engine.planner.plan_request import AUTO, PlanRequest
from fsdp_engine.planner.progress import PlanProgress, plan_progress
from fsdp_engine.planner.strategy_plan import StrategyPlan
from fsdp_engine.simulation.causal_lm_stages import Stages
from fsdp_engine.simulation.compiled import simulated_compiler
from fsdp_engine.simulation.context_parallel import sequence_length
from fsdp_engine.simulation.machine import H100, Machine
from fsdp_engine.simulation.simulate import MakeOptimizer, Parallelize, build_meta_module
from fsdp_engine.simulation.simulation_error import SimulationError
from fsdp_engine.simulation.time_accuracy import family_of
from fsdp_engine.simulation.tp_plan import fitting_degrees

_FORMULAS_ALONE = "the plan was made by formulas only, which do not run the model."

# Tokens of a sequence from which "auto" tries context parallelism.
_LONG_SEQUENCE = 2**15

# A quick plan tries no further candidate after these seconds, if one fits.
QUICK_SECONDS = 6.0


def plan(
    build: Callable[[], nn.Module] | str,
    batch: Any,
    *,
    world_size: int,
    machine: Machine | str = H100,
    memory: float | None = None,
    meshes: Iterable[Sequence[int]] | None = None,
    checkpointing: Iterable[Activations] | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    microbatches: int = 1,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    formulas: bool = False,
    progress: bool = False,
    offload: Offload | str | None = AUTO,
    global_batch: float | None = None,
    sequences: Sequence[int] | None = None,
    quick: bool = False,
    cache: bool = False,
    compile: bool = False,
    context_parallel: int | Sequence[int] | str = 1,
    tensor_parallel: int | Sequence[int] | str = 1,
    parallelize: Parallelize | None = None,
    pipeline: int | Sequence[int] | str = 1,
    schedules: str | Sequence[str] = "1F1B",
    stages: Stages | None = None,
    stage_loss: Callable[[Any, Any], Tensor] | None = None,
    **options: Any,
) -> StrategyPlan:
    """Select a strategy: simulate a step of the model under each strategy, with fake tensors in
    this process. The machine does not have to be available.

    Args:
        build: a function that returns the model, or its name as ``module:function``.
        batch: the inputs of the model on one data-parallel rank, or on one group of
            context-parallel ranks, or a function that returns them;
            with ``microbatch_sizes`` or ``global_batch`` a function of the size, with ``sequences``
            one that also takes ``sequence=``. See :func:`~.simulation.simulate`.
        world_size: all ranks.
        machine: a machine, the name of a preset, or a file of ``calibrate``.
        memory: memory limit of a rank in bytes. None: 0.9 of the machine's memory.
        meshes: sizes of the data-parallel axes to try, (inner,) or (outer, inner). None: one axis,
            and nodes x ranks per node.
        checkpointing: values to try for what becomes of blocks' activations: they are kept
            (False), recomputed in backward (True), partly kept ("selective", or a
            :class:`~fsdp_engine.Checkpointing`), or on the host until then ("offload"). None:
            False, "selective" and True; and "offload", unless ``offload`` is None, for candidates
            whose activations do not fit and that would be the fastest if copies took no time.
            "selective" is left out, with a warning, for a model that it does not work with.
        microbatch_sizes: sizes to try. None: only ``batch``.
        microbatches: forwards and backwards per step.
        loss, optimizer: see :func:`~.simulation.simulate`.
        formulas: do not run the model; use formulas, without activations and times. Whether
            candidates fit is then unknown.
        progress: show a progress bar on stderr.
        offload: of all candidates, without those whose levels do not allow it; None: all state is
            on the device. "auto": if no candidate fits, those that might are tried again with
            optimizer state on the host; and if none fits then, with main weights and gradients
            there, too.
        global_batch: tokens or samples of a step on all ranks. The largest microbatch that fits is
            searched for each candidate, with the number of microbatches that gives this batch;
            among ``microbatch_sizes``, if they are given. None: ``batch`` and ``microbatches``.
        sequences: lengths of sequences to try. None: only that of ``batch``.
        quick: try the candidates that are the best most often, level 3 and HSDP first, until one
            fits and a few seconds are over. :meth:`~.strategy_plan.StrategyPlan.full` tries the
            others.
        cache: keep the results of candidates on disk, in the user's cache folder, and take those
            that are there; see [Note: What a cached row depends on] in ``plan_cache.py``.
        compile: blocks of all candidates are compiled by ``block.compile()``, which ``shard`` does
            not do.
        context_parallel: consecutive ranks that share each sequence, by ``context_parallel`` of
            torch around forward and backward (:func:`~.simulation.simulate`); several numbers to
            try all of them. "auto": 1, and for sequences of 32,768 tokens or more the powers of two
            that fit a node and divide the inner axis, and half of a sequence. With more than 1,
            candidates have the levels of a quick plan; all levels are tried with the degrees of the
            fastest.
        tensor_parallel: consecutive ranks that share the model's matrices; several numbers to try
            all of them. "auto": 1 and the powers of two that fit a node, divide the ranks, and for
            which a model of transformers has a plan (``tp_plan``). The others of the
            ``world_size`` ranks are data-parallel. Levels are those of ``context_parallel``, and
            candidates whose weights and optimizer state cannot fit are left out.
            Numbers that leave more data-parallel ranks than the global batch has rows are left out.
        parallelize: applies tensor parallelism to the model, see :func:`~.simulation.simulate`.
        pipeline: ranks of a pipeline of stages; several numbers to try all of them. "auto": 1, and
            the powers of two up to the number of nodes, or 16, for which the model has stages. With
            more than 1, levels are those of ``context_parallel``; a step needs at least so many
            microbatches. They are simulated from the
            costs of their stages (``quick`` of :func:`~.simulation.pipeline.simulate_pipeline`).
        schedules: of pipelines, those that split backwards included; see
            :func:`~.simulation.pipeline.simulate_pipeline`.
        stages: builds a stage, ``stages(index, num_stages)``. None:
            :class:`~fsdp_engine.CausalLMStages` of ``build``. The batch is then a dict with
            ``input_ids`` and ``labels``, or a tuple of the first stage's input and the targets.
        stage_loss: of the last stage's output and the targets. None: the cross-entropy of logits.
        **options: arguments of ``fe.shard`` for all candidates: ``units``, ``mp_policy``,
            ``config``, ...

    Returns:
        A :class:`~fsdp_engine.planner.strategy_plan.StrategyPlan`. If the model depends on the
        values of tensors (``if x.sum() > 0``), it is made by formulas, as with ``formulas``, and
        contains the line that reads a value.

    Raises:
        SimulationError: the model, the loss or the optimizer raised an exception; names the line.
        RuntimeError: torch.distributed is initialized in this process.
        TypeError: ``build`` does not return a module, its forward does not accept ``batch``, or an
            argument has another type.
        ValueError: an argument is invalid, also for ``fe.shard``.
    """
    request = PlanRequest(
        build,
        batch,
        world_size,
        machine,
        memory,
        meshes,
        checkpointing,
        microbatch_sizes,
        microbatches,
        loss,
        optimizer,
        formulas,
        progress,
        offload,
        global_batch,
        sequences,
        quick,
        cache,
        compile,
        context_parallel,
        tensor_parallel,
        parallelize,
        pipeline,
        schedules,
        stages,
        stage_loss,
        options,
    )
    known = Known()

    def replan(**changes: Any) -> StrategyPlan:
        """The same with other arguments."""
        return _Planning(replace(request, **changes), known).plan(replan)

    return replan()


# Options of ``shard`` that may select single blocks.
_BY_NAME = ("units", "codec_rules", "granule", "expert_mesh")


class _Planning:
    """One plan.

    Args:
        request: its arguments.
        known: results of other plans, which this one extends.

    Raises:
        SimulationError, TypeError, ValueError: see :func:`plan`.
    """

    def __init__(self, request: PlanRequest, known: Known) -> None:
        self._request = request
        self._model = model = build_meta_module(request.make_model)
        self._job = job = Job(request, known, request.microbatches)
        if not any(request.options.get(name) for name in _BY_NAME):
            repeated = find_repeated(model)
            job.repeated = repeated if repeated is not None and repeated.is_deep else None
        total = request.global_batch
        self._search = None if total is None else BatchSearch(job, total)
        degrees = request.degrees(model)
        self._candidates = list(request.only) or self._all_candidates(model, degrees)
        first = self._candidates[0]
        others = fitting_degrees(model, request.world_size, request.where.ranks_per_node)
        self._setting = Setting(
            model=type(model).__name__,
            num_elements=sum(param.numel() for param in model.parameters()),
            machine=request.where.name,
            world_size=request.world_size,
            ranks_per_node=request.where.ranks_per_node,
            memory=request.limit,
            item=job.unit(first)[0],
            microbatches=request.microbatches,
            machine_memory=request.where.processor.memory_bytes,
            machine_family=family_of(request.where),
            is_quick=request.quick,
            is_compiled=request.compile,
            more_degrees=degrees == [1] and others != [],
            more_contexts=request.context_parallel == 1 and request.where.host_runs_ahead,
        )
        if self._search is not None:
            batch = self._search.batch_of(first)
            self._setting = replace(self._setting, global_batch=batch)
        if request.cache and not request.formulas:
            job.use_cache(model)
        self._started = time.monotonic()

    def _all_candidates(self, model: nn.Module, degrees: Sequence[int]) -> list[Candidate]:
        """Those that may fit, of a global batch with the first size."""
        request = self._request
        every = self._with_long_sequences(request.candidates(degrees, request.pipelines(model)))
        if self._search is not None:
            every = _with_batch(every, self._search)
        if not every:
            raise ValueError(
                "global_batch: expected a size whose microbatches the schedules of pipelines take; "
                f"found {request.global_batch}"
            )
        found = self._allowed(self._without_hopeless(every))
        if not found:
            self._estimate(every[-1])  # raises
        return found

    def plan(self, replan: Callable[..., StrategyPlan]) -> StrategyPlan:
        """Try all candidates; by formulas if the model reads values.

        Args:
            replan: makes the plan with other arguments.
        """
        if self._request.formulas:
            return self._by_formulas(_FORMULAS_ALONE, replan)
        try:
            with simulated_compiler():  # blocks are traced once
                return self._by_simulations(replan)
        except SimulationError as error:
            if not error.needs_values or not self._data_parallel:
                raise
            return self._by_formulas(str(error), replan)

    def _by_simulations(self, replan: Callable[..., StrategyPlan]) -> StrategyPlan:
        outcomes = self._simulated()
        request, job, search = self._request, self._job, self._search
        is_varied = not (request.is_compared or request.quick or search) and outcomes[0].fits
        trials = job.trials(outcomes[0], request.limit) if is_varied else ()
        row_items = 1 if search is None else search.row_items(self._candidates[0])
        return StrategyPlan(
            self._setting,
            outcomes,
            trials,
            dict(request.options),
            job.simulate,
            replan,
            request.where,
            row_items,
            request.parallelize,
            request.make_stage,
        )

    def _simulated(self) -> tuple[Outcome, ...]:
        request = self._request
        found = self._outcomes(self._candidates)
        if request.only:
            return sorted_outcomes(found)
        if not request.quick:
            found += self._outcomes(self._more_levels(found))
        if request.tries_offloaded_activations:
            found += self._outcomes(_with_offloaded_activations(found, request.more_offloads))
        return sorted_outcomes(self._with_offloads(found, self._outcomes))

    def _by_formulas(self, why_unknown: str, replan: Callable[..., StrategyPlan]) -> StrategyPlan:
        setting = replace(self._setting, why_unknown=why_unknown, global_batch=0)
        tried = self._estimates(self._data_parallel)
        found = self._with_offloads(tried, self._estimates)
        options = dict(self._request.options)
        return StrategyPlan(setting, sorted_outcomes(found), options=options, replan=replan)

    def _outcomes(self, tried: Sequence[Candidate]) -> list[Outcome]:
        """Results of simulations; in a quick plan, of as many as there is time for."""
        request, job = self._request, self._job
        found: list[Outcome] = []
        with plan_progress(request.progress) as shown, _frozen_objects():
            job.progress = shown
            shown.add(len(tried))
            for each in tried:
                if self._is_late and any(other.fits for other in found):
                    break
                try:
                    search = None if request.only else self._search
                    chosen = each if search is None else search.sized(each)
                    found.append(job.outcome(chosen, request.limit))
                except SimulationError as error:
                    is_default = request.checkpointing is None and each.checkpointing == SELECTIVE
                    if error.needs_values or not is_default:
                        raise
                    warnings.warn(f"plan: left out {each}: {error}", stacklevel=5)
                else:
                    shown.found(found[-1], self._setting.item)
        job.progress = PlanProgress()
        return found

    @property
    def _is_late(self) -> bool:
        request = self._request
        has_end = request.quick and not request.is_compared
        return has_end and time.monotonic() - self._started >= QUICK_SECONDS

    def _with_offloads(
        self,
        outcomes: list[Outcome],
        outcomes_of: Callable[[Sequence[Candidate]], list[Outcome]],
    ) -> list[Outcome]:
        """Returns the outcomes; while none fits, also those of the candidates that might fit with
        an offload."""
        kept = list(outcomes)
        for offload in self._request.more_offloads:
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

    # Formulas.

    @property
    def _data_parallel(self) -> list[Candidate]:
        return [each for each in self._candidates if each.is_data_parallel]

    def _estimates(self, tried: Sequence[Candidate]) -> list[Outcome]:
        """Results of formulas, for the candidates that differ in their formulas."""
        return [
            Outcome.of_estimate(each, self._estimate(each), self._request.limit)
            for each in dict.fromkeys(map(_in_formulas, tried))
        ]

    def _estimate(self, candidate: Candidate) -> Estimate:
        request = self._request
        known = ("units", "mp_policy", "config", "granule", "codec_rules", "min_unit_size")
        options = {name: value for name, value in request.options.items() if name in known}
        return estimate(
            self._model,
            world_size=candidate.data_parallel,
            outer_size=candidate.mesh[0] if len(candidate.mesh) == 2 else 1,
            strategy=candidate.strategy,
            outer_strategy=candidate.outer_strategy,
            num_microbatches=request.microbatches,
            offload=candidate.offload if request.where.host_runs_ahead else None,
            **options,
        )

    def _without_hopeless(self, tried: list[Candidate]) -> list[Candidate]:
        """Those whose weights and optimizer state, by formulas, fit, and in a full plan all
        without other parallelism; the first if there are none. Tensor and pipeline parallelism
        divide them by their ranks at most."""
        request = self._request

        @functools.cache
        def held(candidate: Candidate) -> float:
            found = self._estimate(candidate)
            state = found.weight_bytes + found.optimizer_bytes * (request.optimizer is None)
            return state / (candidate.tensor_parallel * candidate.pipeline)

        return [
            each
            for each in tried
            if (each.is_data_parallel and not request.quick)
            or held(_in_formulas(each)) <= request.limit
        ] or tried[:1]

    def _more_levels(self, outcomes: Sequence[Outcome]) -> list[Candidate]:
        """Candidates with the degrees of the fastest one that fits, if it has others than data
        parallelism, with the levels that a quick plan does not try."""
        best = sorted_outcomes(outcomes)[0]
        like = best.candidate
        if like.is_data_parallel or best.fits is not True:
            return []
        tried = [each.candidate for each in outcomes if each.candidate.degrees == like.degrees]
        found = candidates(
            dict.fromkeys(each.mesh for each in tried),
            [like.checkpointing],
            [like.microbatch_size],
            like.offload,
            [like.sequence],
            like.tensor_parallel,
            like.context_parallel,
            like.pipeline,
            like.schedule,
        )
        return self._allowed([each for each in found if not is_quick(each)])

    def _with_long_sequences(self, tried: list[Candidate]) -> list[Candidate]:
        """Without those with context parallelism that "auto" does not try."""
        if self._request.context_parallel != AUTO:
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
        """Those whose levels allow their offload."""

        @functools.cache
        def is_allowed(candidate: Candidate) -> bool:
            try:
                self._estimate(candidate)
            except OffloadLevelError:
                return False
            return True

        def may_be_refused(candidate: Candidate) -> bool:
            places = {} if candidate.offload is None else candidate.offload.places
            return bool(places.keys() - {"optimizer_state"})

        return [
            each for each in tried if not may_be_refused(each) or is_allowed(_in_formulas(each))
        ]


def _with_batch(tried: Sequence[Candidate], search: BatchSearch) -> list[Candidate]:
    """Those whose numbers of batches divide the global batch.

    Raises:
        ValueError: there are none with a length of sequences.
    """

    def kind(each: Candidate) -> tuple[int, int, int | None]:
        return each.num_batches, each.pipeline, each.sequence

    allowed: set[tuple[int, int, int | None]] = set()
    refused: dict[int | None, ValueError] = {}
    for each in {kind(each): each for each in tried}.values():
        try:
            search.batch_of(each)
        except ValueError as error:
            refused.setdefault(each.sequence, error)
        else:
            allowed.add(kind(each))
    sequences = {sequence for *_, sequence in allowed}
    for sequence, refusal in refused.items():
        if sequence not in sequences:
            raise refusal
    return [each for each in tried if kind(each) in allowed and search.sizes(each)]


def _with_offloaded_activations(
    outcomes: Sequence[Outcome], offloads: Iterable[Offload]
) -> list[Candidate]:
    """Returns candidates with activations on the host that may be the fastest that fits, with one
    of ``offloads`` if none does without. A candidate takes at least the time that it takes with
    activations on the device."""
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
    """The candidate without what formulas do not know."""
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
    """Python's garbage collector does not visit objects that exist now, those of imported
    libraries, while models are simulated: they take a tenth of the time."""
    if gc.get_freeze_count():
        yield  # the caller's frozen objects stay so
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
