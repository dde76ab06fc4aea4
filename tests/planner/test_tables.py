"""Tables fit the terminal; what a pipe or a file receives has all columns."""

from __future__ import annotations

import sys

import pytest
from rich.table import Table

from fsdp_engine.planner.planner_tables import plan_table
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.strategies import LEVELS
from fsdp_engine.terminal import table_text, terminal_width
from tests.planner.made_plans import SETTING, rows


def headings(table: Table) -> list[str]:
    """The names of the columns."""
    return [str(each.header) for each in table.columns]


def grid(table: Table) -> list[str]:
    """The lines of the table itself, without title and caption."""
    return [line for line in table_text(table).splitlines() if line[:1] in "┏┃┡│└"]


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("width", [80, 120, 250])
def test_a_plan_fits_the_terminal(width: int, is_offloaded: bool) -> None:
    table = plan_table(SETTING, rows(is_offloaded=is_offloaded), width)
    assert all(len(line) <= width for line in grid(table))
    text = " ".join(table_text(table).split())
    names = headings(table)
    everything = headings(plan_table(SETTING, rows(is_offloaded=is_offloaded)))
    _, _, rest = text.partition("Not shown in")
    left_out = rest.partition(": ")[2].partition(". ")[0].split(", ")
    # Every column is there, folded, or named as left out.
    short = {"strategy": "level", "recompute": "redo", "offloaded": "offload"}
    for name in everything:
        assert (name in names or short.get(name) in names) != (name in left_out), name
    assert {"at most", "step"} <= {*names}
    assert ("Not shown in" in text) == (len(names) < len(everything))
    assert ("Levels: 0 no_shard, 1 optim," in text) == ("level" in names)


def test_the_most_important_columns_are_the_last_to_go() -> None:
    def names(width: int) -> list[str]:
        return headings(plan_table(SETTING, rows(), width))

    most = ["level", "outer", "ranks", "recompute", "at most", "free", "step", "tokens/s"]
    assert names(80) == most
    assert names(120)[:2] == ["strategy", "outer"]
    assert len(names(160)) > len(names(140)) > len(names(120))
    table = plan_table(SETTING, rows(), 80)
    levels = [list(table.columns[column].cells) for column in (0, 1)]
    names_of = [(each.candidate.strategy, each.candidate.outer_strategy) for each in rows()]
    found = [(int(str(a)), int(str(b))) for a, b in zip(*levels, strict=True)]
    assert [(list(LEVELS)[a], list(LEVELS)[b]) for a, b in found] == names_of


def test_without_a_terminal_no_column_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert terminal_width() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "91")
    assert terminal_width() == 91
    table = plan_table(SETTING, rows(), None)
    assert {*KINDS, "strategy", "exposed", "sent inner", "sent outer"} <= {*headings(table)}
    assert "Not shown" not in table_text(table)
