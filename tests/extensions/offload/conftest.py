"""A fixture for tests that shard a model in the process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """Destroys the group that ``shard`` makes in a process without one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
