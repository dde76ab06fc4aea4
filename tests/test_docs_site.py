"""The site of `make docs`: it builds strictly, needs no network, and its search works."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import fsdp_engine as fe
from tests.browser import needs_chromium, shown

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built anew with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        ["make", "docs", f"SITE={folder}"], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_public_name_has_an_entry_in_the_api_reference(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    anchors = set(re.findall(r'id="(fsdp_engine\.[\w.]+)"', pages))
    assert {f"fsdp_engine.{name}" for name in fe.__all__} <= anchors
    assert "fsdp_engine.fsdp2.fully_shard.fully_shard" in anchors
    assert "fsdp_engine.megatron.finalize_model_grads.finalize_model_grads" in anchors
    assert "fsdp_engine.pipelining.PipelineStage" in anchors
    assert not re.search(r":(class|func|meth|attr):", pages)


def test_pages_load_scripts_styles_fonts_and_images_from_the_site(site: Path) -> None:
    loads = r'<(?:script|img|link)\b[^>]*?(?:src|href)="?((?:https?:)?//[^">\s]+)'
    assert re.findall(loads, '<script src="https://a.b/c"></script>') == ["https://a.b/c"]
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert {url for page in pages for url in re.findall(loads, page.read_text())} == set()


@needs_chromium
def test_search_in_a_browser_finds_a_method(site: Path, tmp_path: Path) -> None:
    dom = shown(site / "index.html", "?q=clip_grad_norm_", tmp_path / "found")
    (found,) = re.findall(r'class="md-search-result__list".*?</ol>', dom, re.DOTALL)
    links = re.findall(r'href="[^"]*?reference/training\.html[^"]*"', found)
    assert any("fsdp_engine.Engine.clip_grad_norm_" in link for link in links), links
    none = shown(site / "index.html", "?q=clip_grad_of_none_", tmp_path / "none")
    assert "No matching documents" in none


@needs_chromium
def test_tables_of_figures_are_tables_in_a_browser(site: Path, tmp_path: Path) -> None:
    dom = shown(site / "internals" / "benchmarks.html", "", tmp_path / "profile")
    assert dom.count("<table>") > 20
    assert "| --- |" not in dom
