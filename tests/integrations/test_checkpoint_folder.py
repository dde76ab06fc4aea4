"""Folders of the trainers' checkpoints after an error or a kill."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.writer import Writer
from fsdp_engine.integrations import checkpoint_folder
from fsdp_engine.integrations.checkpoint_folder import (
    SAVING,
    atomic_folder,
    load_folder,
    save_folder,
)
from tests.checkpoint.scene import failing, on_rank_0, shared_folder, visible
from tests.pool import on_ranks


def rename_until(failed: int) -> AbstractContextManager[Any]:
    """Patch of ``Path.rename`` that raises in call number ``failed``, counted from 1, and in no
    other."""
    rename, count = Path.rename, 0

    def counted(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == failed:
            raise OSError("for a test")
        return rename(path, target)

    return mock.patch.object(Path, "rename", counted)


@on_ranks(2)
def test_a_folder_is_kept_if_its_replacement_fails_or_is_killed_between_the_renames() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    folder = Path(shared_folder()) / "x"

    def write(text: str) -> None:
        with atomic_folder(folder, engine) as staging:
            if engine.ranks.rank == 0:
                (staging / "file").write_text(text)

    write("older")
    with rename_until(2), pytest.raises(OSError, match="for a test"):
        write("newer")
    assert (folder / "file").read_text() == "older"
    # A killed job does not rename the older folder back, and removes nothing.
    with (
        rename_until(2),
        mock.patch.object(checkpoint_folder, "_clear"),
        pytest.raises(OSError, match="for a test"),
    ):
        write("newer")
    dist.barrier()
    assert not folder.exists()
    dist.barrier()
    other = folder.with_name("y")
    with pytest.raises(ValueError, match="planted"), atomic_folder(other, engine):
        raise ValueError("planted")
    assert (folder / "file").read_text() == "older"
    assert not other.exists()
    assert not (folder.parent / SAVING).exists()
    dist.barrier()
    write("newer")
    assert (folder / "file").read_text() == "newer"


@on_ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_no_files() -> None:
    model = nn.Linear(4, 4)
    engine = fe.shard(model)
    root = Path(shared_folder())
    for name in ("new", "older"):
        if name == "older":
            save_folder(root / name, engine, [], {"which": "older"})
        files = visible(root), visible(root / name) if name == "older" else []
        dist.barrier()
        faults = (
            failing(checkpoint_folder, "random_state", on_rank=1),
            failing(Writer, "write_data", on_rank=1),
        )
        for fault in faults:
            with fault, pytest.raises(OSError, match="No space left"):
                save_folder(root / name, engine, [], {"which": "newer"})
            dist.barrier()
            assert (visible(root), visible(root / name) if name == "older" else []) == files
            dist.barrier()
    assert load_folder(root / "older", engine, []) == {"which": "older"}
    on_rank_0(lambda: shutil.rmtree(root))
    assert torch.isfinite(model.weight.to_local()).all()
