"""README and docs: links lead somewhere, and README stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
USER_PAGES = sorted(set(DOCS.glob("*.md")) - {DOCS / "design.md"})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the repository's page view makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    slugs = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
    # Repeated headings are left out: the repository and the site give their anchors different
    # names.
    return {slug for slug in slugs if slugs.count(slug) == 1}


def broken_links(page: Path, text: str) -> list[str]:
    """Links of ``text`` to missing files or headings; addresses elsewhere are not tried."""
    without_code = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text, flags=re.M | re.S)
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", without_code):
        path = page.parent / target if target else page
        if "://" in target:
            continue
        if not path.exists():
            broken.append(target)
        elif anchor and anchor[1:] not in anchors(path.read_text(encoding="utf-8")):
            broken.append(target + anchor)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_seen_and_headings_of_the_same_words_have_no_anchor() -> None:
    text = (
        "[a](docs/design.md#2-nouns), `f[0](x)`, [b](https://example.com/x), [`c`](docs/none.md), "
        "[d](docs/design.md#none), [e](#none)"
    )
    found = broken_links(ROOT / "README.md", text)
    assert found == ["docs/none.md", "docs/design.md#none", "#none"]
    assert anchors("# A b\n## C\n### C\n```\n# code\n```\n## `d_e`, f\n") == {"a-b", "d_e-f"}


def test_readme_is_read_in_five_minutes_and_leads_to_every_page_for_users() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for page in DOCS.glob("*.md"):
        assert f"(docs/{page.name})" in text, page.name
    assert "(docs/internals/README.md)" in text
    index = (DOCS / "internals" / "README.md").read_text(encoding="utf-8")
    for page in (DOCS / "internals").glob("[a-z]*.md"):
        assert f"({page.name})" in index, page.name


def test_pages_for_users_are_read_in_two_hours() -> None:
    texts = [page.read_text(encoding="utf-8") for page in USER_PAGES]
    shown = [re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL) for text in texts]
    assert sum(len(text.split()) for text in shown) <= 20_000


def test_figures_are_those_of_the_results_files() -> None:
    run = subprocess.run(
        [sys.executable, "tools/figures.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_the_table_of_versions_is_that_of_the_pinned_and_the_required_ones() -> None:
    text = (DOCS / "internals" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([\w.]+) \| ([\w.]*) \| ", text, re.M)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?[>=]=([\w.]+)', project))
    assert len(rows) > 15
    for name, oldest, pinned in rows:
        if name not in ("Python", "package"):
            assert pins.get(name, "") == pinned, name
            # Packages that the Makefile installs are not in pyproject.toml.
            assert required.get(name.replace("_", "-"), pinned) == oldest, name
