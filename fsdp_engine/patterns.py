"""Dotted names: patterns over them, and many as one.

In a pattern ``*`` stands for one part of a name, ``**`` for any number, ``?`` for one character.
``"blocks.*"`` is every child of ``blocks``, and not their insides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STANDS_FOR = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression for ``fullmatch``."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.compile("".join(_STANDS_FOR.get(part) or re.escape(part) for part in parts))


def joined_names(names: Sequence[str]) -> str:
    """Names as one, numbered neighbours as a run: ``embedding + blocks.0-3 + norm``."""
    runs: list[tuple[str, str]] = []  # the first and the last of each
    for name in names:
        if runs and name == _following(runs[-1][1]):
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
    return " + ".join(
        first if first == last else f"{first}-{last.rpartition('.')[2]}" for first, last in runs
    )


def _following(name: str) -> str | None:
    """The name with the next number at its end."""
    holder, dot, number = name.rpartition(".")
    return f"{holder}{dot}{int(number) + 1}" if number.isdecimal() else None
