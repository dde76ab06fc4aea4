"""Jobs that end or are killed while they save: the save completes, or an older checkpoint loads."""

from __future__ import annotations

import os
import random
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.manifest import MANIFEST
from tests.checkpoint.scene import Values, update
from tests.models import Transformer, token_batch
from tests.pool import RankError, Ranks
from tests.processes import printed, torchrun

NUM_KILLS = 12
# Numbers of saves after which a job is killed, at most MOST_SECONDS later.
LIVES = (1, 2, 3)
MOST_SECONDS = 0.1


def train(folder: str, until: int | None, life: int = 0, saves: bool = True) -> dict[str, Tensor]:
    """Trains until a step, saving after every one; or until it is killed."""
    rank, draw = dist.get_rank(), random.Random(life)
    torch.manual_seed(rank)
    model = nn.Module()
    model.net, model.dropout = Transformer(num_blocks=1), nn.Dropout(0.2)
    engine = fe.shard(model.net, initial_values="rank0")  # each rank has another seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    place = Values([rank, 0])  # each rank has an order of its own
    extra = {"scheduler": scheduler, "data": place}
    timeout = timedelta(seconds=60)
    checkpointer = fe.Checkpointer(folder, engine, optimizer, extra=extra, keep=2, timeout=timeout)
    step = checkpointer.load(verify=True).step or 0 if checkpointer.steps() else 0
    last, seconds = step + draw.choice(LIVES), draw.uniform(0, MOST_SECONDS)
    victim, later = draw.randrange(2), draw.choice((0, 0.05))
    while until is None or step < until:
        place.value = [place.value[0], place.value[1] + 1]
        loss = engine.model(*token_batch(2, 10_000 * place.value[0] + place.value[1]))
        update(loss + model.dropout(torch.ones(8)).sum() * loss, optimizer)
        scheduler.step()
        step += 1
        if saves:
            (checkpointer.save if step % 2 else checkpointer.save_async)(step)
        if until is None and step == last:
            # The other rank may notice the death, or be killed before.
            after = seconds if rank == victim else seconds + later
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
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
    assert found == sorted(found), "a job resumed an older checkpoint than an earlier job did"
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


SCRIPT = """
import sys
import threading
import torch
import torch.distributed as dist
from torch import nn
import fsdp_engine as fe

script_has_ended = threading.Event()


class LateCheckpointer(fe.Checkpointer):
    def _write(self, save):
        script_has_ended.wait()
        super()._write(save)


torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
engine = fe.shard(model, strategy="optim_grads_params")
LateCheckpointer(sys.argv[1], engine).save_async(1)
if sys.argv[2] == "destroy":
    dist.destroy_process_group()
script_has_ended.set()
"""


def run(folder: Path, launcher: tuple[str, ...], ending: str) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = (*launcher, str(script), str(folder / "saved"), ending)
    return printed(*command, succeeds=ending != "destroy")


@pytest.mark.parametrize("launcher", [(), pytest.param(torchrun(2), marks=pytest.mark.thorough)])
def test_the_save_is_finished(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    run(tmp_path, launcher, "plainly")
    assert (tmp_path / "saved/step-00000001" / MANIFEST).is_file()


def test_a_save_that_cannot_be_finished_ends_the_script_with_its_error(tmp_path: Path) -> None:
    text = run(tmp_path, torchrun(2), "destroy")
    for part in (
        "saving step 1 into",
        "before destroy_process_group()",
        "that it was destroyed",
    ):
        assert part in text
    # Without a group each rank would act as the only one, and publish its shards alone.
    assert not list((tmp_path / "saved").glob("step-*"))
