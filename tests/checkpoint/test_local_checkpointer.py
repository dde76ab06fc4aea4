"""Checkpoints in directories of the nodes: what a lost node had is on the next one."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.checkpoint import local_directory
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.local_directory import Nodes, _to_all_nodes
from tests.checkpoint.scene import (
    Config,
    Position,
    all_configs,
    contents,
    different,
    label,
    run_on,
    shared_folder,
    small,
    train,
    trained,
)
from tests.pool import Ranks, on_ranks

FOUR = {label(config): config for config in all_configs()[4]}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def node_folder(root: str, ranks_per_node: int) -> Path:
    return Path(root) / f"node{rank() // ranks_per_node}"


@contextmanager
def local_checkpointer(
    root: str, engine: Any, optimizer: Any, ranks_per_node: int = 1, **options: Any
) -> Iterator[fe.LocalCheckpointer]:
    """Saves into a directory of this rank's node, and is closed."""
    folder = node_folder(root, ranks_per_node)
    checkpointer = fe.LocalCheckpointer(folder, engine, optimizer, **options)
    yield checkpointer
    checkpointer.close()


def saved_files(root: str | Path) -> dict[str, list[str]]:
    """Files of shards by node, without their save's own name: the ranks that wrote them."""
    return {
        node.name: sorted(file.name.split("_")[-2] for file in node.glob("step-*/*.distcp"))
        for node in sorted(Path(root).iterdir())
    }


def save_local(root: str, ranks_per_node: int, config: Config | None, step: int = 3) -> Any:
    model, engine, optimizer = small() if config is None else trained(config)
    position = Position(100 + rank())
    extra = {"data": position}
    with local_checkpointer(root, engine, optimizer, ranks_per_node, extra=extra) as checkpointer:
        checkpointer.save(step)
    return contents(model, engine, optimizer)


def load_local(
    root: str, ranks_per_node: int, config: Config | None, expected: Any
) -> tuple[int | None, int, list[str], list[int]]:
    """The loaded step and position, what differs from ``expected``, and steps found before."""
    model, engine, optimizer = small(seed=7) if config is None else trained(config, seed=7)
    position = Position()
    extra = {"data": position}
    with local_checkpointer(root, engine, optimizer, ranks_per_node, extra=extra) as checkpointer:
        steps = checkpointer.steps()
        report = checkpointer.load()
    found = contents(model, engine, optimizer)
    return report.step, position.index, different(found, expected), steps


def lose(root: Path, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(root / f"node{node}")


@pytest.mark.parametrize("config", FOUR.values(), ids=FOUR)
def test_each_node_may_be_lost_at_any_levels(ranks: Ranks, tmp_path: Path, config: Config) -> None:
    expected = ranks.run(save_local, str(tmp_path), 2, config, world_size=4)[0]
    shutil.copytree(tmp_path / "node0", tmp_path / "kept")
    lose(tmp_path, 0)
    found = ranks.run(load_local, str(tmp_path), 2, config, expected, world_size=4)
    assert found == [(3, 100 + each, [], [3]) for each in range(4)]
    lose(tmp_path, 1)
    (tmp_path / "kept").rename(tmp_path / "node1")
    found = ranks.run(load_local, str(tmp_path), 2, config, expected, world_size=4)
    assert found == [(3, 100 + each, [], [3]) for each in range(4)]


def test_each_file_is_on_its_node_and_on_the_next(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_local, str(tmp_path), 1, None, world_size=4)
    assert saved_files(tmp_path) == {
        "node0": ["0", "3"],
        "node1": ["0", "1"],
        "node2": ["1", "2"],
        "node3": ["2", "3"],
    }


@pytest.mark.parametrize(
    ("lost", "world_size", "ranks_per_node"),
    [
        ((), 4, 1),
        ((0,), 4, 1),
        ((1, 3), 4, 1),  # not neighbours
        ((2,), 3, 1),  # the nodes that are left, one with another number
        ((0, 2), 2, 1),
        ((3,), 1, 4),
        ((), 4, 4),  # one node, which has the files of two ranks
    ],
)
def test_any_ranks_load_what_is_left(
    ranks: Ranks, tmp_path: Path, lost: tuple[int, ...], world_size: int, ranks_per_node: int
) -> None:
    expected = ranks.run(save_local, str(tmp_path), 1, None, world_size=4)[0]
    lose(tmp_path, *lost)
    left = sorted(node for node in tmp_path.iterdir())
    for number, node in enumerate(left):
        node.rename(tmp_path / f"left{number}")
    for number in range(len(left)):
        (tmp_path / f"left{number}").rename(tmp_path / f"node{number}")
    arguments = str(tmp_path), ranks_per_node, None, expected
    if ranks_per_node == 4:
        with pytest.raises(Exception, match=r"expected the latest complete checkpoint.*found none"):
            ranks.run(load_local, *arguments, world_size=world_size)
        return
    found = ranks.run(load_local, *arguments, world_size=world_size)
    same = world_size == 4
    assert found == [(3, 100 + each if same else 100, [], [3]) for each in range(world_size)]
    # Nothing is left of the load, and nothing was added to the checkpoint.
    assert not list(tmp_path.glob("node*/.loading*"))


def test_neighbours_that_are_lost_are_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_local, str(tmp_path), 1, None, world_size=4)
    lose(tmp_path, 3, 0)
    with pytest.raises(Exception, match=r"step: expected the latest complete checkpoint in the "):
        ranks.run(load_local, str(tmp_path), 1, None, None, world_size=4)


@pytest.mark.parametrize("world_size", [0, 1, 2])
def test_one_node_keeps_its_ranks_checkpoints(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    expected = run_on(ranks, world_size, save_local, str(tmp_path), 4, None)[0]
    found = run_on(ranks, world_size, load_local, str(tmp_path), 4, None, expected)
    assert found == [(3, 100 + each, [], [3]) for each in range(max(world_size, 1))]


def test_a_shared_checkpointer_loads_a_nodes_full_copy(ranks: Ranks, tmp_path: Path) -> None:
    """The format is that of other checkpoints: of two nodes, each has all files."""
    expected = ranks.run(save_local, str(tmp_path), 1, None, world_size=2)[0]
    assert ranks.run(load_shared, str(tmp_path / "node1"), expected, world_size=4) == [[]] * 4


def load_shared(folder: str, expected: Any) -> list[str]:
    model, engine, optimizer = small(seed=7)
    fe.Checkpointer(folder, engine, optimizer).load(verify=True)
    return different(contents(model, engine, optimizer), expected)


# --- saves that fail, or stop half way ---


@contextmanager
def failing(owner: Any, name: str, on_rank: int) -> Iterator[None]:
    """A method raises on one rank, as on a full disk."""
    original = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if rank() == on_rank:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, original)


class File(FileIO):
    """Its methods can be replaced."""


FAILURES = {
    "received file": (File, "write"),
    "sent file": (File, "readinto"),
    "publishing": (CheckpointDirectory, "publish"),
}


@pytest.mark.parametrize("where", FAILURES)
@on_ranks(4)
def test_a_failure_on_one_rank_is_raised_on_all_and_the_save_before_stays(where: str) -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    local_directory.FileIO = File  # type: ignore[attr-defined]
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        checkpointer.save(1)
        before = contents(model, engine, optimizer)
        for save in (checkpointer.save, checkpointer.save_async):
            train(model, optimizer)
            with (
                failing(*FAILURES[where], on_rank=2),
                pytest.raises(RuntimeError, match=r"saving step 2 failed: .*No space left"),
            ):
                save_and_wait(checkpointer, save)
            dist.barrier()
            assert checkpointer.steps() == [1]
        assert checkpointer.load().step == 1
        assert different(contents(model, engine, optimizer), before) == []
        checkpointer.save(2)
        checkpointer.wait()  # for the removal of the first
        dist.barrier()
        assert checkpointer.steps() == [2]
        folders = {path.name for path in node_folder(root, 1).iterdir()} - {".lock"}
        assert len(folders) == 1


def save_and_wait(checkpointer: fe.LocalCheckpointer, save: Callable[[int], None]) -> None:
    save(2)
    checkpointer.wait()


@on_ranks(4)
def test_a_save_that_was_not_published_on_all_nodes_is_not_loaded_and_goes() -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer, keep=2) as checkpointer:
        checkpointer.save(10)
        before = contents(model, engine, optimizer)
        train(model, optimizer)
        checkpointer.save(20)
        # As if nodes had died after the first two had published step 20.
        if rank() >= 2:
            shutil.rmtree(next(node_folder(root, 1).glob("step-*20")))
        dist.barrier()
        assert checkpointer.steps() == [10]
        assert checkpointer.load().step == 10
        assert different(contents(model, engine, optimizer), before) == []
        checkpointer.save(15)
        assert checkpointer.steps() == [10, 15]
        checkpointer.wait()
        dist.barrier()
        assert not list(node_folder(root, 1).glob("step-*20*"))


@on_ranks(4)
def test_ranks_that_are_lost_while_all_publish_leave_one_complete_checkpoint() -> None:
    """Two neighbours do not learn that all have published; the others remove the one before."""
    root = shared_folder()
    _, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        checkpointer.save(1)
        with without_an_answer(on_ranks=(0, 1)):
            if rank() < 2:
                with pytest.raises(RuntimeError, match="rank 3 has ended"):
                    checkpointer.save(2)
            else:
                with pytest.raises(RuntimeError, match="rank 0 has ended"):
                    checkpointer.save(2)
        if rank() >= 2:
            checkpointer._retire(2)  # as they do when all have published
        dist.barrier()
        assert checkpointer.steps() == [2]
        assert checkpointer.load().step == 2


@contextmanager
def without_an_answer(on_ranks: tuple[int, ...]) -> Iterator[None]:
    """After all have published, some ranks do not learn it, and the others lose them after it."""
    original, original_agree = local_directory.gather_objects, local_directory.agree

    def gather(*args: Any) -> Any:
        answers = original(*args)
        if rank() in on_ranks:
            raise RuntimeError("rank 3 has ended")
        local_directory.agree = lose_ranks
        return answers

    def lose_ranks(*args: Any) -> Any:
        raise RuntimeError("rank 0 has ended")

    local_directory.gather_objects = gather
    try:
        yield
    finally:
        local_directory.gather_objects, local_directory.agree = original, original_agree


@on_ranks(2)
def test_a_step_that_is_saved_again_replaces_the_first() -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        checkpointer.save(5)
        train(model, optimizer)
        checkpointer.save_async(5)
        checkpointer.wait()
        expected = contents(model, engine, optimizer)
        train(model, optimizer)
        assert checkpointer.load(5).step == 5
        assert different(contents(model, engine, optimizer), expected) == []
        checkpointer.close()
        assert len(list(node_folder(root, 1).glob("step-*"))) == 1


@on_ranks(2)
def test_a_damaged_copy_is_an_error_on_all_ranks_that_names_the_tensor() -> None:
    root = shared_folder()
    _, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        checkpointer.save(1)
        if rank() == 0:
            file = next(Path(root).glob("node0/step-*/__shards_*_0_*.distcp"))
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        dist.barrier()
        with pytest.raises(ValueError, match=r"found 1 that are not"):
            checkpointer.load(verify=True)


@on_ranks(2)
def test_a_damaged_manifest_is_another_nodes_to_replace() -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        checkpointer.save(1)
        expected = contents(model, engine, optimizer)
        if rank() == 1:
            next(Path(root).glob("node1/step-*/manifest.json")).write_text("{}")
        train(model, optimizer)
        if rank() == 1:
            with pytest.warns(UserWarning, match="is not loaded"):
                assert checkpointer.load().step == 1
        else:
            assert checkpointer.load().step == 1
        assert different(contents(model, engine, optimizer), expected) == []


@on_ranks(2)
def test_removed_checkpoints_are_gone_on_all_nodes() -> None:
    root = shared_folder()
    _, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer, keep=3) as checkpointer:
        checkpointer.save(1)
        checkpointer.save_async(2)
        checkpointer.remove()
        assert [path.name for path in node_folder(root, 1).iterdir()] == [".lock"]
        assert checkpointer.steps() == []
        checkpointer.save(3)
        assert checkpointer.steps() == [3]


@on_ranks(2)
def test_a_directory_that_cannot_be_created_is_an_error_on_all_ranks() -> None:
    root = shared_folder()
    _, engine, optimizer = small()
    if rank() == 1:
        (Path(root) / "node1").write_text("a file")
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        for method in (lambda: checkpointer.save(1), checkpointer.steps, checkpointer.load):
            with pytest.raises(OSError, match="File exists"):
                method()


# --- how files reach nodes ---


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 13])
def test_metadata_reaches_all_nodes_from_nodes_that_have_it(num_nodes: int) -> None:
    nodes = Nodes([[2 * node, 2 * node + 1] for node in range(num_nodes)], rank=0)
    having = {0}
    for transfers in _to_all_nodes({"a": 1}, nodes):
        senders = [each.sender for each in transfers]
        receivers = [each.receiver for each in transfers]
        assert {*senders} <= having
        assert len({*senders, *receivers}) == 2 * len(transfers)  # all at once
        having |= {*receivers}
    assert having == {2 * node for node in range(num_nodes)}


@on_ranks(4)
def test_ranks_with_one_directory_are_a_node() -> None:
    root = shared_folder()
    _, engine, _ = small()
    # Ranks of a node need not be consecutive, and a node may have more ranks than others.
    folder = Path(root) / ("first" if rank() in (0, 2, 3) else "second")
    nodes = Nodes.find(folder, engine.ranks)
    assert nodes.ranks_of == [[0, 2, 3], [1]]
    checkpointer = fe.LocalCheckpointer(folder, engine)
    checkpointer.save(1)
    assert checkpointer.load().step == 1
    assert len(list(Path(root).glob("*/step-*/*.distcp"))) == 8


def test_leftovers_of_a_killed_load_are_removed(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    left = directory.begin_load()
    (left / "file").write_bytes(b"content")
    directory.begin()
    assert not left.exists()
