"""Checkpoints in directories of the nodes: the next node has a copy of each node's files."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.checkpoint import local_directory
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.local_directory import Nodes, _to_all_nodes
from tests.checkpoint.scene import (
    Values,
    contents,
    different,
    failing,
    flip,
    raises_each,
    rank,
    shared_folder,
    small,
    train,
)
from tests.pool import Ranks, on_ranks


def node_folder(root: str, ranks_per_node: int) -> Path:
    return Path(root) / f"node{rank() // ranks_per_node}"


@contextmanager
def local_checkpointer(
    root: str, engine: Any, optimizer: Any, ranks_per_node: int = 1, **options: Any
) -> Iterator[fe.LocalCheckpointer]:
    """A checkpointer for a directory of this rank's node, closed after the block."""
    folder = node_folder(root, ranks_per_node)
    checkpointer = fe.LocalCheckpointer(folder, engine, optimizer, **options)
    yield checkpointer
    checkpointer.close()


def save_local(root: str, ranks_per_node: int) -> Any:
    model, engine, optimizer = small("optim_grads_params")
    extra = {"data": Values(100 + rank())}
    with local_checkpointer(root, engine, optimizer, ranks_per_node, extra=extra) as checkpointer:
        checkpointer.save(3)
    return contents(model, optimizer)


def load_local(root: str, ranks_per_node: int, expected: Any) -> Any:
    """Loaded step and ``extra``, differences from ``expected``, available steps; or the error."""
    model, engine, optimizer = small("optim", seed=7, steps=0)
    extra = {"data": Values()}
    with local_checkpointer(root, engine, optimizer, ranks_per_node, extra=extra) as checkpointer:
        try:
            steps = checkpointer.steps()
            report = checkpointer.load()
        except (FileNotFoundError, RuntimeError) as error:
            return str(error)
    return report.step, extra["data"].value, different(contents(model, optimizer), expected), steps


# Ranks per node at the save; lost nodes; at the load, number of ranks and ranks per node; whether
# all files are left.
LOSSES: list[tuple[int, tuple[int, ...], int, int, bool]] = [
    (1, (), 4, 1, True),
    (1, (1, 3), 4, 1, True),  # not neighbours
    (1, (2,), 3, 1, True),  # the remaining nodes, one of them renumbered
    (1, (0, 2), 2, 1, True),
    (1, (3,), 1, 4, False),
    (1, (), 4, 4, False),  # one node, which has the files of two ranks
    (1, (3, 0), 4, 1, False),  # neighbours
    (1, (0,), 4, 1, True),
    (2, (0,), 4, 2, True),
    (2, (1,), 4, 2, True),
    (4, (), 4, 4, True),  # one node
]


@pytest.mark.filterwarnings("ignore:.*of rank 0")
def test_any_ranks_load_the_files_that_are_left(ranks: Ranks, tmp_path: Path) -> None:
    saved = {number: tmp_path / f"by {number}" for number in (1, 2, 4)}
    expected = {
        number: ranks.run(save_local, str(folder), number)[0] for number, folder in saved.items()
    }
    # Each node has its own rank's file and that of the previous node.
    files = {
        node.name: sorted(file.name.split("_")[-2] for file in node.glob("step-*/*.distcp"))
        for node in saved[1].iterdir()
    }
    assert files == {f"node{n}": sorted({str(n), str((n - 1) % 4)}) for n in range(4)}
    for number, (by, lost, world_size, ranks_per_node, is_whole) in enumerate(LOSSES):
        root = tmp_path / str(number)
        left = [node for node in sorted(saved[by].iterdir()) if int(node.name[-1]) not in lost]
        for place, node in enumerate(left):
            shutil.copytree(node, root / f"node{place}")
        call = (load_local, str(root), ranks_per_node, expected[by])
        found = ranks.run(*call, world_size=world_size)
        if is_whole:
            positions = [100 + each if world_size == 4 else 100 for each in range(world_size)]
            assert found == [(3, position, [], [3]) for position in positions]
        else:
            for error in found:
                assert re.search("expected a complete checkpoint.*found none", error)
        # Nothing is left of the load, and nothing was added to the checkpoint.
        assert not list(root.glob("node*/.loading*"))


def load_shared(folder: str, expected: Any) -> list[str]:
    model, engine, optimizer = small(seed=7, steps=0)
    fe.Checkpointer(folder, engine, optimizer).load(verify=True)
    return different(contents(model, optimizer), expected)


def test_a_shared_checkpointer_loads_a_nodes_full_copy(ranks: Ranks, tmp_path: Path) -> None:
    """The format is that of other checkpoints, and each of two nodes has all files."""
    expected = ranks.run(save_local, str(tmp_path), 1, world_size=2)[0]
    assert ranks.run(load_shared, str(tmp_path / "node1"), expected, world_size=4) == [[]] * 4


# --- saves that fail, or stop half way ---


class File(FileIO):
    """Its methods can be replaced."""


# Receiving a file, sending a file and publishing fail.
FAILURES: list[Any] = [(File, "write"), (File, "readinto"), (CheckpointDirectory, "publish")]


@on_ranks(4)
def test_a_failure_on_one_rank_is_raised_on_all_and_the_save_before_stays() -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    with (
        patch.object(local_directory, "FileIO", File),
        local_checkpointer(root, engine, optimizer) as checkpointer,
    ):
        for step, fault in enumerate(FAILURES, 1):
            checkpointer.save(step)
            before = contents(model, optimizer)
            for save in (checkpointer.save, checkpointer.save_async):
                train(model, optimizer)
                with failing(*fault, on_rank=2):
                    message = rf"saving step {step + 1} failed: .*No space left"
                    with pytest.raises(RuntimeError, match=message):
                        save_and_wait(checkpointer, save, step + 1)
                dist.barrier()
                assert checkpointer.steps() == [step]
            assert checkpointer.load().step == step
            assert different(contents(model, optimizer, whole=False), before) == []
            save_and_wait(checkpointer, checkpointer.save, step + 1)  # the first is removed
            dist.barrier()
            assert checkpointer.steps() == [step + 1]
            folders = {path.name for path in node_folder(root, 1).iterdir()} - {".lock"}
            assert len(folders) == 1


def save_and_wait(checkpointer: fe.LocalCheckpointer, save: Any, step: int) -> None:
    save(step)
    checkpointer.wait()


@on_ranks(4)
def test_a_save_that_was_not_published_on_all_nodes_is_not_loaded_and_goes() -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer, keep=2) as checkpointer:
        checkpointer.save(10)
        before = contents(model, optimizer)
        train(model, optimizer)
        checkpointer.save(20)
        # As if the other nodes had died after the first two nodes had published step 20.
        if rank() >= 2:
            shutil.rmtree(next(node_folder(root, 1).glob("step-*20")))
        dist.barrier()
        assert checkpointer.steps() == [10]
        assert checkpointer.load().step == 10
        assert different(contents(model, optimizer), before) == []
        checkpointer.save(15)
        assert checkpointer.steps() == [10, 15]
        checkpointer.wait()
        dist.barrier()
        assert not list(node_folder(root, 1).glob("step-*20*"))


@on_ranks(4)
def test_ranks_that_are_lost_while_all_publish_leave_one_complete_checkpoint() -> None:
    """Two neighbours do not learn that all ranks have published; the others remove the earlier
    checkpoint."""
    root = shared_folder()
    _, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        checkpointer.save(1)
        lost = "rank 3" if rank() < 2 else "rank 0"
        with without_an_answer(), pytest.raises(RuntimeError, match=f"{lost} has ended"):
            checkpointer.save(2)
        if rank() >= 2:
            checkpointer._retire(2)  # as ranks do after all have published
        dist.barrier()
        assert checkpointer.steps() == [2]
        assert checkpointer.load().step == 2


@contextmanager
def without_an_answer() -> Iterator[None]:
    """After all have published, ranks 0 and 1 get an error instead of the answer. The other ranks
    get the answer, and an error from the next ``agree``."""
    original = local_directory.gather_objects

    def gather(*args: Any) -> Any:
        answers = original(*args)
        if rank() < 2:
            raise RuntimeError("rank 3 has ended")
        agree.side_effect = RuntimeError("rank 0 has ended")
        return answers

    with (
        patch.object(local_directory, "gather_objects", gather),
        patch.object(local_directory, "agree", wraps=local_directory.agree) as agree,
    ):
        yield


@on_ranks(2)
def test_a_step_that_is_saved_again_replaces_the_first_and_all_can_be_removed() -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer, keep=3) as checkpointer:
        checkpointer.save(5)
        train(model, optimizer)
        checkpointer.save_async(5)
        checkpointer.wait()
        expected = contents(model, optimizer)
        train(model, optimizer)
        assert checkpointer.load(5).step == 5
        assert different(contents(model, optimizer), expected) == []
        checkpointer.close()
        assert len(list(node_folder(root, 1).glob("step-*"))) == 1
        checkpointer.save_async(6)
        checkpointer.remove()
        assert [path.name for path in node_folder(root, 1).iterdir()] == [".lock"]
        assert checkpointer.steps() == []
        checkpointer.save(3)
        assert checkpointer.steps() == [3]


@on_ranks(2)
def test_a_damaged_manifest_is_another_nodes_to_replace_and_a_copy_is_an_error() -> None:
    root = shared_folder()
    model, engine, optimizer = small()
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        checkpointer.save(1)
        expected = contents(model, optimizer)
        if rank() == 1:
            next(Path(root).glob("node1/step-*/manifest.json")).write_text("{}")
        train(model, optimizer)
        warned = pytest.warns(UserWarning, match="is not loaded") if rank() == 1 else nullcontext()
        with warned:
            assert checkpointer.load().step == 1
        assert different(contents(model, optimizer), expected) == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            raises_each((Exception, "is not loaded", checkpointer.load))
        checkpointer.save(2)
        if rank() == 0:
            flip(next(Path(root).glob("node0/step-*2/__shards_*_0_*.distcp")))
        dist.barrier()
        with pytest.raises(ValueError, match=r"found 1 that differ"):
            checkpointer.load(2, verify=True)


@on_ranks(2)
def test_a_directory_that_cannot_be_created_is_an_error_on_all_ranks() -> None:
    root = shared_folder()
    _, engine, optimizer = small()
    if rank() == 1:
        (Path(root) / "node1").write_text("a file")
    with local_checkpointer(root, engine, optimizer) as checkpointer:
        calls = partial(checkpointer.save, 1), checkpointer.steps, checkpointer.load
        raises_each(*((OSError, "File exists", call) for call in calls))


# --- how files reach nodes ---


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 13])
def test_metadata_reaches_all_nodes_from_nodes_that_have_it(num_nodes: int) -> None:
    nodes = Nodes([[2 * node, 2 * node + 1] for node in range(num_nodes)], rank=0)
    having = {0}
    for transfers in _to_all_nodes({"a": 1}, nodes):
        senders = [each.sender for each in transfers]
        receivers = [each.receiver for each in transfers]
        assert {*senders} <= having
        # All transfers of a round run at the same time.
        assert len({*senders, *receivers}) == 2 * len(transfers)
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
