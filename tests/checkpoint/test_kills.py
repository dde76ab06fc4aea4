"""Jobs that are killed while they save: they resume, and end as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from tests.checkpoint.scene import update
from tests.models import Transformer, token_batch
from tests.pool import RankError, Ranks

NUM_KILLS = 12
# A job is killed so many saves after its start, at most so long after the last of them.
LIVES = (1, 2, 3)
MOST_SECONDS = 0.1


class Data:
    """Batches in an order of their own on each rank, drawn as they are needed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._draw = torch.Generator().manual_seed(rank)

    def next(self) -> Any:
        return token_batch(2, int(torch.randint(10_000, (), generator=self._draw)))

    def state_dict(self) -> dict[str, Any]:
        return {"draw": self._draw.get_state(), "rank": self._rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self._rank
        self._draw.set_state(state["draw"])


def die_after(seconds: float) -> None:
    """This rank is killed at that moment, whatever it does."""

    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def train(folder: str, until: int | None, life: int = 0, saves: bool = True) -> dict[str, Tensor]:
    """Trains until a step, saving after every one; or until it is killed."""
    rank, draw = dist.get_rank(), random.Random(life)
    torch.manual_seed(rank)
    model = nn.Module()
    model.net, model.dropout = Transformer(num_blocks=1), nn.Dropout(0.2)
    engine = fe.shard(model.net, initial_values="rank0")  # ranks are seeded apart
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = Data(rank)
    extra = {"scheduler": scheduler, "data": data}
    timeout = timedelta(seconds=60)
    checkpointer = fe.Checkpointer(folder, engine, optimizer, extra=extra, keep=2, timeout=timeout)
    step = checkpointer.load(verify=True).step or 0 if checkpointer.steps() else 0
    last, seconds = step + draw.choice(LIVES), draw.uniform(0, MOST_SECONDS)
    victim, later = draw.randrange(2), draw.choice((0, 0.05))
    while until is None or step < until:
        loss = engine.model(*data.next())
        update(loss + model.dropout(torch.ones(8)).sum() * loss, optimizer)
        scheduler.step()
        step += 1
        if saves:
            (checkpointer.save if step % 2 else checkpointer.save_async)(step)
        if until is None and step == last:
            # The other rank may find out, or be killed before.
            die_after(seconds if rank == victim else seconds + later)
    checkpointer.close()
    return engine.full_state_dict()


@pytest.mark.thorough
def test_a_job_that_is_killed_twelve_times_ends_with_the_same_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    checkpoints = CheckpointDirectory(killed)
    found, num_half_written = [], 0
    for life in range(NUM_KILLS):
        with pytest.raises(RankError, match="died with exit code -9"):
            ranks.run(train, str(killed), None, life, world_size=2)
        found.append(max(checkpoints.complete(), default=0))
        num_half_written += any(killed.glob(".saving-*"))
    assert found == sorted(found), "a job went back behind an older checkpoint"
    assert found[-1] >= NUM_KILLS - 1, "a job lost what it had saved"
    assert num_half_written > NUM_KILLS // 4, "kills did not meet saves"
    until = found[-1] + 10
    survived = ranks.run(train, str(killed), until, world_size=2)[0]
    whole = ranks.run(train, str(tmp_path / "whole"), until, 0, False, world_size=2)[0]
    assert survived.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(survived[name], value), name
    left = [path.name for path in killed.iterdir()]
    assert not [name for name in left if name.startswith((".saving", ".removing"))], left
    assert len(left) == 3, left  # two checkpoints and the lock
