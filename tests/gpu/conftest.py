"""A fixture of tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.gpu.scene import process_group


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with process_group("nccl", 1) as mesh:
        yield mesh
