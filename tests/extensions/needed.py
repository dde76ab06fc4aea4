"""Marks tests of one extension that use another one, which may have been deleted."""

from __future__ import annotations

import pytest

from fsdp_engine.extension_list import EXTENSIONS

_FOLDERS = {each.folder for each in EXTENSIONS}


def needs(*folders: str) -> pytest.MarkDecorator:
    """Returns a mark that skips a test unless all of these extensions exist."""
    missing = [folder for folder in folders if folder not in _FOLDERS]
    return pytest.mark.skipif(bool(missing), reason=f"needs the extensions {missing}")
