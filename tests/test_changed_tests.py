"""``tools/changed_tests.py``: which tests a change needs."""

from __future__ import annotations

from tools.changed_tests import EVERYTHING, LANES, QUICK_CORE, ROOT, changed_since, paths_for


def test_a_change_of_lanes_runs_these_and_the_quick_core() -> None:
    for changed, expected in (
        (["fsdp_engine/planner/a/b.py"], [*QUICK_CORE, "tests/planner"]),
        (["tests/integrations/test_ray.py"], [*QUICK_CORE, "tests/integrations"]),
        (["README.md", "docs/internals/behaviour.md"], [*QUICK_CORE, *LANES["docs"][1]]),
        (["fsdp_engine/planner/a.py", "fsdp_engine/engine.py"], EVERYTHING),
        (["tests/pool.py"], EVERYTHING),
        (["Makefile"], EVERYTHING),
        ([], EVERYTHING),
    ):
        assert paths_for(changed) == expected, changed
    assert changed_since("no-such-branch") is None


def test_paths_are_there_and_no_lane_is_imported_from_elsewhere() -> None:
    for path in [*QUICK_CORE, *(each for _, tests in LANES.values() for each in tests)]:
        assert (ROOT / path).exists(), path
    lanes = ("planner", "integrations", "pretrained")
    package = ROOT / "fsdp_engine"
    for path in package.rglob("*.py"):
        inside = path.relative_to(package).parts
        if inside[0] not in (*lanes, "__init__.py", "__main__.py"):
            text = path.read_text(encoding="utf-8")
            assert not [lane for lane in lanes if f"from fsdp_engine.{lane}" in text], path
