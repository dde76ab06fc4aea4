"""``plan``: simulates every strategy and selects the fastest that fits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.extras import naming_extra
from fsdp_engine.offload import HOST, Offload
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
    sorted_outcomes,
)
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
    **options: Any,
) -> StrategyPlan:
    """Select a strategy: simulate a step of the model under each strategy, with fake tensors in
    this process. The machine does not have to be available.

    Args:
        build: a function that returns the model, or its name as ``module:function``.
        batch: the inputs of the model on one rank, or a function that returns them; with
            ``microbatch_sizes`` a function of the size. See :func:`~.simulation.simulate`.
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
    for name, flag in (("formulas", formulas), ("progress", progress)):
        check_type(name, flag, bool, "True or False")
    if meshes is None:
        sizes = fitting_meshes(world_size, where.ranks_per_node)
    else:
        sizes = check_meshes(meshes, world_size)
    limit = USABLE * where.processor.memory_bytes if memory is None else memory
    make = import_function(build, "build") if isinstance(build, str) else build
    model = meta_model(make)
    job = _Job(make, batch, world_size, where, microbatches, loss, optimizer, options)
    given = offload if isinstance(offload, Offload) else None
    every = list(candidates(sizes, kept, batch_sizes, given))
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
        item=number_of_items(job.inputs(every[0].microbatch_size))[0],
        microbatches=microbatches,
        machine_memory=where.processor.memory_bytes,
        machine_family=family_of(where),
    )
    why_unknown = _FORMULAS_ALONE if formulas else ""

    def outcomes_of(tried: Sequence[Candidate]) -> list[Outcome]:
        shown = _with_progress_bar(tried) if progress else tried
        found = []
        for each in shown:
            try:
                found.append(job.outcome(each, limit))
            except SimulationError as error:
                may_be_left_out = checkpointing is None and each.checkpointing == SELECTIVE
                if error.needs_values or not may_be_left_out:
                    raise
                warnings.warn(f"plan: left out {each}: {error}", stacklevel=3)
        return found

    has_host = where.host_runs_ahead and where.host_link is not None
    more: tuple[Offload, ...] = AUTO_OFFLOADS if offload == AUTO and has_host else ()
    if where.host_memory_bandwidth is None:  # which the host needs to cast main weights
        more = tuple(each for each in more if each.main_weights != HOST)

    def allowed(tried: Sequence[Candidate]) -> list[Candidate]:
        return _allowed(model, job, tried)

    if not formulas:
        try:
            found = outcomes_of(every)
            if checkpointing is None and offload is not None and has_host:
                found += outcomes_of(_with_offloaded_activations(found, more))
            found = _with_offloads(found, more, allowed, outcomes_of)
            outcomes = sorted_outcomes(found)
        except SimulationError as error:
            if not error.needs_values:
                raise
            why_unknown = str(error)
    if why_unknown:
        setting = replace(setting, why_unknown=why_unknown)

        def estimates_of(tried: Sequence[Candidate]) -> list[Outcome]:
            return _estimate_all(model, job, tried, limit)

        found = _with_offloads(estimates_of(every), more, allowed, estimates_of)
        outcomes = sorted_outcomes(found)
        return StrategyPlan(setting, outcomes, options=options)
    trials = job.trials(outcomes[0], limit) if outcomes[0].fits else ()
    return StrategyPlan(setting, outcomes, trials, options, job.simulate)


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


@dataclass(frozen=True)
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
    known: OperationCache = field(default_factory=OperationCache)

    def inputs(self, size: int | None) -> Any:
        """A rank's batch."""
        if not callable(self.batch):
            if size is not None:
                raise ValueError(
                    "batch: expected a function of the microbatch size, since microbatch_sizes "
                    f"are given; found {type(self.batch).__name__}"
                )
            return self.batch
        return self.batch() if size is None else self.batch(size)

    def simulate(
        self, candidate: Candidate, *, inputs: Any = None, microbatches: int | None = None
    ) -> Simulation:
        """Simulate a step of ``candidate``."""
        return simulate(
            self.build,
            self.world_size,
            batch=self.inputs(candidate.microbatch_size) if inputs is None else inputs,
            mesh=candidate.mesh,
            machine=self.machine,
            loss=self.loss,
            optimizer=self.optimizer,
            microbatches=microbatches or self.microbatches,
            strategy=candidate.strategy,
            outer_strategy=candidate.outer_strategy,
            checkpointing=candidate.checkpointing,
            offload=candidate.offload,
            known=self.known,
            **self.options,
        )

    def outcome(self, candidate: Candidate, limit: float) -> Outcome:
        """The result of simulating ``candidate``."""
        return Outcome.of_simulation(
            candidate, self.simulate(candidate), self._items(candidate, 1), limit
        )

    def trials(self, chosen: Outcome, limit: float) -> tuple[Trial, ...]:
        """Variations of ``chosen``: a larger batch, and more microbatches."""
        candidate = chosen.candidate
        inputs = self.inputs(candidate.microbatch_size)
        more = _MORE_MICROBATCHES * self.microbatches
        tries: dict[str, tuple[int, Callable[[], Simulation]]] = {
            "a microbatch twice as large": (
                2,
                functools.partial(self.simulate, candidate, inputs=_doubled(inputs)),
            ),
            f"{more} microbatches a step": (
                _MORE_MICROBATCHES,
                functools.partial(self.simulate, candidate, microbatches=more),
            ),
        }
        found = []
        for change, (factor, run) in tries.items():
            try:
                simulation = run()
            except SimulationError:
                continue  # for example a model that only accepts one batch size
            items = self._items(candidate, factor)
            outcome = Outcome.of_simulation(candidate, simulation, items, limit)
            found.append(Trial(change, outcome.rate / chosen.rate, outcome.lacking))
        return tuple(found)

    def _items(self, candidate: Candidate, factor: int) -> int:
        _, count = number_of_items(self.inputs(candidate.microbatch_size))
        return factor * count * self.microbatches * self.world_size


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


def _with_progress_bar(every: Sequence[Candidate]) -> Iterable[Candidate]:
    with naming_extra():
        from rich.console import Console
        from rich.progress import track

    return track(every, "planning", console=Console(stderr=True), transient=True)


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
    return replace(candidate, checkpointing=False, microbatch_size=None)


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
