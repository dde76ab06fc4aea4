"""``plan``: simulates every strategy and selects the fastest that fits."""

from __future__ import annotations

import functools
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.offload import HOST, Offload
from fsdp_engine.planner.batch_search import (
    MOST_SIMULATED,
    divisors,
    largest_fitting,
    of_many,
    rows_of_rank,
)
from fsdp_engine.planner.command_inputs import import_function
from fsdp_engine.planner.estimates import Estimate, OffloadLevelError, estimate
from fsdp_engine.planner.outcome import (
    ACTIVATIONS,
    KIND_OF_OFFLOADED,
    USABLE,
    Candidate,
    Outcome,
    Setting,
    Trial,
    candidates,
    check_checkpointing,
    check_meshes,
    fitting_meshes,
    is_faster,
    quick_candidates,
    sorted_outcomes,
)
from fsdp_engine.planner.plan_cache import JobCache, cache_of, digest
from fsdp_engine.planner.progress import PlanProgress, plan_progress
from fsdp_engine.planner.questions import check_positive
from fsdp_engine.planner.strategy_plan import StrategyPlan
from fsdp_engine.runtime.activations import OFFLOAD, Activations
from fsdp_engine.simulation.machine import H100, Machine
from fsdp_engine.simulation.operations import OperationCache
from fsdp_engine.simulation.simulate import MakeOptimizer, Simulation, build_module, simulate
from fsdp_engine.simulation.simulation_error import (
    SimulationError,
    check_callable,
    check_count,
    check_memory,
    check_type,
    listed,
)
from fsdp_engine.simulation.time_accuracy import family_of
from fsdp_engine.units.checkpointing import SELECTIVE

_FORMULAS_ALONE = "the plan was made by formulas only, which do not run the model."

# Everything that can be on the host.
EVERYTHING = Offload(optimizer_state=HOST, main_weights=HOST, gradients=HOST)
# As `offload`: only if nothing fits without. The offloads that are tried then, until some fit.
AUTO = "auto"
AUTO_OFFLOADS = (Offload(optimizer_state=HOST), EVERYTHING)

# A quick plan tries no further candidate after these seconds, if one fits.
QUICK_SECONDS = 6.0

# Factor of the number of microbatches in a trial of the chosen candidate.
_MORE_MICROBATCHES = 4


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
    **options: Any,
) -> StrategyPlan:
    """Select a strategy: simulate a step of the model under each strategy, with fake tensors in
    this process. The machine does not have to be available.

    Args:
        build: a function that returns the model, or its name as ``module:function``.
        batch: the inputs of the model on one rank, or a function that returns them; with
            ``microbatch_sizes`` or ``global_batch`` a function of the size, with ``sequences`` one
            that also takes ``sequence=``. See :func:`~.simulation.simulate`.
        world_size: data-parallel ranks.
        machine: a machine, the name of a preset, or a file of ``calibrate``.
        memory: memory limit of a rank in bytes. None: 0.9 of the machine's memory.
        meshes: sizes of the axes to try, (inner,) or (outer, inner). None: one axis, and nodes x
            ranks per node.
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
    given: dict[str, Any] = {
        "world_size": world_size,
        "machine": machine,
        "memory": memory,
        "meshes": meshes,
        "checkpointing": checkpointing,
        "microbatch_sizes": microbatch_sizes,
        "microbatches": microbatches,
        "loss": loss,
        "optimizer": optimizer,
        "formulas": formulas,
        "progress": progress,
        "offload": offload,
        "global_batch": global_batch,
        "sequences": sequences,
        "quick": quick,
        "cache": cache,
    }
    known, rows = OperationCache(), _Rows()
    for name in ("meshes", "checkpointing", "microbatch_sizes", "sequences"):
        if isinstance(given[name], Iterator):
            given[name] = list(given[name])

    def replan(**changes: Any) -> StrategyPlan:
        """The same with other arguments."""
        again = {**given, **changes}
        return _plan(build, batch, options, known, rows, replan, **again)

    return replan()


def _plan(
    build: Callable[[], nn.Module] | str,
    batch: Any,
    options: dict[str, Any],
    known: OperationCache,
    rows: _Rows,
    replan: Callable[..., StrategyPlan],
    *,
    world_size: int,
    machine: Machine | str,
    memory: float | None,
    meshes: Iterable[Sequence[int]] | None,
    checkpointing: Iterable[bool | str] | None,
    microbatch_sizes: Sequence[int] | None,
    microbatches: int,
    loss: Callable[[Any], Tensor] | None,
    optimizer: MakeOptimizer | None,
    formulas: bool,
    progress: bool,
    offload: Offload | str | None,
    global_batch: float | None,
    sequences: Sequence[int] | None,
    quick: bool,
    cache: bool,
    is_compared: bool = False,
) -> StrategyPlan:
    """See :func:`plan`. Plans of one call share ``known`` and ``rows``. With ``is_compared`` the
    chosen candidate is not varied, and a quick plan tries all of its candidates: plans that are
    compared must not depend on the time that they take."""
    where = machine if isinstance(machine, Machine) else Machine.named(machine)
    check_count("world_size", world_size, "1 rank or more")
    check_count("microbatches", microbatches, "at least 1")
    if memory is not None:
        check_memory(memory)
    if offload is not None and offload != AUTO:
        check_type("offload", offload, Offload, "an fe.Offload, 'auto' or None")
    if not isinstance(build, str):
        check_callable("build", build, "a function that returns a torch.nn.Module, or its name")
    for name, function in (("loss", loss), ("optimizer", optimizer)):
        if function is not None:
            check_callable(name, function, "a function, or None")
    kept: list[Any] = [False, SELECTIVE, True]
    if checkpointing is not None:
        kept = listed("checkpointing", checkpointing, "True, False, 'selective' ..., in a tuple")
    for each in kept:
        check_checkpointing(each)
    batch_sizes: list[Any] = [None]
    if microbatch_sizes is not None:
        batch_sizes = listed("microbatch_sizes", microbatch_sizes, "sizes, such as (1, 2)")
        for each in batch_sizes:
            check_count("microbatch_sizes", each, "sizes of 1 or more")
    lengths: list[Any] = [None]
    if sequences is not None:
        lengths = listed("sequences", sequences, "lengths, such as (4096, 8192)")
        for each in lengths:
            check_count("sequences", each, "lengths of 1 or more")
    if global_batch is not None:
        check_positive("global_batch", global_batch, "tokens or samples of a step")
        if formulas:
            raise ValueError(
                "global_batch: expected a plan that runs the model, since formulas do not know the "
                "memory of a microbatch; found formulas"
            )
        if microbatches != 1:
            raise ValueError(
                "microbatches: expected none with global_batch, from which their number follows; "
                f"found {microbatches}"
            )
    flags = {"formulas": formulas, "progress": progress, "quick": quick, "cache": cache}
    for name, flag in flags.items():
        check_type(name, flag, bool, "True or False")
    if meshes is None:
        sizes = fitting_meshes(world_size, where.ranks_per_node)
    else:
        sizes = check_meshes(meshes, world_size)
    limit = USABLE * where.processor.memory_bytes if memory is None else memory
    make = import_function(build, "build") if isinstance(build, str) else build
    model = meta_model(make)
    job = _Job(make, batch, world_size, where, microbatches, loss, optimizer, options, known, rows)
    given = offload if isinstance(offload, Offload) else None
    one_size = [None] if global_batch is None else [batch_sizes[0] or 1]
    every = list(
        candidates(sizes, kept, batch_sizes if global_batch is None else one_size, given, lengths)
    )
    if quick:
        every = _without_hopeless(model, job, quick_candidates(every), limit)
    if not every:
        raise ValueError(
            "meshes, checkpointing, microbatch_sizes: expected at least one candidate; found none"
        )
    last = every[-1]
    every = _allowed(model, job, every)
    if not every:
        _estimate(model, job, last)  # raises
    setting = Setting(
        model=type(model).__name__,
        num_elements=sum(param.numel() for param in model.parameters()),
        machine=where.name,
        world_size=world_size,
        ranks_per_node=where.ranks_per_node,
        memory=limit,
        item=job.unit(every[0])[0],
        microbatches=microbatches,
        machine_memory=where.processor.memory_bytes,
        machine_family=family_of(where),
        is_quick=quick,
    )
    if cache and not formulas:
        job.use_cache(model)
    search = None
    if global_batch is not None:
        search = _Search(
            job, global_batch, None if microbatch_sizes is None else batch_sizes, limit
        )
        setting = replace(setting, global_batch=search.batch_of(every[0]))
    why_unknown = _FORMULAS_ALONE if formulas else ""

    started = time.monotonic()

    def outcomes_of(tried: Sequence[Candidate]) -> list[Outcome]:
        found: list[Outcome] = []
        with plan_progress(progress) as shown, _frozen_objects():
            job.progress = shown
            shown.add(len(tried))
            for each in tried:
                has_time = time.monotonic() - started < QUICK_SECONDS
                has_time = has_time or is_compared or not quick
                if not has_time and any(other.fits for other in found):
                    break
                try:
                    chosen = each if search is None else search.sized(each)
                    found.append(job.outcome(chosen, limit))
                except SimulationError as error:
                    may_be_left_out = checkpointing is None and each.checkpointing == SELECTIVE
                    if error.needs_values or not may_be_left_out:
                        raise
                    warnings.warn(f"plan: left out {each}: {error}", stacklevel=3)
                else:
                    shown.found(found[-1], setting.item)
        job.progress = PlanProgress()
        return found

    has_host = where.host_runs_ahead and where.host_link is not None
    has_more = offload == AUTO and has_host and not quick
    more: tuple[Offload, ...] = AUTO_OFFLOADS if has_more else ()
    if where.host_memory_bandwidth is None:  # which the host needs to cast main weights
        more = tuple(each for each in more if each.main_weights != HOST)

    def allowed(tried: Sequence[Candidate]) -> list[Candidate]:
        return _allowed(model, job, tried)

    if not formulas:
        try:
            found = outcomes_of(every)
            if checkpointing is None and offload is not None and has_host and not quick:
                found += outcomes_of(_with_offloaded_activations(found, more))
            found = _with_offloads(found, more, allowed, outcomes_of)
            outcomes = sorted_outcomes(found)
        except SimulationError as error:
            if not error.needs_values:
                raise
            why_unknown = str(error)
    if why_unknown:
        setting = replace(setting, why_unknown=why_unknown, global_batch=0)

        def estimates_of(tried: Sequence[Candidate]) -> list[Outcome]:
            return _estimate_all(model, job, tried, limit)

        found = _with_offloads(estimates_of(every), more, allowed, estimates_of)
        outcomes = sorted_outcomes(found)
        return StrategyPlan(setting, outcomes, options=options, replan=replan)
    is_varied = not is_compared and not quick and search is None and outcomes[0].fits
    trials = job.trials(outcomes[0], limit) if is_varied else ()
    row_items = 1 if search is None else search.row_items(every[0])
    return StrategyPlan(setting, outcomes, trials, options, job.simulate, replan, where, row_items)


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
        and all(is_faster(each, other) for other in fitting)
    ]


def _with_offloads(
    outcomes: list[Outcome],
    offloads: Iterable[Offload],
    allowed: Callable[[Sequence[Candidate]], list[Candidate]],
    outcomes_of: Callable[[Sequence[Candidate]], list[Outcome]],
) -> list[Outcome]:
    """Returns the outcomes; while none fits, also those of the candidates that might fit with an
    offload."""
    kept = list(outcomes)
    for offload in offloads:
        if any(each.fits is not False for each in outcomes):
            break
        kinds = [KIND_OF_OFFLOADED[role] for role in offload.places]
        might = allowed(
            [
                replace(each.candidate, offload=offload)
                for each in kept
                if each.lacking <= sum(each.memory.get(kind, 0) for kind in kinds)
            ]
        )
        if might:
            outcomes = outcomes + outcomes_of(might)
    return outcomes


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


@dataclass
class _Rows:
    """Outcomes that were simulated, by machine, ranks and candidate, without a memory limit."""

    outcomes: dict[tuple[str, int, Candidate, int, int], Outcome] = field(default_factory=dict)


@dataclass
class _Job:
    """The arguments that all candidates share; see :func:`plan`. Their simulations share a cache of
    operations."""

    build: Callable[[], nn.Module]
    batch: Any
    world_size: int
    machine: Machine
    microbatches: int
    loss: Callable[[Any], Tensor] | None
    optimizer: MakeOptimizer | None
    options: dict[str, Any]
    known: OperationCache
    rows: _Rows
    progress: PlanProgress = field(default_factory=PlanProgress)
    cache: JobCache | None = None

    def use_cache(self, model: nn.Module) -> None:
        """Take outcomes from disk, and keep them there."""
        parts = ("loss", "optimizer", "options", "machine", "world_size")
        self.cache = cache_of({"model": model, **{name: getattr(self, name) for name in parts}})

    def inputs(self, candidate: Candidate) -> Any:
        """A rank's batch."""
        size, sequence = candidate.microbatch_size, candidate.sequence
        if not callable(self.batch):
            if size is not None or sequence is not None:
                raise ValueError(
                    "batch: expected a function of the microbatch size, since microbatch_sizes, "
                    f"sequences or global_batch are given; found {type(self.batch).__name__}"
                )
            return self.batch
        sizes = () if size is None else (size,)
        return self.batch(*sizes) if sequence is None else self.batch(*sizes, sequence=sequence)

    def unit(self, candidate: Candidate) -> tuple[str, int]:
        """The unit of a rank's microbatch, and its size."""
        return number_of_items(self.inputs(candidate))

    def simulate(self, candidate: Candidate, *, inputs: Any = None) -> Simulation:
        """Simulate a step of ``candidate``."""
        return simulate(
            self.build,
            self.world_size,
            batch=self.inputs(candidate) if inputs is None else inputs,
            mesh=candidate.mesh,
            machine=self.machine,
            loss=self.loss,
            optimizer=self.optimizer,
            microbatches=candidate.microbatches or self.microbatches,
            strategy=candidate.strategy,
            outer_strategy=candidate.outer_strategy,
            checkpointing=candidate.checkpointing,
            offload=candidate.offload,
            known=self.known,
            **self.options,
        )

    def outcome(self, candidate: Candidate, limit: float, factor: int = 1) -> Outcome:
        """The result of ``candidate``, with ``factor`` times its batch."""
        count = candidate.microbatches
        if count is not None and count > MOST_SIMULATED:
            fewer = [replace(candidate, microbatches=each) for each in (2, MOST_SIMULATED)]
            two, three = (self.outcome(each, limit, factor) for each in fewer)
            return of_many(two, three, candidate)
        key = repr(self.machine), self.world_size, candidate, self.microbatches, factor
        found = self.rows.outcomes.get(key)
        if found is None:
            found = self.rows.outcomes[key] = self._stored(candidate, factor)
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
        simulation = self.simulate(candidate, inputs=inputs)
        _, items = number_of_items(inputs)
        items *= (candidate.microbatches or self.microbatches) * self.world_size
        found = Outcome.of_simulation(candidate, simulation, items, math.inf)
        if self.cache is not None and row is not None:
            self.cache.put(row, found)
        return found

    def trials(self, chosen: Outcome, limit: float) -> tuple[Trial, ...]:
        """Variations of ``chosen``: a larger batch, and more microbatches."""
        candidate = chosen.candidate
        more = _MORE_MICROBATCHES * (candidate.microbatches or self.microbatches)
        longer = replace(self, microbatches=more)  # simulates all of them
        tries: dict[str, Callable[[], Outcome]] = {
            "a microbatch twice as large": lambda: self.outcome(candidate, limit, 2),
            f"{more} microbatches a step": lambda: longer.outcome(candidate, limit),
        }
        found = []
        for change, run in tries.items():
            try:
                outcome = run()
            except SimulationError:
                continue  # for example a model that only accepts one batch size
            found.append(Trial(change, outcome.rate / chosen.rate, outcome.lacking))
        return tuple(found)


@dataclass(frozen=True)
class _Search:
    """The search for microbatches of a global batch; see ``batch_search.py``."""

    job: _Job
    global_batch: float
    sizes: Sequence[int] | None
    limit: float

    def batch_of(self, candidate: Candidate) -> int:
        """Tokens or samples of a step, nearest to those that were asked for."""
        _, items = self._row(candidate)
        return self._rows(candidate) * items * self.job.world_size

    def row_items(self, candidate: Candidate) -> int:
        """Tokens or samples of a row."""
        return self._row(candidate)[1]

    def sized(self, candidate: Candidate) -> Candidate:
        """The candidate with the largest microbatch that fits."""
        rows = self._rows(candidate)
        sizes = divisors(rows)
        if self.sizes is not None:
            sizes = [each for each in sizes if each in self.sizes]
            if not sizes:
                raise ValueError(
                    f"microbatch_sizes: expected a divisor of a rank's {rows} rows in a step; "
                    f"found {list(self.sizes)}"
                )

        def outcome_of(tried: Candidate) -> Outcome:
            return self.job.outcome(tried, self.limit)

        return largest_fitting(candidate, rows, sizes, self.limit, outcome_of)

    def _row(self, candidate: Candidate) -> tuple[str, int]:
        return self.job.unit(replace(candidate, microbatch_size=1))

    def _rows(self, candidate: Candidate) -> int:
        item, items = self._row(candidate)
        return rows_of_rank(self.global_batch, self.job.world_size, items, item)


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


def meta_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model without allocating memory.

    Raises:
        SimulationError: ``build`` raised an exception.
        TypeError: ``build`` does not return a module.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        return build_module(build)


def _doubled(inputs: Any) -> Any:
    """The batch, concatenated with itself along rows."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = tensors[0].shape[0] if tensors else 0

    def twice(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and tensor.shape[0] == rows
        return torch.cat([tensor, tensor]) if has_rows else tensor

    return tree_map_only(Tensor, twice, inputs)


def _estimate_all(
    model: nn.Module, job: _Job, every: Sequence[Candidate], limit: float
) -> list[Outcome]:
    """Results of formulas, for the candidates that differ in their formulas."""
    return [
        Outcome.of_estimate(each, _estimate(model, job, each), limit)
        for each in dict.fromkeys(map(_in_formulas, every))
    ]


def _in_formulas(candidate: Candidate) -> Candidate:
    """The candidate without what formulas do not know."""
    return replace(
        candidate, checkpointing=False, microbatch_size=None, microbatches=None, sequence=None
    )


def _estimate(model: nn.Module, job: _Job, candidate: Candidate) -> Estimate:
    known = ("units", "mp_policy", "config", "granule", "codec_rules", "min_unit_size")
    options = {name: value for name, value in job.options.items() if name in known}
    return estimate(
        model,
        world_size=job.world_size,
        outer_size=candidate.mesh[0] if len(candidate.mesh) == 2 else 1,
        strategy=candidate.strategy,
        outer_strategy=candidate.outer_strategy,
        num_microbatches=job.microbatches,
        offload=candidate.offload if job.machine.host_runs_ahead else None,
        **options,
    )


def _without_hopeless(
    model: nn.Module, job: _Job, tried: list[Candidate], limit: float
) -> list[Candidate]:
    """Those whose weights and optimizer state, by formulas, fit; the first if none does."""

    @functools.cache
    def held(candidate: Candidate) -> int:
        found = _estimate(model, job, candidate)
        return found.weight_bytes + found.optimizer_bytes * (job.optimizer is None)

    return [each for each in tried if held(_in_formulas(each)) <= limit] or tried[:1]


def _allowed(model: nn.Module, job: _Job, tried: Sequence[Candidate]) -> list[Candidate]:
    """Those whose levels allow their offload."""

    @functools.cache
    def is_allowed(candidate: Candidate) -> bool:
        try:
            _estimate(model, job, candidate)
        except OffloadLevelError:
            return False
        return True

    def may_be_refused(candidate: Candidate) -> bool:
        places = {} if candidate.offload is None else candidate.offload.places
        return bool(places.keys() - {"optimizer_state"})

    return [each for each in tried if not may_be_refused(each) or is_allowed(_in_formulas(each))]
