"""Manages a directory of checkpoints on each node, with copies of the files on the next node.

The directories are in memory or on disks of the nodes. Each rank writes its file into the directory
of its node, and the file is then sent to the next node. So all files of a checkpoint exist unless
two neighbouring nodes are lost. A checkpoint is published, by a rename on each node, when all
copies are complete. Older checkpoints are removed when all nodes have published the new one. So at
any time the nodes together have all files of a checkpoint.

To load, ranks compare the folders of their nodes. The folders of one save have the same manifest.
The newest save of which each file exists on some node is loaded. If the ranks of a node read a file
that the node does not have, another node sends it. Such files exist only after the loss of a node,
or if the number of nodes has changed.

[Note: Files of a load]
A received file must not be added to a published folder, and a file that a node has may be removed
by a later save. So each node loads from a folder of hard links to its files, into which it also
receives the missing files. The folder is removed after the load.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from fsdp_engine.checkpoint.files import CheckpointFiles
from fsdp_engine.checkpoint.folder import files_of
from fsdp_engine.checkpoint.job_directory import JobDirectory, Step, WriteFiles, choose
from fsdp_engine.checkpoint.manifest import MANIFEST, Manifest
from fsdp_engine.checkpoint.model_state import RANKS
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import gather_objects, receive_, send
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.memory import allocator

_CHUNK_BYTES = 16 << 20
# File with an identifier of the running system, which is the same in all of its containers.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Nodes:
    """The nodes of a job: groups of ranks that have the same directory.

    Args:
        ranks_of: The ranks of each node, ascending. Nodes are in the order of their first ranks.
        rank: The index of this rank.

    Attributes:
        own: The index of this rank's node.
    """

    def __init__(self, ranks_of: Sequence[Sequence[int]], rank: int) -> None:
        self.ranks_of = ranks_of
        self.own = next(node for node, ranks in enumerate(ranks_of) if rank in ranks)

    @classmethod
    def find(cls, path: Path, ranks: Ranks) -> Nodes:
        """Create the directory, and compare the directories of all ranks. Collective.

        Raises:
            OSError: The directory cannot be created. All ranks raise.
        """
        error: Exception | None = None
        identity: tuple[str, int, int] | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            status = path.stat()
            identity = (_BOOT_ID.read_text(), status.st_dev, status.st_ino)
        except OSError as caught:
            error = caught
        what = f"the directory {path}"
        found = agree(what, error, ranks.control_group, identity, call="the directories of nodes")
        groups: dict[tuple[str, int, int], list[int]] = {}
        for rank, each in enumerate(found):
            groups.setdefault(each, []).append(rank)
        return cls(list(groups.values()), ranks.rank)

    @property
    def number(self) -> int:
        """Number of nodes."""
        return len(self.ranks_of)

    @property
    def own_ranks(self) -> Sequence[int]:
        """The ranks of this rank's node."""
        return self.ranks_of[self.own]

    def one_of(self, node: int, index: int) -> int:
        """Returns a rank of ``node``. Consecutive indices select its ranks in turn."""
        return self.ranks_of[node][index % len(self.ranks_of[node])]


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends from its folder to the folder of another rank."""

    name: str
    num_bytes: int
    sender: int
    receiver: int


def send_files(
    transfers: Sequence[Transfer], folder: Path, rank: int, group: ProcessGroup | None
) -> None:
    """Send and receive files. Every rank calls it with the same transfers in the same order.

    A rank sends and receives at the same time, both in the order of ``transfers``. So the first
    incomplete transfer can always proceed.

    Args:
        transfers: The transfers of all ranks.
        folder: The folder of the files on this rank.
        rank: The index of this rank.
        group: The group of the ranks.

    Raises:
        Exception: A file cannot be read or written. All other transfers are completed.
    """
    if group is None:
        return

    def send_all() -> list[Exception]:
        return [
            error
            for each in transfers
            if each.sender == rank
            for error in _send_file(each, folder, group)
        ]

    with ThreadPoolExecutor(1, thread_name_prefix="files of a checkpoint") as thread:
        sending = thread.submit(send_all)
        errors = [
            error
            for each in transfers
            if each.receiver == rank
            for error in _receive_file(each, folder, group)
        ]
        errors += sending.result()
    if errors:
        raise errors[0]


def _send_file(each: Transfer, folder: Path, group: ProcessGroup) -> list[Exception]:
    with _GuardedFile(folder / each.name, "rb") as file:
        for part in _parts(each.num_bytes):
            file.read_into(part)
            send(part, group, each.receiver)
    return file.errors


def _receive_file(each: Transfer, folder: Path, group: ProcessGroup) -> list[Exception]:
    with _GuardedFile(folder / each.name, "wb") as file:
        for part in _parts(each.num_bytes):
            receive_(part, group, each.sender)
            file.write(part)
    return file.errors


def _parts(num_bytes: int) -> Iterator[Tensor]:
    chunk = allocator.empty(min(num_bytes, _CHUNK_BYTES), torch.uint8, "cpu")
    for start in range(0, num_bytes, _CHUNK_BYTES):
        yield chunk[: num_bytes - start]


class _GuardedFile:
    """A file that stores errors instead of raising them, because the other rank of a transfer would
    wait forever. After an error it is not read or written any further.

    Attributes:
        errors: The errors that have occurred.
    """

    def __init__(self, path: Path, mode: Literal["rb", "wb"]) -> None:
        self.errors: list[Exception] = []
        self._path = path
        self._file: FileIO | None = None
        with self._guard():
            self._file = FileIO(path, mode)

    def __enter__(self) -> _GuardedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with self._guard():
                if self._file.writable():
                    os.fsync(self._file.fileno())
            self._file.close()

    def read_into(self, part: Tensor) -> None:
        """Fill ``part`` with the next bytes."""
        self._move(part, lambda view, file: file.readinto(view))

    def write(self, part: Tensor) -> None:
        """Append ``part``."""
        self._move(part, lambda view, file: file.write(view))

    def _move(self, part: Tensor, move: Callable[[memoryview, FileIO], int]) -> None:
        if self._file is None or self.errors:
            return
        view = memoryview(part.numpy())  # type: ignore[arg-type]
        with self._guard():
            while len(view):
                count = move(view, self._file)
                if not count:
                    raise OSError(f"{self._path}: expected {len(view)} bytes more; found the end")
                view = view[count:]

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(error)


@dataclass(frozen=True)
class _Folder:
    """A checkpoint's folder on one node.

    Attributes:
        path: The path of the folder.
        step: The step of the checkpoint.
        generation: The number of the folder among those of its step; see ``directory.py``.
        identity: A checksum of the manifest, which is equal on all nodes of a save.
        num_files: The number of files of the checkpoint on all nodes, without the manifest.
        sizes: The sizes of the files that this node has, in bytes.
    """

    path: Path
    step: int
    generation: int
    identity: int
    num_files: int
    sizes: dict[str, int]

    @classmethod
    def read(cls, path: Path, step: int, generation: int) -> _Folder:
        """Read the manifest of a folder, and list its files that have the sizes in the manifest.

        Raises:
            OSError, ValueError: The manifest cannot be read.
        """
        manifest = Manifest.read(path)
        content = (path / MANIFEST).read_bytes()
        sizes = {
            name: row.bytes
            for name, row in manifest.files.items()
            if (path / name).is_file() and (path / name).stat().st_size == row.bytes
        }
        sizes[MANIFEST] = len(content)
        return cls(path, step, generation, zlib.crc32(content), len(manifest.files), sizes)


class _Save:
    """The folders of one save by node. None: the node has no such folder."""

    def __init__(self, folders: Sequence[_Folder | None]) -> None:
        self.folders = folders
        self.sizes: dict[str, int] = {}
        for each in folders:
            self.sizes |= each.sizes if each is not None else {}
        existing = [each for each in folders if each is not None]
        self.step = existing[0].step
        self.generation = max(each.generation for each in existing)
        self.is_complete = len(self.sizes) == existing[0].num_files + 1


class LocalFiles(CheckpointFiles):
    """The files of a checkpoint in a folder on each node. See [Note: Files of a load].

    Args:
        folder: The folder of this rank's node.
        ranks: The ranks that load.
        nodes: The nodes of the ranks.
        held: The names of the files in the folder of each node.
        sizes: The sizes of all files of the checkpoint, in bytes.
        group: The process group over which files are sent.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        nodes: Nodes,
        held: Sequence[set[str]],
        sizes: Mapping[str, int],
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(folder, ranks)
        self._nodes = nodes
        self._held = held
        self._sizes = sizes
        self._group = group

    def to_check(self, names: Iterable[str]) -> list[str]:
        """Returns the files among ``names`` in this node's folder that this rank checks."""
        own = self._nodes.own_ranks
        there = sorted(self._held[self._nodes.own].intersection(names))
        return there[own.index(self._ranks.rank) :: len(own)]

    def fetch(self, names_to_read: Callable[[], Iterable[str]]) -> None:
        """Receive the files that this node's ranks read but the node does not have. Collective.

        Raises:
            OSError: A file cannot be read or written. All ranks raise.
        """
        what, control = "files of other nodes", self._ranks.control_group
        missing: set[str] = set()
        error: Exception | None = None
        try:
            missing = set(names_to_read()) - self._held[self._nodes.own]
        except Exception as caught:
            error = caught
        by_rank = agree(what, error, control, missing)
        transfers = []
        holders = {
            name: [node for node, held in enumerate(self._held) if name in held]
            for name in sorted(set().union(*by_rank))
        }
        for node, ranks in enumerate(self._nodes.ranks_of):
            wanted = sorted(set().union(*(by_rank[rank] for rank in ranks)))
            for index, name in enumerate(wanted):
                source = holders[name][(node + index) % len(holders[name])]
                sender = self._nodes.one_of(source, index)
                receiver = self._nodes.one_of(node, index)
                transfers.append(Transfer(name, self._sizes[name], sender, receiver))
            self._held[node].update(wanted)
        try:
            send_files(transfers, self.folder, self._ranks.rank, self._group)
        except Exception as caught:
            error = caught
        agree(what, error, control)


class LocalDirectory(JobDirectory):
    """A directory on each node; see the module docstring.

    The first call of :meth:`meet`, :meth:`steps`, :meth:`open` or :meth:`retire` compares the
    directories of all ranks. This call is collective.

    Args:
        path: The path of the directory on this rank's node; created if it does not exist.
        ranks: The ranks that save and load.
        timeout: The timeout of the collectives of saves.
    """

    @cached_property
    def _nodes(self) -> Nodes:
        return Nodes.find(self.path, self._ranks)

    @property
    def _is_leader(self) -> bool:
        """Whether this rank creates, renames and removes the folders of its node."""
        return self._nodes.own_ranks[0] == self._ranks.rank

    def meet(self) -> None:
        """Create the process group, and find the ranks that have the same directory. Collective."""
        super().meet()
        self._nodes  # noqa: B018

    def begin(self) -> Path | None:
        """Create the folder of a save if this rank is the first one of its node."""
        return self._directory.begin() if self._is_leader else None

    def staging(self, created: Sequence[Path | None]) -> Path:
        """Returns the folder of this rank's node."""
        folder = created[self._nodes.own_ranks[0]]
        assert folder is not None
        return folder

    def write(self, write: WriteFiles, staging: Path, step: int) -> None:
        """Write the files, copy them to the next node, and publish the checkpoint."""
        write(lambda: None)
        what, nodes, group = f"copies of step {step}", self._nodes, self.host_group()
        found: dict[str, int] = {}
        error: Exception | None = None
        try:
            if self._is_leader:
                found = {each.name: each.stat().st_size for each in staging.iterdir()}
        except OSError as caught:
            error = caught
        by_rank = agree(what, error, group, found)
        sizes = [by_rank[ranks[0]] for ranks in nodes.ranks_of]
        first = {name: sizes[0].pop(name) for name in (METADATA, MANIFEST)}
        to_next = [
            Transfer(
                name, num_bytes, nodes.one_of(node, index), nodes.one_of(_next(node, nodes), index)
            )
            for node, files in enumerate(sizes)
            for index, (name, num_bytes) in enumerate(sorted(files.items()))
            if nodes.number > 1
        ]
        for transfers in (*_to_all_nodes(first, nodes), to_next):
            try:
                send_files(transfers, staging, self._ranks.rank, group)
            except Exception as caught:
                error = error or caught
        agree(what, error, group)
        published: Path | None = None
        try:
            if self._is_leader:
                published = self._directory.publish(staging, step)
        except OSError as caught:
            error = caught
        # The published checkpoint is discarded only after this rank has received a failure from
        # some rank. If the exchange itself fails because a rank is lost, the checkpoint is kept:
        # other ranks may have received success, and removed the previous checkpoint.
        if any(gather_objects(error is not None, group, what)) and published is not None:
            self._directory.discard(published)
        agree(what, error, group)

    def discard(self, staging: Path) -> None:
        """Remove the folder of a failed save on this node."""
        if self._is_leader:
            self._directory.discard(staging)

    def retire(self, keep: int | None, step: int) -> None:
        """Remove all but the ``keep`` latest steps up to ``step``. Later steps are also removed:
        they were not published on all nodes, or were saved before an older step was loaded."""
        if self._is_leader:
            self._directory.retire(keep, newest=step)

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints of which all files exist, ascending. Collective."""
        return sorted(self._complete("steps()"))

    @contextmanager
    def open(self, step: Step) -> Iterator[CheckpointFiles]:
        """Context in which each node reads from a folder of links. See [Note: Files of a load].
        Collective."""
        what, nodes, control = f"load({step!r})", self._nodes, self._ranks.control_group
        complete = self._complete(what)
        save = complete[choose(step, list(complete), f"the nodes' directories {self.path}")]
        own = save.folders[nodes.own]
        folder: Path | None = None
        error: Exception | None = None
        try:
            if self._is_leader:
                folder = self._directory.begin_load()
                if own is not None:
                    for name in own.sizes:
                        os.link(own.path / name, folder / name)
        except OSError as caught:
            error = caught
        try:
            folders = agree(what, error, control, folder)
            folder = folders[nodes.own_ranks[0]]
            held = [set(each.sizes) if each is not None else set() for each in save.folders]
            files = LocalFiles(folder, self._ranks, nodes, held, save.sizes, self.host_group())
            files.fetch(lambda: (METADATA, MANIFEST))
            files.fetch(lambda: _files_of_objects(folder, self._ranks.rank))
            yield files
        finally:
            if folder is not None and self._is_leader:
                self._directory.discard(folder)

    def _complete(self, what: str) -> dict[int, _Save]:
        """Returns the newest complete save of each step. Collective."""
        found: list[_Folder] = []
        error: Exception | None = None
        try:
            if self._is_leader:
                found = list(self._own_folders())
        except Exception as caught:  # warnings may be errors
            error = caught
        by_rank = agree(what, error, self._ranks.control_group, found)
        saves: dict[tuple[int, int], list[_Folder | None]] = {}
        for node, ranks in enumerate(self._nodes.ranks_of):
            for folder in by_rank[ranks[0]]:
                row = saves.setdefault((folder.step, folder.identity), [None] * self._nodes.number)
                row[node] = folder
        complete = [each for each in map(_Save, saves.values()) if each.is_complete]
        return {each.step: each for each in sorted(complete, key=lambda each: each.generation)}

    def _own_folders(self) -> Iterator[_Folder]:
        for generation, step, path in sorted(self._directory.folders()):
            try:
                yield _Folder.read(path, step, generation)
            except ValueError as error:
                warnings.warn(f"{path} is not loaded: {error}", stacklevel=2)


def _next(node: int, nodes: Nodes) -> int:
    return (node + 1) % nodes.number


def _to_all_nodes(sizes: Mapping[str, int], nodes: Nodes) -> Iterator[list[Transfer]]:
    """Yield the transfers of node 0's files to all nodes, in rounds. In each round, all nodes that
    have the files send them."""
    distance = 1
    while distance < nodes.number:
        yield [
            Transfer(name, num_bytes, nodes.ranks_of[node][0], nodes.ranks_of[node + distance][0])
            for node in range(min(distance, nodes.number - distance))
            for name, num_bytes in sizes.items()
        ]
        distance *= 2


def _files_of_objects(folder: Path, rank: int) -> set[str]:
    """Returns the names of the files with the objects that a rank reads: all objects except the
    states of other ranks."""
    metadata = read_metadata(folder)
    return files_of(
        {
            key: None
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, BytesStorageMetadata)
            and (not key.startswith(f"{RANKS}.") or key == f"{RANKS}.{rank}")
        },
        metadata,
    )
