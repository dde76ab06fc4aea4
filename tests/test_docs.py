"""README and docs: links lead somewhere, and README stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def broken_links(page: Path, text: str) -> list[str]:
    """What ``text`` of ``page`` links to and is not there; addresses elsewhere are not tried."""
    without_code = re.sub(r"`[^`\n]*`", "", text)
    targets = re.findall(r"\]\(([^)#\s]+)", without_code)
    return [each for each in targets if "://" not in each and not (page.parent / each).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_seen() -> None:
    text = "[a](docs/design.md#units), `f[0](x)`, [b](https://example.com/x), [`c`](docs/none.md)"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md"]


def test_readme_is_read_in_five_minutes_and_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 170
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in text, page.name


def test_figures_are_those_of_the_results_files() -> None:
    run = subprocess.run(
        [sys.executable, "tools/figures.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
