"""Features that some versions of torch lack, and marks of the tests that need them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from fsdp_engine.flat_dtensor.slices import MARKS_SUMS

_PINS = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8")
pinned_torch = pytest.mark.skipif(
    f"torch=={torch.__version__.partition('+')[0]}\n" not in _PINS,
    reason="figures are those of the pinned torch",
)

_IS_BEFORE_2_13 = TorchVersion(torch.__version__) < (2, 13)

# torch 2.11's dynamo fails with an AssertionError of its own at a `raise` that it cannot trace.
compiled_code_raises = pytest.mark.skipif(
    _IS_BEFORE_2_13,
    reason="errors of traced functions come through torch.compile from torch 2.13 on",
)

# Defined as `MARKS_SUMS` in ``flat_dtensor/slices.py``.
marks_gradients = pytest.mark.skipif(
    not MARKS_SUMS, reason="torch distinguishes gradients of slices since version 2.13"
)

# Whether memory can move between storages: [Note: Arena] in ``extensions/arenas/arena.py``.
CAN_PLAN_ADDRESSES = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
plans_addresses = pytest.mark.skipif(
    not CAN_PLAN_ADDRESSES, reason="addresses are planned from torch 2.13 on"
)
# [Note: Unread memory] in ``memory/allocator.py``.
swaps_memory = pytest.mark.skipif(
    not CAN_PLAN_ADDRESSES, reason="memory that is not gathered is withheld from torch 2.13 on"
)
stages_classes = pytest.mark.skipif(
    _IS_BEFORE_2_13,
    reason="torch 2.11's stager raises KeyError for a class among the parts of an object",
)
