"""Blocks of files: reads, writes and the mapping agree, with and without direct writes."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_engine.extensions.offload import disk_memory
from fsdp_engine.extensions.offload.disk_memory import DiskBlock, DiskFile, Mapping

PIECE = disk_memory.PIECE


@pytest.fixture(params=["direct", "buffered"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Direct writes to a disk that takes only whole pages, or a file system without them."""
    open_file, pwritev = os.open, os.pwritev

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *args, **kwargs)

    def pages_only(file: int, memories: list[memoryview], start: int) -> int:
        address = torch.frombuffer(memories[0], dtype=torch.uint8).data_ptr()
        if address % 4096 or len(memories[0]) % 4096 or start % 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(file, memories, start)  # type: ignore[arg-type]

    if request.param == "buffered":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(os, "pwritev", pages_only)
    return str(request.param)


@pytest.mark.parametrize("size", [0, 1, 4096, PIECE - 1, PIECE, 2 * PIECE + 4097])
def test_reads_return_what_was_written_also_through_the_mapping(
    size: int, access: str, tmp_path: Path
) -> None:
    file = DiskFile(tmp_path)
    before, block, behind = (DiskBlock(each, file) for each in (5, size, 5))
    assert file.is_direct == (access == "direct")
    assert not os.listdir(tmp_path)
    before.bytes.fill_(3)
    behind.bytes.fill_(4)
    found = torch.empty(size + 64, dtype=torch.uint8)[64:]
    block.read(found.fill_(1))
    assert not found.any()
    for number in range(2):
        content = torch.randint(0, 256, (size,), dtype=torch.uint8)
        block.write(content)
        assert torch.equal(block.bytes, content), number
        block.read(found)
        assert torch.equal(found, content), number
        block.bytes.add_(1)
        block.read(found)
        assert torch.equal(found, content + 1), number
        block.read(found[size // 2 :], size // 2)
        assert torch.equal(found, content + 1), number
    assert block.bytes.numel() == size
    assert before.bytes.eq(3).all()
    assert behind.bytes.eq(4).all()


def test_ten_thousand_blocks_share_the_descriptors_of_their_file(tmp_path: Path) -> None:
    def mapped() -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum(str(tmp_path) in line for line in maps)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # files of other tests
    before = descriptors()
    file = DiskFile(tmp_path)
    with_file = descriptors()
    blocks = [DiskBlock(4097, file) for _ in range(10_000)]
    assert before < descriptors() == with_file
    assert mapped()
    for number in (0, 9_999):
        blocks[number].bytes.fill_(number % 251)
        blocks[number].flush()
    last = blocks[-1].bytes  # the last reference to its memory
    del blocks, file
    assert descriptors() == before
    assert mapped() == 1
    assert last.eq(9_999 % 251).all()
    del last
    assert not mapped()


def test_a_mapping_that_the_system_refuses_is_an_error(tmp_path: Path) -> None:
    file = DiskFile(tmp_path)
    with pytest.raises(OSError, match=r"mmap of 4096 bytes of state: Invalid argument"):
        Mapping(file.number, 1, 4096)
    with pytest.raises(OSError, match=r"mmap of 1 bytes of state: Bad file descriptor"):
        Mapping(-1, 0, 1)
