"""``python -m fsdp_engine.checkpoint``: a checkpoint's contents, damage, and differences of two."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.checkpoint import cli, tables
from fsdp_engine.checkpoint.cli import app
from fsdp_engine.checkpoint.inspection import (
    TensorDifference,
    compare,
    group_tensors,
    matches,
    shared_bytes,
)
from fsdp_engine.checkpoint.manifest import FORMAT_VERSION, MANIFEST, TensorRow
from fsdp_engine.checkpoint.offline import StoredCheckpoint, find_folders, verify
from fsdp_engine.checkpoint.writer import METADATA
from tests.checkpoint.damaged import without_sums
from tests.checkpoint.scene import Values, byte_of, exported, flip, run_on, small, train
from tests.models import Transformer
from tests.pool import Ranks

KEY = "model.blocks.1.qkv.weight"


def save_run(folder: str) -> None:
    """Two checkpoints of one run."""
    model, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer, extra={"data": Values({"index": 7})})
    checkpointer.save(1)
    train(model, optimizer)
    checkpointer.save(2)
    checkpointer.close()


def save_again(source: str, target: str, strategy: str, plain: bool) -> None:
    """The weights of step 1, as other ranks and levels save them."""
    _, engine, optimizer = small(strategy, seed=1)
    position = Values()
    extra = {"data": position}
    fe.Checkpointer(source, engine, optimizer, extra=extra).load(1)
    if plain:
        fe.save_checkpoint(target, engine, optimizer, {"data": position.state_dict()})
    else:
        checkpointer = fe.Checkpointer(target, engine, optimizer, extra=extra)
        checkpointer.save(1)
        checkpointer.close()


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``run``: steps 1 and 2 of two ranks. Step 1 again: ``other`` of four ranks, ``alone`` of one
    process without a group, ``plain`` without a manifest, ``unsharded`` by torch alone. Read-only.
    """
    folder = tmp_path_factory.mktemp("saved")
    run = str(folder / "run")
    ranks.run(save_run, run, world_size=2)
    ranks.run(save_again, run, str(folder / "other"), "optim", False, world_size=4)
    run_on(ranks, 0, save_again, run, str(folder / "alone"), "optim", False)
    run_on(ranks, 1, save_again, run, str(folder / "plain"), "optim_grads", True)
    model = Transformer(num_blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=first(folder), no_dist=True)
    dcp.save(state, checkpoint_id=folder / "unsharded", no_dist=True)
    return folder


def first(folder: Path) -> Path:
    return folder / "run" / "step-00000001"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of all of them, to be damaged."""
    return shutil.copytree(saved, tmp_path / "saved")


def run(*arguments: Any, code: int = 0) -> str:
    """What a command prints; with code 2, what it says on stderr, on one line."""
    result = CliRunner().invoke(
        app, [str(each) for each in arguments], env={"COLUMNS": "300", "TERM": "dumb"}
    )
    assert result.exit_code == code, f"{result.output}{result.exception!r}"
    assert "Traceback" not in result.output
    if code != 2:
        assert not result.stderr
        return result.stdout
    return result.stderr


def rows(output: str) -> dict[str, list[str]]:
    """Cells of the tables, by the first one of each row."""
    lines = [line for line in output.splitlines() if line.startswith(("│", "|"))]
    cells = [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in cells}


def facts(output: str) -> dict[str, str]:
    """Lines of the form "name  value"."""
    found = [re.match(r"(\w+(?: \w+)*) {2,}(.*\S)", line) for line in output.splitlines()]
    return {match[1]: match[2] for match in found if match}


# --- inspect ---


def test_inspect_tells_how_a_checkpoint_was_saved_and_what_is_in_it(saved: Path) -> None:
    output = run("inspect", saved / "run")
    found = facts(output)
    assert found["checkpoint"].endswith("run/step-00000002")
    assert found["step"] == "2"
    assert found["steps"] == "2, 1 (latest first)"
    assert found["world"] == "2 ranks (outer 1, inner 2)"
    assert found["strategy"].startswith("inner optim_grads_params")
    assert f"torch {torch.__version__}" in found["libraries"]
    assert found["class"] == "AdamW"
    model = Transformer(num_blocks=2)
    elements = sum(value.numel() for value in model.state_dict().values())
    assert f"{elements:,} elements in {len(model.state_dict())} tensors" in found["model"]
    num_parameters = len(list(model.parameters()))
    assert found["group 0"].startswith(f"{num_parameters} parameters: lr 0.001, betas (0.9, 0.999)")
    assert found["extra of rank 0"] == "data: {'index': 7}"
    assert "random states and extra of 2 ranks" in output
    weight = model.state_dict()[KEY.removeprefix("model.")]
    shape = str([*weight.shape])
    assert rows(output)[KEY] == [shape, "float32", f"{weight.numel():,}", rows(output)[KEY][-1]]
    files = list((saved / "run" / "step-00000002").iterdir())
    assert found["files"].startswith(f"{len(files)}, ")


def test_inspect_takes_a_step_a_pattern_no_tensors_or_json(saved: Path) -> None:
    assert facts(run("inspect", saved / "run", "--step", 1))["step"] == "1"
    assert facts(run("inspect", first(saved), "--step", 1))["step"] == "1"
    assert "steps" not in facts(run("inspect", first(saved)))
    assert set(rows(run("inspect", first(saved), "--match", "blocks.1.q*"))) == {KEY}
    assert "no tensors that match 'x.*'" in run("inspect", first(saved), "--match", "x.*")
    assert rows(run("inspect", first(saved), "--no-tensors")) == {}
    found = json.loads(run("inspect", saved / "run", "--json"))
    assert (found["step"], found["steps"], found["world_size"]) == (2, [1, 2], 2)
    assert found["optimizer"] == "AdamW"
    assert found["groups"][0]["hyperparameters"]["weight_decay"] == "0.01"
    assert {row["name"] for row in found["tensors"]} >= {KEY}
    assert json.loads(run("inspect", saved / "run", "--json", "--no-tensors"))["tensors"] == []
    for name in ("plain", "unsharded"):  # without a manifest
        output = run("inspect", saved / name)
        assert facts(output)["step"].startswith("unknown: no manifest.json")
        assert "world" not in facts(output)
        assert facts(output)["model"] == facts(run("inspect", first(saved)))["model"]
        assert "lr 0.001" in facts(output)["group 0"]
        assert KEY in rows(output)


def test_inspect_shows_files_that_are_missing_and_that_do_not_belong(copy: Path) -> None:
    folder = copy / "run" / "step-00000002"
    lost = next(folder.glob("*.distcp"))
    lost.unlink()
    (folder / "notes.txt").write_text("mine")
    (copy / "run" / ".saving-dead").mkdir()
    found = facts(run("inspect", copy / "run", "--no-tensors"))
    assert found["MISSING"] == lost.name
    assert found["stray"] == "notes.txt"
    assert found["besides"] == ".saving-dead (not complete)"


@pytest.mark.thorough
def test_ten_thousand_tensors_are_shown_as_the_kinds_that_they_are(tmp_path: Path) -> None:
    state = {
        f"layers.{number}.{name}.weight": torch.zeros(size)
        for number in range(5000)
        for name, size in (("attention", (2, 3)), ("mlp", (4,)))
    }
    state["layers.7.norm.weight"] = torch.zeros(1)
    dcp.save({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    output = run("inspect", tmp_path)
    assert len(output.splitlines()) < 30
    assert rows(output)["model.layers.*.attention.weight"][:4] == [
        "5,000",
        "[2, 3]",
        "float32",
        "30,000",
    ]
    assert rows(output)["model.layers.7.norm.weight"][0] == "1"
    matched = rows(run("inspect", tmp_path, "--match", "layers.49.*"))
    assert set(matched) == {"model.layers.49.attention.weight", "model.layers.49.mlp.weight"}
    assert len(rows(run("inspect", tmp_path, "--match", "layers.1*", "--all"))) == 2 * 1111


def test_tensors_of_another_shape_are_never_put_together() -> None:
    shapes = {"a.0.w": 2, "a.1.w": 2, "a.2.w": 3, "a.3.w": 2, "a1.w": 2, "0": 2}
    groups = group_tensors(
        [
            TensorRow(name, (size,), "float16" if "3" in name else "float32")
            for name, size in shapes.items()
        ]
    )
    found = [(group.name, group.count) for group in groups]
    assert found == [("a.*.w", 2), ("a.2.w", 1), ("a.3.w", 1), ("a1.w", 1), ("0", 1)]
    assert matches("model.a.w", "model.*")
    assert matches("model.a.w", "a.*")
    assert not matches("model.a.w", "w")


# --- verify ---


def test_verify_has_a_line_for_each_whole_checkpoint(saved: Path) -> None:
    output = run("verify", saved / "run", saved / "other", saved / "alone")
    assert re.fullmatch(
        r"ok .*run/step-00000002: every byte is as it was written \(4 files, .*\)\n"
        r"ok .*other/step-00000001: every byte is as it was written \(6 files, .*\)\n"
        r"ok .*alone/step-00000001: every byte is as it was written \(3 files, .*\)\n",
        output,
    )
    assert "step-00000001: every" in run("verify", saved / "run", "--step", 1)
    assert run("verify", saved / "run", "--all").count("every byte") == 2


def test_every_kind_of_damage_is_found_and_named(copy: Path) -> None:
    folder = first(copy)

    def damaged(change: Callable[[Path], Any], name: str, *parts: str) -> None:
        kept = (folder / name).read_bytes()
        change(folder / name)
        output = run("verify", folder, copy / "other", code=1)
        assert output.startswith("DAMAGED")
        for part in (name, *parts):
            assert part in output
        assert "ok " in output.splitlines()[-1]  # the other one is told nevertheless
        (folder / name).write_bytes(kept)
        assert "every byte is as it was written" in run("verify", folder)

    path, place = byte_of(folder, KEY)
    parts = (f"{path.name}: expected", f"damaged are {KEY}\n")
    damaged(lambda path: flip(path, place), path.name, *parts)
    damaged(lambda path: path.write_bytes(path.read_bytes()[:-1]), path.name, "damaged are")
    damaged(Path.unlink, path.name, "found none")
    damaged(Path.unlink, METADATA, "found none")
    damaged(lambda path: flip(path, 50), METADATA)
    damaged(lambda path: flip(path, 200), MANIFEST)
    damaged(lambda path: path.write_bytes(b""), MANIFEST)
    damaged(Path.unlink, MANIFEST, "expected the manifest of step-00000001; found none")
    (folder / "notes.txt").write_text("mine")
    assert "not part of it: notes.txt" in run("verify", folder)
    (folder / MANIFEST).unlink()
    output = run("verify", copy / "run", code=1)
    assert "step-00000002: every byte is as it was written" in output
    assert re.search(r"^DAMAGED .*step-00000001 \(", output, re.MULTILINE)
    (copy / "run" / "step-00000002" / MANIFEST).unlink()
    run("verify", copy / "run", code=1)


@pytest.mark.parametrize("name", ["plain", "unsharded"])
def test_without_checksums_each_entry_is_compared_with_its_own(copy: Path, name: str) -> None:
    folder = (copy / name).rename(copy / "step-00000009")  # it may have any name
    (folder / "__shards_old.distcp").write_text("")
    output = run("verify", folder)
    assert "there are no checksums for its files (no manifest.json)" in output
    assert "not part of it: __shards_old.distcp" in output
    path, place = byte_of(folder, KEY)
    flip(path, place)
    assert f"{path.name}: damaged are {KEY}\n" in run("verify", folder, code=1)
    path.write_bytes(path.read_bytes()[:-1])
    assert " damaged are " in run("verify", folder, code=1)
    path.unlink()
    assert f"{path.name}: expected a file; found none" in run("verify", folder, code=1)
    (folder / METADATA).write_bytes(b"nonsense")
    assert "found it damaged" in run("verify", folder, code=1)
    (folder / METADATA).unlink()
    run("verify", folder, code=1)


# --- export ---


def test_export_writes_the_weights_of_any_checkpoint(saved: Path, tmp_path: Path) -> None:
    expected = weights(first(saved))
    for name in ("run", "other", "alone", "plain", "unsharded"):
        options = ["--step", 1] if name == "run" else []
        assert "1 files" in run("export", saved / name, tmp_path / name, *options)
        found = exported(tmp_path / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    options = ["--dtype", "bfloat16", "--max-shard-size", "5KB"]
    run("export", first(saved), tmp_path / "split", *options)
    assert (tmp_path / "split" / "model.safetensors.index.json").is_file()
    found = exported(tmp_path / "split")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], v.bfloat16()) for k, v in expected.items())


def weights(folder: Path) -> dict[str, Tensor]:
    state = {"model": Transformer(num_blocks=2).state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["model"]


def test_bars_end_where_the_work_ends(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    @contextmanager
    def progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        told.append(num_bytes)
        yield lambda count: told.append(-count)

    monkeypatch.setattr(cli, "_progress", progress)
    run("export", first(saved), tmp_path)
    run("verify", saved / "plain")
    run("diff", first(saved), saved / "plain")
    # Metadata has no checksum of its own, and stands for the rest of the second bar.
    metadata = (saved / "plain" / METADATA).stat().st_size
    assert sum(told) == metadata
    folder, read = first(saved), []
    verdict = verify(folder, read.append)
    assert sum(read) == verdict.num_bytes - (folder / MANIFEST).stat().st_size


# --- diff ---


def test_the_same_weights_are_equal_whatever_ranks_and_levels_saved_them(saved: Path) -> None:
    output = run("diff", first(saved), saved / "other")
    assert "equal: " in output
    assert "norm of the difference 0\n" in output
    assert "4 entries of ranks" in output
    run("diff", saved / "other", saved / "plain")
    run("diff", saved / "other", saved / "alone")
    # Torch alone writes neither extra nor the optimizer's class.
    output = run("diff", saved / "plain", saved / "unsharded", code=1)
    assert "only in A: 2\n" in output
    for pattern in ("model.*", "optimizer.state.*", "optimizer.param_groups.*"):
        run("diff", saved / "plain", saved / "unsharded", "--match", pattern)
    # Ranks are compared if asked for.
    run("diff", first(saved), first(saved), "--ranks")
    output = run("diff", first(saved), saved / "other", "--ranks", code=1)
    assert "only in B: 2\n  ranks.2\n  ranks.3\n" in output


def test_another_step_has_another_step_other_weights_and_other_state(saved: Path) -> None:
    output = run("diff", first(saved), saved / "run", code=1)
    assert "  step: 1; 2\n" in output
    every = run("diff", first(saved), saved / "run", "--all", code=1)
    assert KEY in rows(every)
    assert f"optimizer.state.{KEY.removeprefix('model.')}.step" in every
    assert re.search(r"norm of the difference \S+ \(model \S+, optimizer \S+\)$", output.strip())


def test_one_changed_element_is_found_and_named(copy: Path) -> None:
    path, place = byte_of(copy / "plain", KEY)
    without_sums(copy / "plain")  # with them it would be damage
    before = weights(copy / "plain")
    flip(path, place, 1)
    after = weights(copy / "plain")
    gap = float((after[KEY[6:]].double() - before[KEY[6:]].double()).abs().max())
    assert gap > 0
    diff = partial(run, "diff", copy / "other", copy / "plain")
    output = diff(code=1)
    size = before[KEY[6:]].numel()
    assert rows(output) == {KEY: [f"{size:,}", "1", f"{gap:.6g}", f"{gap:.6g}"]}
    diff("--match", "*.bias")
    diff("--match", KEY, code=1)
    diff("--atol", 2 * gap)
    diff("--atol", gap / 2, code=1)
    diff("--rtol", 1e-2)


def written(folder: Path, **entries: Any) -> StoredCheckpoint:
    dcp.save(entries, checkpoint_id=folder, no_dist=True)
    return StoredCheckpoint(folder)


def test_entries_shapes_dtypes_and_objects_that_differ_are_listed(tmp_path: Path) -> None:
    one = {"w": torch.zeros(4), "x": torch.zeros(2, 3), "y": torch.zeros(3), "z": torch.zeros(1)}
    a = written(tmp_path / "a", model=one, optimizer={"lr": 0.1, "betas": (0.9, 0.99)}, k=1)
    two = {"w": torch.zeros(4), "x": torch.zeros(3, 2), "y": torch.zeros(3).half(), "z": 3}
    b = written(tmp_path / "b", model=two, optimizer={"lr": 0.2, "betas": (0.9, 0.99)}, n=1)
    found = compare(a, b)
    assert found.only_in_a == ["k"]
    assert found.only_in_b == ["n"]
    assert found.other == [
        "model.x: shape (2, 3), float32; shape (3, 2), float32",
        "model.y: shape (3,), float32; shape (3,), float16",
        "model.z: shape (1,), float32; an object",
    ]
    assert found.values == ["optimizer.lr: 0.1; 0.2"]
    assert (found.num_compared, found.tensors) == (2, [])
    assert compare(a, a).is_empty
    run("diff", tmp_path / "a", tmp_path / "b", code=1)


def test_values_are_told_apart_in_every_dtype(tmp_path: Path) -> None:
    nan, inf, bf16, fp8 = math.nan, math.inf, torch.bfloat16, torch.float8_e4m3fn
    # Values of A and B, dtype; number of different elements and of NaNs, largest difference, norm.
    table: dict[str, tuple[Any, ...]] = {
        "nan": ([nan, 1.0, nan, 2.0], [nan, nan, 3.0, 2.0], None, (2, 2, 0.0, 0.0)),
        "inf": ([inf, -inf, inf], [inf, inf, 0.0], None, (2, 0, inf, inf)),
        "zero": ([0.0, 1.0], [-0.0, 1.0], None, None),
        "bfloat16": ([1.0, 2.0], [1.0, 2.5], bf16, (1, 0, 0.5, 0.5)),
        "float8": ([1.0, 2.0], [1.0, 4.0], fp8, (1, 0, 2.0, 2.0)),
        "bool": ([True, False], [True, True], None, (1, 0, 1.0, 1.0)),
        "int64": ([2**60, 5], [2**60 + 1, 5], None, (1, 0, 1.0, 1.0)),
        "uint8": ([0, 255], [255, 255], torch.uint8, (1, 0, 255.0, 255.0)),
        "complex64": ([3 + 4j, 1j], [0j, 1j], None, (1, 0, 5.0, 5.0)),
        "empty": ([[], []], [[], []], None, None),
    }
    a, b = (
        written(
            tmp_path / name,
            model={key: torch.tensor(row[side], dtype=row[2]) for key, row in table.items()},
        )
        for side, name in enumerate("ab")
    )
    found = {each.name.removeprefix("model."): each for each in compare(a, b).tensors}
    told = {k: (v.num_different, v.num_nan, v.max_abs, v.norm) for k, v in found.items()}
    assert told == {key: row[3] for key, row in table.items() if row[3]}
    # No tolerance makes infinity or NaN equal to a number.
    loose = compare(a, b, rtol=1e9, atol=1e9)
    assert {each.name for each in loose.tensors if each.num_different} == {"model.nan", "model.inf"}
    assert "NaN in one" in run("diff", tmp_path / "a", tmp_path / "b", code=1)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes, and of all that one piece takes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return result


def save_wide(folder: str, strategy: str) -> None:
    """One tensor that is much larger than the buffer, and in other pieces on each level."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(301, 1003), torch.nn.Linear(1003, 1))
    fe.save_checkpoint(folder, fe.shard(model, strategy=strategy))


def test_a_tensor_larger_than_the_buffer_is_compared_in_pieces(
    ranks: Ranks, tmp_path: Path
) -> None:
    key, buffer_bytes = "model.0.weight", 1 << 16
    ranks.run(save_wide, str(tmp_path / "a"), "optim_grads_params", world_size=4)
    ranks.run(save_wide, str(tmp_path / "b"), "no_shard", world_size=2)
    a, b = StoredCheckpoint(tmp_path / "a"), StoredCheckpoint(tmp_path / "b")
    assert 16 * buffer_bytes < 4 * 301 * 1003
    assert len(a.saved.entries[key].chunks) > 1  # type: ignore[union-attr]
    pieces: list[int] = []
    with LargestTensor() as largest:
        assert compare(a, b, buffer_bytes=buffer_bytes, progress=pieces.append).is_empty
    assert largest.num_bytes <= buffer_bytes
    assert sum(pieces) == shared_bytes(a, b)
    assert max(pieces) <= buffer_bytes
    # Each of these elements is in another piece; the result does not depend on the buffer.
    without_sums(tmp_path / "b")
    b = StoredCheckpoint(tmp_path / "b")
    path, start = byte_of(tmp_path / "b", key)
    for element in (0, 150_000, 301 * 1003 - 1):
        flip(path, start + 4 * element + 2)
    with LargestTensor() as largest:
        found = compare(a, b, buffer_bytes=buffer_bytes)
    assert largest.num_bytes <= buffer_bytes
    assert [(each.name, each.num_different) for each in found.tensors] == [(key, 3)]
    (whole,) = compare(a, b, buffer_bytes=1 << 26).tensors
    assert whole.max_abs == found.tensors[0].max_abs > 0
    assert whole.norm == pytest.approx(found.norm)


def test_the_models_largest_differences_come_first() -> None:
    found = [
        TensorDifference("small", "model", (2,), 2, 1, 0, 0.1, 0.01),
        TensorDifference("large", "model", (2,), 2, 1, 0, 3.0, 9.0),
        TensorDifference("nan", "model", (2,), 2, 1, 1, 0.0, 0.0),
        TensorDifference("step", "optimizer", (), 1, 1, 0, 9.0, 81.0),
    ]
    ordered = ["nan", "large", "small", "step"]
    assert list(tables.differences(found, None).columns[0].cells) == ordered
    table = tables.differences(found, limit=2)
    assert list(table.columns[0].cells) == ["nan", "large", "and 2 more (--all lists them)"]


# --- mistakes ---


def test_what_is_no_checkpoint_is_told_on_one_line(copy: Path, tmp_path: Path) -> None:
    folder = first(copy)
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "empty").mkdir()
    bad: list[tuple[list[Any], str]] = [
        ([tmp_path / "nowhere"], f"expected a checkpoint at {tmp_path / 'nowhere'}; found nothing"),
        ([file], f"found the file {file}"),
        ([tmp_path / "empty"], "found neither manifest.json nor .metadata"),
        ([copy / "run", "--step", 3], r"step 3 in .*; found those of steps \[1, 2\]"),
        ([folder, "--step", 3], "expected step 3 at .*; found 1"),
        ([copy / "plain", "--step", 3], "expected step 3 at .*; found an unknown one"),
    ]
    text = (folder / MANIFEST).read_text()
    newer = text.replace('"format_version": 1', f'"format_version": {FORMAT_VERSION + 1}')
    assert newer != text
    message = f"format version {FORMAT_VERSION} or older; found {FORMAT_VERSION + 1}"
    for arguments, part in [*bad, ([folder], message)]:
        if part == message:
            (folder / MANIFEST).write_text(newer)
        path, *options = arguments
        for command in (
            ["inspect", path],
            ["verify", path],
            ["export", path, tmp_path / "out"],
            *([] if options else [["diff", path, copy / "run"]]),
            *([] if options else [["diff", copy / "other" / "step-00000001", path]]),
        ):
            error = run(*command, *options, code=2)
            assert error.count("\n") == 1
            assert error.startswith("error: ")
            assert re.search(part, error), error
    (folder / MANIFEST).write_text(text)
    path, _ = byte_of(folder, KEY)
    path.write_bytes(b"")
    for command in (["export", folder, copy / "out"], ["diff", folder, copy / "other"]):
        assert run(*command, code=2).count("\n") == 1
    flip(folder / MANIFEST, 300)
    for command in (["inspect", folder], ["export", folder, copy / "out"]):
        assert MANIFEST in run(*command, code=2)
    assert not (tmp_path / "out").exists()


def test_bad_options_are_refused(saved: Path, tmp_path: Path) -> None:
    export = partial(run, "export", first(saved), tmp_path / "out", code=2)
    assert "--dtype: expected one of" in export("--dtype", "int99")
    for size in ("many", "0GB"):
        assert "max_shard_size: expected" in export("--max-shard-size", size)
    assert "none like 'x.*'" in run("diff", first(saved), first(saved), "--match", "x.*", code=2)
    # A directory stands for its latest checkpoint.
    assert find_folders(saved / "run") == [saved / "run" / "step-00000002"]
    assert find_folders(saved / "run", 1) == [first(saved)]
    assert len(find_folders(saved / "run", every=True)) == 2


def test_python_dash_m_runs_it_without_a_process_group(saved: Path) -> None:
    command = [sys.executable, "-m", "fsdp_engine.checkpoint", "verify", str(saved / "run")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    assert "every byte is as it was written" in result.stdout
    assert result.stderr == ""
