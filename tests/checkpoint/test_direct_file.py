"""Files are written past the page cache where the system allows it, with the right contents."""

from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest

from fsdp_engine.checkpoint import direct_file
from fsdp_engine.checkpoint.direct_file import BLOCK_BYTES, DirectFile

SIZES = [0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES]


def write_in_pieces(path: Path, content: bytes, seed: int) -> DirectFile:
    draw = random.Random(seed)
    with DirectFile(path) as file:
        start = 0
        while start < len(content):
            size = draw.choice((1, 7, 64, 5000, 1 << 20, 3 << 20))
            assert file.write(content[start : start + size]) == len(content[start : start + size])
            start += size
            assert file.tell() == min(start, len(content))
            if draw.random() < 0.2:
                os.fsync(file.fileno())
                assert path.read_bytes() == content[:start]
        os.fsync(file.fileno())
    return file


def test_a_file_holds_the_written_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in [*SIZES, 2 * BLOCK_BYTES + 12345]:
        content = random.Random(size).randbytes(size)
        path.write_bytes(b"older and longer" * 100)
        file = write_in_pieces(path, content, size)
        assert path.read_bytes() == content
        assert (file.num_bytes, file.crc) == (size, zlib.crc32(content))


def refuse_direct_open(original: Any) -> Any:
    def opens(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(original(path, flags, *args))

    return opens


def refuse_direct_write(original: Any) -> Any:
    def writes(descriptor: int, data: Any, place: int) -> int:
        if direct_file.fcntl.fcntl(descriptor, direct_file.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(original(descriptor, data, place))

    return writes


def write_a_part(original: Any) -> Any:
    return lambda descriptor, data, place: original(descriptor, data[: len(data) // 3 + 1], place)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [("open", refuse_direct_open), ("pwrite", refuse_direct_write), ("pwrite", write_a_part)],
    ids=["no direct files", "no direct writes", "short writes"],
)
def test_file_systems_that_cannot_are_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrap: Any
) -> None:
    content = random.Random(1).randbytes(BLOCK_BYTES + 999)
    with monkeypatch.context() as patch:
        patch.setattr(direct_file.os, name, wrap(getattr(os, name)))
        write_in_pieces(tmp_path / "file", content, 1)
    assert (tmp_path / "file").read_bytes() == content


def test_an_error_of_the_disk_is_raised_and_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = os.pwrite, 0

    def fails_once(*args: Any) -> int:
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    monkeypatch.setattr(direct_file.os, "pwrite", fails_once)
    file = DirectFile(tmp_path / "file")

    def write_much() -> None:
        for _ in range(4):
            file.write(bytes(BLOCK_BYTES))

    for call in (write_much, file.fileno, file.close):
        with pytest.raises(OSError, match="No space left"):
            call()
    assert file.closed
