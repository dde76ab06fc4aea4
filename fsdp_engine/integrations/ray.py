"""``RayCheckpoints``: checkpoints for ``ray.train.report`` and ``get_checkpoint`` of Ray Train.

Each worker writes its slices into a local folder and reports the folder. Ray uploads the files of
all workers into one folder of its storage (a shared file system, S3, ...), and registers the
checkpoint when all workers have reported. Nothing is gathered. If a worker is killed during a save,
the previous checkpoint remains the latest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fsdp_engine.checkpoint.files import CheckpointFiles
from fsdp_engine.checkpoint.folder import LoadReport, collector_paused
from fsdp_engine.checkpoint.joint_optimizer import Optimizers
from fsdp_engine.checkpoint.run_folder import Run
from fsdp_engine.checkpoint.run_state import Stateful
from fsdp_engine.checkpoint.sharded_model import Engines
from fsdp_engine.comm.agreement import agree
from fsdp_engine.extras import naming_extra

with naming_extra():
    import ray.train


class RayCheckpoints:
    """Saves a run into the storage of Ray Train, and restores it.

    Use this class in the function that ``TorchTrainer`` runs on each worker. All methods are
    collective: every worker calls them, in the same order. A folder in the storage has the format
    of ``fsdp_engine.Checkpointer``. Ray removes old checkpoints
    (``ray.train.CheckpointConfig(num_to_keep=...)``).

    Args:
        engine: The result of ``fsdp_engine.shard`` over all workers, or a dict of several engines.
        optimizer: One optimizer, or several, over the parameters of all engines. None: only weights
            are saved.
        extra: Objects with ``state_dict()`` and ``load_state_dict()``, by name: scheduler, data
            position. Each rank saves the state of its own objects.

    Raises:
        TypeError, ValueError: ``engine`` or ``extra`` has a wrong type or value.
    """

    def __init__(
        self,
        engine: Engines,
        optimizer: Optimizers | None = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._run = Run(engine, optimizer, extra)
        self._control = self._run.ranks.control_group

    def report(self, metrics: Mapping[str, Any], step: int) -> None:
        """Save the current state and report it. Returns when the checkpoint is in the storage.

        Args:
            metrics: Numbers and strings by name. Ray keeps those of rank 0, and ``step``.
            step: The number of the training step, at least 0, which must be equal on all ranks.

        Raises:
            ValueError, TypeError, RuntimeError: ``step`` is not an int of at least 0 or differs
                between ranks, a forward or backward is running, the optimizer does not belong to
                the engine, or writing failed on some rank.

        All ranks raise each error, and Ray's latest checkpoint remains.
        """
        self._run.await_ranks()
        what = f"report of step {step!r}"
        entries: dict[str, Any] = {}
        error: Exception | None = None
        with ExitStack() as cleanup:
            folder = Path()
            try:
                if not isinstance(step, int) or step < 0:
                    raise ValueError(f"step: expected an integer of at least 0; found {step!r}")
                entries = self._run.entries()
                folder = Path(tempfile.mkdtemp(prefix="fsdp_engine-"))
                cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            except Exception as caught:
                error = caught
            value = (step, self._run.extra_digest)
            answers = agree(what, error, self._control, value, call="report")
            steps = [other for other, _ in answers]
            if any(other != step for other in steps):
                raise ValueError(f"step: expected the same on all ranks; found {steps[:16]}")
            self._run.check_extra_tensors([digest for _, digest in answers])
            self._run.write(entries, folder, step, self._control)
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step, **metrics}, checkpoint=checkpoint)

    def load(
        self, *, strict: bool = True, verify: bool = False, trust: bool = False
    ) -> LoadReport | None:
        """Load the latest checkpoint of Ray, on any number of workers.

        If the storage is not a file system, Ray downloads the checkpoint once to each machine.

        Args:
            strict, verify, trust: The arguments of ``Checkpointer.load``.

        Returns:
            The step and ``extra`` of the checkpoint; None if there is no checkpoint yet.

        Raises:
            FileNotFoundError, ValueError, RuntimeError: Errors of ``Checkpointer.load``. All ranks
                raise.
        """
        self._run.await_ranks()
        what = "load of Ray's latest checkpoint"
        error: Exception | None = None
        folder: Path | None = None
        with collector_paused(), ExitStack() as download:
            try:
                checkpoint = ray.train.get_checkpoint()
                if checkpoint is not None:
                    folder = Path(download.enter_context(checkpoint.as_directory()))
            except Exception as caught:
                error = caught
            there = agree(what, error, self._control, folder is not None)
            if not all(there):
                if any(there):
                    found = [rank for rank, has in enumerate(there) if has]
                    raise ValueError(
                        f"{what}: expected a checkpoint on all ranks, or on none; found one on "
                        f"ranks {found[:16]} only"
                    )
                return None
            assert folder is not None
            files = CheckpointFiles(folder, self._run.ranks)
            return self._run.load(files, strict=strict, verify=verify, trust=trust, what=what)
