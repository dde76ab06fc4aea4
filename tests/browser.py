"""A headless browser, for pages that tests open from files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium-headless-shell"
)


def shown(page: Path, query: str, profile: Path, *options: str) -> str:
    """The document of a page opened from its file, after its scripts have run."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no name is resolved: the page is offline
        "--virtual-time-budget=20000",
        *options,
        "--dump-dom",
        page.as_uri() + query,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout
