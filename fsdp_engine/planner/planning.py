"""What a planning found: a row for each candidate, the one to take, and why."""

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
class Planning:
    """The answer of :func:`~fsdp_engine.planner.plan.plan`. ``print`` shows the table, and what to
    take in words.

    Attributes:
        setting: the job that was planned.
        outcomes: those that fit, the fastest first; then those that do not, by how much they lack.
            Where activations are unknown, those first whose other memory fits, the one that sends
            least first.
        trials: the chosen one with something changed.
        options: arguments of ``fe.shard`` that all candidates shared; not saved.
        simulate: simulates a candidate again, for its timeline; None where nothing was simulated,
            or the planning was loaded.
    """

    setting: Setting
    outcomes: tuple[Outcome, ...]
    trials: tuple[Trial, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    simulate: Callable[[Candidate], Simulation] | None = None

    @property
    def chosen(self) -> Outcome | None:
        """The fastest that fits; None: nothing does, or it is unknown."""
        return self._chosen_of(None)

    @property
    def best(self) -> dict[str, Any]:
        """Arguments for ``fe.shard(model, **planning.best)`` on all ranks.

        Raises:
            ValueError: nothing fits, or it is unknown; the message has the table.
        """
        return self.arguments()

    def arguments(
        self,
        mesh: Mesh | None = None,
        world_size: int | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Arguments for ``fe.shard``: strategies, checkpointing, sizes of the mesh unless the job
        has one, and what all candidates shared.

        Args:
            mesh: sizes of the axes that the job has; None: any.
            world_size: data-parallel ranks that it has; None: those planned for.
            given: arguments that the job gives itself; None: those planned with.

        Raises:
            ValueError: another number of ranks was planned for, or nothing that was planned for
                ``mesh`` fits, or it is unknown; the message has the table.
        """
        if world_size not in (None, self.setting.world_size):
            raise ValueError(
                f"plan: expected a planning for {world_size} ranks; "
                f"found one for {self.setting.world_size}"
            )
        chosen = self._chosen_of(mesh)
        if chosen is None:
            where = "" if mesh is None else f" on {' x '.join(map(str, mesh))} ranks"
            found_ones = "none"
            if self.setting.why_unknown:
                found_ones = (
                    "none known to fit, since activations are unknown; give `strategy` yourself"
                )
            raise ValueError(f"plan: expected a way that fits{where}; found {found_ones}\n{self}")
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

    def within(self, memory: float) -> Planning:
        """The same with ``memory`` bytes for a rank. Nothing is simulated again, so there are no
        trials.

        Raises:
            TypeError, ValueError: ``memory`` is no positive number.
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
        """Write it as JSON, without ``options``."""
        parts = ("setting", "outcomes", "trials")
        content = {name: _plain(getattr(self, name)) for name in parts}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Planning:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it says something else.
        """
        content = read_json(path, "a planning as `save` writes it")
        try:
            return cls(
                Setting(**content["setting"]),
                tuple(map(Outcome.from_plain, content["outcomes"])),
                tuple(Trial(**each) for each in content["trials"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a planning as `save` writes it; found {error!r}"
            ) from error

    def __str__(self) -> str:
        from fsdp_engine.planner.tables import planning_table  # needs rich

        table = table_text(planning_table(self.setting, self.outcomes))
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
