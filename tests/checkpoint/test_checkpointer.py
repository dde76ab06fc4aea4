"""The checkpointer: complete or not there, whatever ranks load, whatever goes wrong."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.checkpoint import direct_file, reader, writer
from fsdp_engine.checkpoint import manifest as manifest_module
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest
from fsdp_engine.checkpoint.reader import verify_files
from tests import reference
from tests.checkpoint.scene import (
    Config,
    Everything,
    Position,
    all_configs,
    contents,
    different,
    label,
    run_on,
    shard,
    shared_folder,
    small,
    step,
    train,
    trained,
    two_groups,
)
from tests.models import Mlp, Transformer
from tests.pool import Ranks, on_few_ranks, on_ranks


def visible(folder: str | Path) -> list[str]:
    """Everything in a directory of checkpoints but the lock."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name != ".lock")


# --- loaded values ---


def save_each(folder: str, configs: list[Config]) -> list[dict[str, Any]]:
    found = []
    for config in configs:
        model, engine, optimizer = trained(config)
        checkpointer = fe.Checkpointer(f"{folder}/{label(config)}", engine, optimizer)
        if len(found) % 2:
            checkpointer.save_async(7)
            for parameter in model.parameters():
                parameter.data.zero_()
            checkpointer.wait()
            checkpointer.load()
        else:
            checkpointer.save(7)
        found.append(contents(model, engine, optimizer))
    return found if dist.get_rank() == 0 else []


def load_each(folder: str, pairs: list[tuple[Config, Config]], expected: Any) -> list[str]:
    lines = []
    for source, target in pairs:
        torch.manual_seed(2)
        model = Everything()
        engine = shard(model, target)
        optimizer = two_groups(model, swap=True, lr=5e-2)
        report = fe.Checkpointer(f"{folder}/{label(source)}", engine, optimizer).load(verify=True)
        assert (report.step, report.problems) == (7, [])
        found = contents(model, engine, optimizer, whole=False)
        lines += [
            f"{label(source)} -> {label(target)}: {line}"
            for line in different(found, expected[label(source)])
        ]
        step(model, optimizer, 5)
    return lines


def test_any_ranks_and_levels_load_what_others_saved_bit_for_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    # test_checkpoint.py tries every pair; a third of them shows that nothing is lost on the way.
    configs = {world_size: each[::3] for world_size, each in all_configs().items()}
    expected = {}
    for world_size, each in configs.items():
        found = run_on(ranks, world_size, save_each, str(tmp_path), each)[0]
        expected |= dict(zip(map(label, each), found, strict=True))
    draw = random.Random(3)
    several, single = [*configs[2], *configs[4]], [*configs[0], *configs[1]]
    for world_size, each in configs.items():
        pairs = [(draw.choice(several), target) for target in each]
        pairs += [(source, draw.choice(each)) for source in single]
        for lines in run_on(ranks, world_size, load_each, str(tmp_path), pairs, expected):
            assert lines == []


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    # Keeps means of rows and columns, so it steps on whole parameters only.
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def train_with(name: str, strategy: str, folder: str, saves: bool) -> dict[str, Any]:
    """Two steps, a save (or a load), two more; everything at the end."""
    torch.manual_seed(0 if saves else 1)
    model = Transformer(num_blocks=1)
    engine = fe.shard(model, strategy=strategy)
    optimizer = OPTIMIZERS[name](model.parameters())
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    if saves:
        train(model, optimizer, 2)
        checkpointer.save(2)
    else:
        checkpointer.load()
    train(model, optimizer, 2)
    return contents(model, engine, optimizer)


@pytest.mark.parametrize("world_size", [0, 2])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_state_of_any_optimizer_comes_back(
    ranks: Ranks, tmp_path: Path, name: str, world_size: int
) -> None:
    level, other = ("optim_grads_params", "optim") if name != "Adafactor" else ("no_shard",) * 2
    saved = run_on(ranks, world_size, train_with, name, level, str(tmp_path), True)
    loaded = run_on(ranks, world_size, train_with, name, other, str(tmp_path), False)
    # Not bit by bit: the levels sum in another order.
    for key, value in saved[0].items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(loaded[0][key], value, rtol=1e-4, atol=1e-6)
        else:
            assert loaded[0][key] == value


def go_on(folder: str, seed: int, saves: bool) -> list[Any]:
    """What random generators, the scheduler and the place in the data do after a checkpoint."""
    _, engine, optimizer = small()
    torch.manual_seed(seed + dist.get_rank())
    random.seed(seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    position = Position()
    extra = {"scheduler": scheduler, "data": position}
    checkpointer = fe.Checkpointer(folder, engine, optimizer, extra=extra)
    if saves:
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        position.index = 100 + dist.get_rank()
        torch.rand(seed + dist.get_rank())
        random.random()
        checkpointer.save(3)
    else:
        assert checkpointer.load().step == 3
    return [torch.rand(4).tolist(), random.random(), scheduler.state_dict(), position.index]


def test_every_rank_goes_on_with_its_own_random_state_and_place(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved = ranks.run(go_on, str(tmp_path), 5, True, world_size=2)
    loaded = ranks.run(go_on, str(tmp_path), 6, False, world_size=2)
    assert saved[0][0] != saved[1][0]
    assert loaded == saved
    for world_size in (0, 1, 4):
        others = run_on(ranks, world_size, go_on, str(tmp_path), 6, False)
        assert [found[3] for found in others] == [100] * max(world_size, 1)
        assert [found[2] for found in others] == [saved[0][2]] * max(world_size, 1)


@pytest.mark.parametrize("world_size", [0, 1])
def test_one_process_goes_on_with_its_own_random_state_and_place(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    saved = run_on(ranks, world_size, go_on, str(tmp_path), 5, True)
    assert run_on(ranks, 1 - world_size, go_on, str(tmp_path), 6, False) == saved


@on_few_ranks
def test_an_extra_that_was_not_saved_stays_with_a_warning() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    fe.Checkpointer(folder, engine, optimizer, extra={"data": Position(3)}).save(1)
    known, new = Position(), Position(8)
    checkpointer = fe.Checkpointer(folder, engine, optimizer, extra={"data": known, "new": new})
    with pytest.warns(UserWarning, match=r"missing extra\.new: expected its state"):
        report = checkpointer.load()
    assert (known.index, new.index) == (3, 8)
    assert len(report.problems) == 1


# --- in the background ---


@on_few_ranks
def test_what_lands_is_the_moment_of_the_call_though_training_goes_on() -> None:
    folder = shared_folder()
    model, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    with held_up_writes() as go:
        for number in range(2):  # the second takes the first one's memory again
            before = contents(model, engine, optimizer)
            checkpointer.save_async(number)
            assert CheckpointDirectory(Path(folder)).complete().keys() == set(range(number))
            train(model, optimizer, 2)
            assert different(contents(model, engine, optimizer), before)
            go.set()
            checkpointer.wait()
            go.clear()
            assert checkpointer.steps() == list(range(number + 1))
            checkpointer.load()
            assert different(contents(model, engine, optimizer), before) == []


@contextmanager
def held_up_writes() -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    go = threading.Event()
    original = writer.Writer.write_data

    def waits(self: Any, *args: Any) -> Any:
        assert go.wait(30)
        return original(self, *args)

    writer.Writer.write_data = waits  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        writer.Writer.write_data = original  # type: ignore[method-assign]


@on_few_ranks
def test_a_second_save_waits_for_the_first() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    with held_up_writes() as go:
        checkpointer.save_async(1)
        threading.Timer(0.3, go.set).start()
        start = time.monotonic()
        checkpointer.save_async(2)
        assert time.monotonic() - start > 0.2
        checkpointer.save(3)
    assert checkpointer.steps() == [1, 2, 3]


@on_ranks(2)
def test_a_failure_in_the_background_is_raised_by_the_next_call_on_every_rank() -> None:
    folder = shared_folder()
    model, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    checkpointer.save(1)
    for call in (
        lambda: checkpointer.save(3),
        lambda: checkpointer.save_async(3),
        checkpointer.wait,
        checkpointer.load,
    ):
        with no_space(on_rank=1):
            checkpointer.save_async(2)
            train(model, optimizer)
            with pytest.raises(RuntimeError, match=r"^saving step 2 .*rank 1: OSError.*No "):
                call()
        assert checkpointer.steps() == [1]
    checkpointer.save(4)
    assert checkpointer.steps() == [1, 4]


@on_ranks(2)
def test_a_rank_without_host_memory_is_an_error_on_all() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    if dist.get_rank() == 1:

        def fails(entries: Any) -> Any:
            raise RuntimeError("can't allocate memory")

        checkpointer._host_memory.snapshot = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        checkpointer.save_async(1)
    dist.barrier()
    assert visible(folder) == []
    assert checkpointer.steps() == []


@on_ranks(2)
def test_twenty_that_are_closed_leave_no_files_and_no_threads() -> None:
    folder = shared_folder()
    engine = fe.shard(nn.Linear(4, 4))

    def held() -> list[int]:
        gc.collect()
        dist.barrier()
        return [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]

    counts = []
    for number in range(20):
        checkpointer = fe.Checkpointer(f"{folder}/{number}", engine)
        checkpointer.save_async(1)
        checkpointer.close()
        counts.append(held())
    # Libraries open what they need once; a thread that has ended may be seen for a moment.
    assert counts[-1][0] <= counts[1][0], counts
    assert counts[-1][1] <= counts[1][1] + 2, counts
    engine.full_state_dict()  # the engine's own groups stay
    checkpointer.save(3)  # a closed checkpointer opens again
    checkpointer.load(3)
    checkpointer.close()
    checkpointer.close()


# --- faults ---


@contextmanager
def no_space(on_rank: int, after_bytes: int = 1000) -> Iterator[None]:
    """The disk of one rank is full after some bytes."""
    original = direct_file.DirectFile.write

    def write(self: Any, data: Any) -> int:
        if self.num_bytes > after_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, data)

    if dist.get_rank() == on_rank:
        direct_file.DirectFile.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        direct_file.DirectFile.write = original  # type: ignore[method-assign]


@on_ranks(2)
@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_raised_on_all_and_leaves_nothing(on_rank: int) -> None:
    folder = shared_folder()
    model, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    checkpointer.save(1)
    saved = contents(model, engine, optimizer)
    train(model, optimizer)
    with no_space(on_rank), pytest.raises(RuntimeError, match=rf"rank {on_rank}: .*No space left"):
        checkpointer.save(2)
    assert checkpointer.steps() == [1]
    dist.barrier()
    assert visible(folder) == ["step-00000001"]
    checkpointer.load(verify=True)
    assert different(contents(model, engine, optimizer), saved) == []


@on_few_ranks
@pytest.mark.parametrize("where", ["write", "publish"])
def test_a_failure_at_the_very_end_leaves_nothing(where: str) -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    checkpointer.save(1)
    owner: Any = Manifest if where == "write" else CheckpointDirectory
    original = getattr(owner, where)

    def fails(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    setattr(owner, where, fails)
    try:
        with pytest.raises(RuntimeError, match=r"^saving step 2 failed: .*Input/output error"):
            checkpointer.save(2)
    finally:
        setattr(owner, where, original)
    dist.barrier()
    assert visible(folder) == ["step-00000001"]
    dist.barrier()
    checkpointer.save(2)
    assert checkpointer.steps() == [1, 2]


@on_few_ranks
def test_a_place_that_cannot_be_written_is_refused_on_every_rank() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    file = Path(folder) / "file"
    if dist.get_rank() == 0:
        file.write_text("")
    dist.barrier()
    for path, kind in ((file, OSError), (file / "below", OSError), ("/proc/nowhere", OSError)):
        with pytest.raises(kind):
            fe.Checkpointer(path, engine, optimizer).save(1)


@on_few_ranks
def test_two_jobs_cannot_save_into_one_directory() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    first = fe.Checkpointer(folder, engine, optimizer)
    first.save(1)
    other = fe.Checkpointer(folder, engine, optimizer)
    for call in (other.save, other.save_async):
        with pytest.raises(RuntimeError, match=r"another job|process \d+ on .* does"):
            call(2)
    other.load(1)  # reading is no conflict
    first.save(2)
    first.close()
    other.save(3)
    assert other.steps() == [1, 2, 3]


def saved_folder(ranks: Ranks, folder: Path) -> Path:
    ranks.run(save_small, str(folder), world_size=2)
    return folder / "step-00000001"


def save_small(folder: str) -> None:
    _, engine, optimizer = small()
    fe.Checkpointer(folder, engine, optimizer).save(1)


def refuse_load(folder: str, verify: bool, kind: type[Exception], *parts: str) -> None:
    """The load is refused on this rank, and changes nothing."""
    model, engine, optimizer = small(seed=3)
    before = contents(model, engine, optimizer)
    with pytest.raises(kind) as caught:
        fe.Checkpointer(folder, engine, optimizer).load(verify=verify)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"
    assert different(contents(model, engine, optimizer), before) == []


def test_a_flipped_byte_is_found_in_any_file_with_the_tensor_it_is_in(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = saved_folder(ranks, tmp_path)
    manifest = Manifest.read(folder)
    verify_files(folder, manifest)
    draw = random.Random(1)
    places = dict(writer.dcp.FileSystemReader(folder).read_metadata().storage_data)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(12):
            at = draw.randrange(len(whole))
            path.write_bytes(
                whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]
            )
            with pytest.raises(ValueError, match=re.escape(path.name)):
                verify_files(folder, Manifest.read(folder))
        path.write_bytes(whole)
    verify_files(folder, manifest)
    # A byte within a tensor's values.
    index, place = next((i, p) for i, p in places.items() if i.fqn.startswith("model.blocks.1"))
    path = folder / place.relative_path
    whole = bytearray(path.read_bytes())
    with open(path, "rb") as file:
        start = reader.data_offset(reader.FileView(file, place.offset, place.length), 0)
    assert start is not None
    whole[place.offset + start] ^= 64
    path.write_bytes(bytes(whole))
    ranks.run(refuse_load, str(tmp_path), True, ValueError, path.name, index.fqn, world_size=2)


def test_truncated_and_missing_files_are_refused_before_anything_is_read(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = saved_folder(ranks, tmp_path)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        ranks.run(refuse_load, str(tmp_path), False, ValueError, path.name, world_size=2)
        path.unlink()
        if path.name == MANIFEST:  # then it is no checkpoint at all
            parts = ["expected the latest complete checkpoint", "found none"]
        else:
            parts = [path.name]
        ranks.run(refuse_load, str(tmp_path), False, FileNotFoundError, *parts, world_size=2)
        path.write_bytes(whole)


def test_a_newer_format_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = saved_folder(ranks, tmp_path)
    text = (folder / MANIFEST).read_text()
    newer = text.replace('"format_version": 1', f'"format_version": {FORMAT_VERSION + 1}')
    (folder / MANIFEST).write_text(newer)
    parts = [f"expected format version {FORMAT_VERSION}", f"found {FORMAT_VERSION + 1}"]
    ranks.run(refuse_load, str(tmp_path), False, ValueError, *parts, world_size=2)


def load_differently(folder: str) -> None:
    torch.manual_seed(4)
    model = Transformer(num_blocks=2)
    model.extra = nn.Linear(3, 3)  # type: ignore[assignment]
    model.blocks[0] = Mlp()
    engine = fe.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    before = contents(model, engine, optimizer)
    with pytest.raises(ValueError, match="expected the entries of this model") as caught:
        checkpointer.load()
    assert different(contents(model, engine, optimizer), before) == []
    report = checkpointer.load(strict=False)
    assert report.step == 1
    for line in report.problems:
        assert line in str(caught.value)
    for part in ("missing model.extra.weight", "unexpected model.blocks.0", "extra.bias"):
        assert any(part in line for line in report.problems), part
    found = contents(model, engine, optimizer)
    assert torch.equal(found["model.extra.weight"], before["model.extra.weight"])
    assert not torch.equal(found["model.head.weight"], before["model.head.weight"])
    other = fe.Checkpointer(folder, engine, torch.optim.SGD(model.parameters(), lr=0.3))
    with pytest.raises(ValueError, match="expected the state of SGD; found that of AdamW"):
        other.load()
    report = other.load(strict=False)
    assert any("expected the state of SGD" in line for line in report.problems)
    assert other._run._optimizer is not None
    assert other._run._optimizer.param_groups[0]["lr"] == 0.3


def test_what_does_not_fit_is_listed_and_left_out_if_asked_for(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved_folder(ranks, tmp_path)
    ranks.run(load_differently, str(tmp_path), world_size=2)


@on_ranks(2)
def test_ranks_that_ask_for_different_things_are_told() -> None:
    folder = Path(shared_folder())
    model, engine, optimizer = small()
    checkpointer = fe.Checkpointer(folder / "run", engine, optimizer)
    for number in (1, 2):
        checkpointer.save(number)
        fe.save_checkpoint(folder / f"one{number}", engine, optimizer)
    is_first = dist.get_rank() == 0
    before = {name: value.clone() for name, value in engine.full_state_dict().items()}
    with pytest.raises(ValueError, match="step: expected the same on all ranks; found 1 on rank 0"):
        checkpointer.load(1 if is_first else 2)
    with pytest.raises(ValueError, match="strict: expected the same on all ranks"):
        checkpointer.load(1, strict=is_first)
    with pytest.raises(ValueError, match="checkpoint: expected the same on all ranks"):
        fe.load_checkpoint(folder / ("one1" if is_first else "one2"), engine, optimizer)
    kind = torch.optim.SGD if is_first else torch.optim.AdamW
    other = kind(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer: expected the same .*SGD.* on rank 0"):
        fe.Checkpointer(folder / "another", engine, other).save(3)
    with pytest.raises(ValueError, match="optimizer: expected the same"):
        fe.save_checkpoint(folder / "other", engine, other)
    assert not (folder / "other").exists()
    assert checkpointer.steps() == [1, 2]
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, before[name]), name


@on_ranks(2)
def test_bad_arguments_are_refused() -> None:
    folder = shared_folder()
    _, engine, optimizer = small()
    for keep in (0, -1, 1.5):
        with pytest.raises(ValueError, match="keep: expected a number of at least 1"):
            fe.Checkpointer(folder, engine, optimizer, keep=keep)  # type: ignore[arg-type]
    for extra in ({"a": 3}, {1: Position()}, [Position()]):
        with pytest.raises(TypeError, match="extra"):
            fe.Checkpointer(folder, engine, optimizer, extra=extra)  # type: ignore[arg-type]
    checkpointer = fe.Checkpointer(folder, engine, optimizer)
    for number in (-1, 1.5, "latest"):
        with pytest.raises(ValueError, match="step: expected a number of at least 0"):
            checkpointer.save(number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step: expected the same on all ranks; found 0 on"):
        checkpointer.save(dist.get_rank())
    with pytest.raises(FileNotFoundError, match="found none"):
        checkpointer.load()
    with pytest.raises(ValueError, match=r"step: .*found 'x'"):
        checkpointer.save("x" if dist.get_rank() == 1 else 1)  # type: ignore[arg-type]
    with engine.unsharded(), pytest.raises(RuntimeError, match="sharded parameter"):
        checkpointer.save(1)
    checkpointer.save(1)
    with pytest.raises(FileNotFoundError, match=r"expected the 2 complete .*steps \[1\]"):
        checkpointer.load(2)
    dist.barrier()
    assert visible(folder) == ["step-00000001"]


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
    (tmp_path / "step-00000300").mkdir()  # without a manifest: not ours
    assert list(directory.complete()) == [20, 100]
    directory.discard(directory.begin())
    assert visible(tmp_path) == ["notes.txt", "step-00000020", "step-00000100", "step-00000300"]
    directory.retire(None)
    assert list(directory.complete()) == [20, 100]


def test_a_step_that_is_saved_again_is_there_at_every_moment(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    first = fake_checkpoint(directory, 7)
    second = fake_checkpoint(directory, 7)
    assert directory.complete() == {7: second}
    assert first.exists()
    directory.retire(3)
    assert visible(tmp_path) == [second.name]
    third = fake_checkpoint(directory, 7)
    assert directory.complete() == {7: third}


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = Manifest(
        step=3,
        world_size=8,
        mesh={"outer": 2, "inner": 4},
        strategy={"inner": "optim", "outer": "no_shard"},
        tensors=(manifest_module.TensorRow("model.a", (3, 4), "float32"),),
        files={"a": manifest_module.FileRow(10, "00000001")},
        libraries=manifest_module.library_versions(),
    )
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert json.loads((tmp_path / MANIFEST).read_text())["format_version"] == 1
    # Older code refuses what it would take for a whole model.
    manifest = dataclasses.replace(manifest, trainable_only=True)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert json.loads((tmp_path / MANIFEST).read_text())["format_version"] == 2
    # Older code does not know the place of a stage.
    manifest = dataclasses.replace(manifest, stage={"pp": "1 of 2"})
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert json.loads((tmp_path / MANIFEST).read_text())["format_version"] == FORMAT_VERSION == 3
    for text in ("", "[]", "{}", '{"format_version": 1}', "\udcff"):
        (tmp_path / MANIFEST).write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=MANIFEST):
            Manifest.read(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match=MANIFEST):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("ways", ["save", "save_async"])
@on_ranks(2)
def test_a_closed_checkpointer_leaves_no_key_in_the_store(ways: str) -> None:
    folder = shared_folder()
    engine = fe.shard(Mlp(), strategy="optim")
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for number in range(5):
        checkpointer = fe.Checkpointer(folder, engine)
        getattr(checkpointer, ways)(number)
        checkpointer.close()
        checkpointer.close()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    # The first one writes counters that later ones raise. Threads that look after ranks write keys,
    # too, when they start; two a Checkpointer would be eight.
    assert counts[-1] - counts[0] < 4, counts


# --- stages of a pipeline ---


def save_a_stage(folder: str, names: tuple[str, ...], saves: bool) -> list[str]:
    """Two stages of equal layers; returns the errors."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    stage = mesh.get_local_rank(0)
    torch.manual_seed(stage)
    model = Mlp()
    engine = fe.shard(model, mesh[names[1]])
    errors = []
    calls: list[Callable[[], Any]] = []
    for first in range(2):  # one stage after the other
        local = fe.LocalCheckpointer(f"{folder}/local", engine)
        shared = fe.Checkpointer(f"{folder}/shared", engine)
        if saves:
            calls = [
                partial(shared.save, 0),
                partial(local.save, 0),
                lambda: fe.save_checkpoint(f"{folder}/one", engine),
            ]
        else:
            calls = [shared.load, local.load, lambda: fe.load_checkpoint(f"{folder}/one", engine)]
        for call in calls if stage == first else ():
            try:
                call()
            except ValueError as error:
                errors.append(str(error))
        shared.close()
        local.close()
        dist.barrier()
    if saves:
        for saved in (f"{folder}/stage-{stage}/shared", f"{folder}/stage-{stage}/one"):
            fe.save_checkpoint(saved, engine)
            with torch.no_grad():
                model.up.weight.zero_()
            fe.load_checkpoint(saved, engine)
        torch.manual_seed(stage)
        reference.assert_same_weights(model, Mlp())
    return errors


@pytest.mark.parametrize("names", [("pp", "dp"), ("stages", "inner"), ("dp_replicate", "dp_shard")])
def test_stages_of_a_pipeline_do_not_overwrite_each_other(
    ranks: Ranks, tmp_path: Path, names: tuple[str, ...]
) -> None:
    is_pipeline = names[0] != "dp_replicate"
    for saves in (True, False):
        found = ranks.run(save_a_stage, str(tmp_path), names, saves, world_size=4)
        assert found[:2] == [[], []]
        for errors in found[2:]:
            assert len(errors) == (3 if is_pipeline else 0)
            for error in errors:
                assert f"expected the checkpoint of {names[0]} 1 of 2; found that of" in error
    if is_pipeline:
        (folder,) = (tmp_path / "shared").glob("step-*")
        assert Manifest.read(folder).stage == {names[0]: "0 of 2"}
    # One process reads what any stage has saved.
    ranks.run(load_a_stage, f"{tmp_path}/stage-1/one", world_size=1)


def load_a_stage(folder: str) -> None:
    model = Mlp()
    fe.load_checkpoint(folder, fe.shard(model))
    torch.manual_seed(1)
    reference.assert_same_weights(model, Mlp())
