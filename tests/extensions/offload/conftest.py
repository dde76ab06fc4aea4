"""A fixture for tests that shard a model in the process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """``shard`` makes a group for a process that has none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
