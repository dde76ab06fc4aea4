"""The result of ``plan``: an outcome for each candidate, the chosen one, and a recommendation.

The recommendation is a text: the choice, the next faster candidate, the bottleneck, and changes
that would help.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fsdp_engine.planner.outcome import (
    ACTIVATIONS,
    KIND_OF_OFFLOADED,
    USABLE,
    Candidate,
    Mesh,
    Outcome,
    Setting,
    Times,
    Trial,
    is_faster,
    sorted_outcomes,
)
from fsdp_engine.simulation.simulate import Simulation
from fsdp_engine.simulation.simulation_error import check_memory, read_json
from fsdp_engine.simulation.time_accuracy import accuracy_of
from fsdp_engine.terminal import format_bytes, format_count, format_seconds, table_text
from fsdp_engine.units.checkpointing import SELECTIVE, recomputed_by

# Waits below this fraction of a step are not mentioned.
_MIN_SHARE = 0.05


def advice(setting: Setting, outcomes: Sequence[Outcome], trials: Sequence[Trial]) -> str:
    """The recommendation, one sentence per line.

    Args:
        setting: the job.
        outcomes: sorted; see :class:`~fsdp_engine.planner.strategy_plan.StrategyPlan`.
        trials: variations of the first outcome.
    """
    lines = []
    if setting.why_unknown:
        lines.append(f"Activations and times are unknown: {setting.why_unknown}")
    if limit := _limit(setting):
        lines.append(limit)
    first = outcomes[0]
    if first.lacking:
        return "\n".join([*lines, *_nothing_fits(setting, outcomes)])
    if first.times is None:
        return "\n".join([*lines, *_unknown_fit(setting, first)])
    lines.append(_choice(setting, first, first.times))
    lines.append(accuracy_of(setting.machine_family).sentence(first.times.step))
    lines.append(_next_faster(first, outcomes))
    lines.append(_bottleneck(setting, first, first.times))
    lines += _help(setting, first, first.times, trials)
    return "\n".join(lines)


def _limit(setting: Setting) -> str:
    """The memory limit, and the memory that is kept free and why; empty if the machine's memory is
    unknown."""
    whole = setting.machine_memory
    if not whole:
        return ""
    has = f"the machine's {format_bytes(whole)} ({whole / 1e9:,.4g} GB)"
    if setting.memory != USABLE * whole:
        return f"Memory limit: {format_bytes(setting.memory)}, as given, of {has}."
    others = "the driver's context, buffers of NCCL and of kernels"
    if setting.machine_family == "calibrated CPU":
        others = "the system, buffers of messages and of kernels"
    return (
        f"Memory limit: {format_bytes(setting.memory)}, {USABLE} of {has}; "
        f"{format_bytes(whole - setting.memory)} are kept free for {others}, and fragmentation."
    )


def _unknown_fit(setting: Setting, first: Outcome) -> list[str]:
    sent = format_bytes(sum(first.sent.values()))
    held, limit = format_bytes(first.peak_bytes), format_bytes(setting.memory)
    return [
        "Whether any candidate fits is therefore unknown.",
        f"Of the candidates whose weights, gradients and optimizer state fit, {first.candidate} "
        f"sends the fewest bytes ({sent} per step); it holds {held} of {limit}, without "
        "activations.",
    ]


def _choice(setting: Setting, chosen: Outcome, times: Times) -> str:
    held = format_bytes(chosen.peak_bytes)
    limit = format_bytes(setting.memory)
    rate = f"{format_count(chosen.rate)} {setting.item}/s"
    step = f"{format_seconds(times.step)} {accuracy_of(setting.machine_family).mark}"
    text = f"Use {chosen.candidate}: {step} per step, {rate}, at most {held} of {limit}."
    sharing = min(setting.ranks_per_node, setting.world_size)
    for place, num_bytes in chosen.elsewhere.items():
        text += (
            f" Each node keeps {format_bytes(sharing * num_bytes)} on the {place}, "
            f"{format_bytes(num_bytes)} of each rank."
        )
    return text


def _next_faster(chosen: Outcome, outcomes: Sequence[Outcome]) -> str:
    faster = [each for each in outcomes if each.lacking and is_faster(each, chosen)]
    if not faster:
        return "No candidate that does not fit would be faster."
    nearest = min(faster, key=lambda each: each.rate)
    speedup = f"is {nearest.rate / chosen.rate - 1:.1%} faster"
    return (
        f"The next faster candidate, {nearest.candidate}, {speedup} and does not fit: "
        f"{_missing_memory(nearest)}."
    )


def _missing_memory(outcome: Outcome) -> str:
    kind = outcome.largest_kind
    return (
        f"it exceeds the limit by {format_bytes(outcome.lacking)}, and the largest part of its "
        f"memory is {kind} ({format_bytes(outcome.memory[kind])})"
    )


def _bottleneck(setting: Setting, chosen: Outcome, times: Times) -> str:
    shares = times.shares()
    waits = {name: share for name, share in shares.items() if name != "compute"}
    worst = max(waits, key=lambda name: waits[name])
    names = {
        "inner link": f"the inner link ({_link(setting, chosen, inner=True)})",
        "outer link": f"the outer link ({_link(setting, chosen, inner=False)})",
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


def _link(setting: Setting, chosen: Outcome, *, inner: bool) -> str:
    mesh = chosen.candidate.mesh
    ranks = mesh[-1] if inner else setting.world_size
    return "within a node" if ranks <= setting.ranks_per_node else "between nodes"


def _help(setting: Setting, chosen: Outcome, times: Times, trials: Sequence[Trial]) -> list[str]:
    lines = []
    for trial in trials:
        fits = "fits" if not trial.lacking else f"needs {format_bytes(trial.lacking)} more"
        lines.append(
            f"With {trial.change}: {trial.speedup:.2f} times the {setting.item}/s; {fits}."
        )
    is_slow = times.shares()["host"] >= 2 * _MIN_SHARE
    if is_slow and "main_weights" in _offloaded_roles(chosen.candidate):
        lines.append(
            "The host works on weights in its memory once a step, and compute waits: more "
            "microbatches make steps rarer."
        )
    elif is_slow:
        lines.append(
            "The host issues work too slowly: larger microbatches, fewer and larger operations "
            "(torch.compile) or CUDA graphs help."
        )
    return lines


def _nothing_fits(setting: Setting, outcomes: Sequence[Outcome]) -> list[str]:
    nearest = outcomes[0]
    kind = nearest.largest_kind
    lines = [
        f"No candidate fits {format_bytes(setting.memory)}. The nearest is {nearest.candidate}: "
        f"{_missing_memory(nearest)}."
    ]
    if kind == ACTIVATIONS:
        recompute = "" if nearest.candidate.checkpointing else "activation checkpointing, "
        lines.append(f"Possible changes: {recompute}a smaller microbatch, or a shorter sequence.")
    elif kind == "transient":
        lines.append(
            "Possible changes: smaller units (`units=`), or a smaller "
            "suggested_communication_unit_size."
        )
    else:
        lines.append(
            "Possible changes: more ranks, or less state (another optimizer, lower precision)."
        )
    tried = {role for each in outcomes for role in _offloaded_roles(each.candidate)}
    known = [nearest.memory.get(kind, 0) for kind in KIND_OF_OFFLOADED.values()]
    if tried == KIND_OF_OFFLOADED.keys():
        lines.append("Everything on the host is not enough.")
    elif tried:
        lines.append("Offloaded optimizer state is not enough.")
    elif nearest.lacking <= known[0]:
        lines.append("Optimizer state on the host (`offload`) may be enough.")
    elif nearest.lacking <= sum(known):
        lines.append("Main weights, gradients and optimizer state on the host may be enough.")
    return lines


def _offloaded_roles(candidate: Candidate) -> Iterable[str]:
    return () if candidate.offload is None else candidate.offload.places


@dataclass(frozen=True)
class StrategyPlan:
    """The result of :func:`~fsdp_engine.planner.strategy_search.plan`. ``print`` shows the table
    and the recommendation.

    Attributes:
        setting: the planned job.
        outcomes: those that fit, the fastest first; then the others, by the bytes that exceed the
            limit. If activations are unknown, first those whose other memory fits, by the bytes
            that they send.
        trials: variations of the chosen candidate.
        options: arguments of ``fe.shard`` for all candidates; not saved.
        simulate: simulates a candidate again, for its timeline. None if the plan was made by
            formulas, or was loaded.
    """

    setting: Setting
    outcomes: tuple[Outcome, ...]
    trials: tuple[Trial, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    simulate: Callable[[Candidate], Simulation] | None = None

    @property
    def chosen(self) -> Outcome | None:
        """The fastest outcome that fits. None: no candidate fits, or it is unknown."""
        return self._chosen_of(None)

    @property
    def best(self) -> dict[str, Any]:
        """Arguments for ``fe.shard(model, **planning.best)`` on all ranks.

        Raises:
            ValueError: no candidate fits, or it is unknown; the message contains the table.
        """
        return self.arguments()

    def arguments(
        self,
        mesh: Mesh | None = None,
        world_size: int | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Arguments for ``fe.shard``: strategies, checkpointing, offload, ``options``, and the
        sizes of the mesh unless ``mesh`` is given.

        Args:
            mesh: sizes of the job's axes. None: any.
            world_size: the job's data-parallel ranks. None: those of the plan.
            given: arguments that override ``options``; values of None are ignored.

        Raises:
            ValueError: the plan is for another number of ranks, or no candidate for ``mesh`` fits,
                or it is unknown; the message contains the table.
        """
        if world_size not in (None, self.setting.world_size):
            raise ValueError(
                f"plan: expected a plan for {world_size} ranks; "
                f"found one for {self.setting.world_size}"
            )
        chosen = self._chosen_of(mesh)
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
        found = {
            **self.options,
            "checkpointing": candidate.checkpointing,
            **({} if candidate.offload is None else {"offload": candidate.offload}),
            **{name: value for name, value in given.items() if value is not None},
            "strategy": candidate.strategy,
            "outer_strategy": candidate.outer_strategy,
        }
        if mesh is None:
            found["mesh"] = candidate.mesh
        return found

    def within(self, memory: float) -> StrategyPlan:
        """Returns the plan for a memory limit of ``memory`` bytes per rank. Does not simulate
        again; the result has no trials.

        Raises:
            TypeError, ValueError: ``memory`` is not a positive number.
        """
        check_memory(memory)
        return dataclasses.replace(
            self,
            setting=dataclasses.replace(self.setting, memory=memory),
            outcomes=sorted_outcomes(
                dataclasses.replace(each, lacking=max(each.peak_bytes - memory, 0.0))
                for each in self.outcomes
            ),
            trials=(),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, without ``options``.

        Raises:
            ValueError: a candidate has a policy of checkpointing that is a function or operations,
                which the file cannot contain.
        """
        for each in self.outcomes:
            recomputed = recomputed_by(each.candidate.checkpointing)
            if recomputed is not None and recomputed.policy not in (None, SELECTIVE):
                raise ValueError(
                    f"checkpointing: expected a policy of None or {SELECTIVE!r} in a plan that is "
                    f"saved; found {recomputed}"
                )
        parts = ("setting", "outcomes", "trials")
        content = {name: _plain(getattr(self, name)) for name in parts}
        Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StrategyPlan:
        """Read a file that :meth:`save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: the file has other contents.
        """
        content = read_json(path, "a plan as written by `save`")
        try:
            return cls(
                Setting(**content["setting"]),
                tuple(map(Outcome.from_plain, content["outcomes"])),
                tuple(Trial(**each) for each in content["trials"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a plan as written by `save`; found {error!r}"
            ) from error

    def __str__(self) -> str:
        from fsdp_engine.planner.planner_tables import plan_table  # needs rich

        table = table_text(plan_table(self.setting, self.outcomes))
        return f"{table}\n{advice(self.setting, self.outcomes, self.trials)}"

    def _chosen_of(self, mesh: Mesh | None) -> Outcome | None:
        for each in self.outcomes:
            if each.fits and mesh in (None, each.candidate.mesh):
                return each
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return dataclasses.asdict(value)
