"""The result of ``plan``: an outcome for each candidate, the chosen one, and a recommendation.

The recommendation is a text. It names the chosen candidate, a faster one that does not fit, the
bottleneck, and changes that would help.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_engine import terminal
from fsdp_engine.kernel_interface import Engine, checked_arguments
from fsdp_engine.planner.candidate_sharding import shard_as
from fsdp_engine.planner.candidates import Candidate, Mesh, merged_extensions
from fsdp_engine.planner.comparison import ComparedRow, Comparison, named_machines
from fsdp_engine.planner.option_values import SELECTIVE
from fsdp_engine.planner.outcome import (
    ACTIVATIONS,
    TOLERANCE,
    USABLE,
    Outcome,
    Setting,
    Times,
    Trial,
    is_faster,
    sorted_outcomes,
)
from fsdp_engine.planner.questions import TrainingRun
from fsdp_engine.planner.simulation.causal_lm_stages import Stages
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.simulate import Simulation
from fsdp_engine.planner.simulation.simulation_error import (
    check_count,
    check_positive,
    listed,
    read_json,
)
from fsdp_engine.planner.simulation.step_options import Parallelize
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of
from fsdp_engine.planner.state_places import KIND_OF_OFFLOADED

if TYPE_CHECKING:  # this import loads torch's compiler
    from torch.distributed.pipelining import PipelineStage

# Default numbers of ranks of `scaling`, from one node of eight ranks.
RANKS = tuple(2**power for power in range(3, 13))

# Waits below this fraction of a step's time are not mentioned.
_MIN_SHARE = 0.05


def advice(setting: Setting, outcomes: Sequence[Outcome], trials: Sequence[Trial]) -> str:
    """Returns the recommendation, one sentence per line.

    Args:
        setting: The job.
        outcomes: The outcomes in the order of ``StrategyPlan.outcomes``.
        trials: Variations of the first outcome.
    """
    lines = []
    if setting.why_unknown:
        lines.append(f"Activations and times are unknown: {setting.why_unknown}")
    limit = [text] if (text := _limit(setting)) else []
    first = outcomes[0]
    if first.lacking:
        if setting.is_quick:
            lines.append(
                f"This is a quick plan, of {len(outcomes)} of the candidates: a full plan "
                "(`--full`, `planning.full()`) may find one that fits."
            )
        return "\n".join([*lines, *_nothing_fits(setting, outcomes), *limit])
    if first.times is None:
        return "\n".join([*lines, *_unknown_fit(setting, first), *limit])
    lines += [_choice(setting, first, first.times), *limit]
    if setting.is_compiled:
        lines.append(_COMPILED)
    lines.append(accuracy_of(setting.machine_family).sentence(first.times.step))
    lines += _beyond_accuracy(first.candidate)
    if setting.is_quick:
        lines.append(
            f"This is a quick plan, of {len(outcomes)} of the candidates: others may be faster."
        )
    else:
        lines.append(_next_faster(first, outcomes))
    lines.append(_bottleneck(setting, first, first.times))
    lines += _help(setting, first, first.times, trials)
    return "\n".join(lines)


_COMPILED = (
    "Blocks are compiled in this plan: call block.compile() on each of them, before or after "
    "fe.shard, which does not compile."
)


def _beyond_accuracy(candidate: Candidate) -> list[str]:
    """Returns a caveat if the stated accuracy does not cover the candidate's parallelism."""
    found = ["context parallelism"] * (candidate.context_parallel > 1)
    found += ["pipelines"] * (candidate.pipeline > 1)
    text = (
        f"The compared steps did not use {' or '.join(found)}; times of this plan are less certain."
    )
    return [text] * bool(found)


def _limit(setting: Setting) -> str:
    """Returns the memory limit, and the size and purpose of the memory kept free; empty if the
    machine's memory is unknown."""
    whole = setting.machine_memory
    if not whole:
        return ""
    has = f"the machine's {terminal.format_bytes(whole)} ({whole / 1e9:,.4g} GB)"
    if setting.memory != USABLE * whole:
        return f"Memory limit: {terminal.format_bytes(setting.memory)}, as given, of {has}."
    others = "the driver's context, buffers of NCCL and of kernels"
    if setting.machine_family == "calibrated CPU":
        others = "the system, buffers of messages and of kernels"
    return (
        f"Memory limit: {terminal.format_bytes(setting.memory)}, {USABLE} of {has}; "
        f"{terminal.format_bytes(whole - setting.memory)} are kept free for {others}, and "
        "fragmentation."
    )


def _unknown_fit(setting: Setting, first: Outcome) -> list[str]:
    sent = terminal.format_bytes(sum(first.sent.values()))
    held, limit = terminal.format_bytes(first.peak_bytes), terminal.format_bytes(setting.memory)
    return [
        "Whether any candidate fits is therefore unknown.",
        f"Of the candidates whose weights, gradients and optimizer state fit, {first.candidate} "
        f"sends the fewest bytes ({sent} per step); it holds {held} of {limit}, without "
        "activations.",
    ]


def _choice(setting: Setting, chosen: Outcome, times: Times) -> str:
    held = terminal.format_bytes(chosen.peak_bytes)
    limit = terminal.format_bytes(setting.memory)
    rate = f"{terminal.format_count(chosen.rate)} {setting.item}/s"
    step = f"{terminal.format_seconds(times.step)} {accuracy_of(setting.machine_family).mark}"
    text = f"Use {chosen.candidate}: {step} per step, {rate}, at most {held} of {limit}."
    sharing = min(setting.ranks_per_node, setting.world_size)
    for place, num_bytes in chosen.elsewhere.items():
        text += (
            f" Each node keeps {terminal.format_bytes(sharing * num_bytes)} on the {place}, "
            f"{terminal.format_bytes(num_bytes)} of each rank."
        )
    return text


def _next_faster(chosen: Outcome, outcomes: Sequence[Outcome]) -> str:
    faster = [each for each in outcomes if each.lacking and is_faster(each, chosen)]
    if not faster:
        # Rates within the tolerance are considered equal, though the table may show a difference.
        is_close = any(each.lacking and each.rate > chosen.rate for each in outcomes)
        margin = f" by more than {TOLERANCE:.1%}" if is_close else ""
        return f"No candidate above the memory limit would be faster{margin}."
    nearest = min(faster, key=lambda each: (each.lacking, -each.rate))
    speedup = f"is {nearest.rate / chosen.rate - 1:.1%} faster"
    return (
        f"Of the faster candidates, which do not fit, {nearest.candidate} lacks the least memory: "
        f"it {speedup}, but {_missing_memory(nearest)}."
    )


def _missing_memory(outcome: Outcome) -> str:
    kind = outcome.largest_kind
    return (
        f"it exceeds the limit by {terminal.format_bytes(outcome.lacking)}, and the largest part "
        f"of its memory is {kind} ({terminal.format_bytes(outcome.memory[kind])})"
    )


def _bottleneck(setting: Setting, chosen: Outcome, times: Times) -> str:
    shares = times.shares()
    waits = {name: share for name, share in shares.items() if name != "compute"}
    worst = max(waits, key=lambda name: waits[name])
    tensor = chosen.candidate.tensor_parallel
    context = chosen.candidate.context_parallel * tensor
    inner = chosen.candidate.mesh[-1] * tensor
    pipeline = chosen.candidate.pipeline
    names = {
        "inner link": f"the inner link ({_link(setting, inner)})",
        "outer link": f"the outer link ({_link(setting, setting.world_size // pipeline)})",
        "context link": f"the context-parallel link ({_link(setting, context)})",
        "tensor link": f"the tensor-parallel link ({_link(setting, tensor)})",
        "other stages": "other stages of the pipeline",
        "state copies": "copies of offloaded state",
        "activation copies": "copies of activations",
        "host": "the host",
    }
    listed = [
        f"{names.get(name, name)} {share:.0%}"
        for name, share in waits.items()
        if share >= _MIN_SHARE
    ]
    most = "compute" if shares["compute"] >= waits[worst] else names.get(worst, worst)
    spent = ", ".join([f"compute takes {shares['compute']:.0%} of the step", *listed])
    end = "" if listed else ", and waits are negligible"
    return f"Bottleneck: {most}; {spent}{end}."


def _link(setting: Setting, num_ranks: int) -> str:
    """Returns "within a node" if this number of consecutive ranks fits a node, otherwise "between
    nodes"."""
    return "within a node" if num_ranks <= setting.ranks_per_node else "between nodes"


# For each schedule, a phrase that names schedules with shorter waits.
_SHORTER_SCHEDULES = {
    **dict.fromkeys(("GPipe", "1F1B"), "and schedules such as Interleaved1F1B and ZBVZeroBubble "),
    "Interleaved1F1B": "and the schedule ZBVZeroBubble ",
}


def _help(setting: Setting, chosen: Outcome, times: Times, trials: Sequence[Trial]) -> list[str]:
    lines = []
    for trial in trials:
        fits = "fits" if not trial.lacking else f"needs {terminal.format_bytes(trial.lacking)} more"
        lines.append(
            f"With {trial.change}: {trial.speedup:.2f} times the {setting.item}/s; {fits}."
        )
    candidate = chosen.candidate
    if candidate.pipeline > 1 and times.shares().get("other stages", 0.0) >= 2 * _MIN_SHARE:
        lines.append(
            "Stages wait for each other: more microbatches of fewer rows "
            f"{_SHORTER_SCHEDULES.get(candidate.schedule or '', '')}shorten the waits."
        )
    is_slow = times.shares()["host"] >= 2 * _MIN_SHARE
    if is_slow and "main_weights" in chosen.candidate.places:
        lines.append(
            "The host works on weights in its memory once per step, and compute waits for it. More "
            "microbatches per step reduce the share of this wait."
        )
    elif is_slow:
        compiled = "" if setting.is_compiled else " (torch.compile)"
        lines.append(
            "The host issues work too slowly: larger microbatches, or fewer and larger operations"
            f"{compiled} help."
        )
    return lines


def _nothing_fits(setting: Setting, outcomes: Sequence[Outcome]) -> list[str]:
    nearest = outcomes[0]
    kind = nearest.largest_kind
    lines = [
        f"No candidate fits {terminal.format_bytes(setting.memory)}. The nearest is "
        f"{nearest.candidate}: {_missing_memory(nearest)}."
    ]
    if kind == ACTIVATIONS:
        recompute = "" if nearest.candidate.checkpointing else "activation checkpointing, "
        lines.append(f"Possible changes: {recompute}a smaller microbatch, or a shorter sequence.")
    elif kind == "transient":
        lines.append(
            "Possible changes: smaller units (`units=`), or a smaller "
            "`prefetch_window` and `staging_limit` of fe.Options."
        )
    else:
        lines.append(
            "Possible changes: more ranks, or less state (another optimizer, lower precision)."
        )
    if setting.more_contexts and kind == ACTIVATIONS:
        lines.append("Context parallelism (`context_parallel=`) may be enough.")
    if setting.more_degrees:
        lines.append('Tensor parallelism (`tensor_parallel="auto"`) may be enough.')
    tried = {role for each in outcomes for role in each.candidate.places}
    known = [nearest.memory.get(kind, 0) for kind in KIND_OF_OFFLOADED.values()]
    if tried == KIND_OF_OFFLOADED.keys():
        lines.append(
            "No candidate fits with optimizer state, main weights and gradients on the host."
        )
    elif tried:
        lines.append("Offloaded optimizer state is not enough.")
    elif nearest.lacking <= known[0]:
        lines.append("Optimizer state on the host (`offload`) may be enough.")
    elif nearest.lacking <= sum(known):
        lines.append("Main weights, gradients and optimizer state on the host may be enough.")
    return lines


@dataclass(frozen=True)
class StrategyPlan:
    """The result of ``fe.plan``. ``print`` shows the table and the recommendation.

    Attributes:
        setting: The planned job.
        outcomes: Results of the candidates. Those that fit come first, the fastest first. The
            others follow, ordered by the bytes by which they exceed the limit. If activations are
            unknown, candidates whose other memory fits are first, ordered by the bytes they send.
        trials: Variations of the chosen candidate.
        options: Arguments of ``fe.shard`` for all candidates; not saved.
        simulate: Simulates a candidate again, for its timeline. None if the plan was made by
            formulas or was loaded.
        replan: Plans the job again with other arguments. None if the plan was loaded.
        machine: The machine. None if the plan was made by formulas or was loaded.
        row_items: Tokens or samples per row of the batch, if the plan has a global batch.
        parallelize: Applies tensor parallelism to the model; not saved. None: the model's
            ``tp_plan`` is applied.
        stages: Builds a stage of a pipeline; not saved.
    """

    setting: Setting
    outcomes: tuple[Outcome, ...]
    trials: tuple[Trial, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    simulate: Callable[[Candidate], Simulation] | None = None
    replan: Callable[..., StrategyPlan] | None = None
    machine: Machine | None = None
    row_items: int = 1
    parallelize: Parallelize | None = None
    stages: Stages | None = None

    @property
    def chosen(self) -> Outcome | None:
        """The fastest outcome that fits. None: no candidate is known to fit."""
        return self._chosen_of()

    @property
    def best(self) -> dict[str, Any]:
        """Arguments for ``fe.shard(model, **planning.best)`` on all ranks. With context
        parallelism, parameters are sharded over all ranks, too, but forward and backward must run
        within torch's ``context_parallel``.

        Raises:
            ValueError: No candidate is known to fit; the message then contains the table. Or the
                chosen candidate has tensor parallelism (use ``shard``) or a pipeline (use
                ``shard_stages``).
        """
        if self.chosen is not None and self.chosen.candidate.pipeline > 1:
            raise ValueError(
                "plan: expected a candidate without a pipeline, since a pipeline's rank has only "
                f"some stages; found {self.chosen.candidate}. Call planning.shard_stages(stages) "
                "instead"
            )
        if self.chosen is not None and self.chosen.candidate.tensor_parallel > 1:
            raise ValueError(
                "plan: expected a candidate without tensor parallelism, which fe.shard does not "
                f"apply; found {self.chosen.candidate}. Call planning.shard(model) instead"
            )
        return self.arguments()

    def shard(self, model: nn.Module, **given: Any) -> Engine:
        """Shard the model as in the chosen candidate, including tensor parallelism. Collective; the
        plan must be equal on all ranks. With tensor parallelism, the root of the engine's mesh has
        the dimension "tp". With context parallelism, it has the dimension "cp", and forward and
        backward must run within torch's ``context_parallel`` over this dimension.

        Args:
            model: The planned model; see ``fe.shard``.
            given: Arguments of ``fe.shard`` that override ``options``.

        Raises:
            ValueError: No candidate is known to fit, the chosen one has a pipeline, the plan is for
                another number of ranks, or it differs between ranks. The error is raised on all
                ranks. See also ``fe.shard`` and ``fe.apply_tp_plan``.
        """

        return shard_as(partial(self._select, given), model, self.parallelize)

    def shard_stages(self, stages: Stages | None = None, **given: Any) -> list[PipelineStage]:
        """Build and shard this rank's stages as in the chosen candidate, for its schedule of
        ``torch.distributed.pipelining``. Collective; the plan must be equal on all ranks. The root
        of the engines' mesh has the dimension "pp", with tensor parallelism "tp", and with context
        parallelism "cp".

        Args:
            stages: Builds a stage, ``stages(index, num_stages)``, on the device. None: the planned
                stages.
            given: Arguments of ``fe.shard`` that override ``options``.

        Raises:
            ValueError: No candidate is known to fit, the chosen one has no pipeline, the plan is
                for another number of ranks, or it differs between ranks. This error is raised on
                all ranks. Or the plan was loaded, and ``stages`` is None.
        """
        build = stages or self.stages
        if build is None:
            raise ValueError(
                "stages: expected a function (index, num_stages) that builds a stage, since the "
                "plan was loaded; found None"
            )
        from fsdp_engine.planner.stage_sharding import shard_stages_as

        return shard_stages_as(partial(self._select, given), build, self.parallelize)

    def _select(self, given: Mapping[str, Any], num_ranks: int) -> tuple[Candidate, dict[str, Any]]:
        """Returns the candidate that all ranks use, and the arguments of ``shard``."""
        self._check_ranks(num_ranks, self.setting.world_size)
        chosen = self._fitting().candidate
        given = checked_arguments(given, "StrategyPlan.shard()")
        return chosen, self.arguments(chosen.mesh, chosen.data_parallel, given)

    def arguments(
        self,
        mesh: Mesh | None = None,
        world_size: int | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Returns arguments for ``fe.shard`` from the fastest candidate that fits: strategies,
        extensions, ``options``, and the sizes of the mesh unless ``mesh`` is given.

        Args:
            mesh: Sizes of the job's axes. None: any.
            world_size: Number of the job's data-parallel ranks. None: any.
            given: Arguments that override ``options``; values of None are ignored.

        Raises:
            ValueError: The plan is for another number of ranks, or no candidate for ``mesh`` is
                known to fit; the message then contains the table.
        """
        if world_size is not None:
            planned = {each.candidate.data_parallel for each in self.outcomes}
            self._check_ranks(world_size, *sorted(planned, reverse=True))
        chosen = self._chosen_of(mesh, world_size)
        if chosen is None:
            where = "" if mesh is None else f" on {' x '.join(map(str, mesh))} ranks"
            reason = "none"
            if self.setting.why_unknown:
                reason = (
                    "none that is known to fit, since activations are unknown. Set `strategy` "
                    "instead"
                )
            raise ValueError(f"plan: expected a candidate that fits{where}; found {reason}\n{self}")
        candidate = chosen.candidate
        found = {**self.options, **{name: each for name, each in given.items() if each is not None}}
        found |= {
            "extensions": merged_extensions(candidate, found.get("extensions")),
            "strategy": candidate.strategy,
            "outer_strategy": candidate.outer_strategy,
        }
        if mesh is None:
            found["mesh"] = candidate.mesh
        return found

    def within(self, memory: float) -> StrategyPlan:
        """Returns the plan for a memory limit of ``memory`` bytes per rank. No candidate is
        simulated again, and the result has no trials.

        Raises:
            TypeError, ValueError: ``memory`` is not a positive number.
        """
        check_positive("memory", memory, "a number of bytes, such as 80e9")
        return dataclasses.replace(
            self,
            setting=dataclasses.replace(self.setting, memory=memory),
            outcomes=sorted_outcomes(
                dataclasses.replace(each, lacking=max(each.peak_bytes - memory, 0.0))
                for each in self.outcomes
            ),
            trials=(),
            replan=None if self.replan is None else partial(self.replan, memory=memory),
        )

    def full(self) -> StrategyPlan:
        """Returns the plan of all candidates, after a quick plan. Candidates that the quick plan
        tried are not simulated again.

        Raises:
            ValueError: The plan was loaded.
        """
        # `_again` returns a plan whose `replan` has lost the memory limit that `within` has set.
        return dataclasses.replace(self._again(quick=False), replan=self.replan)

    def training(self, items: float, price: float | None = None) -> TrainingRun:
        """Returns days, GPU hours, model flops utilization and cost of a training run.

        Args:
            items: Number of tokens (or samples) in the run.
            price: Price of a GPU hour in dollars. None: no cost.

        Raises:
            ValueError: No candidate is known to fit, or a number is not positive.
        """
        return TrainingRun.of(self.setting, self._fitting(), items, price)

    def compare(self, machines: Sequence[Machine | str]) -> Comparison:
        """Plan the job for several machines.

        Args:
            machines: Machines, names of presets, or paths of files written by ``calibrate``.

        Raises:
            ValueError: The plan was loaded, or there is no such machine.
        """
        named = list(named_machines(machines))
        rows = [self._row(label, machine=each) for label, each in named]
        return Comparison("machine", tuple(rows))

    def scaling(self, ranks: Iterable[int] = RANKS) -> Comparison:
        """Plan the job for other numbers of ranks, with the candidates of a quick plan. The global
        batch stays the same if the plan has one; otherwise each rank's batch does.

        Args:
            ranks: Numbers of ranks. Numbers that do not divide the rows of the global batch are
                left out.

        Raises:
            ValueError: The plan was loaded, there are no numbers, or no number divides the rows of
                the global batch.
        """
        rows = []
        total = self.setting.global_batch
        counts = listed("ranks", ranks, "numbers of ranks")
        for count in counts:
            check_count("ranks", count, "1 rank or more")
            if not total or total % (count * self.row_items) == 0:
                rows.append(self._row(f"{count:,}", world_size=count, meshes=None, quick=True))
        if not rows:
            what = "numbers of ranks"
            if total:
                number = f"{total // self.row_items:,}"
                what = f"numbers that divide the {number} rows of the global batch"
            raise ValueError(f"ranks: expected {what}; found {counts}")
        return Comparison("ranks", tuple(rows))

    def _row(self, label: str, **changes: Any) -> ComparedRow:
        plan = self._again(is_compared=True, **{"quick": self.setting.is_quick, **changes})
        return ComparedRow(label, plan.setting, plan.chosen)

    def _again(self, **changes: Any) -> StrategyPlan:
        if self.replan is None:
            raise ValueError(
                "plan: expected a plan that fe.plan made in this process, since it plans again; "
                "found a loaded plan. Call fe.plan"
            )
        return self.replan(**changes)

    def _fitting(self) -> Outcome:
        if self.chosen is None or self.chosen.times is None:
            raise ValueError(f"plan: expected a candidate that fits; found none\n{self}")
        return self.chosen

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, without ``options``.

        Raises:
            ValueError: The checkpointing policy of a candidate is a function or a list of
                operations, which the file cannot contain.
        """
        for each in self.outcomes:
            if each.candidate.has_own_policy:
                raise ValueError(
                    f"checkpointing: expected a policy of None or {SELECTIVE!r} in a plan that is "
                    f"saved; found {each.candidate.checkpointing}"
                )
        parts = ("setting", "outcomes", "trials")
        content = {name: _plain(getattr(self, name)) for name in parts}
        Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StrategyPlan:
        """Read a file that ``save`` wrote.

        Raises:
            OSError: There is no such file.
            ValueError: The file does not contain a plan.
        """
        content = read_json(path, "a plan as written by `save`")
        try:
            outcomes = tuple(map(Outcome.from_plain, content["outcomes"]))
            trials = tuple(Trial(**each) for each in content["trials"])
            if not outcomes:
                raise ValueError("no outcomes")
            for each in trials:
                each.check()
            return cls(Setting(**content["setting"]), outcomes, trials)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a plan as written by `save`; found {error!r}"
            ) from error

    def __str__(self) -> str:
        terminal.import_rich()
        from fsdp_engine.planner.planner_tables import plan_table

        table = terminal.table_text(plan_table(self.setting, self.outcomes))
        return f"{table}\n{advice(self.setting, self.outcomes, self.trials)}"

    def _check_ranks(self, num_ranks: int, *planned: int) -> None:
        if num_ranks not in planned:
            raise ValueError(
                f"plan: expected a plan for {num_ranks} ranks; "
                f"found one for {' or '.join(map(str, planned))}"
            )

    def _chosen_of(self, mesh: Mesh | None = None, num_ranks: int | None = None) -> Outcome | None:
        """Returns the fastest outcome that fits, with this mesh and these data-parallel ranks."""
        for each in self.outcomes:
            candidate = each.candidate
            is_there = mesh in (None, candidate.mesh)
            if each.fits and is_there and num_ranks in (None, candidate.data_parallel):
                return each
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return dataclasses.asdict(value)
