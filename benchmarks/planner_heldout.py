"""Planned peak memory compared with that of two gloo ranks, for models held out of the tuning.

    python benchmarks/planner_heldout.py [--models U-Net Qwen3] [--levels optim]

As ``planner_memory.py``, for ``HELD_OUT`` of ``_planner_models.py``, which were written
after the planner's memory model.
"""

from __future__ import annotations

import planner_memory
from _planner_models import HELD_OUT

if __name__ == "__main__":
    planner_memory.main(models=HELD_OUT, name="planner_heldout")
