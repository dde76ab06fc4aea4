"""Jobs that are killed while they save: they resume, and end as if nothing had happened.

Processes are forked from a server that has imported everything, so that a job starts in tens of
milliseconds and can be killed often.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from tests import pool
from tests.models import Transformer, token_batch

pytestmark = pytest.mark.thorough

NUM_RANKS = 2
NUM_KILLS = 12
TIMEOUT = timedelta(seconds=60)
# A job is killed so many saves after its start, at most so long after the last of them.
LIVES = (1, 2, 3)
MOST_SECONDS = 0.1


class Data:
    """Batches in an order of their own on each rank, drawn as they are needed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._draw = torch.Generator().manual_seed(rank)
        self._count = 0

    def next(self) -> Any:
        self._count += 1
        return token_batch(2, int(torch.randint(10_000, (), generator=self._draw)))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "draw": self._draw.get_state(), "rank": self._rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self._rank
        self._count = state["count"]
        self._draw.set_state(state["draw"])


def job(rank: int, folder: str, life: int, saves: bool) -> None:
    """Train until the folder's file ``until`` says enough, saving after every step."""
    try:
        _train(rank, Path(folder), life, saves)
    except BaseException:
        (Path(folder) / f"error-{life}-{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _train(rank: int, folder: Path, life: int, saves: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{life}"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    torch.manual_seed(rank)
    model = nn.Module()
    model.net, model.dropout = Transformer(num_blocks=1), nn.Dropout(0.2)
    engine = fe.shard(model.net, initial_values="rank0")  # ranks are seeded apart
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = Data(rank)
    checkpointer = fe.Checkpointer(
        folder / "checkpoints",
        engine,
        optimizer,
        extra={"scheduler": scheduler, "data": data},
        keep=2,
        timeout=TIMEOUT,
    )
    step = checkpointer.load(verify=True).step or 0 if checkpointer.steps() else 0
    if rank == 0:
        (folder / f"started-{life}").write_text(str(step))
    until = folder / "until"
    while True:
        limits: list[Any] = [json.loads(until.read_text()) if until.exists() else None]
        dist.broadcast_object_list(limits)  # ranks see the file at one moment
        if limits[0] is not None and step >= limits[0]:
            break
        loss = engine.model(*data.next())
        (loss + model.dropout(torch.ones(8)).sum() * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if saves:
            (checkpointer.save if step % 2 else checkpointer.save_async)(step)
    checkpointer.close()
    weights = engine.full_state_dict()
    if rank == 0:
        torch.save(weights, folder / "weights")
    dist.destroy_process_group()


@pytest.fixture
def forked() -> Any:
    """Starts the ranks of a job in processes that have everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*pool.PRELOADED, "tests.checkpoint.test_kills"])
    jobs: list[Any] = []

    def start(folder: Path, life: int, saves: bool) -> list[Any]:
        ranks = [
            context.Process(target=job, args=(rank, str(folder), life, saves), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        jobs.extend(ranks)
        return ranks

    yield start
    for process in jobs:
        process.kill()


def finish(ranks: list[Any], folder: Path) -> Any:
    """Wait for a job; the weights that it ended with."""
    for process in ranks:
        process.join(120)
    errors = [file.read_text() for file in folder.glob("error-*")]
    assert [process.exitcode for process in ranks] == [0] * NUM_RANKS, errors
    return torch.load(folder / "weights")


def test_a_job_that_is_killed_twelve_times_ends_with_the_same_weights(
    tmp_path: Path, forked: Any
) -> None:
    draw = random.Random(11)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    checkpoints = CheckpointDirectory(killed / "checkpoints")
    resumed, num_half_written = [], 0
    for life in range(NUM_KILLS):
        ranks = forked(killed, life, True)
        started = killed / f"started-{life}"
        deadline = time.monotonic() + 120
        while not started.exists() or not started.read_text():
            assert time.monotonic() < deadline, "the job does not start"
            assert all(p.is_alive() for p in ranks), [
                file.read_text() for file in killed.glob("error-*")
            ]
            time.sleep(0.002)
        resumed.append(int(started.read_text()))
        wanted = resumed[-1] + draw.choice(LIVES)
        while max(checkpoints.complete(), default=0) < wanted:
            assert time.monotonic() < deadline, "the job does not come forward"
            time.sleep(0.002)
        time.sleep(draw.uniform(0, MOST_SECONDS))
        victim = draw.choice(ranks)
        os.kill(victim.pid, signal.SIGKILL)
        time.sleep(draw.choice((0, 0.05)))  # the other rank may find out, or be killed before
        for process in ranks:
            process.kill()
            process.join(60)
        for file in killed.glob("error-*"):
            file.unlink()  # of the rank that found out
        num_half_written += any((killed / "checkpoints").glob(".saving-*"))
    assert resumed == sorted(resumed), "a job went back behind an older checkpoint"
    assert resumed[-1] >= NUM_KILLS - 1, "a job lost what it had saved"
    assert num_half_written > NUM_KILLS // 4, "kills did not meet saves"

    until = resumed[-1] + 10
    for folder in (killed, whole):
        (folder / "until").write_text(str(until))
    survived = finish(forked(killed, NUM_KILLS, True), killed)
    uninterrupted = finish(forked(whole, 0, False), whole)
    assert survived.keys() == uninterrupted.keys()
    for name, value in uninterrupted.items():
        assert torch.equal(survived[name], value), name
    left = [path.name for path in (killed / "checkpoints").iterdir()]
    assert not [name for name in left if name.startswith((".saving", ".removing"))], left
    assert len(left) == 3, left  # two checkpoints and the lock
