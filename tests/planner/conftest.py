"""Plans of tests keep their rows in a folder of the test, and may try all candidates."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fsdp_engine.planner import strategy_search


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick plans try all of their candidates, however long these take."""
    monkeypatch.setattr(strategy_search, "QUICK_SECONDS", math.inf)
