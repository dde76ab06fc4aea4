"""Draws docs/comparison.svg from results files: step time and peak memory beside FSDP2 and DDP.

``tools/figures.py`` compares the file, and writes it with ``--write``. The drawing has a background
of its own, and the viewer's colour scheme chooses between a light and a dark one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "comparison.svg"
SIZE = "10M"
DTYPES = ("fp32", "bf16")
MEMORY = {"fp32": "fp32", "bf16": "bf16, bf16 reduction"}
NUM_RANKS = 2
PEERS = ("DDP", "FSDP2")
ENGINES = (*PEERS, "no_shard", "optim", "optim_grads", "optim_grads_params")

WIDTH, TOP, ROW, BAR, GROUP_GAP = 860, 58, 21, 15, 14
# Left edge and length of the longest bar, of each panel.
PANELS = ((196, 230), (550, 230))
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
text { fill: #1f2328; font-size: 12px }
.title { font-size: 14px; font-weight: 600 }
.name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 11.5px }
.note { fill: #59636e; font-size: 11px }
.peer { fill: #8c959f }
.ours { fill: #2f7ebc }
@media (prefers-color-scheme: dark) {
  .card { fill: #151b23; stroke: #3d444d }
  text { fill: #f0f6fc }
  .note { fill: #9198a1 }
  .peer { fill: #737b85 }
  .ours { fill: #4a9fe0 }
}"""


def _results(name: str) -> Any:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def step_milliseconds(dtype: str) -> dict[str, float]:
    """Median step time by engine."""
    found = _results(f"step_time_{SIZE}")["results"][f"{SIZE} {dtype}"]
    return {name: found[name]["seconds"]["median"] * 1e3 for name in ENGINES}


def peak_megabytes(dtype: str) -> dict[str, float]:
    """Weights, gradients and optimizer state of a rank at the peak of a step, by engine."""
    found = _results("memory")["results"][MEMORY[dtype]]
    return {
        name: (found[name]["peak"] + found[name]["optimizer, all ranks"] / NUM_RANKS) / 1e6
        for name in ENGINES
    }


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(text)}</text>'


def _bars(panel: int, values: dict[str, dict[str, float]], unit: str) -> Iterator[str]:
    left, length = PANELS[panel]
    longest = max(value for found in values.values() for value in found.values())
    for group, found in enumerate(values.values()):
        for row, (name, value) in enumerate(found.items()):
            y = TOP + group * (len(ENGINES) * ROW + GROUP_GAP) + row * ROW
            width = length * value / longest
            kind = "peer" if name in PEERS else "ours"
            place = f'x="{left}" y="{y}" width="{width:.1f}" height="{BAR}"'
            yield f'<rect {place} rx="2" class="{kind}"/>'
            yield _text(left + width + 5, y + 12, f"{value:.0f} {unit}")


def chart() -> str:
    """The drawing."""
    machine = _results(f"step_time_{SIZE}")["machine"]
    lines = []
    for group, dtype in enumerate(DTYPES):
        top = TOP + group * (len(ENGINES) * ROW + GROUP_GAP)
        lines.append(_text(16, top + 12, dtype, "title"))
        for row, name in enumerate(ENGINES):
            kind = "" if name in PEERS else "name"
            lines.append(_text(PANELS[0][0] - 8, top + row * ROW + 12, name, kind, "end"))
    times = {dtype: step_milliseconds(dtype) for dtype in DTYPES}
    peaks = {dtype: peak_megabytes(dtype) for dtype in DTYPES}
    lines += [
        _text(PANELS[0][0], 34, "Step time", "title"),
        _text(PANELS[1][0], 34, "Peak memory of a rank *", "title"),
        *_bars(0, times, "ms"),
        *_bars(1, peaks, "MB"),
    ]
    bottom = TOP + len(DTYPES) * (len(ENGINES) * ROW + GROUP_GAP)
    notes = (
        f"A GPT of {SIZE} parameters, fused AdamW, {NUM_RANKS} CPU ranks (gloo) on "
        f"{machine['cores']} cores, torch {machine['torch']}; median step time.",
        "* Weights, gradients and optimizer state, without activations. DDP computes in bf16 by "
        "autocast, whose casts of weights are not counted.",
    )
    lines += [_text(16, bottom + 10 + 17 * row, note, "note") for row, note in enumerate(notes)]
    height = bottom + 12 + 17 * len(notes)
    label = "Step time and peak memory of this engine, beside DDP and FSDP2"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{label}" font-family="{FONT}">'
    )
    size = f'width="{WIDTH - 1}" height="{height - 1}"'
    card = f'<rect x="0.5" y="0.5" {size} rx="8" class="card"/>'
    return "\n".join([head, f"<style>{STYLE}\n</style>", card, *lines, "</svg>\n"])
