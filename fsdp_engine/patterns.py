"""Patterns over dotted names: ``*`` stands for one part of a name, ``**`` for any number, ``?`` for
one character. ``"blocks.*"`` is every child of ``blocks``, and not their insides."""

from __future__ import annotations

import re

_STANDS_FOR = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression for ``fullmatch``."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.compile("".join(_STANDS_FOR.get(part) or re.escape(part) for part in parts))
