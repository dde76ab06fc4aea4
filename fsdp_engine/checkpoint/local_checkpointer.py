"""Checkpoints in memory or on disks of the nodes, which the loss of a node does not destroy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

from fsdp_engine.checkpoint.checkpointer import Checkpointer
from fsdp_engine.checkpoint.joint_optimizer import Optimizers
from fsdp_engine.checkpoint.local_directory import LocalDirectory
from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.checkpoint.sharded_model import Engines


class LocalCheckpointer(Checkpointer):
    """Saves a run into a directory of each node, in memory (``/dev/shm``) or on its disk.

    Each file is also copied to the next node. So a job can be started again from memory if workers
    are lost, or nodes of which no two are neighbours (the first and the last one are), on any
    number of ranks. On one node, the checkpoints outlive the workers only.

    Methods, arguments and errors are those of :class:`~.checkpointer.Checkpointer`, but for these.
    Saves are meant to be frequent, beside a ``Checkpointer`` on shared storage with rare ones.

    Args:
        directory: The directory of this rank's node; ranks with the same directory are a node. May
            differ between nodes. Files stay there when the job ends; see :meth:`remove`.
        keep: number of latest checkpoints to keep. A node needs memory for ``2 * keep`` times the
            state of its ranks, 2 times more during a save, and once more for the copies of
            :meth:`save_async`.

    Example::

        memory = fe.LocalCheckpointer("/dev/shm/my-run", engine, optimizer)
        if memory.steps():
            first = memory.load().step
        ...
        memory.save_async(step)  # each 20 steps
        ...
        memory.remove()
    """

    _directory_type = LocalDirectory

    def __init__(
        self,
        directory: str | os.PathLike[str],
        engine: Engines,
        optimizer: Optimizers | None = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = 1,
        timeout: timedelta | None = None,
        trainable_only: bool = False,
    ) -> None:
        super().__init__(
            directory,
            engine,
            optimizer,
            extra=extra,
            keep=keep,
            timeout=timeout,
            trainable_only=trainable_only,
        )

    def remove(self) -> None:
        """Remove all checkpoints, and release all resources.

        Raises:
            RuntimeError: a pending save failed on some rank; the checkpoints remain.
        """
        self.wait()
        self._directory.retire(keep=None, step=-1)
        self.close()
