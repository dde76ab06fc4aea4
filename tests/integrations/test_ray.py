"""Ray Train: checkpoints in Ray's storage, and a small cluster in which a worker dies."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray.train
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.integrations.ray import RayCheckpoints
from tests.integrations.launching import Launched, arguments_of, train_undisturbed, wait_until
from tests.models import Transformer, token_batch
from tests.pool import Ranks, on_ranks


class Storage:
    """Imitates Ray's storage: files of all workers go into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics: list[dict[str, Any]] = []
        self.local: list[Path] = []

    def report(self, metrics: dict[str, Any], checkpoint: ray.train.Checkpoint) -> None:
        self.metrics.append(metrics)
        self.local.append(Path(checkpoint.path))
        name = [f"checkpoint_{uuid.uuid4().hex}"]
        dist.broadcast_object_list(name)
        shutil.copytree(checkpoint.path, self.folder / name[0], dirs_exist_ok=True)
        dist.barrier()
        if dist.get_rank() == 0:
            (self.folder / "latest").write_text(name[0])
        dist.barrier()

    def latest(self) -> ray.train.Checkpoint | None:
        latest = self.folder / "latest"
        if not latest.exists():
            return None
        return ray.train.Checkpoint.from_directory(self.folder / latest.read_text())

    def instead_of_ray(self) -> Any:
        return mock.patch.multiple(ray.train, report=self.report, get_checkpoint=self.latest)


def make(seed: int) -> tuple[fe.Engine, torch.optim.Optimizer, Any, RayCheckpoints]:
    torch.manual_seed(seed)
    engine = fe.shard(Transformer(num_blocks=2), initial_values="rank0")
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extra = {"scheduler": scheduler}
    return engine, optimizer, scheduler, RayCheckpoints(engine, optimizer, extra=extra)


def train(engine: fe.Engine, optimizer: torch.optim.Optimizer, scheduler: Any, seed: int) -> None:
    engine.model(*token_batch(2, seed)).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def third_step(made: tuple[fe.Engine, torch.optim.Optimizer, Any, Any]) -> list[Any]:
    """A random number drawn before the step; weights and schedule after it."""
    engine, optimizer, scheduler, _ = made
    drawn = torch.rand(3)
    train(engine, optimizer, scheduler, 3)
    return [drawn, engine.full_state_dict(), scheduler.state_dict()]


def save_and_tell(folder: str) -> list[Any]:
    storage, made = Storage(Path(folder)), make(seed=1)
    engine, optimizer, scheduler, checkpoints = made
    with storage.instead_of_ray():
        assert checkpoints.load() is None
        for seed in (1, 2):
            train(engine, optimizer, scheduler, seed)
        checkpoints.report({"loss": 1.5}, step=2)
    assert storage.metrics == [{"step": 2, "loss": 1.5}]
    assert not storage.local[0].exists()  # the local copy is gone
    return third_step(made)


def take_up(folder: str) -> list[Any]:
    made = make(seed=5)
    with Storage(Path(folder)).instead_of_ray():
        report = made[-1].load(verify=True)
    assert (report.step, report.problems) == (2, [])
    return third_step(made)


def test_what_workers_report_is_one_checkpoint_for_any_number_of_workers(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved = ranks.run(save_and_tell, str(tmp_path), world_size=2)
    assert len(list(tmp_path.glob("checkpoint_*/manifest.json"))) == 1
    assert len(list(tmp_path.glob("checkpoint_*/*.distcp"))) == 2
    for world_size in (2, 1):
        found = ranks.run(take_up, str(tmp_path), world_size=world_size)
        for rank in range(world_size):
            drawn, weights, schedule = found[rank]
            assert schedule == saved[rank][2]
            # All ranks take the same batches, so the mean gradient does not depend on the number of
            # ranks.
            torch.testing.assert_close(weights, saved[rank][1], rtol=1e-4, atol=1e-5)
            if world_size == 2:
                assert torch.equal(drawn, saved[rank][0])


@on_ranks(2)
def test_an_error_of_one_worker_is_raised_on_all_and_nothing_is_reported() -> None:
    engine, _, _, checkpoints = make(seed=1)
    rank, report = dist.get_rank(), mock.Mock()

    def failing(owner: Any, name: str, words: str, value: Any = None) -> Any:
        fails = mock.Mock(side_effect=OSError(words) if rank else None, return_value=value)
        return mock.patch.object(owner, name, fails)

    with mock.patch.object(ray.train, "report", report):
        with pytest.raises(ValueError, match="step: expected the same on all ranks; found"):
            checkpoints.report({}, step=rank)
        with pytest.raises(ValueError, match="step: expected an integer of at least 0; found -1"):
            checkpoints.report({}, step=-1 if rank else 3)
        with (
            failing(tempfile, "mkdtemp", "no space left", tempfile.mkdtemp()),
            pytest.raises(OSError, match="no space left"),
        ):
            checkpoints.report({}, step=3)
    report.assert_not_called()
    with (
        failing(ray.train, "get_checkpoint", "storage is out of reach"),
        pytest.raises(OSError, match="storage is out of reach"),
    ):
        checkpoints.load()
    engine.model(*token_batch(2, 1)).backward()  # it continues


@pytest.mark.thorough
def test_a_worker_is_killed_and_another_number_of_workers_goes_on(
    ranks: Ranks, texts: Path, launched: Launched
) -> None:
    # Ray puts sockets into it, whose paths may have at most about a hundred characters.
    folder_of_ray = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    storage = texts / "storage"

    def steps_that_ray_knows() -> list[int]:
        snapshot = storage / "gpt" / "checkpoint_manager_snapshot.json"
        try:
            results = json.loads(snapshot.read_text())["checkpoint_results"]
        except (FileNotFoundError, json.JSONDecodeError):  # none yet, or it is being written
            return []
        return [each["metrics"]["step"] for each in results]

    def run(num_workers: int, *more: str) -> list[str]:
        own = ["--storage", str(storage), "--name", "gpt", "--num-workers", str(num_workers)]
        return [*own, *arguments_of(texts, 60, *more)]

    session = [sys.executable, str(Path(__file__).parent / "ray_session.py"), folder_of_ray]
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    slow = {"RAY_DEDUP_LOGS": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240"}
    try:
        command = [*session, *run(2, "--stop-at", "40"), "--", *run(1)]
        driver = launched.start("ray", command, {**environment, **slow})
        wait_until(steps_that_ray_knows, "a checkpoint", 240)
        launched.all_with("RayTrainWorker")[-1].kill()
        assert launched.finish("ray", driver, 300) == 0, launched.log("ray")
    finally:
        launched.kill_all()
        shutil.rmtree(folder_of_ray, ignore_errors=True)
    log = launched.log("ray")
    assert "a new run, on 2 workers" in log
    assert "resumed after step 40, on 1 workers" in log
    resumed = [f"resumed after step {step}, on 2 workers" in log for step in range(5, 40, 5)]
    assert resumed.count(True) == 1
    assert steps_that_ray_knows() == [50, 55, 60]
    metrics = json.loads((texts / "out" / "metrics.json").read_text())
    assert metrics["num_ranks"] == 1
    losses = [record["loss"] for record in metrics["steps"]]
    expected = ranks.run(train_undisturbed, arguments_of(texts, 60), world_size=2)[0]
    assert losses[:40] == pytest.approx(expected[:40], abs=1e-6)
    assert losses == pytest.approx(expected, abs=1e-3)
