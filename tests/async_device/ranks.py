"""Ranks that have the device: a pool of four processes of their own.

To use the fixture, a test file imports it: ``from tests.async_device import ranks as device``, then
``ranks = device.ranks``.
"""

from __future__ import annotations

import pytest

from tests.pool import Ranks


@pytest.fixture(scope="session")
def ranks(device_ranks: Ranks) -> Ranks:
    """``ranks.run(fn, *args, world_size=2)`` where ``fn`` may use ``torch.deferred``."""
    return device_ranks
