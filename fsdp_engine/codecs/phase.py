"""The phase of a use of weights, which determines the encodings that it needs."""

from __future__ import annotations

# BOTH: a unit whose forward is recomputed within its own backward.
FORWARD, BACKWARD = 1, 2
BOTH = FORWARD | BACKWARD

# For codecs with two planes: see [Note: Planes] in ``base.py``.
PLANES: dict[int, tuple[int, ...]] = {FORWARD: (0,), BACKWARD: (1,), BOTH: (0, 1)}
