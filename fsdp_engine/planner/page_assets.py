"""Style and script of the page of a plan (``page.py``), from the files in ``page_files``."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("page_files")
# A script uses names of those before it.
_SCRIPTS = ("formats", "questions", "selection", "table", "timeline")


def style() -> str:
    """The style sheet."""
    return _text("style.css")


def script() -> str:
    """The scripts as one, whose names are not those of the page."""
    parts = [_text(f"{name}.js") for name in _SCRIPTS]
    return "\n".join(['"use strict";', "(() => {", *parts, "})();", ""])


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
