"""Writes the files of a checkpoint in DCP's format, with checksums, and syncs them to disk.

The writer of ``torch.distributed.checkpoint`` writes the files. This module adds checksums of the
written bytes, and chooses file names.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_engine.checkpoint.checksums import FileSums
from fsdp_engine.checkpoint.dcp_metadata import METADATA, add_sums, seal_of
from fsdp_engine.checkpoint.direct_file import DirectFile
from fsdp_engine.checkpoint.manifest import FileRow
from fsdp_engine.memory import allocator

# File names are the prefix, eight hexadecimal digits that identify the save, the rank, DCP's number
# of the file, and the suffix: ``__shards_1c291ca3_0_0.distcp``.
PREFIX, SUFFIX = "__shards_", ".distcp"


class _ChecksummingFiles(FileSystem):
    """File system for DCP's writer that records the size and checksums of each written file."""

    def __init__(self) -> None:
        self.rows: dict[str, FileRow] = {}
        self.sums: dict[str, FileSums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Context with an open file, as in DCP's class. Records the size and checksums of written
        files."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        name = Path(path).name
        with DirectFile(Path(path)) as file:
            yield file
            if name.startswith(METADATA):
                file.write(seal_of(file.sums.whole()))
                os.fsync(file.fileno())
        self.rows[name] = FileRow(file.num_bytes, f"{file.crc:08x}")
        self.sums[name] = file.sums.result()


@dataclasses.dataclass(frozen=True)
class _Written(WriteResult):
    """The first result of a rank, with sizes and checksums of the rank's files."""

    rows: dict[str, FileRow] = dataclasses.field(default_factory=dict)
    sums: dict[str, FileSums] = dataclasses.field(default_factory=dict)


class SavePlanner(dcp.DefaultSavePlanner):
    """Planner that passes tensors to the writer without copies.

    DCP writes full storages, so it would clone a slice of a flat buffer. Here the slice gets a
    separate storage over the same memory.
    """

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the value to write for an item of the plan."""
        value = super().resolve_data(write_item)
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.is_contiguous():
            return allocator.with_own_storage(value)
        return value


class Writer(dcp.FileSystemWriter):
    """Writes and syncs a checkpoint's files.

    Args:
        folder: The folder of the checkpoint.
        finished: Function that the coordinator calls when all files are written, with the metadata
            and a row for each file. All ranks raise its exceptions.
    """

    def __init__(
        self, folder: Path, finished: Callable[[Metadata, dict[str, FileRow]], None]
    ) -> None:
        super().__init__(folder)
        self.fs = self._files = _ChecksummingFiles()
        self._finished = finished
        self._save = ""  # set on the coordinator until the metadata is written

    def discard(self) -> None:
        """Remove the files of a failed save. Does nothing on ranks other than the coordinator.
        Files of a complete checkpoint are not removed."""
        if self._save:
            for file in Path(self.path).glob(f"{PREFIX}{self._save}_*"):
                file.unlink(missing_ok=True)
            (Path(self.path) / f"{METADATA}.tmp").unlink(missing_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder, without DCP's warning about an existing checkpoint."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose file names for all ranks that are unique to this save. Only the coordinator calls
        this method.

        Files with DCP's names would overwrite those of an older checkpoint in the folder.
        """
        self._save = save = uuid.uuid4().hex[:8]
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{PREFIX}{save}_{rank}_"
                ),
            )
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and attach sizes and checksums of the files to the first
        result."""
        results = super().write_data(plan, planner).wait()
        if results:
            first = results[0]
            # The dicts are copied, because a single process does not serialize the results. They
            # would otherwise change when the coordinator writes the metadata.
            results[0] = _Written(
                first.index,
                first.size_in_bytes,
                first.storage_data,
                dict(self._files.rows),
                dict(self._files.sums),
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata. The coordinator calls it after all ranks have written."""
        rows: dict[str, FileRow] = {}
        sums: dict[str, FileSums] = {}
        for result in chain.from_iterable(results):
            if isinstance(result, _Written):
                rows |= result.rows
                sums |= result.sums
        add_sums(metadata, sums)
        super().finish(metadata, results)
        self._save = ""
        rows[METADATA] = next(
            row for name, row in self._files.rows.items() if name.startswith(METADATA)
        )
        self._finished(metadata, rows)
