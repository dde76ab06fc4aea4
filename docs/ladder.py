"""Draws docs/ladder.svg: what each rank holds at each level.

python docs/ladder.py [another file, such as ladder.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

NUM_RANKS = 4
# What, colour, from which level it is cut, bytes a parameter in fp32 with AdamW.
PARTS = (
    ("optimizer state", "#7a5195", 1, 8),
    ("gradients", "#ef8354", 2, 4),
    ("weights", "#2f7ebc", 3, 4),
)
LEVELS = (
    ("no_shard", "DDP", "16 P bytes a rank"),
    ("optim", "ZeRO-1", "8 P + 8 P/n"),
    ("optim_grads", "ZeRO-2", "4 P + 12 P/n"),
    ("optim_grads_params", "ZeRO-3, FSDP", "16 P/n"),
)


def draw_level(axes: Axes, level: int) -> None:
    """One column for each rank: what it holds is filled, what others hold is outlined."""
    for rank in range(NUM_RANKS):
        bottom = 0.0
        for _, colour, cut_from, height in reversed(PARTS):
            place = (1.15 * rank, bottom)
            axes.add_patch(Rectangle(place, 1, height, fill=False, edgecolor=colour, lw=0.8))
            held = height / NUM_RANKS if level >= cut_from else height
            # The first rank holds the top slice.
            start = bottom + height - (rank + 1) * held if level >= cut_from else bottom
            axes.add_patch(Rectangle((place[0], start), 1, held, color=colour, lw=0))
            bottom += height + 0.5
        axes.text(1.15 * rank + 0.5, -0.4, f"rank {rank}", ha="center", va="top", fontsize=7)
    name, alias, size = LEVELS[level]
    axes.set_title(name, fontsize=11, fontfamily="monospace", pad=18)
    axes.text(2.22, 17.6, alias, ha="center", fontsize=9, color="#555555")
    axes.text(2.22, -3.1, size, ha="center", fontsize=10)
    axes.set(xlim=(-0.1, 4.6), ylim=(-3.4, 17.2))
    axes.axis("off")


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "ladder"  # the same file each time
    figure, panels = pyplot.subplots(1, len(LEVELS), figsize=(10, 3.6), facecolor="white")
    for level, axes in enumerate(panels):
        draw_level(axes, level)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for _, colour, _, _ in PARTS]
    names = [name for name, *_ in PARTS]
    figure.legend(handles, names, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.84, bottom=0.1, wspace=0.08)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("ladder.svg")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main()
