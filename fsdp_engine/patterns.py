"""Patterns of dotted names, and abbreviation of lists of names.

In a pattern, ``*`` matches one component of a name, ``**`` any number of components, and ``?`` one
character. ``"blocks.*"`` matches every child of ``blocks``, but not their children.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WILDCARDS = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to a regular expression, to be used with ``fullmatch``."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.compile("".join(_WILDCARDS.get(part) or re.escape(part) for part in parts))


def joined_names(names: Sequence[str]) -> str:
    """Join names. Names with consecutive numbers are shortened to a range, as in
    ``embedding + blocks.0-3 + norm``."""
    runs: list[tuple[str, str]] = []  # first and last name of each range
    for name in names:
        if runs and name == _following(runs[-1][1]):
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
    return " + ".join(
        first if first == last else f"{first}-{last.rpartition('.')[2]}" for first, last in runs
    )


def _following(name: str) -> str | None:
    """Returns ``name`` with its last component increased by one; None if that is not a number."""
    holder, dot, number = name.rpartition(".")
    return f"{holder}{dot}{int(number) + 1}" if number.isdecimal() else None
