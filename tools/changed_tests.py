"""The tests that a change needs: ``python -m tools.changed_tests [BASE]`` prints their paths.

A change is everything since the merge base of HEAD and BASE (``main``), committed or not. If all of
its files belong to the parts in :data:`LANES`, the tests are all tests of these parts and the quick
tests of the core. Otherwise, and where git does not know the base, they are all tests. ``make test
CHANGED=main`` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERYTHING = ["tests"]
# By part that no other code of the package imports: its files, and its tests.
LANES: dict[str, tuple[list[str], list[str]]] = {
    "planner": (
        ["fsdp_engine/planner/*"],
        ["tests/planner"],
    ),
    "integrations": (["fsdp_engine/integrations/*"], ["tests/integrations"]),
    "pretrained": (
        ["fsdp_engine/pretrained/*"],
        ["tests/pretrained", "tests/extensions/adapters"],
    ),
    "docs": (
        ["*.md", "docs/*", "mkdocs.yml", "benchmarks/*", "examples/*"],
        [
            "tests/test_docs.py",
            "tests/test_docs_site.py",
            "tests/test_example.py",
            "tests/test_snippets.py",
        ],
    ),
}
# These tests take a few minutes at most, and find most mistakes in the core.
QUICK_CORE = [
    "tests/test_architecture.py",
    "tests/composition",
    "tests/layout",
    "tests/strategies",
    "tests/memory",
    "tests/runtime/test_equivalence.py",
    "tests/runtime/test_counts.py",
]


def paths_for(changed: Iterable[str]) -> list[str]:
    """Returns the paths of tests to run.

    Args:
        changed: paths of the files of a change, relative to the repository.
    """
    found: dict[str, None] = {}
    for path in changed:
        lanes = [
            tests
            for files, tests in LANES.values()
            if any(fnmatch(path, each) for each in files)
            or any(path == each or path.startswith(f"{each}/") for each in tests)
        ]
        if not lanes:
            return EVERYTHING
        for tests in lanes:
            found.update(dict.fromkeys(tests))
    if not found:
        return EVERYTHING
    return [*QUICK_CORE, *found]


def changed_since(base: str) -> list[str] | None:
    """Returns the files that differ from the merge base; None: git does not know it."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else None

    start = git("merge-base", "HEAD", base)
    if start is None:
        return None
    committed = git("diff", "--name-only", start.strip())
    new = git("ls-files", "--others", "--exclude-standard")
    if committed is None or new is None:
        return None
    return [*committed.splitlines(), *new.splitlines()]


def main() -> None:
    """See the module docstring."""
    changed = changed_since(sys.argv[1] if len(sys.argv) > 1 else "main")
    print(" ".join(EVERYTHING if changed is None else paths_for(changed)))


if __name__ == "__main__":
    main()
