"""A disk that is full, and a directory that is removed under a job."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from tests.pool import Ranks


@contextmanager
def _files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Within it, writing more fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fail_to_save(path: str) -> None:
    engine = fe.shard(nn.Linear(256, 256))
    folder = Path(path) / "checkpoint"
    for has_older in (False, True):
        before = sorted(file.name for file in folder.glob("*")) if folder.exists() else []
        with (
            _files_of_at_most(1 << 14),
            pytest.raises(OSError, match=r"File too large.*checkpoint/__shards_"),
        ):
            fe.save_checkpoint(folder, engine)
        torch.distributed.barrier()
        assert sorted(file.name for file in folder.glob("*")) == before
        torch.distributed.barrier()
        if not has_older:
            fe.save_checkpoint(folder, engine)
    fe.load_checkpoint(folder, engine)


def test_a_save_that_fails_names_the_file_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_fail_to_save, str(tmp_path), world_size=2)


def test_a_directory_that_was_made_anew_is_locked_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    job, other = CheckpointDirectory(path), CheckpointDirectory(path)
    job.discard(job.begin())
    shutil.rmtree(path)
    job.discard(job.begin())
    with pytest.raises(RuntimeError, match="expected no other job to save into"):
        other.begin()
    shutil.rmtree(path)
    other.discard(other.begin())
    with pytest.raises(RuntimeError, match="expected no other job to save into"):
        job.begin()
    other.release()
    job.discard(job.begin())
    job.release()
