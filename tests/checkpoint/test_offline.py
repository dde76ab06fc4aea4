"""``python -m fsdp_engine.checkpoint``: a checkpoint's contents, damage, and differences of two."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.checkpoint import cli, tables
from fsdp_engine.checkpoint.cli import app
from fsdp_engine.checkpoint.inspection import (
    TensorDifference,
    compare,
    describe,
    group_tensors,
    matches,
    shared_bytes,
)
from fsdp_engine.checkpoint.manifest import FORMAT_VERSION, MANIFEST, TensorRow
from fsdp_engine.checkpoint.offline import StoredCheckpoint
from fsdp_engine.checkpoint.writer import METADATA
from tests.checkpoint.scene import (
    Values,
    byte_of,
    exported,
    flip,
    most_allocated,
    run_on,
    small,
    train,
    without_sums,
)
from tests.models import Transformer
from tests.pool import Ranks
from tests.processes import printed

KEY = "model.blocks.1.qkv.weight"


def save_run(folder: str) -> None:
    model, engine, optimizer = small()
    extra = {"data": Values({"index": 7})}
    with contextlib.closing(fe.Checkpointer(folder, engine, optimizer, extra=extra)) as each:
        each.save(1)
        train(model, optimizer)
        each.save(2)


def save_again(source: str, target: str, strategy: str, plain: bool) -> None:
    """Save the weights of step 1 again, on other ranks and at another level."""
    _, engine, optimizer = small(strategy, seed=1)
    data = Values()
    fe.Checkpointer(source, engine, optimizer, extra={"data": data}).load(1)
    if plain:
        fe.save_checkpoint(target, engine, optimizer, {"data": data.state_dict()})
        return
    with contextlib.closing(fe.Checkpointer(target, engine, optimizer, extra={"data": data})) as c:
        c.save(1)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``run`` has steps 1 and 2, saved by two ranks. The other folders have step 1: ``other`` by
    four ranks, ``plain`` by one process without a group and without a manifest, ``unsharded`` by
    torch alone. Read-only.
    """
    folder = tmp_path_factory.mktemp("saved")
    run = str(folder / "run")
    ranks.run(save_run, run, world_size=2)
    ranks.run(save_again, run, str(folder / "other"), "optim", False, world_size=4)
    run_on(ranks, 0, save_again, run, str(folder / "plain"), "optim_grads", True)
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
    """A copy of the saved checkpoints, which a test may damage."""
    return shutil.copytree(saved, tmp_path / "saved")


def run(*arguments: Any, code: int = 0) -> str:
    """The stdout of a command; with code 2, its stderr, which is one line."""
    environment = {"COLUMNS": "300", "TERM": "dumb"}
    result = CliRunner().invoke(app, [str(each) for each in arguments], env=environment)
    assert result.exit_code == code, f"{result.output}{result.exception!r}"
    assert "Traceback" not in result.output
    assert code == 2 or not result.stderr
    return result.stderr if code == 2 else result.stdout


def rows(output: str) -> dict[str, list[str]]:
    """Cells of the tables, by the first one of each row."""
    lines = [line for line in output.splitlines() if line.startswith(("│", "|"))]
    cells = [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in cells}


def facts(output: str) -> dict[str, str]:
    found = [re.match(r" *(\w+(?: \w+)*) {2,}(.*\S)", line) for line in output.splitlines()]
    return {match[1]: match[2] for match in found if match}


# --- inspect ---


def test_inspect_tells_how_a_checkpoint_was_saved_and_what_is_in_it(saved: Path) -> None:
    output = run("inspect", saved / "run", "--all")
    found = facts(output)
    model = Transformer(num_blocks=2)
    elements = sum(value.numel() for value in model.state_dict().values())
    num_parameters = len(list(model.parameters()))
    num_files = len(list((saved / "run" / "step-00000002").iterdir()))
    for name, part in {
        "checkpoint": "run/step-00000002",
        "step": "2",
        "steps": "2, 1 (latest first)",
        "world": "2 ranks (outer 1, inner 2)",
        "strategy": "inner optim_grads_params",
        "libraries": f"torch {torch.__version__}",
        "optimizer": "AdamW, ",
        "model": f"{elements:,} elements in {len(model.state_dict())} tensors",
        "group 0": f"{num_parameters} parameters: lr 0.001, betas (0.9, 0.999)",
        "extra of rank 0": "data.index: 7",
        "files": f"{num_files}, ",
    }.items():
        assert part in found[name], name
    assert "random states and extra of 2 ranks" in output
    weight = model.state_dict()[KEY.removeprefix("model.")]
    assert rows(output)[KEY][:3] == [str([*weight.shape]), "float32", f"{weight.numel():,}"]


def test_inspect_takes_a_step_a_pattern_no_tensors_or_json(saved: Path) -> None:
    for place in (saved / "run", first(saved)):
        assert facts(run("inspect", place, "--step", 1))["step"] == "1"
    assert "steps" not in facts(run("inspect", first(saved)))
    assert set(rows(run("inspect", first(saved), "--match", "blocks.1.q*"))) == {KEY}
    assert "no tensors that match 'x.*'" in run("inspect", first(saved), "--match", "x.*")
    assert rows(run("inspect", first(saved), "--no-tensors")) == {}
    found = json.loads(run("inspect", saved / "run", "--json"))
    assert (found["step"], found["steps"], found["world_size"]) == (2, [1, 2], 2)
    assert found["optimizer"] == "AdamW"
    hyperparameters = found["groups"][0]["hyperparameters"]
    assert (hyperparameters["weight_decay"], hyperparameters["foreach"]) == (0.01, None)
    assert hyperparameters["betas"] == [0.9, 0.999]
    assert found["extra"]["data.index"] == 7
    assert {row["name"] for row in found["tensors"]} >= {KEY}
    assert json.loads(run("inspect", saved / "run", "--json", "--no-tensors"))["tensors"] == []
    for name in ("plain", "unsharded"):  # without a manifest
        output = run("inspect", saved / name, "--all")
        assert facts(output)["step"].startswith("unknown: no manifest.json")
        assert "world" not in facts(output)
        assert facts(output)["model"] == facts(run("inspect", first(saved)))["model"]
        assert "lr 0.001" in facts(output)["group 0"]
        assert KEY in rows(output)


def test_tensors_of_another_shape_are_never_put_together() -> None:
    shapes = {"a.0.w": 2, "a.1.w": 2, "a.2.w": 3, "a.3.w": 2, "a1.w": 2, "0": 2}
    shapes |= {"b.0.m.0": 4, "b.0.m.2": 5, "b.1.m.0": 4, "b.1.m.2": 5}
    groups = group_tensors(
        TensorRow(name, (size,), "float16" if "3" in name else "float32")
        for name, size in shapes.items()
    )
    found = [(group.name, group.count) for group in groups]
    assert found[:5] == [("a.*.w", 2), ("a.2.w", 1), ("a.3.w", 1), ("a1.w", 1), ("0", 1)]
    assert found[5:] == [("b.*.m.0", 2), ("b.*.m.2", 2)]
    assert matches("model.a.w", "model.*")
    assert matches("model.a.w", "a.*")
    assert not matches("model.a.w", "w")


# --- verify ---


def test_verify_has_a_line_for_each_whole_checkpoint(saved: Path) -> None:
    output = run("verify", saved / "run", saved / "other")
    assert re.fullmatch(
        r"ok .*run/step-00000002: every byte is as it was written \(4 files, .*\)\n"
        r"ok .*other/step-00000001: every byte is as it was written \(6 files, .*\)\n",
        output,
    )
    assert "step-00000001: every" in run("verify", saved / "run", "--step", 1)
    assert run("verify", saved / "run", "--all").count("every byte") == 2


def test_every_kind_of_damage_is_found_and_named(copy: Path) -> None:
    folder = first(copy)
    (copy / "run" / ".saving-dead").mkdir()

    def damaged(change: Callable[[Path], Any], name: str, *parts: str) -> None:
        kept = (folder / name).read_bytes()
        change(folder / name)
        output = run("verify", folder, copy / "other", code=1)
        assert output.startswith("DAMAGED")
        for part in (name, *parts):
            assert part in output
        assert "ok " in output.splitlines()[-1]  # the intact checkpoint is listed, too
        (folder / name).write_bytes(kept)
        assert "every byte is as it was written" in run("verify", folder)

    path, place = byte_of(folder, KEY)
    parts = (f"{path.name}: expected", f"damaged entries are {KEY}\n")
    damaged(lambda path: flip(path, place), path.name, *parts)
    damaged(lambda path: path.write_bytes(path.read_bytes()[:-1]), path.name, "damaged entries are")
    for name in (path.name, METADATA):
        damaged(Path.unlink, name, "found none")
    damaged(lambda path: flip(path, 50), METADATA)
    damaged(lambda path: flip(path, 200), MANIFEST)
    damaged(lambda path: path.write_bytes(b""), MANIFEST)
    lost = next((copy / "run" / "step-00000002").glob("*.distcp"))
    kept = lost.read_bytes()
    lost.unlink()
    (lost.parent / "notes.txt").write_text("mine")
    found = facts(run("inspect", copy / "run", "--no-tensors"))
    assert (found["MISSING"], found["stray"]) == (lost.name, "notes.txt")
    assert found["incomplete"] == ".saving-dead"
    lost.write_bytes(kept)
    (lost.parent / "notes.txt").unlink()
    damaged(Path.unlink, MANIFEST, "expected the manifest of step-00000001; found none")
    (folder / "notes.txt").write_text("mine")
    assert "not part of the checkpoint: notes.txt" in run("verify", folder)
    (folder / MANIFEST).unlink()
    output = run("verify", copy / "run", code=1)
    assert "step-00000002: every byte is as it was written" in output
    assert re.search(r"^DAMAGED .*step-00000001 \(", output, re.MULTILINE)
    (copy / "run" / "step-00000002" / MANIFEST).unlink()
    run("verify", copy / "run", code=1)


def test_without_a_manifest_files_are_compared_with_checksums_in_the_metadata(copy: Path) -> None:
    folder = copy / "plain"
    assert "plain: every byte is as it was written (2 files, " in run("verify", folder)
    path, place = byte_of(folder, KEY)
    between = path.read_bytes().rindex(b"ZZZZ")  # padding
    flip(path, between)
    assert f"{path.name}: expected CRC-32C " in (output := run("verify", folder, code=1))
    assert "the data of all entries is intact, but entries in this block cannot" in output
    flip(path, between)
    flip(path, place)
    assert f"damaged entries are {KEY}\n" in run("verify", folder, code=1)
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path.name}: expected " in run("verify", folder, code=1)


@pytest.mark.parametrize("name", ["plain", "unsharded"])
def test_without_checksums_each_entry_is_compared_with_its_own(copy: Path, name: str) -> None:
    folder = (copy / name).rename(copy / "step-00000009")  # it may have any name
    if name == "plain":
        without_sums(folder)
    (folder / "__shards_old.distcp").write_text("")
    output = run("verify", folder)
    assert "neither manifest.json nor .metadata has checksums of files" in output
    assert "not part of the checkpoint: __shards_old.distcp" in output
    path, place = byte_of(folder, KEY)
    flip(path, place)
    assert f"{path.name}: damaged entries are {KEY}\n" in run("verify", folder, code=1)
    path.write_bytes(path.read_bytes()[:-1])
    assert " damaged entries are " in run("verify", folder, code=1)
    path.unlink()
    assert f"{path.name}: expected a file; found none" in run("verify", folder, code=1)
    (folder / METADATA).write_bytes(b"nonsense")
    assert "found it damaged" in run("verify", folder, code=1)
    (folder / METADATA).unlink()
    run("verify", folder, code=1)


# --- export ---


def test_export_writes_the_weights_of_any_checkpoint(saved: Path, tmp_path: Path) -> None:
    expected = weights(first(saved))
    for name in ("run", "other", "plain", "unsharded"):
        options = ["--step", 1] if name == "run" else []
        assert "1 file, " in run("export", saved / name, tmp_path / name, *options)
        found = exported(tmp_path / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    split = partial(run, "export", first(saved), tmp_path / "split", "--max-shard-size", "5KB")
    split("--dtype", "bfloat16")
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

    @contextlib.contextmanager
    def progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        told.append(num_bytes)
        yield lambda count: told.append(-count)

    monkeypatch.setattr(cli, "_progress", progress)
    run("export", first(saved), tmp_path)
    run("verify", saved / "plain")
    run("diff", first(saved), saved / "plain")
    # Metadata has no checksum of its own, so the second progress bar stops short by its size.
    assert sum(told) == (saved / "plain" / METADATA).stat().st_size


# --- diff ---


def test_equal_weights_are_equal_whoever_saved_them_and_another_step_is_not(saved: Path) -> None:
    output = run("diff", first(saved), saved / "other")
    assert "equal: " in output
    assert "norm of the difference 0\n" in output
    assert "4 entries of ranks" in output
    run("diff", saved / "other", saved / "plain")
    # Torch alone writes neither extra nor the optimizer's class.
    output = run("diff", saved / "plain", saved / "unsharded", code=1)
    assert "only in A: 2\n" in output
    for pattern in ("model.*", "optimizer.state.*", "optimizer.param_groups.*"):
        run("diff", saved / "plain", saved / "unsharded", "--match", pattern)
    every = run("diff", first(saved), saved / "run", "--all", code=1)
    assert "  step: 1; 2\n" in every
    assert KEY in rows(every)
    assert f"optimizer.state.{KEY.removeprefix('model.')}.step" in every
    assert re.search(r"norm of the difference \S+ \(model \S+, optimizer \S+\)$", every.strip())
    # --ranks also compares entries of ranks.
    run("diff", first(saved), first(saved), "--ranks")
    output = run("diff", first(saved), saved / "other", "--ranks", code=1)
    assert "only in B: 2\n  ranks.2\n  ranks.3\n" in output


def test_one_changed_element_is_found_and_named(copy: Path) -> None:
    path, place = byte_of(copy / "plain", KEY)
    without_sums(copy / "plain")  # otherwise the change would be reported as damage
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


def test_tensors_within_objects_are_compared_by_element(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, offset in zip(folders, (0.0, 0.5), strict=True):
        averages = ({"mean": torch.arange(4.0) + offset, "count": torch.tensor(3)}, 0.9)
        written(folder, extra=averages)
    a, b = (StoredCheckpoint(folder) for folder in folders)
    (mean,) = compare(a, b).tensors
    assert (mean.name, mean.section, mean.num_different) == ("extra.0.mean", "extra", 4)
    assert (mean.max_abs, mean.norm) == (0.5, 1.0)
    assert compare(a, b).values == []
    assert compare(a, b, atol=0.5).is_empty
    output = run("diff", *folders, code=1)
    assert output.strip().endswith("norm of the difference 1 (extra 1)")


def test_floats_within_objects_are_equal_within_the_tolerance(tmp_path: Path) -> None:
    values = {"best": 1.0, "large": 1.0, "count": 3}
    a = written(tmp_path / "a", extra=(values, 0))
    for changed, atol, names in (
        ({"best": 1.0 + 1e-9}, 1e-8, []),
        ({"best": 1.0 + 1e-7}, 1e-8, ["best"]),
        ({"large": math.inf}, 1e-8, ["large"]),
        ({"large": 10**400}, 1e-8, ["large"]),
        ({"count": 4}, 5.0, ["count"]),
    ):
        b = written(tmp_path / str(changed)[:20], extra=({**values, **changed}, 0))
        found = compare(a, b, rtol=1e-12, atol=atol).values
        assert [each.split(":")[0] for each in found] == [f"extra.0.{name}" for name in names]


def test_integers_are_not_part_of_the_norm(tmp_path: Path) -> None:
    a = written(tmp_path / "a", model={"num_batches": torch.tensor(7), "w": torch.zeros(4)})
    b = written(tmp_path / "b", model={"num_batches": torch.tensor(900), "w": torch.ones(4)})
    found = compare(a, b)
    assert [each.name for each in found.tensors] == ["model.num_batches", "model.w"]
    assert found.norm == 2.0
    assert found.norms == {"model": 2.0}


def test_values_are_complete_in_json_and_short_in_tables(tmp_path: Path) -> None:
    values = {"ids": [*range(300)], "none": None, "rate": math.nan, "at": torch.zeros(2), "s": "x"}
    written(tmp_path / "a", extra=values)
    found = describe(StoredCheckpoint(tmp_path / "a"))
    assert json.loads(json.dumps(dataclasses.asdict(found)))["extra"] == {
        **values,
        "rate": "nan",
        "at": "float32 [2]",
    }
    shown = run("inspect", tmp_path / "a", "--no-tensors")
    assert "rate: nan" in shown
    assert "s: 'x'" in shown
    assert "299" not in shown


def test_the_step_of_a_trainer_s_checkpoint_is_in_the_name_of_its_folder(tmp_path: Path) -> None:
    for step in (9, 16):
        written(tmp_path / f"checkpoint-{step}" / "fsdp_engine", model={"w": torch.ones(2)})
    for path in (tmp_path, tmp_path / "checkpoint-16", tmp_path / "checkpoint-16/fsdp_engine"):
        assert facts(run("inspect", path))["step"] == "16"
        assert facts(run("inspect", path, "--step", 16))["step"] == "16"
    found = run("inspect", tmp_path / "checkpoint-16", "--step", 9, code=2)
    assert "expected step 9" in found
    assert "found 16" in found
    different = run("diff", tmp_path / "checkpoint-9", tmp_path / "checkpoint-16", code=1)
    assert "step: 9; 16" in different


def test_long_sequences_of_numbers_are_one_difference(tmp_path: Path) -> None:
    states = [(3, tuple(range(625)), None), (3, (*range(600), *[0] * 25), 0.5)]
    a, b = (written(tmp_path / n, extra={"s": s}) for n, s in zip("ab", states, strict=True))
    assert compare(a, b).values == ["extra.s.1: 25 of 625 numbers differ", "extra.s.2: None; 0.5"]
    assert compare(a, a).is_empty


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
        "wide": ([2**63 - 1, 0], [-(2**63), 0], None, (1, 0, 2.0**64, 2.0**64)),
        "uint64": ([2**64 - 1, 7], [0, 7], torch.uint64, (1, 0, 2.0**64, 2.0**64)),
        "uint8": ([0, 255], [255, 255], torch.uint8, (1, 0, 255.0, 255.0)),
        "complex64": ([3 + 4j, 1j], [0j, 1j], None, (1, 0, 5.0, 5.0)),
        "empty": ([[], []], [[], []], None, None),
    }
    models: list[Any] = [
        {key: torch.tensor(row[side], dtype=row[2]) for key, row in table.items()}
        for side in range(2)
    ]
    a, b = (written(tmp_path / name, model=m) for name, m in zip("ab", models, strict=True))
    found = {each.name.removeprefix("model."): each for each in compare(a, b).tensors}
    told = {k: (v.num_different, v.num_nan, v.max_abs, v.norm) for k, v in found.items()}
    assert told == {key: row[3] for key, row in table.items() if row[3]}
    # No tolerance makes infinity or NaN equal to a number.
    loose = compare(a, b, rtol=1e9, atol=1e30)
    assert {each.name for each in loose.tensors if each.num_different} == {"model.nan", "model.inf"}
    assert "NaN in one" in run("diff", tmp_path / "a", tmp_path / "b", code=1)


def save_wide(folder: str) -> None:
    """One tensor that is much larger than the buffer, in pieces."""
    torch.manual_seed(5)
    fe.save_checkpoint(folder, fe.shard(torch.nn.Linear(301, 1003)))


def test_a_tensor_larger_than_the_buffer_is_compared_in_pieces(
    ranks: Ranks, tmp_path: Path
) -> None:
    buffer_bytes = 1 << 16
    ranks.run(save_wide, str(tmp_path / "a"), world_size=4)
    torch.manual_seed(5)
    a = StoredCheckpoint(tmp_path / "a")
    b = written(tmp_path / "b", model=torch.nn.Linear(301, 1003).state_dict())
    assert len(a.saved.entries["model.weight"].chunks) > 1  # type: ignore[union-attr]
    pieces: list[int] = []
    both = partial(compare, a, b, match="model.*")
    in_pieces = partial(both, buffer_bytes=buffer_bytes, progress=pieces.append)
    assert most_allocated(in_pieces) <= 1.5 * buffer_bytes
    assert max(pieces) <= buffer_bytes
    assert sum(pieces) == shared_bytes(a, b)
    assert in_pieces().is_empty
    # Each of these elements is in another piece; the result does not depend on the buffer.
    path, start = byte_of(tmp_path / "b", "model.weight")
    for element in (0, 150_000, 301 * 1003 - 1):
        flip(path, start + 4 * element + 2)
    (found,), (whole,) = in_pieces().tensors, both(buffer_bytes=1 << 26).tensors
    assert (found.name, found.num_different) == ("model.weight", 3)
    assert whole.max_abs == found.max_abs > 0
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


def test_what_is_no_checkpoint_or_option_is_told_on_one_line(copy: Path, tmp_path: Path) -> None:
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
        out, other = tmp_path / "out", copy / "other" / "step-00000001"
        diffs = [] if options else [["diff", path, copy / "run"], ["diff", other, path]]
        for command in (["inspect", path], ["verify", path], ["export", path, out], *diffs):
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
    export = partial(run, "export", copy / "plain", tmp_path / "out", code=2)
    assert "--dtype: expected one of" in export("--dtype", "int99")
    for size in ("many", "0GB"):
        assert "max_shard_size: expected" in export("--max-shard-size", size)
    diff = partial(run, "diff", copy / "other", copy / "other", code=2)
    assert "none like 'x.*'" in diff("--match", "x.*")


def test_python_dash_m_runs_it_without_a_process_group(saved: Path) -> None:
    text = printed("-m", "fsdp_engine.checkpoint", "verify", str(saved / "run"))
    assert re.fullmatch("ok .*every byte is as it was written.*\n", text)
