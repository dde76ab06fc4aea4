"""Metadata that no save has written: an error that names the file, and nothing else changes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import pickle
import random
import re
import resource
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.checkpoint.cli import app
from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.manifest import MANIFEST, Manifest
from tests.checkpoint.damaged import save, without_sums
from tests.checkpoint.scene import add_one, contents, different
from tests.pool import Ranks

STATE = {"model": {"weight": torch.arange(12.0).view(4, 3), "bias": torch.ones(())}, "step": 3}


@functools.cache
def plain_metadata(folder: Path) -> bytes:
    """As plain DCP saves it."""
    dcp.save(STATE, checkpoint_id=folder)
    return (folder / METADATA).read_bytes()


def refused(folder: Path, change: bytes | Callable[[Any], Any], *parts: str) -> None:
    """Metadata is refused after a change, or with these bytes."""
    if not isinstance(change, bytes):
        metadata = pickle.loads(plain_metadata(folder))
        change(metadata)
        change = pickle.dumps(metadata)
    (folder / METADATA).write_bytes(change)
    with pytest.raises(ValueError, match=re.escape(METADATA)) as caught:
        read_metadata(folder)
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} is not in {caught.value}"


# --- pickles ---


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


# State (None, {"__eq__": Size}).
SET_EQ = b"N}" + text("__eq__") + named("torch", "Size") + b"s\x86b"
NAMES = [
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
]


def attributes() -> list[Any]:
    """Of everything that the pickle of metadata may name, and defaults of the function."""
    found = [
        *(each for each in vars(dcp_metadata).values() if isinstance(each, type)),
        *(filesystem._StorageInfo, collections.OrderedDict, torch.Size),
        *(pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath),
        torch.serialization._get_layout,
    ]
    function = torch.serialization._get_layout
    return [*(dict(vars(each)) for each in found), function.__defaults__, function.__kwdefaults__]


def test_a_pickle_changes_nothing(tmp_path: Path) -> None:
    ends = [b".", b"", b"0cos\nsystem\n."]  # whole, cut, refused
    changed = ["__eq__", "__defaults__", "__setstate__"]
    before = attributes()
    for name, end, attribute in itertools.product(NAMES, ends, changed):
        change = SET_EQ.replace(text("__eq__"), text(attribute))
        refused(tmp_path, b"\x80\x02" + named(*name) + change + end)
        assert attributes() == before


BOMBS = {
    "memo index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo index as text": b"\x80\x02Np2147483647\n.",
    "long string": b"\x80\x04\x8d\xff\xff\xff\xff\x0f\x00\x00\x00a.",
    "long bytes": b"\x80\x04\x8e\xff\xff\xff\xff\x0f\x00\x00\x00a.",
    "long bytearray": b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00a.",
    "behind a frame": b"\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00Nr\xff\xff\xff\x3f.",
    "behind a class": b"\x80\x02" + named("torch", "Size") + b"r\xff\xff\xff\x3f.",
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_few_bytes_take_no_memory(tmp_path: Path, content: bytes) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refused(tmp_path, content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert time.process_time() - start < 5  # 28 s without the check


def test_every_protocol_is_read(tmp_path: Path) -> None:
    plain_metadata(tmp_path)
    expected = read_metadata(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        if protocol > 1:  # the classes of metadata need 2
            (tmp_path / METADATA).write_bytes(pickle.dumps(expected, protocol))
            assert read_metadata(tmp_path) == expected
        else:
            content = pickle.dumps([1, "a\n", 2.5], protocol)
            refused(tmp_path, content, "expected as the object Metadata; found .* list")


# --- values ---


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def cut(metadata: Any, chunks: list[Any]) -> Any:
    """Another division of ``model.weight``, (4, 3)."""
    chunks = [chunk(*each) for each in chunks]
    metadata.state_dict_metadata["model.weight"].chunks = chunks
    index = next(each for each in metadata.storage_data if each.fqn == "model.weight")
    place = metadata.storage_data.pop(index)
    for each in chunks:
        metadata.storage_data[dataclasses.replace(index, offset=each.offsets)] = place
    return metadata


UNCOVERED: list[Any] = [
    [((0, 0), (2, 3))],
    [],
    [((0, 0), (2, 3)), ((3, 0), (1, 3))],  # a gap
    [((0, 0), (3, 3)), ((2, 0), (2, 3))],  # an overlap
    [((0, 0), (2, 3)), ((1, 0), (2, 3))],  # one that hides a gap
    [((0, 0), (5, 3)), ((4, 0), (-1, 3))],
    [((0, 0), (4, 4))],
    [((0,), (4,))],
    [((0, 0), (4, 3)), ((0, 0), (4, 3))],
    [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (2, 2)), ((1, 0), (3, 1))],  # a hole
]
COVERED: list[Any] = [
    # a pinwheel
    [((0, 0), (1, 2)), ((0, 2), (3, 1)), ((3, 1), (1, 2)), ((1, 0), (3, 1)), ((1, 1), (2, 1))],
    # slices with empty ones
    [((0, 0), (3, 3)), ((3, 0), (1, 3)), ((4, 0), (0, 3)), ((4, 3), (0, 0))],
]


def test_chunks_must_make_up_their_tensor(tmp_path: Path) -> None:
    for chunks in UNCOVERED:
        refused(tmp_path, lambda metadata, chunks=chunks: cut(metadata, chunks), r"model\.weight")
    for chunks in COVERED:
        metadata = cut(pickle.loads(plain_metadata(tmp_path)), chunks)
        (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
        assert read_metadata(tmp_path).state_dict_metadata == metadata.state_dict_metadata


def test_an_error_names_the_place_or_the_field(tmp_path: Path) -> None:
    def places(field: str, new: Any) -> Callable[[Any], Any]:
        return lambda metadata: [
            setattr(place, field, new) for place in metadata.storage_data.values()
        ]

    # Files outside the folder are not read.
    for path in ("../secret", "/etc/passwd", "a/../../b", "", ".", "a\0b", 5, None):
        refused(tmp_path, places("relative_path", path), "relative_path")
    for field, new in (("offset", "x"), ("length", "x"), ("relative_path", 5)):
        message = rf"expected as {field} of .* found .* type {type(new).__name__}"
        refused(tmp_path, places(field, new), message)
    fields = ["planner_data", "storage_data", "state_dict_metadata"]
    for field, new in itertools.product(fields, (7, DEEP)):
        message = rf"expected as {field} dict .* type {type(new).__name__}"
        refused(tmp_path, lambda m, f=field, n=new: setattr(m, f, n), message)
    for content in (b"]" * 200_000 + b"a" * 199_999 + b".", b"(" * 200_000):
        refused(tmp_path, b"\x80\x02" + content)


def places_of(value: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """All (key, dict) within metadata; fields of objects are dicts, too."""
    fields = vars(value) if dataclasses.is_dataclass(value) else value
    if isinstance(fields, dict):
        yield from ((key, fields) for key in fields)
    for child in fields.values() if isinstance(fields, dict) else fields:
        if dataclasses.is_dataclass(child) or isinstance(child, (dict, list, tuple)):
            yield from places_of(child)


REMOVED = object()
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
STRANGE = [
    *(REMOVED, None, -1, "x", 5, 2**70, 10**5000, 0.5, float("nan"), True, b"y", (), [], {}),
    *({"a": 1}, ["x"], ("x", -1), "../x", "/x", DEEP, torch.Size([7]), torch.float16, set()),
    *(chunk([0], [1]), Metadata({}), dcp_metadata.BytesStorageMetadata(), Path("/x"), 1j),
]


def load_mutants(folder: str, work: str, num: int, seed: int) -> dict[str, int]:
    """How many mutants were refused, and how many loaded."""
    model = nn.Linear(3, 4)
    engine = fe.shard(model, strategy="optim_grads_params")
    optimizer = torch.optim.AdamW(model.parameters())
    fe.save_checkpoint(folder, engine, optimizer, {"n": 1})
    without_sums(Path(folder))
    file = Path(folder) / METADATA
    whole = file.read_bytes()
    draw = random.Random(seed)
    commands = ["inspect", folder], ["verify", folder], ["export", folder, f"{work}/out"]
    counts = {"refused": 0, "loaded": 0}
    for number in range(num):
        mutant = pickle.loads(whole)
        mutant.storage_meta = None
        # The class of properties would not pickle another memory format, or less.
        places = [place for place in places_of(mutant) if place[0] != "memory_format"]
        (key, fields), new = draw.choice(places), draw.choice(STRANGE)
        case = f"{number}: {key} = {type(new).__name__}"
        if new is not REMOVED:
            fields[key] = new
        elif "requires_grad" not in fields:
            del fields[key]
        file.write_bytes(pickle.dumps(mutant))
        command = commands[number % 3]
        crash = CliRunner().invoke(app, command).exception
        assert crash is None or isinstance(crash, SystemExit), (case, command, crash)
        add_one(model, engine)
        before = contents(model, optimizer)
        try:
            fe.load_checkpoint(folder, engine, optimizer)
        except (ValueError, OSError, RuntimeError) as error:
            counts["refused"] += 1
            named = "optimizer.param_groups", Path(folder).name
            assert any(name in str(error) for name in named), (case, error)  # noqa: PT017
            if "half way" in str(error):
                file.write_bytes(whole)
                fe.load_checkpoint(folder, engine, optimizer)
                continue
            assert different(contents(model, optimizer, whole=False), before) == [], case
        else:
            counts["loaded"] += 1
    return counts


@pytest.mark.parametrize(
    "num", [40, pytest.param(800, marks=pytest.mark.thorough)], ids=["few", "many"]
)
def test_mutants_are_refused_or_loaded(ranks: Ranks, tmp_path: Path, num: int) -> None:
    folder = str(tmp_path / "mutant")
    (counts,) = ranks.run(
        load_mutants, folder, str(tmp_path), num, 5, world_size=1, group=False, timeout=500
    )
    assert sum(counts.values()) == num
    assert counts["refused"] > num / 2


# --- manifests and directories ---


def test_values_of_a_manifest_are_checked(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save, str(tmp_path), 1, True, world_size=1)
    folder = tmp_path / "step-00000001"
    content = json.loads((folder / MANIFEST).read_text())
    fields: list[tuple[str, Any]] = [
        *(("step", "x"), ("world_size", None), ("mesh", [1]), ("strategy", {"inner": 3})),
        ("tensors", [{"name": "a", "shape": [-1], "dtype": "float32"}]),
        ("tensors", [{"name": "a", "shape": [1], "dtype": "nn"}]),
        ("files", {"a": {"bytes": "x", "crc32": "00000001"}}),
        ("files", {"../a": {"bytes": 1, "crc32": "00000001"}}),
        ("libraries", 3),
    ]
    for field, value in [*fields, ("step", 1)]:
        whole = json.dumps(content | {field: value, "crc32": "0" * 8}, indent=1)
        crc = f"{zlib.crc32(whole.encode()):08x}"
        (folder / MANIFEST).write_text(whole.replace("0" * 8, crc, 1))
        if (field, value) != ("step", 1):
            with pytest.raises(ValueError, match=MANIFEST):
                Manifest.read(folder)
    assert Manifest.read(folder).step == 1


def test_links_in_a_directory_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    (outside / MANIFEST).write_text("{}")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / ".lock").symlink_to(outside / "file")
    directory = CheckpointDirectory(runs)
    with pytest.raises(OSError, match=r"\.lock"):
        directory.begin()
    assert (outside / "file").read_text() == "precious"
    (runs / ".lock").unlink()
    (runs / "step-00000001").symlink_to(outside)
    (runs / "step-00000002").mkdir()
    (runs / "step-00000002" / MANIFEST).write_text("{}")
    staging = directory.begin()
    directory.retire(keep=1)
    assert sorted(os.listdir(runs)) == [".lock", staging.name, "step-00000002"]
    assert sorted(os.listdir(outside)) == ["file", MANIFEST]
    directory.release()
