"""What command lines print: bytes for people, and tables that no narrow terminal cuts short."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def format_bytes(count: float) -> str:
    """``count`` bytes, with a unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"


def print_whole(table: Table) -> None:
    """Print a table in full: where the terminal is too narrow, its lines go on in the next one."""
    console = Console()
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(width=max(console.width, needed)).print(table, crop=False, soft_wrap=False)
