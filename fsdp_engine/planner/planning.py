"""What a planning found: a row for each candidate, the one to take, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.planner.advice import advice
from fsdp_engine.planner.candidates import Candidate, Mesh
from fsdp_engine.planner.outcome import Outcome, Setting, Trial
from fsdp_engine.planner.tables import planning_table
from fsdp_engine.simulation.result import Simulation
from fsdp_engine.terminal import table_text


@dataclass(frozen=True)
class Planning:
    """The answer of :func:`~fsdp_engine.planner.plan.plan`. ``print`` shows the table, and what to
    take in words.

    Attributes:
        setting: the job that was planned.
        outcomes: those that fit, the fastest first; then those that do not, by how much they lack.
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
        """The fastest that fits; None: nothing does."""
        return self._chosen_of(None)

    @property
    def best(self) -> dict[str, Any]:
        """Arguments for ``fe.shard(model, **planning.best)`` on all ranks.

        Raises:
            ValueError: nothing fits; the message has the table.
        """
        return self.arguments(None)

    def arguments(self, mesh: Mesh | None) -> dict[str, Any]:
        """Arguments for ``fe.shard``: strategies, checkpointing, and a config that makes the axes.

        Args:
            mesh: sizes of the axes that the job has; None: any.

        Raises:
            ValueError: nothing that was planned for ``mesh`` fits; the message has the table.
        """
        chosen = self._chosen_of(mesh)
        if chosen is None:
            where = "" if mesh is None else f" on {' x '.join(map(str, mesh))} ranks"
            raise ValueError(f"plan: expected a way that fits{where}; found none\n{self}")
        candidate = chosen.candidate
        found = {
            **self.options,
            "strategy": candidate.strategy,
            "outer_strategy": candidate.outer_strategy,
            "checkpointing": candidate.checkpointing,
        }
        if mesh is None and len(candidate.mesh) == 2:
            config = found.get("config") or DistributedDataParallelConfig()
            found["config"] = dataclasses.replace(
                config, num_distributed_optimizer_instances=candidate.mesh[0]
            )
        return found

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
        try:
            content = json.loads(Path(path).read_text())
            return cls(
                Setting(**content["setting"]),
                tuple(map(Outcome.from_plain, content["outcomes"])),
                tuple(Trial(**each) for each in content["trials"]),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}: expected a planning as `save` writes it; found {error!r}"
            ) from error

    def __str__(self) -> str:
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
