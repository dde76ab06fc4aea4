"""A headless browser, for pages that tests open from files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium-headless-shell"
)


def shown(page: Path, query: str, profile: Path, *options: str) -> str:
    """Open a page from its file, run its scripts, and return the resulting document."""
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


def seen(text: str, probe: str, folder: Path, *options: str) -> Any:
    """Run ``probe`` after the page's own scripts; returns the object ``seen`` that it fills.

    Args:
        text: the text of the page.
        probe: the script.
        folder: contains the page and the browser's profile.
        options: command line options of the browser.
    """
    script = f"""
    <script>
    "use strict";
    const seen = {{}};
    {probe}
    const pre = document.createElement("pre");
    pre.id = "seen";
    pre.textContent = JSON.stringify(seen);
    document.body.append(pre);
    </script>
    """
    page = folder / "page.html"
    page.write_text(text.replace("</body>", script + "</body>"), encoding="utf-8")
    dom = shown(page, "", folder / "profile", *options)
    (found,) = re.findall(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    return json.loads(unescape(found))
