"""The structure of the package does not become worse: ``tools/structure.py``."""

from __future__ import annotations

from tests.torch_versions import pinned_torch
from tools import structure


@pinned_torch
def test_no_figure_is_worse_than_that_of_the_file_and_the_designs_table() -> None:
    now, kept = structure.measured(), structure.kept()
    assert now.keys() == kept.keys()
    assert structure.worse(now, kept) == []
    assert structure.table(kept) in structure.PAGE.read_text(encoding="utf-8")


def test_a_figure_that_is_worse_is_named() -> None:
    file = {"lines": {"now": 1000}, "files": {"now": 7}}
    assert structure.worse({"lines": 1010, "files": 7}, file) == []
    found = structure.worse({"lines": 1011, "files": 8}, file)
    assert found == [
        "lines: expected at most 1,000, 1% more allowed; found 1,011",
        "files: expected at most 7, 1% more allowed; found 8",
    ]


def test_imports_within_functions_and_for_types_are_not_of_the_closure() -> None:
    """``fsdp_engine.patterns`` imports no module of the package at its top level, except for
    types."""
    assert structure.closure("fsdp_engine.patterns") == {"fsdp_engine.patterns"}
    assert "fsdp_engine.layout" in structure.closure("fsdp_engine.layout.placement")
