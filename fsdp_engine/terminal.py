"""Formatting of numbers and tables for command lines.

Only the functions that print tables import rich, because training must not depend on it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fsdp_engine.extras import kept_random_state

if TYPE_CHECKING:
    from rich.table import Table


BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COUNT_UNITS = ("", "k", "M", "B")


def import_rich() -> None:
    """Import rich, which draws random numbers at its import (:func:`.kept_random_state`). Call this
    before any other import of rich in a training process."""
    with kept_random_state():
        import rich.style  # noqa: F401


@dataclass(frozen=True)
class Column:
    """A column of a table that can be fitted to a terminal.

    Attributes:
        name: The heading of the column.
        cells: Texts with rich's markup, one for each row.
        is_number: Whether cells are aligned to the right.
        drop: Position in the order in which columns are left out. 0: the column is never left out.
        fold: Position in the order in which columns are folded; columns with the same number are
            folded together. 0: the column is never folded.
        folded: The shorter name and cells that replace ``name`` and ``cells`` when the column is
            folded.
    """

    name: str
    cells: Sequence[str]
    is_number: bool = True
    drop: int = 0
    fold: int = 0
    folded: tuple[str, Sequence[str]] | None = None

    @property
    def width(self) -> int:
        """Width in characters, including padding and a border."""
        import_rich()
        from rich.text import Text

        texts = [Text(self.name), *map(Text.from_markup, self.cells)]
        return max(text.cell_len for text in texts) + 3


@dataclass(frozen=True)
class Fitted:
    """Columns that fit a terminal.

    Attributes:
        columns: The columns that are printed.
        left_out: Names of the columns that are left out.
        folded: Names of the columns that are folded.
    """

    columns: tuple[Column, ...]
    left_out: tuple[str, ...]
    folded: tuple[str, ...]


def fitted(columns: Sequence[Column], width: int | None) -> Fitted:
    """Leave out and fold columns, the least important first, until the table fits the terminal.

    Args:
        columns: The columns of a table.
        width: The width of the terminal in characters. None: all columns are printed.
    """
    done: list[int] = []
    order = sorted({*(each.drop for each in columns), *(each.fold for each in columns)} - {0})
    if width is not None:
        for number in order:
            if _width(_after(columns, done)) <= width:
                break
            done.append(number)
        # A column that was left out early may fit, because wider columns were left out after it.
        for number in sorted(done, reverse=True):
            fewer = [each for each in done if each != number]
            if _width(_after(columns, fewer)) <= width:
                done = fewer
    left = _after(columns, done)
    left_out = tuple(each.name for each in columns if each.drop in done)
    folded = tuple(each.name for each in columns if each.fold in done and each.drop not in done)
    return Fitted(tuple(left), left_out, folded)


def _after(columns: Iterable[Column], done: Sequence[int]) -> list[Column]:
    found = []
    for each in columns:
        if each.fold in done and each.folded is not None:
            name, cells = each.folded
            each = replace(each, name=name, cells=cells)
        if each.drop not in done:
            found.append(each)
    return found


def _width(columns: Iterable[Column]) -> int:
    return 1 + sum(each.width for each in columns)


def add_columns(table: Table, columns: Sequence[Column], styles: Sequence[str] = ()) -> None:
    """Add columns and their rows to an empty table.

    Args:
        table: The table of rich.
        columns: The columns, which all have the same number of cells.
        styles: The style of each row. Empty: no styles.
    """
    for each in columns:
        table.add_column(each.name, justify="right" if each.is_number else "left", no_wrap=True)
    rows = list(zip(*(each.cells for each in columns), strict=True))
    for cells, style in zip(rows, styles or [""] * len(rows), strict=True):
        table.add_row(*cells, style=style)


def terminal_width() -> int | None:
    """Returns the width of the terminal in characters; None if stdout is a file or a pipe."""
    import_rich()
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else None


def wrapped(text: str, width: int | None) -> str:
    """Wrap the lines of a text between words. Continued lines are indented.

    Args:
        text: A text of one or more lines.
        width: The width of the terminal in characters. None: lines are not wrapped.
    """
    if width is None:
        return text
    lines = [textwrap.wrap(each, width, subsequent_indent="  ") for each in text.splitlines()]
    return "\n".join(line for each in lines for line in each)


def fold_name(name: str, width: int) -> str:
    """Break qualified names into lines, only after dots and spaces.

    Args:
        name: Qualified names of modules, such as "encoder.layers.0 .. encoder.layers.7".
        width: The number of characters of a line. Longer components are not broken.
    """
    lines = [""]
    for part in re.findall(r".[^. ]*[. ]*", name):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def not_shown(found: Fitted, width: int | None) -> str:
    """Returns a sentence that names the columns that were left out; empty if there are none."""
    if not found.left_out:
        return ""
    return (
        f" Not shown in {width} columns: {', '.join(found.left_out)}. A wider terminal "
        "or a file shows all columns."
    )


def counted(count: int, noun: str) -> str:
    """Format a count of things, such as "1 rank" and "2 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit, such as 1.5 GiB."""
    for unit in BYTE_UNITS:
        if count < 1024 or unit == BYTE_UNITS[-1]:
            break
        count /= 1024
    return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"


def format_count(count: float) -> str:
    """Format a count with three significant digits, such as 8.03B, 517 or 1.2M."""
    for unit in COUNT_UNITS:
        if abs(count) < 999.5 or unit == COUNT_UNITS[-1]:
            break
        count /= 1000
    return f"{count:,.3g}{unit}" if abs(count) < 999.5 else f"{count:,.0f}{unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration, given in seconds, in seconds or milliseconds."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def print_whole(table: Table) -> None:
    """Print a table without truncating cells. If the terminal is too narrow, lines are wrapped."""
    from rich.console import Console

    console = Console()
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(width=max(console.width, needed)).print(table, crop=False, soft_wrap=False)


def table_text(table: Table) -> str:
    """Render a table as plain text, without truncating cells."""
    from rich.console import Console

    console = Console(width=1000, no_color=True)
    with console.capture() as captured:
        console.print(table, crop=False, soft_wrap=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
