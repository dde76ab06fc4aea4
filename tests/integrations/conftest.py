"""Fixtures of the tests that start launchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.launching import Launched


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """Starts processes, and ends them with all that they have started."""
    jobs = Launched(tmp_path)
    yield jobs
    jobs.kill_all()
