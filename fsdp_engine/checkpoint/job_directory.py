"""The directory of a job's checkpoints. Rank 0 manages it if all ranks share the storage."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal

from torch.distributed import ProcessGroup

from fsdp_engine.callers import user_stacklevel
from fsdp_engine.checkpoint.directory import CheckpointDirectory, directories_below
from fsdp_engine.checkpoint.files import CheckpointFiles
from fsdp_engine.checkpoint.manifest import MANIFEST
from fsdp_engine.checkpoint.stage_place import Place
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.groups import Ranks

Step = int | Literal["latest"]
# Function that writes this rank's files into a folder. It calls its argument on rank 0 when the
# files of all ranks are complete.
WriteFiles = Callable[[Callable[[], object]], object]


class JobDirectory(ABC):
    """The directory into which all ranks of a job save and from which they load.

    Args:
        path: The path of the directory, which the first save creates.
        ranks: The ranks that save and load.
        timeout: The timeout of the collectives of saves.
    """

    def __init__(self, path: Path, ranks: Ranks, timeout: timedelta) -> None:
        self._directory = CheckpointDirectory(path)
        self._ranks = ranks
        self._timeout = timeout
        self._group: ProcessGroup | None = None
        self._has_warned = False

    @property
    def path(self) -> Path:
        """The path of the directory."""
        return self._directory.path

    def host_group(self) -> ProcessGroup | None:
        """Returns the process group of saves, which training does not use. The first call creates
        it and is collective."""
        if self._group is None:
            self._group = self._ranks.make_host_group(self._timeout)
        return self._group

    def release(self) -> None:
        """Release the lock of the directory and the process group."""
        self._directory.release()
        group, self._group = self._group, None
        self._ranks.free_host_group(group)

    def meet(self) -> None:
        """Run the collectives that :meth:`begin` and :meth:`write` need, before a rank can fail
        alone. Collective."""
        self.host_group()

    def belongs_to(self, place: Place) -> None:
        """Set the pipeline stage of the model (``stage_place.py``). Saves raise an error if the
        directory belongs to another stage."""
        self._directory.place = place

    @abstractmethod
    def begin(self) -> Path | None:
        """Create the folder of a save if this rank is the one that creates it.

        Raises:
            OSError, RuntimeError, ValueError: Errors of :meth:`.CheckpointDirectory.begin`.
        """

    @abstractmethod
    def staging(self, created: Sequence[Path | None]) -> Path:
        """Returns the folder into which this rank writes. ``created`` are the results of
        :meth:`begin` on all ranks."""

    @abstractmethod
    def write(self, write: WriteFiles, staging: Path, step: int) -> None:
        """Write and publish a save. Collective over :meth:`host_group`."""

    @abstractmethod
    def discard(self, staging: Path) -> None:
        """Remove the folder of a failed save."""

    @abstractmethod
    def retire(self, keep: int | None, step: int) -> None:
        """Remove all but the ``keep`` latest steps up to ``step``, which has been saved. A subclass
        determines whether later steps are kept."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, ascending. Collective."""

    @abstractmethod
    def open(self, step: Step) -> AbstractContextManager[CheckpointFiles]:
        """Context in which the files of a checkpoint can be read. Collective.

        Args:
            step: The step of the checkpoint; "latest": the newest complete one.

        Raises:
            FileNotFoundError: There is no such checkpoint. All ranks raise.
        """


class SharedDirectory(JobDirectory):
    """A directory on storage that all ranks share."""

    def begin(self) -> Path | None:
        """Create the folder of a save, on rank 0."""
        return self._directory.begin() if self._ranks.is_first else None

    def staging(self, created: Sequence[Path | None]) -> Path:
        """Returns the folder of rank 0."""
        assert created[0] is not None
        return created[0]

    def write(self, write: WriteFiles, staging: Path, step: int) -> None:
        """Write the files of all ranks, and publish the checkpoint on rank 0."""
        write(lambda: self._directory.publish(staging, step))

    def discard(self, staging: Path) -> None:
        """Remove the folder of a failed save, on rank 0."""
        if self._ranks.is_first:
            self._directory.discard(staging)

    def retire(self, keep: int | None, step: int) -> None:
        """Remove all but the ``keep`` latest steps up to ``step``, on rank 0. Later steps are kept:
        they are those of another run, or were saved before an older step was loaded."""
        if not self._ranks.is_first:
            return
        later = self._directory.retire(keep, step, keeps_later=True)
        if later and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"save({step}): {self._directory.path} has later steps, {later}, of another run or "
                'from before an older step was loaded. load("latest") loads the last of them: '
                "remove their folders, or save into another directory",
                stacklevel=2,
            )

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, as rank 0 finds them. Collective."""
        found: list[int] = []
        error: Exception | None = None
        if self._ranks.is_first:
            try:
                found = list(self._directory.complete())
            except OSError as caught:
                error = caught
        steps = list(agree("steps()", error, self._ranks.control_group, found)[0])
        if self._ranks.is_first and not steps and (below := directories_below(self.path)):
            warnings.warn(
                f"steps(): found no complete checkpoint in {self.path}{below}",
                stacklevel=user_stacklevel(),
            )
        return steps

    @contextmanager
    def open(self, step: Step) -> Iterator[CheckpointFiles]:
        """Context in which all ranks read the folder that rank 0 finds. See
        :meth:`.JobDirectory.open`."""
        folder: Path | None = None
        error: Exception | None = None
        if self._ranks.is_first:
            try:
                folder = self._find(step)
            except Exception as caught:
                error = caught
        folder = agree(f"load({step!r})", error, self._ranks.control_group, folder)[0]
        assert folder is not None
        yield CheckpointFiles(folder, self._ranks)

    def _find(self, step: Step) -> Path:
        complete = self._directory.complete()
        folder = complete[choose(step, complete, str(self.path))]
        if step == "latest" and (newer := self._directory.incomplete(after=max(complete))):
            warnings.warn(
                f"load of the latest step: expected {MANIFEST} in "
                f"{[each.name for each in newer]}; found none, so {folder.name} is loaded",
                stacklevel=5,
            )
        return folder


def choose(step: Step, complete: Sequence[int] | dict[int, Path], where: str) -> int:
    """Returns the number of a step, which may be "latest".

    Raises:
        FileNotFoundError: The step is not in ``complete``.
    """
    if not complete or (step != "latest" and step not in complete):
        if complete:
            found = f"those of steps {sorted(complete)}"
        elif Path(where).is_dir():
            found = f"none{directories_below(Path(where))}"
        else:
            found = "none: there is no such folder"
        which = "a complete checkpoint" if step == "latest" else f"the checkpoint of step {step}"
        raise FileNotFoundError(f"step: expected {which} in {where}; found {found}")
    return max(complete) if step == "latest" else step
