"""Ranks that have the device: a pool of four processes of their own, for this folder only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.async_device.build import build, missing_tool
from tests.async_device.device import NAME, install
from tests.pool import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """``ranks.run(fn, *args, world_size=2)`` where ``fn`` may use ``torch.deferred``.

    The device is never loaded into the process of pytest: other tests would find an accelerator.
    """
    if (tool := missing_tool()) is not None:
        pytest.skip(f"the asynchronous device is not built: no {tool}")
    build()
    pool = Ranks(4, backend=f"cpu:gloo,{NAME}:{NAME}", set_up=install)
    yield pool
    pool.close()
