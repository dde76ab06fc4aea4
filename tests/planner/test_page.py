"""The page of a plan: one valid file, readable without a script, and its script."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.page import page_of, save_page
from fsdp_engine.planner.plan_view import KIND_COLOURS, TIME_COLOURS
from fsdp_engine.planner.planner_tables import plan_columns
from fsdp_engine.planner.strategy_plan import advice
from tests.browser import needs_chromium, seen
from tests.models import Chain, vector_batch
from tests.planner.made_plans import made_plan

VOID = {"meta", "input", "br"}


class Document(HTMLParser):
    """Elements of a page, whose tags must be closed in order.

    Attributes:
        elements: names and attributes, in order.
        texts: texts outside of style and script.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len({*names}), (tag, names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element of a name."""
        return [attributes for name, attributes in self.elements if name == tag]


def small() -> nn.Module:
    return Chain(*(nn.Linear(256, 256) for _ in range(3)))


@cache
def planned() -> tuple[fe.StrategyPlan, fe.Simulation]:
    """A simulated plan on two axes, and the step of its choice."""
    machine = replace(fe.H100, between_nodes=replace(fe.H100.between_nodes, bandwidth=1e8))
    planning = fe.plan(
        *(small, vector_batch(64, 0, 256)),
        world_size=16,
        machine=machine,
        meshes=[(2, 8)],
        checkpointing=(False, True),
        options=fe.Options(min_unit_size=0),
    )
    assert planning.simulate is not None
    return planning, planning.simulate(planning.outcomes[0].candidate)


def test_it_is_one_valid_file_without_network_access(tmp_path: Path) -> None:
    save_page(planned()[0], tmp_path / "plan.html", planned()[1])
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    page = Document(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len({*ids})
    assert {each["for"] for each in page.all("label")} <= {*ids}
    assert [each.get("type") for each in page.all("script")] == [None]
    assert len(page.all("style")) == 1
    for _, attributes in page.elements:
        assert not attributes.keys() & {"src", "href", "onclick"}
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|innerHTML", text)
    (policy,) = (each for each in page.all("meta") if "http-equiv" in each)
    assert policy["content"].startswith("default-src 'none'; ")
    assert "prefers-color-scheme: dark" in text


def test_it_is_readable_without_its_script() -> None:
    planning, step = planned()
    page = Document(page_of(planning, step))
    texts = [text.strip() for text in page.texts]
    for line in advice(planning.setting, planning.outcomes, planning.trials).splitlines():
        assert line in texts
    columns = plan_columns(planning.setting, planning.outcomes)
    for column in columns:
        assert column.name in texts
        for cell in column.cells:
            assert not cell or re.sub(r"\[/?red\]", "", cell) in texts
    rows = [each for each in page.all("tr") if "data-order" in each]
    assert len(rows) == len(planning.outcomes)
    assert [each.get("class") for each in rows].count("chosen") == 1
    assert rows[0]["class"] == "chosen"
    # Parts that need the script are hidden at first.
    assert all("hidden" in each for each in page.all("div") if each.get("class") == "zoom")


def test_the_timeline_has_lanes_units_and_waits_in_their_colours() -> None:
    _, step = planned()
    page = Document(page_of(*planned()))
    texts = "\n".join(page.texts)
    for lane in step.message_seconds:
        assert f"\n{lane}\n" in texts
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        assert f"{unit}, forward: " in texts
        assert f"{unit}, backward: " in texts
    colours = [each["fill"] for each in page.all("rect") if "fill" in each]
    assert {*colours} <= {*TIME_COLOURS.values()}
    waits = [each for each in step.exposed if each.lane.startswith("outer")]
    assert colours.count(TIME_COLOURS["outer link"]) == len(waits) > 0
    ends = [float(each["x"]) + float(each["width"]) for each in page.all("rect")]
    assert 990 < max(ends) < 1000.2
    areas = {each["fill"]: each["points"] for each in page.all("polygon")}
    assert [*areas] == [*KIND_COLOURS.values()]
    # The uppermost corner of the last area is the peak.
    upper = min(float(corner.partition(",")[2]) for corner in areas["#E69F00"].split())
    top = 1.1 * step.peak_bytes
    assert upper == pytest.approx(180 * (1 - step.peak_bytes / top), abs=0.1)


HOSTILE = """<script>document.body.dataset.bad = "1"</script><img src=x onerror=alert(1)>"'&amp;"""
HOSTILE_NAMES = dict.fromkeys(("model", "machine", "item"), HOSTILE)


def test_names_are_escaped() -> None:
    text = page_of(made_plan(**HOSTILE_NAMES))
    page = Document(text)
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert HOSTILE not in text
    assert any(HOSTILE in each for each in page.texts)


def test_a_plan_without_times_or_a_simulation_has_a_page(tmp_path: Path) -> None:
    planning = fe.plan(small, vector_batch(4, 0, 256), world_size=2, formulas=True)
    page = Document(page_of(planning))
    assert page.all("svg") == []
    nothing = planned()[0].within(2.0**10)
    text = page_of(nothing, planned()[1])
    assert "One step of the candidate that exceeds the memory limit the least" in text
    assert 'class="chosen"' not in text


PROBE = """
const rows = () => Array.from(document.querySelectorAll("#plan tbody tr"));
const column = (name) => Array.from(document.querySelectorAll("#plan thead th"))
  .findIndex((head) => head.textContent.trim() === name);
const cells = (name) => rows().map((row) => row.cells[column(name)].textContent);
const click = (name) =>
  document.querySelectorAll("#plan thead th")[column(name)].querySelector("button").click();
seen.before = rows().map((row) => Number(row.dataset.order));
for (const name of ["at most", "strategy", "free"]) {
  click(name);
  seen[name + " up"] = cells(name);
  seen[name + " mark"] = document.querySelectorAll("#plan thead th")[column(name)]
    .getAttribute("aria-sort");
  click(name);
  seen[name + " down"] = cells(name);
}
if (document.getElementById("zoom") !== null) {
  const zoom = document.getElementById("zoom");
  zoom.value = 4;
  const before = document.querySelector(".plot").getBoundingClientRect().width;
  zoom.dispatchEvent(new Event("input"));
  seen.zoomed = document.querySelector(".plot").getBoundingClientRect().width / before;
}
seen.hidden = Array.from(document.querySelectorAll(".zoom")).filter((e) => e.hidden).length;
seen.bad = document.body.dataset.bad || "";
seen.styled = getComputedStyle(document.querySelector("tr.chosen")).backgroundColor;
seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
"""


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_the_table_sorts_in_a_browser(tmp_path: Path, width: int) -> None:
    planning = made_plan(**HOSTILE_NAMES)
    found = seen(page_of(planning), PROBE, tmp_path, f"--window-size={width},800")
    assert found["bad"] == ""
    assert found["wide"] == 0
    assert found["before"] == [*range(len(planning.outcomes))]
    for name in ("at most", "free"):
        numbers = [float(cell.partition(",")[0]) for cell in found[f"{name} up"]]
        assert numbers == sorted(numbers)
        assert len({*numbers}) > 5
        assert found[f"{name} down"] == found[f"{name} up"][::-1]
        assert found[f"{name} mark"] == "ascending"
    assert found["strategy up"] == sorted(found["strategy up"])
    assert found["strategy down"] == sorted(found["strategy up"], reverse=True)
    assert found["styled"] == "rgb(232, 241, 228)"


@needs_chromium
def test_the_timeline_is_zoomed_in_a_browser(tmp_path: Path) -> None:
    found = seen(page_of(*planned()), PROBE, tmp_path)
    assert found["zoomed"] == pytest.approx(4)
    assert found["hidden"] == 0
