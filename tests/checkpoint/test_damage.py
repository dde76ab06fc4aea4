"""Damaged and hostile checkpoints: loads detect damage by default, and run no code. Metadata that
no save could have written is an error that names the file, and changes nothing."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import io
import itertools
import os
import pathlib
import pickle
import random
import re
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.checkpoint.cli import app
from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.manifest import MANIFEST
from tests.checkpoint.scene import (
    Values,
    add_one,
    contents,
    different,
    flip,
    on_rank_0,
    raises_each,
    rank,
    run_on,
    shared_folder,
    update,
    without_sums,
)
from tests.pool import Ranks, on_ranks


class Net(nn.Module):
    """A tensor of several blocks, some small ones, a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(300, 500)
        self.norm = nn.BatchNorm1d(500)
        self.head = nn.Linear(500, 2)
        self.calls: Any = {"calls": [0]}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.wide(x))).square().sum()

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def trained(seed: int, strategy: str = "optim_grads_params") -> tuple[Net, fe.Engine, Any]:
    torch.manual_seed(seed)
    model = Net()
    model.calls = {"calls": [seed]}
    engine = fe.shard(model, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    update(model(torch.rand(4, 300)), optimizer)
    return model, engine, optimizer


def save(folder: str, seed: int, manifest: bool) -> None:
    _, engine, optimizer = trained(seed)
    if manifest:
        extra = {"n": Values(seed)}
        with contextlib.closing(fe.Checkpointer(folder, engine, optimizer, extra=extra)) as each:
            each.save(1)
    else:
        fe.save_checkpoint(folder, engine, optimizer, {"n": seed})


def damage(path: Path, other: bytes, draw: random.Random) -> str:
    """Damages a file, or leaves it alone; returns a description."""
    whole = path.read_bytes()
    size = len(whole)
    changed = bytearray(whole)
    at, length = draw.randrange(size), draw.choice([1, 7, 512, 4096, 300_000])
    part = slice(at, min(at + length, size))
    kind = draw.choice(["bit", "zeros", "cut", "move", "longer", "other", "removed", "noise"])
    match kind:
        case "removed":
            path.unlink()
            return kind
        case "bit":
            changed[at] ^= 1 << draw.randrange(8)
        case "zeros":
            changed[part] = bytes(part.stop - at)
        case "noise":
            changed[part] = draw.randbytes(part.stop - at)
        case "cut":
            del changed[at:]
        case "longer":
            changed += draw.randbytes(9)
        case "move":
            to = draw.randrange(size - (part.stop - at) + 1)
            changed[to : to + part.stop - at] = whole[part]
        case "other":
            changed = bytearray(other)
    path.write_bytes(changed)
    return kind if changed != whole else ""


def role(name: str) -> str:
    """The kind of a file, independent of the save that wrote it."""
    return name.rpartition("_")[2] if name.startswith("__") else name


def mutate(path: Path, draw: random.Random) -> str:
    """Puts something strange into a value of metadata; returns a description."""
    mutant = pickle.loads(path.read_bytes())
    mutant.storage_meta = None
    # TensorProperties with an invalid or missing memory_format cannot be pickled.
    places = [place for place in places_of(mutant) if place[0] != "memory_format"]
    (key, fields), new = draw.choice(places), draw.choice(STRANGE)
    if new is not REMOVED:
        fields[key] = new
    elif "requires_grad" not in fields:
        del fields[key]
    path.write_bytes(pickle.dumps(mutant))
    return f"{key} = {type(new).__name__}"


def load_damaged(work: str, way: str, num: int) -> dict[str, int]:
    """Load ``num`` damaged checkpoints; counts of loads that were refused before any change, failed
    half way, or succeeded."""
    model, engine, optimizer = trained(3)
    folder = Path(work, "damaged") / ("step-00000001" if way == "checkpointer" else "")
    commands = ["inspect"], ["verify"], ["export", f"{work}/out"]
    numbers = Values(3)
    x = torch.rand(4, 300)

    def load(place: str) -> None:
        if way == "checkpointer":
            fe.Checkpointer(place, engine, optimizer, extra={"n": numbers}).load()
        else:
            fe.load_checkpoint(place, engine, optimizer)

    load(f"{work}/1")
    saved = contents(model, optimizer)
    draw = random.Random(7)
    counts = {"before": 0, "half way": 0, "loaded": 0}
    for number in range(num):
        add_one(model, engine)
        for state in optimizer.state.values():
            state["exp_avg"].add_(1.0)
        before = contents(model, optimizer)
        found = ["", ""]
        while rank() == 0 and not found[0]:
            shutil.rmtree(f"{work}/damaged", ignore_errors=True)
            shutil.copytree(f"{work}/1", f"{work}/damaged")
            if way == "metadata":
                without_sums(folder)
                found = [mutate(folder / METADATA, draw), METADATA]
                continue
            path = draw.choice(sorted(folder.iterdir()))
            others = (Path(work, "2") / folder.relative_to(f"{work}/damaged")).iterdir()
            same_role = next(each for each in others if role(each.name) == role(path.name))
            found = [damage(path, same_role.read_bytes(), draw), path.name]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        done, name = found
        case = f"{number}: {done} in {name}"
        if way == "metadata":
            command, *out = commands[number % 3]
            crash = CliRunner().invoke(app, [command, str(folder), *out]).exception
            assert crash is None or isinstance(crash, SystemExit), (case, crash)
        try:
            load(f"{work}/damaged")
        except Exception as error:  # anything else ends the test
            text = str(error)
            if way == "metadata":
                assert isinstance(error, ValueError | OSError | RuntimeError), case  # noqa: PT017
                assert "optimizer.param_groups" in text or "damaged" in text, (case, text)
            elif done not in ("removed", "other") or name not in (MANIFEST, METADATA):
                assert name in text, f"{case}: {text}"
            outcome = "half way" if "failed halfway" in text else "before"
        else:
            outcome = "loaded"
        counts[outcome] += 1
        if outcome == "half way":
            assert "model." in text or "optimizer." in text, f"{case}: {text}"
            save = partial(fe.save_checkpoint, f"{work}/no", engine, optimizer)
            export = partial(fe.export_safetensors, engine, f"{work}/no")
            forwards = partial(model, x), partial(model.wide, x)
            assert_unusable(*forwards, save, export, engine.full_state_dict)
            assert not Path(f"{work}/no").exists()
        if outcome == "half way" or (way == "metadata" and outcome == "loaded"):
            load(f"{work}/1")  # without checksums, damaged values may have been loaded
        expected = before if outcome == "before" else saved
        assert different(contents(model, optimizer, whole=False), expected) == [], case
        model.eval()
        model(x)
        model.train()
    return counts


def assert_unusable(*uses: Callable[[], Any]) -> None:
    message = "partly replaced.*Load a checkpoint again"
    raises_each(*((RuntimeError, message, use) for use in uses))


WAYS = [("checkpointer", 0, 15), ("folder", 2, 15), ("metadata", 0, 40)]
MORE = [("checkpointer", 0, 150), ("folder", 2, 150), ("metadata", 0, 800)]


@pytest.mark.parametrize(
    ("way", "world_size", "num"),
    [*WAYS, *(pytest.param(*row, marks=pytest.mark.thorough) for row in MORE)],
)
def test_damage_is_an_error_or_does_not_matter(
    ranks: Ranks, tmp_path: Path, way: str, world_size: int, num: int
) -> None:
    for number in (1, 2):
        folder = str(tmp_path / str(number))
        run_on(ranks, world_size, save, folder, number, way == "checkpointer")
    for counts in run_on(ranks, world_size, load_damaged, str(tmp_path), way, num, timeout=500):
        assert sum(counts.values()) == num
        assert counts["before"] > num / 3
        assert way == "metadata" or counts["half way"] > num / 30


# --- code in checkpoints ---


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (self.path, 0o777, True)


def hostile_metadata(folder: Path, evil: Any) -> None:
    without_sums(folder)
    metadata = read_metadata(folder)
    metadata.version = evil
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def hostile_tensor(folder: Path, evil: Any) -> None:
    """Replace the bytes of a tensor by a pickle of ``evil``."""
    without_sums(folder)
    metadata = read_metadata(folder)
    content = io.BytesIO()
    torch.save(evil, content)
    index = next(each for each in metadata.storage_data if each.fqn == "model.head.bias")
    place = metadata.storage_data[index]
    with open(folder / place.relative_path, "ab") as file:
        place.offset, place.length = file.tell(), len(content.getvalue())
        file.write(content.getvalue())
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "where", ["metadata", "tensor", "extra", "extra state", "hyperparameter", "checkpointer"]
)
@on_ranks(1)
def test_loading_runs_no_code(where: str) -> None:
    work = shared_folder()
    marker = Path(work) / "ran"
    save(f"{work}/good", 1, manifest=False)
    evil = Evil(str(marker))
    model, engine, optimizer = trained(1)
    folder = Path(work) / "hostile"
    extra: Any = {"n": Values(3)}

    def load(trust: bool) -> None:
        if where == "checkpointer":
            fe.Checkpointer(folder, engine, optimizer, extra=extra).load(trust=trust)
        else:
            fe.load_checkpoint(folder, engine, optimizer, trust=trust)

    if where == "checkpointer":
        hostile: Any = {"n": Values(evil)}
        warning = pytest.warns(UserWarning, match=r"n in extra: .*found os\.makedirs\. It is saved")
        saver = fe.Checkpointer(folder, engine, optimizer, extra=hostile)
        with contextlib.closing(saver), warning:
            saver.save(1)
    else:
        if where == "extra state":
            model.calls = {"calls": evil}
        if where == "hyperparameter":
            optimizer.param_groups[0]["note"] = evil
        extra = {"n": evil} if where == "extra" else {"n": [1, 2.5, "x", None, (True, b"y")]}
        warning = pytest.warns(UserWarning, match=r"n in extra: .*found os\.makedirs\. It is saved")
        with warning if where == "extra" else contextlib.nullcontext():
            fe.save_checkpoint(folder, engine, optimizer, extra)
    if where == "metadata":
        hostile_metadata(folder, evil)
    if where == "tensor":
        hostile_tensor(folder, evil)
    add_one(model, engine)
    optimizer.param_groups[0].pop("note", None)
    model.calls = {"calls": [0]}
    before = contents(model, optimizer)
    name = METADATA if where == "metadata" else "hostile"
    error = RuntimeError if where == "tensor" else ValueError
    with pytest.raises(error, match=f"(?s){name}.*(os.makedirs|head.bias)"):
        load(trust=False)
    assert not marker.exists()
    if where != "tensor":
        assert different(contents(model, optimizer, whole=False), before) == []
    model_only = where in ("metadata", "tensor")
    place = str(folder)
    export, diff = ["export", place, f"{work}/out"], ["diff", place, f"{work}/good"]
    for command in (["inspect", place], ["verify", place], export, diff):
        result = CliRunner().invoke(app, command)
        assert not marker.exists(), command
        if model_only and command in (export, diff):
            assert result.exit_code == 2, result.output
    if model_only:
        with pytest.raises(ValueError, match=METADATA if where == "metadata" else "head.bias"):
            fe.export_safetensors(folder, f"{work}/out2")
        assert not marker.exists()
    if where != "tensor":  # tensors are read as numbers only, even with trust=True
        load(trust=True)
        assert marker.exists()
        marker.rmdir()
        model(torch.rand(4, 300)).backward()
        result = CliRunner().invoke(app, ["inspect", str(folder), "--trust"])
        assert result.exit_code == 0, result.output
        assert marker.exists() == (where != "extra state")


@on_ranks(1)
def test_plain_values_need_no_trust() -> None:
    folder = shared_folder()
    model, engine, optimizer = trained(1)
    values = {
        "numpy": [np.arange(6).reshape(2, 3), np.float64(0.25), np.int32(4), np.bool_(True)],
        "dates": [datetime.datetime(2026, 1, 2, 3), datetime.timedelta(seconds=5)],
        "path": Path("/somewhere/else"),
        "torch": [torch.arange(3), torch.bfloat16, torch.device("cpu"), torch.Size([2])],
        "plain": [1, 2.5, 1j, "x", None, b"y", {1, 2}, (3, [4]), bytearray(b"z")],
        "ordered": collections.OrderedDict(a=1),
    }
    model.calls = io.BytesIO(b"state")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fe.Checkpointer(folder, engine, optimizer, extra={"n": Values(values)}).save(1)
    found = Values()
    fe.Checkpointer(folder, engine, optimizer, extra={"n": found}).load()
    assert repr(found.value) == repr(values)
    assert model.calls.getvalue() == b"state"


@on_ranks(2)
def test_engines_by_name_are_unusable_after_a_failed_load_until_they_are_loaded_again() -> None:
    folder = shared_folder()
    models = {name: nn.Linear(256, 256) for name in ("actor", "critic")}
    engines = {name: fe.shard(each, initial_values="rank0") for name, each in models.items()}
    fe.save_checkpoint(f"{folder}/whole", engines)
    on_rank_0(lambda: shutil.copytree(f"{folder}/whole", f"{folder}/damaged"))
    # `extra` is read before weights. It is not in the last rank's file, so the load fails halfway.
    on_rank_0(lambda: flip(max(Path(f"{folder}/damaged").glob("__shards_*"))))
    with pytest.raises(RuntimeError, match="failed halfway"):
        fe.load_checkpoint(f"{folder}/damaged", engines)
    x = torch.ones(1, 256)
    save = partial(fe.save_checkpoint, f"{folder}/no", engines)
    forwards = [partial(model, x) for model in models.values()]
    assert_unusable(*forwards, save, engines["actor"].full_state_dict)
    fe.load_checkpoint(f"{folder}/whole", engines)
    for model in models.values():
        assert model(x).isfinite().all()
    fe.save_checkpoint(f"{folder}/again", engines)


STATE = {"model": {"weight": torch.arange(12.0).view(4, 3), "bias": torch.ones(())}, "step": 3}


@cache
def plain_metadata(folder: Path) -> bytes:
    """Returns metadata as plain DCP saves it."""
    dcp.save(STATE, checkpoint_id=folder)
    return (folder / METADATA).read_bytes()


def refused(folder: Path, change: bytes | Callable[[Any], Any], *parts: str) -> None:
    """Check that metadata is refused after ``change``, a function or the new content."""
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


# Pickle operations that set ``__eq__`` of the object before them to ``Size``.
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
    """Returns attributes of the objects that pickled metadata may name, and defaults of
    ``_get_layout``."""
    found = [
        *(each for each in vars(dcp_metadata).values() if isinstance(each, type)),
        *(filesystem._StorageInfo, collections.OrderedDict, torch.Size),
        *(pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath),
        torch.serialization._get_layout,
    ]
    function = torch.serialization._get_layout
    return [*(dict(vars(each)) for each in found), function.__defaults__, function.__kwdefaults__]


def test_a_pickle_changes_nothing(tmp_path: Path) -> None:
    ends = [b".", b"", b"0cos\nsystem\n."]  # a complete pickle, a truncated one, a refused one
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
            refused(tmp_path, content, "the object: expected Metadata; found .* list")


# --- values ---


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def cut(metadata: Any, chunks: list[Any]) -> Any:
    """Divide ``model.weight``, (4, 3), into other chunks."""
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
        message = rf"{field} of .*: expected .* found .* type {type(new).__name__}"
        refused(tmp_path, places(field, new), message)
    fields = ["planner_data", "storage_data", "state_dict_metadata"]
    for field, new in itertools.product(fields, (7, DEEP)):
        message = rf"{field}: expected dict .* type {type(new).__name__}"
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


# --- manifests and directories ---


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
