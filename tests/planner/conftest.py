"""Each test has its own cache folder for plans, and can replace simulations."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fsdp_engine as fe
from fsdp_engine.planner import job
from fsdp_engine.planner.simulation.step_options import StepOptions
from tests.planner.made_plans import Words, words


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@cache
def _a_simulation() -> fe.Simulation:
    return fe.simulate(Words, 4, batch=words())


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of candidates' simulations, which are replaced: all return the same result."""
    tried: list[dict[str, Any]] = []
    result = _a_simulation()

    def counted(*args: object, options: StepOptions, **given: Any) -> fe.Simulation:
        tried.append({**given, **options.shard})
        return result

    monkeypatch.setattr(job, "simulate", counted)
    return tried
