"""Record which tests run which lines, in pytest and on ranks, for ``tools/measure_tests.py``.

Each process that ``coverage`` measures records under which test a line ran. A context is the name
of a test without its parameters. Without ``coverage`` nothing happens.
"""

from __future__ import annotations

import os
import sys
from typing import Any

CONTEXTS = "FSDP_ENGINE_TEST_CONTEXTS"


def current_context() -> str:
    """The test that this process of pytest runs now."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0].partition("[")[0]


def switch_to(context: str) -> None:
    """Lines that run from here on are noted for ``context``."""
    coverage: Any = sys.modules.get("coverage")
    if coverage is not None and CONTEXTS in os.environ:
        measured = coverage.Coverage.current()
        if measured is not None:
            measured.switch_context(context)
