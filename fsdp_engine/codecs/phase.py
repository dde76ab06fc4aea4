"""What weights are read for: the phase of a use, which says what bytes it needs."""

from __future__ import annotations

# BOTH: a unit whose forward runs again within its own backward.
FORWARD, BACKWARD = 1, 2
BOTH = FORWARD | BACKWARD

# Where a codec has two planes: see [Note: Planes] in ``base.py``.
PLANES: dict[int, tuple[int, ...]] = {FORWARD: (0,), BACKWARD: (1,), BOTH: (0, 1)}
