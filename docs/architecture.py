"""Draws docs/architecture.svg: the parts of the engine, from a user's call to torch's collectives.

python docs/architecture.py [another file, such as architecture.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

# Rows from the top: name, text, colour; a row has one box or several.
ROWS = (
    (("your training loop", "model(batch), loss.backward(), optimizer.step()", "#8c959f"),),
    (
        ("fe.shard -> Engine", "checks, plan, units; clipping, accumulation", "#2f7ebc"),
        ("fsdp2, megatron, integrations", "other interfaces of the same engine", "#7a5195"),
    ),
    (
        ("hooks", "the only code that modules and autograd call", "#2f7ebc"),
        ("schedule", "recorded order of units; prefetch; free", "#2f7ebc"),
        ("reducer", "order of reductions; .grad", "#2f7ebc"),
    ),
    (
        ("unit", "modules that are gathered together", "#2f7ebc"),
        ("ParamAndGradBuffer", "main weights, compute weights, gradients", "#2f7ebc"),
    ),
    (
        ("sharded buffer", "one flat tensor: gather, reduce, cast", "#2f7ebc"),
        ("lanes", "streams of a device, threads of a CPU", "#2f7ebc"),
        ("communicators", "collectives of one mesh axis", "#2f7ebc"),
    ),
    (("torch.distributed", "NCCL on GPUs, gloo on CPUs", "#8c959f"),),
)
EXTENSIONS = (
    "extensions",
    "offload\nfp8 and Transformer Engine\nrecomputation\npipelines\ndifferent modules\n"
    "whole-tensor optimizers\nEMA, reports, checks\n...",
)
WIDTH, HEIGHT, GAP, SIDE = 9.0, 0.74, 0.3, 2.3


def draw_box(
    axes: Axes, place: tuple[float, float], size: tuple[float, float], colour: str
) -> None:
    """Draw a rounded box at its lower left corner ``place``."""
    box = FancyBboxPatch(place, *size, boxstyle="round,pad=0,rounding_size=0.08", lw=1.2)
    box.set(facecolor=colour + "22", edgecolor=colour)
    axes.add_patch(box)


def main(path: Path) -> None:
    """Draw the picture into a file."""
    matplotlib.rcParams["svg.hashsalt"] = "architecture"  # the same file each time
    figure, axes = pyplot.subplots(figsize=(10.5, 5.4))
    for number, row in enumerate(ROWS):
        bottom = (len(ROWS) - 1 - number) * (HEIGHT + GAP)
        width = (WIDTH - GAP * (len(row) - 1)) / len(row)
        for place, (name, text, colour) in enumerate(row):
            left = place * (width + GAP)
            draw_box(axes, (left, bottom), (width, HEIGHT), colour)
            middle = left + width / 2
            axes.text(middle, bottom + 0.48, name, ha="center", va="center", weight="bold", size=9)
            axes.text(middle, bottom + 0.2, text, ha="center", va="center", size=7.2)
        if number:
            start, end = bottom + HEIGHT + GAP - 0.03, bottom + HEIGHT + 0.03
            arrow = {"arrowstyle": "->", "color": "#59636e"}
            axes.annotate("", (WIDTH / 2, end), (WIDTH / 2, start), arrowprops=arrow)
    bottom, top = HEIGHT + GAP, (len(ROWS) - 1) * (HEIGHT + GAP) - GAP
    left = WIDTH + GAP
    draw_box(axes, (left, bottom), (SIDE, top - bottom), "#ef8354")
    name, text = EXTENSIONS
    axes.text(left + SIDE / 2, top - 0.25, name, ha="center", weight="bold", size=9, va="center")
    axes.text(left + SIDE / 2, (top + bottom) / 2 - 0.15, text, ha="center", va="center", size=7.6)
    axes.set_xlim(-0.1, left + SIDE + 0.1)
    axes.set_ylim(-0.1, len(ROWS) * (HEIGHT + GAP))
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
