"""``LocalCheckpointer``: checkpoints on nodes, in memory or on disks, that survive a node's
loss."""

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

    Each file is also copied to the next node. So a job can be restarted from memory, on any number
    of ranks, after the loss of workers, or of nodes of which no two are neighbours (the first and
    the last node are neighbours). On one node, the checkpoints only survive the loss of workers.

    Use this class for frequent saves, together with a ``Checkpointer`` on shared storage for rare
    saves. Methods, arguments and errors are those of ``Checkpointer``, except for the following.

    Args:
        directory: The directory of this rank's node; ranks with the same directory form a node. It
            may differ between nodes. Its files remain when the job ends; see ``remove``.
        keep: The number of latest checkpoints to keep. A node needs memory for ``2 * keep`` times
            the state of its ranks. During a save it needs memory for 2 more times the state, and
            ``save_async`` needs memory for another copy.

    Example::

        memory = fe.LocalCheckpointer("/dev/shm/my-run", engine, optimizer)
        if memory.steps():
            first = memory.load().step
        ...
        memory.save_async(step)  # every 20 steps
        ...
        memory.remove()
    """

    _directory_type = LocalDirectory
    _has_one_directory = False

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
        """Remove all checkpoints and release all resources.

        Raises:
            RuntimeError: A pending save failed on some rank. The checkpoints remain in this case.
        """
        self.wait()
        self._directory.retire(keep=None, step=-1)
        self.close()
