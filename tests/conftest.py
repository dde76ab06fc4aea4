"""Fixtures that every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import Ranks

# The ranks want the cores; and on tensors this small a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The session's pool of four gloo ranks: ``ranks.run(fn, *args, world_size=4)``."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _collections_look_at_news_only() -> None:
    """A collection, or a search for optimizers, that looks at all of torch takes 0.1 s."""
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


@pytest.fixture(autouse=True)
def _tests_leave_no_group() -> Iterator[None]:
    yield from _leaves_no_group("test")


@pytest.fixture(autouse=True, scope="module")
def _files_leave_no_group() -> Iterator[None]:
    yield from _leaves_no_group("file")


def _leaves_no_group(what: str) -> Iterator[None]:
    """What comes after would fail, and nobody would know why."""
    was_there = dist.is_initialized()  # a fixture's of wider scope
    yield
    if dist.is_initialized() and not was_there:
        dist.destroy_process_group()
        pytest.fail(f"this {what} has left the default process group behind")
