"""Curves of a run as one PNG: loss above, memory below."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from curve import Curve

matplotlib.use("Agg")  # draws without a display; chosen before pyplot is imported

from matplotlib import pyplot


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, free of the bias of its start [Kingma & Ba, 2014, section 3]."""
    total, scale, smoothed = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        smoothed.append(total / scale)
    return smoothed


def draw_curves(path: Path, curve: Curve, bigram: float, title: str) -> None:
    """Draw loss (nats a byte) and memory (MiB) of rank 0 over steps to the PNG file ``path``."""
    steps = [record.step for record in curve.steps]
    losses = [record.loss for record in curve.steps]
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    above.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    above.plot(steps, smooth(losses), color="tab:blue", label="training")
    above.plot(
        [record.step for record in curve.held_out],
        [record.loss for record in curve.held_out],
        color="tab:orange",
        marker="o",
        label="held out",
    )
    above.axhline(bigram, color="gray", linestyle="--", label=f"bigram, held out: {bigram:.3f}")
    above.set(title=title, ylabel="loss (nats a byte)")
    above.legend()
    memory = [record.memory_bytes / 2**20 for record in curve.steps]
    below.plot(steps, memory, color="tab:green")
    # The axis begins at 0 and ends above the line, which may be constant.
    below.set(xlabel="step", ylabel="memory (MiB)", ylim=(0, 1.15 * max(memory)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
