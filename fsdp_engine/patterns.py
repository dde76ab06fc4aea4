"""Patterns of dotted names, and abbreviation of lists of names.

In a pattern, ``*`` matches one component of a name, ``**`` any number of components, and ``?`` one
character. ``"blocks.*"`` matches every child of ``blocks``, but not their children.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# The common start of names is written once only if this saves at least so many characters.
_MIN_SAVED = 24
_WILDCARDS = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to a regular expression, to be used with ``fullmatch``."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.compile("".join(_WILDCARDS.get(part) or re.escape(part) for part in parts))


def joined_names(names: Sequence[str]) -> str:
    """Join names. Names with consecutive numbers are shortened to a range, as in
    ``embedding + blocks.0-3 + norm``, and a long start of all names is written once, as in
    ``base_model.model.{model.embed_tokens + model.norm + lm_head}``."""
    runs: list[tuple[str, str]] = []  # first and last name of each range
    for name in names:
        if runs and name == _following(runs[-1][1]):
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
    texts = [
        first if first == last else f"{first}-{last.rpartition('.')[2]}" for first, last in runs
    ]
    start = _common_start(texts)
    if len(start) * (len(texts) - 1) < _MIN_SAVED:
        return " + ".join(texts)
    return f"{start}{{{' + '.join(text.removeprefix(start) for text in texts)}}}"


def _common_start(names: Sequence[str]) -> str:
    """Returns the components with which all names start, with a dot at the end."""
    start = ""
    for same in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(same)) > 1:
            break
        start += f"{same[0]}."
    return start


def _following(name: str) -> str | None:
    """Returns ``name`` with its last component increased by one; None if that is not a number."""
    holder, dot, number = name.rpartition(".")
    return f"{holder}{dot}{int(number) + 1}" if number.isdecimal() else None
