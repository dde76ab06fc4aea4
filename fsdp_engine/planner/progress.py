"""Progress of planning on stderr: a bar that names the simulated candidate, and a row for each
outcome."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fsdp_engine import terminal
from fsdp_engine.planner.outcome import Outcome

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class PlanProgress:
    """Progress of planning that is not shown. A subclass shows it on a terminal."""

    def add(self, count: int) -> None:
        """Add ``count`` to the number of candidates to try."""

    def trying(self, text: str) -> None:
        """Show the candidate that is being simulated, as ``text``."""

    def found(self, outcome: Outcome, item: str) -> None:
        """Show the outcome of a candidate."""


class _Bar(PlanProgress):
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task, self._total = bar, task, 0

    def add(self, count: int) -> None:
        self._total += count
        self._bar.update(self._task, total=self._total)

    def trying(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def found(self, outcome: Outcome, item: str) -> None:
        self._bar.advance(self._task)
        self._bar.console.print(row_text(outcome, item), style="dim" * bool(outcome.lacking))


def row_text(outcome: Outcome, item: str) -> str:
    """Returns an outcome as one line of text."""
    text = f"{outcome.candidate}: "
    if outcome.times is not None:
        rate = terminal.format_count(outcome.rate)
        text += f"{terminal.format_seconds(outcome.times.step)}, {rate} {item}/s, "
    text += f"{terminal.format_bytes(outcome.peak_bytes)}"
    return f"{text}; {terminal.format_bytes(outcome.lacking)} too much" if outcome.lacking else text


@contextmanager
def plan_progress(is_shown: bool) -> Iterator[PlanProgress]:
    """Yield the progress of a plan. It is shown on stderr if ``is_shown`` and stderr is a
    terminal."""
    if not is_shown:
        yield PlanProgress()
        return
    terminal.import_rich()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:  # each refresh would print a line
        yield PlanProgress()
        return
    description = TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1))
    columns = (MofNCompleteColumn(), BarColumn(bar_width=12), description)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        yield _Bar(bar, bar.add_task("planning", total=0))
