"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.async_device.build import build, missing_tool
from tests.async_device.device import NAME, install
from tests.coverage_contexts import current_context, switch_to
from tests.matrices import left_of_matrices
from tests.pool import Ranks

# The ranks need the cores, and on small tensors a second thread does not help.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough-part",
        metavar="K/N",
        help="run thorough tests only of part K (from 0) of N, without simulations",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the thorough cases of matrices, and deselect the thorough tests of other parts.

    Files stay whole within a part: their fixtures are shared.
    """
    for item in left_of_matrices(items):
        item.add_marker("thorough")
    if (given := config.getoption("--thorough-part")) is None:
        return
    part, num_parts = map(int, given.split("/"))
    others = {
        item
        for item in items
        if item.get_closest_marker("thorough") is not None
        and (
            item.path.parent.name == "simulation"
            or zlib.crc32(item.path.name.encode()) % num_parts != part
        )
    }
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The session's pool of four gloo ranks: ``ranks.run(fn, *args, world_size=4)``."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def device_ranks() -> Iterator[Ranks]:
    """Four ranks that have the device of ``tests/async_device``.

    The device is never loaded into the process of pytest: other tests would find an accelerator.
    """
    if (tool := missing_tool()) is not None:
        pytest.skip(f"the asynchronous device is not built: no {tool}")
    build()
    pool = Ranks(4, backend=f"cpu:gloo,{NAME}:{NAME}", set_up=install)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _collections_look_at_news_only() -> None:
    """Freeze existing objects: a garbage collection, or a search for optimizers, skips them. Over
    all of torch it takes 0.1 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a small corpus in ``texts/``, for runs of the examples."""
    (tmp_path / "texts").mkdir()
    for i in range(4):
        lines = [f"line {n} of file {i}: {n * n * (i + 1)}\n" for n in range(40)]
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(lines))
    return tmp_path


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)
    switch_to(current_context())


@pytest.fixture(autouse=True)
def _tests_leave_no_group() -> Iterator[None]:
    yield from _leaves_no_group("test")


@pytest.fixture(autouse=True, scope="module")
def _files_leave_no_group() -> Iterator[None]:
    yield from _leaves_no_group("file")


def _leaves_no_group(what: str) -> Iterator[None]:
    """Fail a test or module that leaves a process group behind: later tests would fail for no
    visible reason."""
    was_there = dist.is_initialized()  # by a fixture of wider scope
    yield
    if dist.is_initialized() and not was_there:
        dist.destroy_process_group()
        pytest.fail(f"this {what} has left the default process group behind")
