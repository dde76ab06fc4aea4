"""A checkpoint is complete or absent, on any ranks and after any failure."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import json
import os
import random
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.checkpoint import direct_file, writer
from fsdp_engine.checkpoint import manifest as manifest_module
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest
from fsdp_engine.checkpoint.run_state import RandomUse, random_state
from tests import reference
from tests.checkpoint.scene import (
    Counting,
    Values,
    add_one,
    contents,
    different,
    failing,
    flip,
    on_rank_0,
    raises_each,
    refused,
    run_on,
    shared_folder,
    small,
    train,
    visible,
    warned_first,
)
from tests.models import Mlp, Transformer
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.reference import full_weights

# --- loaded values; test_round_trips.py has every level ---


def go_on(folder: str, seed: int, saves: bool) -> list[Any]:
    """The following random numbers, learning rates and positions in the data, after a save or a
    load."""
    _, engine, optimizer = small(steps=0)
    torch.manual_seed(seed + dist.get_rank())
    random.seed(seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    position = Values()
    extra = {"scheduler": scheduler, "data": position}
    checkpointer = fe.Checkpointer(folder, engine, optimizer, extra=extra)
    if saves:
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        position.value = {"index": 100 + dist.get_rank()}
        torch.rand(seed + dist.get_rank())
        random.random()
        checkpointer.save(3)
    else:
        assert checkpointer.load().step == 3
    return [torch.rand(4).tolist(), random.random(), scheduler.state_dict(), position.value]


@pytest.mark.filterwarnings("ignore:.*of rank 0")
def test_every_rank_goes_on_with_its_own_random_state_and_place(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved = ranks.run(go_on, str(tmp_path / "2"), 5, True, world_size=2)
    loaded = ranks.run(go_on, str(tmp_path / "2"), 6, False, world_size=2)
    assert saved[0][0] != saved[1][0]
    assert loaded == saved
    for world_size in (0, 1, 4):
        others = run_on(ranks, world_size, go_on, str(tmp_path / "2"), 6, False)
        expected = [saved[0][2], {"index": 100}]
        assert [found[2:] for found in others] == [expected] * max(world_size, 1)
    for world_size in (0, 1):
        folder = str(tmp_path / str(world_size))
        saved = run_on(ranks, world_size, go_on, folder, 5, True)
        assert run_on(ranks, 1 - world_size, go_on, folder, 6, False) == saved


# --- in the background ---


@contextmanager
def held_up_writes() -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    go = threading.Event()
    original = writer.Writer.write_data

    def waits(self: Any, *args: Any) -> Any:
        assert go.wait(30)
        return original(self, *args)

    with patch.object(writer.Writer, "write_data", waits):
        yield go


@on_few_ranks
def test_the_moment_of_the_call_is_saved_though_training_goes_on() -> None:
    folder = shared_folder()
    model, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer, keep=5)
    with held_up_writes() as go:
        for number in range(2):  # the second save reuses the memory of the first
            before = contents(model, optimizer)
            checkpointer.save_async(number)
            assert CheckpointDirectory(Path(folder)).complete().keys() == set(range(number))
            train(model, optimizer)
            assert different(contents(model, optimizer, whole=False), before)
            go.set()
            checkpointer.wait()
            go.clear()
            assert checkpointer.steps() == list(range(number + 1))
            checkpointer.load()
            assert different(contents(model, optimizer, whole=False), before) == []
        # A second save waits for the first.
        checkpointer.save_async(2)
        threading.Timer(0.1, go.set).start()
        start = time.monotonic()
        checkpointer.save_async(3)
        assert time.monotonic() - start > 0.05
        checkpointer.save(4)
    assert checkpointer.steps() == list(range(5))


@pytest.mark.parametrize("way", ["save", "save_async"])
@on_ranks(2)
def test_a_save_after_a_load_of_an_older_step_stays_and_names_the_later_ones(way: str) -> None:
    _, engine, optimizer = small()
    checkpointer = fe.Checkpointer(shared_folder(), engine, optimizer, keep=2)
    for step in (10, 20, 30):
        checkpointer.save(step)
    checkpointer.wait()  # for the removal of the first
    assert checkpointer.steps() == [20, 30]
    checkpointer.load(20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (22, 24):
            getattr(checkpointer, way)(step)
            checkpointer.wait()
    found = [str(each.message) for each in caught if "later steps" in str(each.message)]
    assert len(found) == (dist.get_rank() == 0)
    assert all("save(22): " in each and "has later steps, [30]" in each for each in found)
    assert checkpointer.steps() == [22, 24, 30]
    assert "extra" not in repr(checkpointer.load())


@pytest.mark.parametrize("way", ["save", "save_async"])
@on_ranks(2)
def test_many_that_are_closed_leave_no_files_no_threads_and_no_keys_in_the_store(way: str) -> None:
    folder = shared_folder()
    engine = fe.shard(nn.Linear(4, 4))
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for number in range(8):
        checkpointer = fe.Checkpointer(f"{folder}/{number}", engine)
        getattr(checkpointer, way)(1)
        checkpointer.close()
        checkpointer.close()
        gc.collect()
        dist.barrier()
        held = [len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")]
        counts.append([*held, store.num_keys()])
        dist.barrier()
    # The number of descriptors must not grow after the second round, when libraries have opened
    # theirs. A thread that has ended may be listed for a moment.
    assert counts[-1][0] <= counts[1][0], counts
    assert counts[-1][1] <= counts[1][1] + 2, counts
    # The number of keys must not grow with checkpointers: seven more with two keys each would add
    # fourteen. The first checkpointer writes counters, which later ones increment. Threads that
    # monitor ranks write keys, too, when they start.
    assert counts[-1][2] - counts[0][2] < 4, counts
    engine.full_state_dict()  # the engine's own groups stay
    checkpointer.save(3)  # a closed checkpointer opens again
    checkpointer.load(3)
    checkpointer.close()


# --- faults ---

# Text of the error; owner, name and rank.
FAULTS: dict[str, tuple[Any, ...]] = {
    "rank 0: .*No space": (direct_file.DirectFile, "_write_block", 0),
    "rank 1: .*No space": (direct_file.DirectFile, "_write_block", 1),
    "^saving step 2 failed: .*No space": (Manifest, "write"),
    "^saving step 2 failed: .*No space left": (CheckpointDirectory, "publish"),
}


@on_ranks(2)
def test_a_fault_is_raised_on_all_by_this_call_or_the_next_and_the_older_stays_whole() -> None:
    folder = shared_folder()
    model, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    checkpointer.save(1)
    saved = contents(model, optimizer)
    train(model, optimizer)

    def fails(fault: Any, message: str, call: Callable[[], Any]) -> None:
        with failing(*fault), pytest.raises(RuntimeError, match=message):
            call()
        assert checkpointer.steps() == [1]
        dist.barrier()
        assert visible(folder) == ["step-00000001"]
        dist.barrier()

    for message, fault in FAULTS.items():
        fails(fault, message, partial(checkpointer.save, 2))
    later = [partial(each, 3) for each in (checkpointer.save, checkpointer.save_async)]
    for call in (*later, checkpointer.wait, checkpointer.load):
        with failing(*FAULTS["rank 1: .*No space"]):
            checkpointer.save_async(2)
            train(model, optimizer)
            fails(FAULTS["rank 1: .*No space"], "^saving step 2 .*rank 1: OSError.*No ", call)
    snapshot = failing(checkpointer._host_memory, "snapshot", on_rank=1)
    with snapshot, pytest.raises(OSError, match="No space left"):
        checkpointer.save_async(2)
    checkpointer.save(2)
    assert checkpointer.steps() == [1, 2]
    checkpointer.load(1, verify=True)
    assert different(contents(model, optimizer, whole=False), saved) == []
    for path in sorted(Path(folder).glob("step-*1/*")):
        on_rank_0(partial(flip, path, 5, 1))
        with refused(model, path.name, optimizer=optimizer):
            checkpointer.load(1, verify=True)
        on_rank_0(partial(flip, path, 5, 1))


@on_ranks(2)
def test_one_directory_is_of_one_job_and_can_be_written() -> None:
    folder = shared_folder()
    _, engine, optimizer = small(steps=0)
    file = Path(folder) / "file"
    on_rank_0(file.touch)
    raises_each(
        *(
            (OSError, r"file|proc", partial(fe.Checkpointer(path, engine, optimizer).save, 1))
            for path in (file, file / "below", "/proc/nowhere")
        )
    )
    folder = shared_folder()
    first = fe.Checkpointer(folder, engine, optimizer)
    first.save(1)
    other = fe.Checkpointer(folder, engine, optimizer)
    in_use = "no other job .*another checkpointer of this process"
    raises_each(*((RuntimeError, in_use, partial(f, 2)) for f in (other.save, other.save_async)))
    other.load(1)  # reading is no conflict
    first.save(2)
    first.close()
    other.save(3)
    assert other.steps() == [1, 2, 3]


@on_ranks(2)
def test_entries_that_do_not_fit_are_listed_and_left_out_if_asked_for() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    fe.Checkpointer(folder, engine, optimizer, extra={"data": Values(3)}).save(1)
    known, new = Values(), Values(8)
    extra = {"data": known, "new": new}
    with warned_first(r"missing extra\.new: expected its state"):
        report = fe.Checkpointer(folder, engine, optimizer, extra=extra).load()
    assert (known.value, new.value, len(report.problems)) == (3, 8, 1)
    with warned_first(r"found none for data, .* Pass extra=\{'data'"):
        report = fe.Checkpointer(folder, engine, optimizer).load()
    assert report.extra == {"data": 3}
    assert not report.problems
    torch.manual_seed(4)
    model = Transformer(num_blocks=2)
    model.extra = nn.Linear(3, 3)  # type: ignore[assignment]
    model.blocks[0] = Mlp()
    engine = fe.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    before = contents(model, optimizer)
    with refused(model, "expected the entries of this model", optimizer=optimizer) as caught:
        checkpointer.load()
    report = checkpointer.load(strict=False)
    assert report.step == 1
    assert all(line in str(caught.value) for line in report.problems)
    for part in ("missing model.extra.weight", "unexpected model.blocks.0", "extra.bias"):
        assert any(part in line for line in report.problems), part
    found = contents(model, optimizer)
    assert torch.equal(found["model.extra.weight"], before["model.extra.weight"])
    assert not torch.equal(found["model.head.weight"], before["model.head.weight"])
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    other = fe.Checkpointer(folder, engine, sgd)
    with pytest.raises(ValueError, match="expected the state of SGD; found that of AdamW"):
        other.load()
    assert any("expected the state of SGD" in line for line in other.load(strict=False).problems)
    assert sgd.param_groups[0]["lr"] == 0.3


@on_ranks(2)
def test_bad_arguments_and_those_that_differ_between_ranks_are_refused() -> None:
    folder = Path(shared_folder())
    model, engine, optimizer = small()
    rank = dist.get_rank()
    first = rank == 0
    make: Any = partial(fe.Checkpointer, folder / "run", engine, optimizer)
    checkpointer = make()
    with pytest.raises(FileNotFoundError, match="found none"):
        checkpointer.load()
    for number in (1, 2):
        checkpointer.save(number)
        fe.save_checkpoint(folder / f"one{number}", engine, optimizer)
    kind = torch.optim.SGD if first else torch.optim.AdamW
    other = kind(model.parameters(), lr=0.1)
    another = fe.Checkpointer(folder / "another", engine, other)
    keeps, same = "keep: expected an int of at least 1", "expected the same on all ranks"
    saves = "step: expected an int of at least 0"
    before = contents(model, optimizer)

    def save(step: Any) -> Callable[[], Any]:
        return partial(checkpointer.save, step)

    def load(*step: Any, **options: Any) -> Callable[[], Any]:
        return partial(checkpointer.load, *step, **options)

    load_one = partial(fe.load_checkpoint, folder / f"one{1 + rank}", engine, optimizer)
    save_other = partial(fe.save_checkpoint, folder / "other", engine, other)
    raises_each(
        *((ValueError, keeps, partial(make, keep=each)) for each in (0, -1, 1.5)),
        (TypeError, "extra", partial(make, extra={"a": 3})),
        (TypeError, "extra", partial(make, extra={1: Values()})),
        (TypeError, "extra", partial(make, extra=[Values()])),
        *((ValueError, saves, save(each)) for each in (-1, 1.5, "latest")),
        (ValueError, f"step: {same}; found 0 on", save(rank)),
        (ValueError, r"step: .*found 'x'", save(1 if first else "x")),
        (FileNotFoundError, r"the checkpoint of step 3 .*steps \[1, 2\]", load(3)),
        (ValueError, f"step: {same}; found 1 on rank 0", load(1 + rank)),
        (ValueError, f"strict: {same}", load(1, strict=first)),
        (ValueError, f"checkpoint: {same}", load_one),
        (ValueError, rf"optimizer: {same}.*SGD.* on rank 0", partial(another.save, 3)),
        (ValueError, f"optimizer: {same}", save_other),
    )
    with engine.unsharded(), pytest.raises(RuntimeError, match="sharded parameter"):
        checkpointer.save(1)
    assert different(contents(model, optimizer, whole=False), before) == []
    dist.barrier()
    assert not (folder / "other").exists()
    assert visible(folder / "run") == ["step-00000001", "step-00000002"]


# --- the directory ---


def fake_checkpoint(directory: CheckpointDirectory, step: int) -> Path:
    staging = directory.begin()
    (staging / MANIFEST).write_text("{}")
    return directory.publish(staging, step)


def test_the_latest_are_kept_and_what_died_jobs_left_is_removed(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for number in (5, 20, 100, 3):
        fake_checkpoint(directory, number)
    (tmp_path / "notes.txt").write_text("mine")
    assert list(directory.complete()) == [3, 5, 20, 100]
    directory.retire(2)
    assert list(directory.complete()) == [20, 100]
    (tmp_path / ".saving-dead").mkdir()
    (tmp_path / ".removing-step-00000005").mkdir()
    (directory.begin_load() / "file").write_bytes(b"of a killed load")
    (tmp_path / "step-00000300").mkdir()  # without a manifest: not ours
    assert list(directory.complete()) == [20, 100]
    directory.discard(directory.begin())
    assert visible(tmp_path) == ["notes.txt", "step-00000020", "step-00000100", "step-00000300"]
    directory.retire(None)
    assert list(directory.complete()) == [20, 100]
    # A step that is saved again is there at every moment.
    again = fake_checkpoint(directory, 100)
    assert directory.complete()[100] == again
    assert (tmp_path / "step-00000100").exists()
    directory.retire(3)
    assert visible(tmp_path) == ["notes.txt", "step-00000020", again.name, "step-00000300"]
    assert fake_checkpoint(directory, 100) == directory.complete()[100] != again


def test_a_folder_that_cannot_be_removed_is_named_and_the_next_save_tries_again(
    tmp_path: Path,
) -> None:
    directory = CheckpointDirectory(tmp_path)
    for number in (1, 2):
        fake_checkpoint(directory, number)
    with (
        patch.object(shutil, "rmtree", lambda *args, **options: None),
        pytest.warns(UserWarning, match=r"\.removing-step-00000001 could not be removed"),
    ):
        directory.retire(1)
    assert visible(tmp_path) == [".removing-step-00000001", "step-00000002"]
    directory.clean()
    assert visible(tmp_path) == ["step-00000002"]


@on_ranks(2)
def test_an_error_while_older_checkpoints_are_removed_is_a_warning() -> None:
    folder = shared_folder()
    checkpointer = fe.Checkpointer(folder, fe.shard(nn.Linear(2, 2)), keep=1)
    checkpointer.save(1)
    with (
        failing(CheckpointDirectory, "retire", on_rank=0),
        warned_first(r"save\(2\): older checkpoints .*could not be removed: .*No space left"),
    ):
        checkpointer.save(2)
        checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    checkpointer.save(3)
    checkpointer.wait()
    assert checkpointer.steps() == [3]


def test_a_lock_that_fails_is_closed(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    descriptors = len(os.listdir("/proc/self/fd"))
    with failing(fcntl, "flock"), pytest.raises(OSError, match="No space left"):
        directory.begin()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_directory_that_was_made_anew_is_locked_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    job, other = CheckpointDirectory(path), CheckpointDirectory(path)
    job.discard(job.begin())
    for first, second in ((job, other), (other, job)):
        shutil.rmtree(path)
        first.discard(first.begin())
        with pytest.raises(
            RuntimeError, match=r"no other job to save into.*another checkpointer of"
        ):
            second.begin()
    other.release()
    job.discard(job.begin())
    job.release()


@on_ranks(2)
def test_ranks_that_call_different_checkpointers_are_an_error_on_all() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    regular, best = (
        fe.Checkpointer(f"{folder}/{name}", engine, optimizer) for name in ("all", "best")
    )
    chosen = best if dist.get_rank() == 0 else regular
    for call in (partial(chosen.save, 4), partial(chosen.save_async, 4), chosen.load, chosen.steps):
        expected = r"same checkpointer; found that of .*best on rank 0, that of .*all on rank 1"
        with pytest.raises(ValueError, match=expected):
            call()
    regular.save(4)
    dist.barrier()
    assert visible(folder) == ["all"]
    of_other = fe.Checkpointer(f"{folder}/other", small()[1])
    with pytest.raises(ValueError, match="same checkpointer"):
        (regular if dist.get_rank() == 0 else of_other).save(4)
    # Different names on each rank are accepted: all ranks use rank 0's.
    own = fe.Checkpointer(f"{folder}/of-{dist.get_rank()}", engine, optimizer)
    own.save(5)
    assert own.steps() == [5]


@on_ranks(2)
def test_a_rank_that_calls_something_else_is_named_with_its_call() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    checkpointer = fe.Checkpointer(f"{folder}/run", engine, optimizer)
    checkpointer.save(1)
    expected = r"same calls in the same order; found rank 0 in export_safetensors, rank 1 in Check"
    export = partial(fe.export_safetensors, engine, f"{folder}/exported")
    call: Callable[[], Any] = export if dist.get_rank() == 0 else checkpointer.steps
    with pytest.raises(RuntimeError, match=expected):
        call()
    if dist.get_rank() == 1:
        checkpointer.close()  # closing needs no other rank, since no save is pending
    assert not os.path.exists(f"{folder}/exported/model.safetensors")


def test_a_manifest_comes_back_as_it_was_and_its_values_are_checked(tmp_path: Path) -> None:
    plain = Manifest(
        step=3,
        world_size=8,
        mesh={"outer": 2, "inner": 4},
        strategy={"inner": "optim", "outer": "no_shard"},
        tensors=(manifest_module.TensorRow("model.a", (3, 4), "float32"),),
        files={"a": manifest_module.FileRow(10, "00000001")},
        libraries=manifest_module.library_versions(),
    )
    # Manifests with ``trainable_only``, a stage or ties have later versions, which older engines
    # refuse.
    part = dataclasses.replace(plain, trainable_only=True)
    stage = dataclasses.replace(part, stage={"pp": "1 of 2"})
    tied = dataclasses.replace(plain, ties={"b": "a"})
    assert FORMAT_VERSION == 4
    for version, manifest in enumerate((plain, part, stage, tied), 1):
        manifest.write(tmp_path)
        assert Manifest.read(tmp_path) == manifest
        content = json.loads((tmp_path / MANIFEST).read_text())
        assert content["format_version"] == version

    def changed(field: str, value: Any) -> str:
        """The manifest's text with one value changed and a valid checksum."""
        whole = json.dumps(content | {field: value, "crc32": "0" * 8}, indent=1)
        return whole.replace("0" * 8, f"{zlib.crc32(whole.encode()):08x}", 1)

    (tmp_path / MANIFEST).write_text(changed("step", 1))
    assert Manifest.read(tmp_path).step == 1
    fields: list[tuple[str, Any]] = [
        *(("step", "x"), ("world_size", None), ("mesh", [1]), ("strategy", {"inner": 3})),
        ("tensors", [{"name": "a", "shape": [-1], "dtype": "float32"}]),
        ("tensors", [{"name": "a", "shape": [1], "dtype": "nn"}]),
        ("files", {"a": {"bytes": "x", "crc32": "00000001"}}),
        ("files", {"../a": {"bytes": 1, "crc32": "00000001"}}),
        *(("libraries", 3), ("ties", {"b": 1})),
    ]
    damaged = ["", "[]", "{}", '{"format_version": 1}', "\udcff", "[" * 100_000]
    for text in (*damaged, *(changed(*each) for each in fields)):
        (tmp_path / MANIFEST).write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=MANIFEST):
            Manifest.read(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match=MANIFEST):
        Manifest.read(tmp_path)


# --- stages of a pipeline ---


def save_and_load_a_stage(folder: str, names: tuple[str, ...]) -> list[str]:
    """Two stages of equal layers, one after the other; returns the errors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    stage = mesh.get_local_rank(0)
    torch.manual_seed(stage)
    model = Mlp()
    engine = fe.shard(model, mesh[names[1]])
    errors = []

    def in_turn(calls_of: Callable[[Any, Any], list[Callable[[], Any]]]) -> None:
        for first in range(2):
            local = fe.LocalCheckpointer(f"{folder}/local", engine)
            shared = fe.Checkpointer(f"{folder}/shared", engine)
            for call in calls_of(shared, local) if stage == first else ():
                try:
                    call()
                except ValueError as error:
                    errors.append(str(error))
            shared.close()
            local.close()
            dist.barrier()

    one: Any = (f"{folder}/one", engine)
    save_one, load_one = partial(fe.save_checkpoint, *one), partial(fe.load_checkpoint, *one)
    in_turn(lambda shared, local: [partial(shared.save, 0), partial(local.save, 0), save_one])
    saved = f"{folder}/stage-{stage}"
    fe.save_checkpoint(saved, engine, extra={"stage": stage})
    add_one(model)
    assert fe.load_checkpoint(saved, engine) == {"stage": stage}
    torch.manual_seed(stage)
    reference.assert_same_weights(model, Mlp())
    in_turn(lambda shared, local: [shared.load, local.load, load_one])
    return errors


@pytest.mark.parametrize("names", [("pp", "dp"), ("stages", "inner"), ("dp_replicate", "dp_shard")])
def test_stages_of_a_pipeline_do_not_overwrite_each_other(
    ranks: Ranks, tmp_path: Path, names: tuple[str, ...]
) -> None:
    is_pipeline = names[0] != "dp_replicate"
    found = ranks.run(save_and_load_a_stage, str(tmp_path), names, world_size=4)
    assert found[:2] == [[], []]
    for errors in found[2:]:
        assert len(errors) == (6 if is_pipeline else 0)
        for error in errors:
            assert f"expected the checkpoint of {names[0]} 1 of 2; found that of" in error
    if is_pipeline:
        (folder,) = (tmp_path / "shared").glob("step-*")
        assert Manifest.read(folder).stage == {names[0]: "0 of 2"}
    # One process reads what any stage has saved.
    ranks.run(load_a_stage, f"{tmp_path}/stage-1", world_size=1)


def load_a_stage(folder: str) -> None:
    model = Mlp()
    fe.load_checkpoint(folder, fe.shard(model))
    torch.manual_seed(1)
    reference.assert_same_weights(model, Mlp())


@on_ranks(2)
def test_an_object_that_refuses_its_state_leaves_weights_as_they_are() -> None:
    class Refusing(Values):
        def load_state_dict(self, state: Any) -> None:
            if dist.get_rank() == 1:
                raise KeyError("planted")

    folder = shared_folder()
    model, engine, optimizer = small()
    with closing(fe.Checkpointer(folder, engine, optimizer, extra={"data": Values(3)})) as saver:
        saver.save(1)
    train(model, optimizer)
    before = contents(model, optimizer)
    checkpointer = fe.Checkpointer(folder, engine, optimizer, extra={"data": Refusing()})
    raises_each((Exception, "planted", checkpointer.load))
    assert not different(contents(model, optimizer), before)
    fe.Checkpointer(folder, engine, optimizer, extra={"data": Values()}).load()
    assert different(contents(model, optimizer), before)
    # A sharded tensor in `extra` is read with the weights. The object's `load_state_dict` is called
    # only afterwards.
    shadow = {"data": Values(next(model.parameters()).detach().clone())}
    with closing(fe.Checkpointer(folder, engine, optimizer, extra=shadow)) as saver:
        saver.save(2)
    raises_each((Exception, "planted", partial(checkpointer.load, 2)))


@on_ranks(2)
def test_a_module_whose_extra_state_was_not_saved_keeps_it() -> None:
    class Strict(Counting):
        def set_extra_state(self, state: Any) -> None:
            self.calls = {"list": state["list"], "forward": state["forward"]}

    folder = shared_folder()
    model = nn.Sequential(nn.Linear(3, 3))
    fe.Checkpointer(folder, fe.shard(model)).save(1)
    other = nn.Sequential(nn.Linear(3, 3), Strict())
    other[1].calls = {"forward": 3, "list": [1, 2]}
    checkpointer = fe.Checkpointer(folder, fe.shard(other))
    report = checkpointer.load(strict=False)
    assert report.problems == ["missing model.1._extra_state: expected an object; found nothing"]
    assert other[1].calls == {"forward": 3, "list": [1, 2]}
    loaded = full_weights(other)
    assert all(torch.equal(loaded[name], value) for name, value in full_weights(model).items())


@on_ranks(2)
def test_a_folder_that_is_one_checkpoint_is_refused_as_directory() -> None:
    folder = shared_folder()
    _, engine, _ = small()
    checkpointer = fe.Checkpointer(folder, engine)
    checkpointer.save(3)
    inner = fe.Checkpointer(f"{folder}/step-00000003", engine)
    text = f"step-00000003, which is one checkpoint. Pass {folder} instead, and call load"
    for call in (inner.steps, inner.load, partial(inner.save, 4)):
        raises_each((Exception, text, call))
    assert checkpointer.steps() == [3]


@on_ranks(2)
def test_directories_below_a_folder_without_checkpoints_are_named() -> None:
    folder = shared_folder()
    _, engine, _ = small()
    for name in ("best", "latest"):
        with contextlib.closing(fe.Checkpointer(f"{folder}/{name}", engine)) as each:
            each.save(3)
    outer = fe.Checkpointer(folder, engine)
    text = "there are some in best, latest below it"
    raises_each((FileNotFoundError, f"found none; {text}", outer.load))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert outer.steps() == []
    found = [each for each in shown if text in str(each.message)]
    assert len(found) == (dist.get_rank() == 0)
    assert all(each.filename == __file__ for each in found)


def load_with_errors(folder: str) -> str:
    """Load a run while warnings are errors. Returns the error of this rank."""
    checkpointer = fe.Checkpointer(folder, fe.shard(nn.Linear(4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            checkpointer.load()
        except UserWarning as caught:
            return str(caught)
    return ""


def test_a_warning_that_is_an_error_leaves_no_rank_waiting(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_there, str(tmp_path), 0, world_size=2)
    first, *others = ranks.run(load_with_errors, str(tmp_path), world_size=3)
    assert "Random states stay" in first
    assert others == ["", ""]


@on_ranks(2)
def test_a_checkpointer_that_is_made_after_a_step_takes_the_run_as_one_that_draws() -> None:
    engine = fe.shard(model := nn.Linear(4, 4), initial_values="rank0")
    assert not engine.has_trained
    model(torch.ones(2, 4)).sum().backward()
    assert engine.has_trained
    use = fe.Checkpointer(shared_folder(), engine)._run._random_use
    assert use.is_used(random_state(engine.ranks.device))


def save_there(folder: str, drawing: int | None) -> None:
    """Save a run in which rank ``drawing`` draws from a global generator; None: no rank does."""
    checkpointer = fe.Checkpointer(folder, fe.shard(nn.Linear(4, 4)))
    torch.randn(4, generator=torch.Generator().manual_seed(0))
    if dist.get_rank() == drawing:
        torch.randn(4)
    checkpointer.save(1)
    checkpointer.close()


def warnings_there(folder: str, save_again: bool = False) -> list[str]:
    checkpointer = fe.Checkpointer(folder, fe.shard(nn.Linear(4, 4)))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        checkpointer.load()
    if save_again:
        checkpointer.save(2)
    checkpointer.close()
    return [str(each.message) for each in shown if "Random states" in str(each.message)]


@pytest.mark.parametrize("drawing", [None, 0, 1])
def test_other_ranks_are_warned_that_random_states_stay(
    ranks: Ranks, tmp_path: Path, drawing: int | None
) -> None:
    folder = str(tmp_path)
    ranks.run(save_there, folder, drawing, world_size=2)
    # The second save follows a load, and nothing is drawn between them. The run still counts as one
    # that draws, if it drew before the first save.
    assert ranks.run(warnings_there, folder, True, world_size=2) == [[], []]
    for again in (True, False):
        (texts, *others) = ranks.run(warnings_there, folder, again, world_size=3)
        if drawing is None:
            assert texts == []
        elif again:
            (text,) = texts
            assert "found 2 ranks at the save, 3 at this load. Random states stay" in text
        assert others == [[], []]
    (text, *_) = ranks.run(warnings_there, folder, world_size=1)
    assert len(text) == (drawing is not None)


@on_ranks(2)
def test_a_load_without_the_optimizer_warns_that_its_state_is_not_loaded() -> None:
    folder = shared_folder()
    model = nn.Linear(4, 4)
    engine = fe.shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    for given in (optimizer, None):
        with contextlib.closing(fe.Checkpointer(f"{folder}/{given is None}", engine, given)) as c:
            c.save(1)
    shown: list[str] = []
    for saved, given in (("False", None), ("False", optimizer), ("True", None)):
        with (
            contextlib.closing(fe.Checkpointer(f"{folder}/{saved}", engine, given)) as checkpointer,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            checkpointer.load()
        shown += [str(each.message) for each in caught if "optimizer" in str(each.message)]
    assert len(shown) == (dist.get_rank() == 0)
    assert all("expected one for the saved optimizer state; found None" in text for text in shown)


def test_each_global_generator_counts_as_drawn() -> None:
    device = torch.device("cpu")
    for draw in (torch.randn, random.random, numpy.random.rand):
        use = RandomUse(device)
        assert not use.is_used(random_state(device))
        draw(*(() if draw is random.random else (1,)))
        assert use.is_used(random_state(device))
        use.restart(was_used=False)
        torch.manual_seed(5)
        assert not use.is_used(random_state(device))
        use.restart(was_used=False)
        assert not use.is_used(random_state(device))
        use.restart(was_used=True)
        assert use.is_used(random_state(device))
