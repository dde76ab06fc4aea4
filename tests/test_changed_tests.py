"""``tools/changed_tests.py``: which tests a change needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.changed_tests import EVERYTHING, LANES, QUICK_CORE, ROOT, changed_since, paths_for


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["fsdp_engine/planner/a/b.py"], [*QUICK_CORE, "tests/planner"]),
        (["tests/integrations/test_ray.py"], [*QUICK_CORE, "tests/integrations"]),
        (["README.md", "docs/guide.md"], [*QUICK_CORE, *LANES["docs"][1]]),
        (["fsdp_engine/planner/a.py", "fsdp_engine/engine.py"], EVERYTHING),
        (["tests/pool.py"], EVERYTHING),
        (["Makefile"], EVERYTHING),
        ([], EVERYTHING),
    ],
)
def test_a_change_of_lanes_runs_these_and_the_quick_core(
    changed: list[str], expected: list[str]
) -> None:
    assert paths_for(changed) == expected


def test_paths_are_there_and_no_lane_is_imported_from_elsewhere() -> None:
    for path in [*QUICK_CORE, *(each for _, tests in LANES.values() for each in tests)]:
        assert (ROOT / path).exists(), path
    lanes = ("planner", "integrations", "pretrained")
    package = ROOT / "fsdp_engine"
    for path in package.rglob("*.py"):
        inside = path.relative_to(package).parts
        if inside[0] in lanes or inside in [("__init__.py",), ("__main__.py",)]:
            continue
        text = path.read_text(encoding="utf-8")
        for lane in lanes:
            assert f"from fsdp_engine.{lane}" not in text, (path, lane)


def test_an_unknown_base_is_no_change(tmp_path: Path) -> None:
    assert changed_since("no-such-branch") is None
