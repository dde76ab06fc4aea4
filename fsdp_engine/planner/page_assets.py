"""Style and script of the page of a plan (``page.py``)."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --back: #ffffff; --text: #1d2125; --soft: #5a646e; --line: #d5dae0; --head: #f3f5f7;
  --chosen: #e8f1e4; --busy: #aab3bd; --bad: #b3261e; --link: #0b57d0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #16191d; --text: #e4e7ea; --soft: #9aa5b0; --line: #363d45; --head: #20252b;
    --chosen: #263a24; --busy: #5d6772; --bad: #ff8a80; --link: #8ab4f8;
  }
}
body {
  margin: 0 auto; max-width: 90rem; padding: 1rem 1.5rem 3rem; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.soft { color: var(--soft); font-size: 0.87rem; }
.advice p { margin: 0.25rem 0; max-width: 75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; text-align: left; white-space: nowrap; font-weight: normal; }
thead th { background: var(--head); border-bottom: 2px solid var(--line); font-weight: 600; }
tbody tr { border-bottom: 1px solid var(--line); }
.number { text-align: right; }
thead button {
  all: unset; cursor: pointer; font-weight: 600; border-radius: 2px;
}
thead button:focus-visible { outline: 2px solid var(--link); }
thead button::after { content: " \\2195"; color: var(--soft); }
th[aria-sort="ascending"] button::after { content: " \\2191"; color: inherit; }
th[aria-sort="descending"] button::after { content: " \\2193"; color: inherit; }
tr.chosen { background: var(--chosen); }
tr.chosen th { font-weight: 700; }
tr.chosen th::before { content: "\\25b6 "; }
tr.lacking td, tr.lacking th { color: var(--soft); }
tr.lacking .free { color: var(--bad); }
tr.lacking .bar { opacity: 0.4; }
.bar { display: flex; width: 14rem; height: 0.9rem; }
.bar i { display: block; height: 100%; }
.what-if {
  display: flex; flex-wrap: wrap; gap: 0.3rem 1rem; align-items: center; margin: 0.7rem 0;
}
.what-if[hidden] { display: none; }
.what-if input { width: 20rem; max-width: 100%; }
.what-if p { margin: 0; flex-basis: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; padding: 0; list-style: none; }
.legend i { display: inline-block; width: 0.9rem; height: 0.9rem; margin-right: 0.4rem;
  vertical-align: -0.1rem; border: 1px solid var(--line); }
.chart {
  display: grid; grid-template-columns: max-content minmax(0, 1fr); font-size: 0.8rem; margin: 0;
}
.chart .scroll { overflow-y: hidden; }
.names { text-align: right; padding-right: 0.5rem; }
.names div { overflow: hidden; white-space: nowrap; }
.plot { position: relative; width: calc(100% * var(--zoom, 1)); }
.plot svg { display: block; width: 100%; }
.ticks { position: relative; height: 1.4rem; color: var(--soft); }
.ticks span { position: absolute; transform: translateX(-50%); }
.ticks span:first-child { transform: none; }
.ticks span.end { transform: translateX(-100%); }
.names .scale { position: relative; overflow: visible; }
.scale span { position: absolute; right: 0; transform: translateY(-50%); color: var(--soft); }
.busy { fill: var(--busy); }
.rule { stroke: var(--line); vector-effect: non-scaling-stroke; }
.limit { stroke: var(--text); stroke-dasharray: 6 4; vector-effect: non-scaling-stroke; }
"""

SCRIPT = """
"use strict";
(() => {
  const table = document.getElementById("plan");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);

  const sortBy = (head, column) => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach((each) => each.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value;
    const compare = head.className === "number"
      ? (a, b) => value(a) - value(b)
      : (a, b) => value(a).localeCompare(value(b));
    rows.sort((a, b) => sign * compare(a, b) || a.dataset.order - b.dataset.order);
    body.append(...rows);
  };
  heads.forEach((head, column) => {
    if (head.dataset.fixed !== undefined) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(head, column));
    head.append(button);
    head.setAttribute("aria-sort", "none");
  });

  const slider = document.getElementById("limit");
  const unit = Number(table.dataset.unit);
  const digits = Number(table.dataset.digits);
  const name = table.dataset.unitName;
  const inUnits = (bytes) => (bytes / unit).toLocaleString(
    "en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const rates = rows.map((row) => Math.abs(Number(row.dataset.rate)));
  const step = Math.max(...rates) / 1000 || 1;
  const rank = (row) => Math.round(Number(row.dataset.rate) / step);

  const choose = (limit) => {
    let best = null;
    let count = 0;
    rows.forEach((row) => {
      const peak = Number(row.dataset.peak);
      const lacks = peak > limit;
      const cell = row.querySelector(".free");
      row.classList.toggle("lacking", lacks);
      row.classList.remove("chosen");
      cell.textContent = inUnits(limit - peak) + (lacks ? ", " + row.dataset.largest : "");
      cell.dataset.value = limit - peak;
      if (lacks) return;
      count += 1;
      const isBetter = best === null || rank(row) > rank(best)
        || (rank(row) === rank(best) && peak < Number(best.dataset.peak));
      if (isBetter) best = row;
    });
    let text = count + " of " + rows.length + " candidates fit " + inUnits(limit) + " " + name;
    if (best !== null) {
      best.classList.add("chosen");
      text += "; the fastest is " + best.dataset.label + ": " + best.dataset.step + " ms per step";
    }
    document.getElementById("limit-text").textContent = inUnits(limit) + " " + name;
    document.getElementById("verdict").textContent = text + ".";
  };
  if (slider !== null) {
    const given = Number(slider.dataset.limit);
    document.getElementById("what-if").hidden = false;
    slider.addEventListener("input", () => choose(Number(slider.value) * unit));
    document.getElementById("reset").addEventListener("click", () => {
      slider.value = given / unit;
      choose(given);
    });
    choose(given);
  }

  const zoom = document.getElementById("zoom");
  if (zoom !== null) {
    document.getElementById("zooming").hidden = false;
    zoom.addEventListener("input", () => {
      document.getElementById("step").style.setProperty("--zoom", zoom.value);
    });
  }
})();
"""
