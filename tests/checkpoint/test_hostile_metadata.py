"""Metadata that no save has written: an error that names the file, and nothing else changes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import os
import pathlib
import pickle
import random
import resource
import time
import zlib
from collections.abc import Iterator
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
from tests.checkpoint.scene import contents, different
from tests.pool import Ranks


def plain_checkpoint(folder: Path) -> Path:
    """As plain DCP saves it."""
    state = {"model": {"weight": torch.arange(12.0).view(4, 3), "bias": torch.ones(())}, "step": 3}
    dcp.save(state, checkpoint_id=folder)
    return folder


# --- pickles ---


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


SET_EQ = (
    b"N}" + text("__eq__") + named("torch", "Size") + b"s\x86b"
)  # state (None, {"__eq__": Size})

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
        filesystem._StorageInfo,
        pathlib.PurePosixPath,
        pathlib.PosixPath,
        pathlib.PureWindowsPath,
        collections.OrderedDict,
        torch.Size,
        torch.serialization._get_layout,
    ]
    function = torch.serialization._get_layout
    return [*(dict(vars(each)) for each in found), function.__defaults__, function.__kwdefaults__]


@pytest.mark.parametrize(("module", "name"), NAMES)
@pytest.mark.parametrize("end", [b".", b"", b"0cos\nsystem\n."], ids=["whole", "cut", "refused"])
@pytest.mark.parametrize("attribute", ["__eq__", "__defaults__", "__setstate__"])
def test_a_pickle_changes_nothing(
    tmp_path: Path, module: str, name: str, end: bytes, attribute: str
) -> None:
    change = SET_EQ.replace(text("__eq__"), text(attribute))
    (tmp_path / METADATA).write_bytes(b"\x80\x02" + named(module, name) + change + end)
    before = attributes()
    with pytest.raises(ValueError, match=METADATA):
        read_metadata(tmp_path)
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
    (tmp_path / METADATA).write_bytes(content)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=METADATA):
        read_metadata(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert time.process_time() - start < 5  # 28 s without the check


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    expected = read_metadata(plain_checkpoint(tmp_path))
    if protocol > 1:  # the classes of metadata need 2
        (tmp_path / METADATA).write_bytes(pickle.dumps(expected, protocol))
        found = read_metadata(tmp_path)
        assert found == expected
    else:
        (tmp_path / METADATA).write_bytes(pickle.dumps([1, "a\n", 2.5], protocol))
        with pytest.raises(ValueError, match=r"expected as the object Metadata; found .* list"):
            read_metadata(tmp_path)


# --- values ---


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


UNCOVERED = {
    "half": [((0, 0), (2, 3))],
    "none": [],
    "a gap": [((0, 0), (2, 3)), ((3, 0), (1, 3))],
    "an overlap": [((0, 0), (3, 3)), ((2, 0), (2, 3))],
    "an overlap that hides a gap": [((0, 0), (2, 3)), ((1, 0), (2, 3))],
    "negative": [((0, 0), (5, 3)), ((4, 0), (-1, 3))],
    "outside": [((0, 0), (4, 4))],
    "too few dims": [((0,), (4,))],
    "twice": [((0, 0), (4, 3)), ((0, 0), (4, 3))],
    "a pinwheel with a hole": [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (2, 2)),
        ((1, 0), (3, 1)),
    ],
}


@pytest.mark.parametrize("chunks", UNCOVERED.values(), ids=UNCOVERED)
def test_chunks_must_make_up_their_tensor(tmp_path: Path, chunks: list[Any]) -> None:
    plain_checkpoint(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    metadata.state_dict_metadata["model.weight"].chunks = [chunk(*each) for each in chunks]
    index = next(each for each in metadata.storage_data if each.fqn == "model.weight")
    place = metadata.storage_data.pop(index)
    for offsets, _ in chunks:
        metadata.storage_data[dataclasses.replace(index, offset=torch.Size(offsets))] = place
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata.*model\.weight"):
        read_metadata(tmp_path)


COVERED = {
    "a pinwheel": [
        ((0, 0), (1, 2)),
        ((0, 2), (3, 1)),
        ((3, 1), (1, 2)),
        ((1, 0), (3, 1)),
        ((1, 1), (2, 1)),
    ],
    "slices with empty ones": [
        ((0, 0), (3, 3)),
        ((3, 0), (1, 3)),
        ((4, 0), (0, 3)),
        ((4, 3), (0, 0)),
    ],
}


@pytest.mark.parametrize("chunks", COVERED.values(), ids=COVERED)
def test_chunks_of_any_shape_may_make_up_a_tensor(tmp_path: Path, chunks: list[Any]) -> None:
    plain_checkpoint(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    metadata.state_dict_metadata["model.weight"].chunks = [chunk(*each) for each in chunks]
    index = next(each for each in metadata.storage_data if each.fqn == "model.weight")
    place = metadata.storage_data.pop(index)
    for offsets, _ in chunks:
        metadata.storage_data[dataclasses.replace(index, offset=torch.Size(offsets))] = place
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    assert read_metadata(tmp_path).state_dict_metadata == metadata.state_dict_metadata


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../b", "", ".", "a\0b", 5, None]
)
def test_files_outside_the_folder_are_not_read(tmp_path: Path, name: Any) -> None:
    plain_checkpoint(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata.*relative_path"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("field", "new"),
    [("offset", "x"), ("length", "x"), ("relative_path", 5)],
)
def test_an_error_names_the_value_of_a_place(tmp_path: Path, field: str, new: Any) -> None:
    plain_checkpoint(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        setattr(place, field, new)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    kind = type(new).__name__
    with pytest.raises(ValueError, match=rf"expected as {field} of .* found .* type {kind}"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("field", ["planner_data", "storage_data", "state_dict_metadata"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_error_names_the_field(tmp_path: Path, field: str, is_nested: bool) -> None:
    plain_checkpoint(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    new = DEEP if is_nested else 7
    setattr(metadata, field, new)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    kind = type(new).__name__
    with pytest.raises(ValueError, match=rf"expected as {field} dict .* type {kind}"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    "content", [b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", b"\x80\x02" + b"(" * 200_000]
)
def test_a_nested_pickle_is_damaged_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=METADATA):
        read_metadata(tmp_path)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values within metadata."""
    yield path
    if dataclasses.is_dataclass(value):
        for name, child in vars(value).items():
            yield from places_of(child, (*path, ("attribute", name)))
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from places_of(child, (*path, ("key", key)))
    elif isinstance(value, (list, tuple)):
        for number, child in enumerate(value):
            yield from places_of(child, (*path, ("number", number)))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``value`` with ``new`` at ``path``; without an entry where ``new`` is REMOVED."""
    if not path:
        return new
    (kind, name), *rest = path
    if kind == "attribute":
        child = replaced(getattr(value, name), tuple(rest), new)
        made = copy.copy(value)
        if child is REMOVED:
            vars(made).pop(name)
        else:
            object.__setattr__(made, name, child)
        return made
    items = dict(value) if kind == "key" else dict(enumerate(value))
    child = replaced(items[name], tuple(rest), new)
    if child is REMOVED:
        items.pop(name)
    else:
        items[name] = child
    if kind == "key":
        return items
    try:
        return type(value)(items.values())
    except TypeError:  # torch.Size holds integers alone
        return tuple(items.values())


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
    metadata = pickle.loads((Path(folder) / METADATA).read_bytes())
    metadata.storage_meta = None
    unsaved = ("attribute", "memory_format")  # the class would not pickle another one
    paths = [path for path in places_of(metadata) if path and unsaved not in path]
    draw = random.Random(seed)
    counts = {"refused": 0, "loaded": 0}
    for number in range(num):
        path, new = draw.choice(paths), draw.choice(STRANGE)
        if new is REMOVED and ("attribute", "properties") in path[:-1]:
            new = None  # the class pickles none without
        case = f"{number}: {path} = {type(new).__name__} {'' if new is DEEP else str(type(new))}"
        mutant = replaced(metadata, path, new)
        (Path(folder) / METADATA).write_bytes(pickle.dumps(mutant))
        for command in (["inspect", folder], ["verify", folder], ["export", folder, f"{work}/out"]):
            result = CliRunner().invoke(app, command)
            crash = result.exception
            assert crash is None or isinstance(crash, SystemExit), (case, command, crash)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        engine.weights_changed()
        before = contents(model, engine, optimizer)
        try:
            fe.load_checkpoint(folder, engine, optimizer)
        except (ValueError, OSError, RuntimeError) as error:
            counts["refused"] += 1
            named = "optimizer.param_groups", Path(folder).name
            assert any(name in str(error) for name in named), (case, error)  # noqa: PT017
            if "half way" in str(error):
                (Path(folder) / METADATA).write_bytes(pickle.dumps(metadata))
                fe.load_checkpoint(folder, engine, optimizer)
                continue
            assert different(contents(model, engine, optimizer, whole=False), before) == [], case
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "x"),
        ("world_size", None),
        ("mesh", [1]),
        ("strategy", {"inner": 3}),
        ("tensors", [{"name": "a", "shape": [-1], "dtype": "float32"}]),
        ("tensors", [{"name": "a", "shape": [1], "dtype": "nn"}]),
        ("files", {"a": {"bytes": "x", "crc32": "00000000"}}),
        ("files", {"../a": {"bytes": 1, "crc32": "00000000"}}),
        ("libraries", 3),
    ],
)
def test_values_of_a_manifest_are_checked(
    ranks: Ranks, tmp_path: Path, field: str, value: Any
) -> None:
    ranks.run(save, str(tmp_path), 1, True, world_size=1)
    folder = tmp_path / "step-00000001"
    content = json.loads((folder / MANIFEST).read_text())
    content |= {field: value, "crc32": "0" * 8}
    whole = json.dumps(content, indent=1)
    crc = f"{zlib.crc32(whole.encode()):08x}"
    (folder / MANIFEST).write_text(whole.replace("0" * 8, crc, 1))
    with pytest.raises(ValueError, match=MANIFEST):
        Manifest.read(folder)


def test_nested_json_is_a_damaged_manifest(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=MANIFEST):
        Manifest.read(tmp_path)


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
    directory.begin()
    directory.retire(keep=1)
    assert sorted(os.listdir(runs))[1:] == [
        ".saving-" + directory.unfinished()[0].name[8:],
        "step-00000002",
    ]
    assert sorted(os.listdir(outside)) == ["file", MANIFEST]
    directory.release()
