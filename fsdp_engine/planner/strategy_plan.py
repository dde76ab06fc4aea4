"""The result of ``plan``: an outcome for each candidate, the chosen one, and a recommendation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fsdp_engine.planner.advice import advice
from fsdp_engine.planner.candidates import Candidate, Mesh
from fsdp_engine.planner.outcome import Outcome, Setting, Trial, sorted_outcomes
from fsdp_engine.simulation.arguments import check_memory, read_json
from fsdp_engine.simulation.result import Simulation
from fsdp_engine.terminal import table_text


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
        """Arguments for ``fe.shard``: strategies, checkpointing, ``options``, and the sizes of the
        mesh unless ``mesh`` is given.

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
        """Write the plan as JSON, without ``options``."""
        parts = ("setting", "outcomes", "trials")
        content = {name: _plain(getattr(self, name)) for name in parts}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

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
