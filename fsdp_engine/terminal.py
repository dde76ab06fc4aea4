"""Formatting of numbers and tables for command lines.

Only functions that print tables import rich, because training must not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_engine.extras import naming_extra

if TYPE_CHECKING:
    from rich.table import Table


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"


def format_count(count: float) -> str:
    """Format a count with three significant digits: 8.03B, 517, 1.20M."""
    for unit in ("", "k", "M", "B"):
        if abs(count) < 999.5 or unit == "B":
            break
        count /= 1000
    return f"{count:,.3g}{unit}" if abs(count) < 999.5 else f"{count:,.0f}{unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds or milliseconds."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def print_whole(table: Table) -> None:
    """Print a table without truncating cells. A narrow terminal wraps its lines."""
    with naming_extra():
        from rich.console import Console

    console = Console()
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(width=max(console.width, needed)).print(table, crop=False, soft_wrap=False)


def table_text(table: Table) -> str:
    """Render a table as plain text, without truncating cells."""
    with naming_extra():
        from rich.console import Console

    console = Console(width=1000, no_color=True)
    with console.capture() as captured:
        console.print(table, crop=False, soft_wrap=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
