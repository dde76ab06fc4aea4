"""Damaged and hostile checkpoints: seen by default, never loaded as something else, never run."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import pickle
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.checkpoint.cli import app
from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from fsdp_engine.checkpoint.manifest import MANIFEST
from tests.checkpoint.damaged import save, trained, without_sums
from tests.checkpoint.scene import (
    Values,
    add_one,
    contents,
    different,
    flip,
    on_rank_0,
    raises_each,
    shared_folder,
)
from tests.pool import Ranks, on_ranks


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
    """What kind of file it is, whichever save wrote it."""
    return name.rpartition("_")[2] if name.startswith("__") else name


def load_damaged(work: str, manifest: bool, num: int) -> dict[str, int]:
    """Loads as many damaged checkpoints; how many were refused before, half way, and loaded."""
    model, engine, optimizer = trained(3)
    place = "step-00000001" if manifest else "."
    numbers = Values(3)
    x = torch.rand(4, 300)

    def load(folder: str) -> None:
        if manifest:
            fe.Checkpointer(folder, engine, optimizer, extra={"n": numbers}).load()
        else:
            fe.load_checkpoint(folder, engine, optimizer)

    load(f"{work}/1")
    saved = contents(model, optimizer)
    before: dict[str, Any] = {}
    draw = random.Random(7)
    counts = {"before": 0, "half way": 0, "loaded": 0}
    for number in range(num):
        if not different(contents(model, optimizer, whole=False), saved):
            add_one(model, engine)
            for state in optimizer.state.values():
                state["exp_avg"].add_(1.0)
            before = contents(model, optimizer)
        found = ["", ""]
        while dist.get_rank() == 0 and not found[0]:
            shutil.rmtree(f"{work}/damaged", ignore_errors=True)
            folder = shutil.copytree(f"{work}/1", f"{work}/damaged") / Path(place)
            path = draw.choice(sorted(folder.iterdir()))
            others = Path(work, "2", place).iterdir()
            same_role = next(each for each in others if role(each.name) == role(path.name))
            found = [damage(path, same_role.read_bytes(), draw), path.name]
        dist.broadcast_object_list(found)
        done, name = found
        case = f"{number}: {done} in {name}"
        try:
            load(f"{work}/damaged")
        except Exception as error:  # anything else ends the test
            text = str(error)
            if done not in ("removed", "other") or name not in (MANIFEST, METADATA):
                assert name in text, f"{case}: {text}"
            outcome = "half way" if "half way" in text else "before"
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
            load(f"{work}/1")
        before = before if outcome == "before" else saved
        assert different(contents(model, optimizer, whole=False), before) == [], case
        model.eval()
        model(x)
        model.train()
    return counts


def assert_unusable(*uses: Callable[[], Any]) -> None:
    message = "partly replaced.*Load a checkpoint again"
    raises_each(*((RuntimeError, message, use) for use in uses))


@pytest.mark.parametrize("num", [15, pytest.param(150, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("world_size", "manifest"), [(0, True), (2, False)], ids=["checkpointer", "folder"]
)
def test_damage_is_an_error_or_does_not_matter(
    ranks: Ranks, tmp_path: Path, world_size: int, manifest: bool, num: int
) -> None:
    alone: Any = {"world_size": max(world_size, 1), "group": world_size > 0}
    for number in (1, 2):
        ranks.run(save, str(tmp_path / str(number)), number, manifest, **alone)
    for counts in ranks.run(load_damaged, str(tmp_path), manifest, num, **alone):
        assert sum(counts.values()) == num
        assert counts["before"] > num / 3
        assert counts["half way"] > num / 30


# --- code in checkpoints ---


class Evil:
    """Its pickle makes a folder when it is read."""

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
    """The bytes of a tensor are another pickle."""
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


def refuse_code(work: str, where: str) -> None:
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
        with contextlib.closing(fe.Checkpointer(folder, engine, optimizer, extra=hostile)) as each:
            each.save(1)
    else:
        if where == "extra state":
            model.calls = {"calls": evil}
        if where == "hyperparameter":
            optimizer.param_groups[0]["note"] = evil
        extra = {"n": evil} if where == "extra" else {"n": [1, 2.5, "x", None, (True, b"y")]}
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
    if where != "tensor":  # of a tensor only numbers are read, with any trust
        load(trust=True)
        assert marker.exists()
        marker.rmdir()
        model(torch.rand(4, 300)).backward()
        result = CliRunner().invoke(app, ["inspect", str(folder), "--trust"])
        assert result.exit_code == 0, result.output
        assert marker.exists() == (where != "extra state")


@pytest.mark.parametrize(
    "where", ["metadata", "tensor", "extra", "extra state", "hyperparameter", "checkpointer"]
)
def test_loading_runs_no_code(ranks: Ranks, tmp_path: Path, where: str) -> None:
    ranks.run(refuse_code, str(tmp_path), where, world_size=1, group=False)


@on_ranks(1)
def test_plain_values_need_no_trust() -> None:
    folder = shared_folder()
    model, engine, optimizer = trained(1)
    values = {
        "numpy": [np.arange(6).reshape(2, 3), np.float64(0.25), np.int32(4), np.bool_(True)],
        "dates": [datetime.datetime(2026, 1, 2, 3), datetime.timedelta(seconds=5)],
        "path": Path("/somewhere/else"),
        "torch": [torch.arange(3), torch.bfloat16, torch.device("cpu"), torch.Size([2])],
        "plain": [1, 2.5, 1j, "x", None, b"y", {1, 2}, (3, [4]), OrderedDict(a=1), bytearray(b"z")],
    }
    model.calls = io.BytesIO(b"state")
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
    # The last rank's file has no `extra`, which is read before weights.
    on_rank_0(lambda: flip(max(Path(f"{folder}/damaged").glob("__shards_*"))))
    with pytest.raises(RuntimeError, match="half way"):
        fe.load_checkpoint(f"{folder}/damaged", engines)
    x = torch.ones(1, 256)
    save = partial(fe.save_checkpoint, f"{folder}/no", engines)
    forwards = [partial(model, x) for model in models.values()]
    assert_unusable(*forwards, save, engines["actor"].full_state_dict)
    fe.load_checkpoint(f"{folder}/whole", engines)
    for model in models.values():
        assert model(x).isfinite().all()
    fe.save_checkpoint(f"{folder}/again", engines)
