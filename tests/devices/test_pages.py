"""Huge pages of host memory: who asks for them, and for what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fsdp_engine.devices import pages
from fsdp_engine.devices.memory import Memory

HUGE = 2 << 20
MANY = 16 << 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Begins and ends of what is asked for, in a system that has such pages."""
    found: list[tuple[int, int]] = []

    def madvise(begin: int, num_bytes: int, advice: int) -> int:
        found.append((begin, begin + num_bytes))
        return 0

    monkeypatch.setattr(pages, "_huge_pages", lambda: (HUGE, madvise))
    return found


def range_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def test_only_whole_pages_within_a_block_are_asked_for(asked: list[tuple[int, int]]) -> None:
    books = Memory(torch.device("cpu"))
    tensor = books.persistent(MANY, torch.uint8, "main")
    ((begin, end),) = asked
    first, last = range_of(tensor.untyped_storage())
    assert begin % HUGE == end % HUGE == 0
    assert first <= begin < first + HUGE
    assert last - HUGE < end <= last
    assert not tensor.any()


@pytest.mark.parametrize("lasts", [False, True])
def test_memory_that_comes_and_goes_asks_when_it_is_fresh(
    asked: list[tuple[int, int]], lasts: bool
) -> None:
    books = Memory(torch.device("cpu"))
    make = books.lasting if lasts else books.transient
    storage = make(MANY, torch.uint8, "full")
    storage.fill()
    assert len(asked) == 1


def test_small_blocks_do_not_ask(asked: list[tuple[int, int]]) -> None:
    books = Memory(torch.device("cpu"))
    books.persistent(pages.LEAST_BYTES - 1, torch.uint8, "main")
    assert asked == []


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "_SIZE_FILE", tmp_path / "none")
    pages._huge_pages.cache_clear()
    try:
        assert not Memory(torch.device("cpu")).persistent(MANY, torch.uint8, "main").any()
        assert pages._huge_pages()[1] is None
    finally:
        pages._huge_pages.cache_clear()


def _kernel_gives_them() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not _kernel_gives_them(), reason="the kernel has no huge pages to give")
def test_the_kernel_has_heard() -> None:
    tensor = Memory(torch.device("cpu")).persistent(MANY, torch.uint8, "main")
    begin, end = range_of(tensor.untyped_storage())
    middle = (begin + end) // 2
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags
