"""The first example of docs/planner.md runs as it is printed."""

from __future__ import annotations

import pytest

from tools.planner_example import WIDTH, printed_by_command, printed_in_page


@pytest.mark.thorough
def test_the_first_example_prints_what_the_page_has() -> None:
    found = printed_by_command().splitlines()
    assert max(map(len, found)) <= WIDTH
    assert any(line.startswith("Use ") for line in found)
    # After a change of the planner: python tools/planner_example.py --write
    assert found == printed_in_page().splitlines()
