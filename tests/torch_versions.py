"""What some versions of torch cannot do, and the tests that need it."""

from __future__ import annotations

import pytest
import torch

# Memory moves between storages: [Note: Arena] in ``devices/arena.py``.
CAN_PLAN_ADDRESSES = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
plans_addresses = pytest.mark.skipif(
    not CAN_PLAN_ADDRESSES, reason="addresses are planned from torch 2.13 on"
)
