"""``plan``: every strategy tried on the simulated clock, and the fastest that fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.candidates import Candidate, candidates, check_meshes, fitting_meshes
from fsdp_engine.planner.estimates import estimate
from fsdp_engine.planner.inputs import named
from fsdp_engine.planner.outcome import Outcome, Setting, Trial, sorted_outcomes
from fsdp_engine.planner.planning import Planning
from fsdp_engine.simulation.arguments import (
    check_callable,
    check_count,
    check_memory,
    check_type,
    listed,
)
from fsdp_engine.simulation.building import made_by
from fsdp_engine.simulation.errors import SimulationError
from fsdp_engine.simulation.known_operations import KnownOperations
from fsdp_engine.simulation.machine import H100, Machine
from fsdp_engine.simulation.result import Simulation
from fsdp_engine.simulation.simulate import MakeOptimizer, simulate

# Of a machine's memory, where no other limit is given: the driver's context, buffers of NCCL and
# kernels, and gaps between an allocator's blocks take the rest (docs/planner.md).
USABLE = 0.9

_FORMULAS_ALONE = "formulas alone were asked for, which do not run the model."

# Microbatches, in place of one, that are tried for the chosen candidate.
_MORE_MICROBATCHES = 4


def plan(
    build: Callable[[], nn.Module] | str,
    batch: Any,
    *,
    world_size: int,
    machine: Machine | str = H100,
    memory: float | None = None,
    meshes: Iterable[Sequence[int]] | None = None,
    checkpointing: Iterable[bool] = (False, True),
    microbatch_sizes: Sequence[int] | None = None,
    microbatches: int = 1,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    formulas: bool = False,
    progress: bool = False,
    **options: Any,
) -> Planning:
    """Which strategy to take: the engine runs the model under each, on a machine that need not be
    there, with fake tensors, in this process.

    Args:
        build: makes the model, or ``module:function`` that does.
        batch: what the model is called with on one rank, or a function that makes it; with
            ``microbatch_sizes`` a function of the size. See :func:`~.simulation.simulate`.
        world_size: data-parallel ranks.
        machine: what it would run on: a machine, the name of a preset, or a file of ``calibrate``.
        memory: bytes that a rank may hold. None: 0.9 of what the machine's have.
        meshes: sizes of the axes to try, (inner,) or (outer, inner). None: one axis, and nodes x
            ranks of a node.
        checkpointing: whether each unit's activations are computed again in backward; both are
            tried.
        microbatch_sizes: sizes to try. None: the batch is as it is.
        microbatches: forwards and backwards in a step.
        loss, optimizer: see :func:`~.simulation.simulate`.
        formulas: the model is not run; rows come from formulas, without activations and times, and
            whether they fit is unknown.
        progress: show a bar on stderr.
        **options: arguments of ``fe.shard`` for all candidates: ``units``, ``mp_policy``,
            ``config``, ...

    Returns:
        A :class:`~fsdp_engine.planner.planning.Planning`. Where the model depends on the values of
        tensors (``if x.sum() > 0``), its rows come from formulas as with ``formulas``, and it says
        which line that was.

    Raises:
        SimulationError: the model, the loss or the optimizer raised something; names the line.
        RuntimeError: torch.distributed is initialised in this process.
        TypeError: ``build`` makes no module, its forward does not take ``batch``, or an argument is
            of another type.
        ValueError: an argument, or what ``fe.shard`` would refuse.
    """
    where = machine if isinstance(machine, Machine) else Machine.named(machine)
    check_count("world_size", world_size, "1 rank or more")
    check_count("microbatches", microbatches, "at least 1")
    if memory is not None:
        check_memory(memory)
    if not isinstance(build, str):
        check_callable("build", build, "a function that makes a torch.nn.Module, or its name")
    for name, function in (("loss", loss), ("optimizer", optimizer)):
        if function is not None:
            check_callable(name, function, "a function, or None")
    recomputes = listed("checkpointing", checkpointing, "True, False or both, in a tuple")
    for each in recomputes:
        check_type("checkpointing", each, bool, "True, False or both, in a tuple")
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
    make = named(build, "build") if isinstance(build, str) else build
    model = on_meta(make)
    job = _Job(make, batch, world_size, where, microbatches, loss, optimizer, options)
    every = list(candidates(sizes, recomputes, batch_sizes))
    if not every:
        raise ValueError(
            "meshes, checkpointing, microbatch_sizes: expected something to try; found nothing"
        )
    setting = Setting(
        model=type(model).__name__,
        num_elements=sum(param.numel() for param in model.parameters()),
        machine=where.name,
        world_size=world_size,
        ranks_per_node=where.ranks_per_node,
        memory=limit,
        item=number_of_items(job.inputs(every[0].microbatch_size))[0],
        microbatches=microbatches,
    )
    why_unknown = _FORMULAS_ALONE if formulas else ""
    if not formulas:
        told = _with_bar(every) if progress else every
        try:
            outcomes = sorted_outcomes([job.outcome(each, limit) for each in told])
        except SimulationError as error:
            if not error.needs_values:
                raise
            why_unknown = str(error)
    if why_unknown:
        setting = replace(setting, why_unknown=why_unknown)
        return Planning(setting, _by_formulas(model, job, every, limit), options=options)
    trials = job.trials(outcomes[0], limit) if outcomes[0].fits else ()
    return Planning(setting, outcomes, trials, options, job.simulate)


@dataclass(frozen=True)
class _Job:
    """What all candidates have in common; see :func:`plan`. Their operations are worked out once
    for all."""

    build: Callable[[], nn.Module]
    batch: Any
    world_size: int
    machine: Machine
    microbatches: int
    loss: Callable[[Any], Tensor] | None
    optimizer: MakeOptimizer | None
    options: dict[str, Any]
    known: KnownOperations = field(default_factory=KnownOperations)

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
        """A step of ``candidate``."""
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
            known=self.known,
            **self.options,
        )

    def outcome(self, candidate: Candidate, limit: float) -> Outcome:
        """``candidate``, tried."""
        return Outcome.of_simulation(
            candidate, self.simulate(candidate), self._items(candidate, 1), limit
        )

    def trials(self, chosen: Outcome, limit: float) -> tuple[Trial, ...]:
        """``chosen`` with a larger batch, and with more microbatches."""
        candidate = chosen.candidate
        inputs = self.inputs(candidate.microbatch_size)
        more = _MORE_MICROBATCHES * self.microbatches
        tries: dict[str, tuple[int, Callable[[], Simulation]]] = {
            "a microbatch twice as large": (
                2,
                functools.partial(self.simulate, candidate, inputs=_twice(inputs)),
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
                continue  # a model for batches of one size, say: then it is no advice
            items = self._items(candidate, factor)
            outcome = Outcome.of_simulation(candidate, simulation, items, limit)
            found.append(Trial(change, outcome.rate / chosen.rate, outcome.lacking))
        return tuple(found)

    def _items(self, candidate: Candidate, factor: int) -> int:
        _, count = number_of_items(self.inputs(candidate.microbatch_size))
        return factor * count * self.microbatches * self.world_size


def number_of_items(inputs: Any) -> tuple[str, int]:
    """What a rank's batch is counted in, and how much of it there is: elements of its first matrix
    of integers are tokens; without one, rows of its first tensor are samples.

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


def _with_bar(every: Sequence[Candidate]) -> Iterable[Candidate]:
    with naming_extra():
        from rich.console import Console
        from rich.progress import track

    return track(every, "planning", console=Console(stderr=True), transient=True)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``build`` makes, of which nothing is allocated.

    Raises:
        SimulationError: ``build`` raised.
        TypeError: ``build`` makes something else.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        return made_by(build)


def _twice(inputs: Any) -> Any:
    """The batch, and itself once more behind it."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = tensors[0].shape[0] if tensors else 0

    def twice(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and tensor.shape[0] == rows
        return torch.cat([tensor, tensor]) if has_rows else tensor

    return tree_map_only(Tensor, twice, inputs)


def _by_formulas(
    model: nn.Module, job: _Job, every: Sequence[Candidate], limit: float
) -> tuple[Outcome, ...]:
    """What is known without a simulation, of candidates that differ in it."""
    known = ("units", "mp_policy", "config", "granule", "codec_rules", "min_unit_size")
    options = {name: value for name, value in job.options.items() if name in known}
    outcomes = []
    for each in dict.fromkeys(
        replace(each, checkpointing=False, microbatch_size=None) for each in every
    ):
        found = estimate(
            model,
            world_size=job.world_size,
            outer_size=each.mesh[0] if len(each.mesh) == 2 else 1,
            strategy=each.strategy,
            outer_strategy=each.outer_strategy,
            num_microbatches=job.microbatches,
            **options,
        )
        outcomes.append(Outcome.of_estimate(each, found, limit))
    return sorted_outcomes(outcomes)
