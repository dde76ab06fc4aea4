"""The training of ``train_gpt.py``, started by Ray Train.

    python examples/train_ray.py --num-workers 2 --storage /shared/ray --name gpt --steps 600

Ray replaces a worker that dies, and all workers resume from the latest checkpoint in ``--storage``.
The same command resumes the run ``--name`` later, with any number of workers. Further options are
those of ``train_gpt.py``. ``metrics.json`` is written to ``--out``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from fsdp_engine.integrations.ray import RayCheckpoints
from settings import Settings, parse_settings
from train_gpt import Job, prepare


@dataclass
class RayJob(Job):
    """A job that saves its checkpoints with Ray, and loads them from there."""

    def __post_init__(self) -> None:
        extra = {"curve": self.curve}
        self.checkpoints = RayCheckpoints(self.engine, self.optimizers, extra=extra)

    def resume(self) -> str:
        """Continue from Ray's latest checkpoint, if any; returns a line that says so."""
        report = self.checkpoints.load()
        return "" if report is None else f"resumed after step {report.step}"

    def save(self, step: int) -> None:
        """Save, and report the latest losses."""
        curve = self.curve
        losses = {"loss": curve.steps[-1].loss, "held_out_loss": curve.held_out[-1].loss}
        self.checkpoints.report(losses, step)


def train(config: dict[str, Any]) -> None:
    """What each worker runs; Ray has made the process group."""
    settings: Settings = config["settings"]
    job = prepare(settings, RayJob)
    resumed = job.resume()
    if job.rank == 0:
        print(f"{resumed or 'a new run'}, on {job.plan.num_ranks} workers")
    job.train()
    if job.rank == 0:
        job.curve.write_json(settings.out / "metrics.json", num_ranks=job.plan.num_ranks)


def parse_arguments(arguments: list[str] | None) -> tuple[argparse.Namespace, Settings]:
    """This file's own arguments, and those of the training."""
    parser = argparse.ArgumentParser(prog="train_ray.py")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument(
        "--storage", required=True, help="folder that all machines see, or s3://..."
    )
    parser.add_argument("--name", required=True, help="of the run")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints")
    parser.add_argument("--max-failures", type=int, default=10, help="how often to start again")
    own, others = parser.parse_known_args(arguments)
    return own, parse_settings(others)


def main(arguments: list[str] | None = None) -> None:
    """The driver; by default with the arguments of the command line."""
    own, settings = parse_arguments(arguments)
    trainer = TorchTrainer(
        train,
        train_loop_config={"settings": settings},
        scaling_config=ScalingConfig(num_workers=own.num_workers, use_gpu=own.gpu),
        run_config=RunConfig(
            name=own.name,
            storage_path=own.storage,
            failure_config=FailureConfig(max_failures=own.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=own.keep),
        ),
    )
    result = trainer.fit()
    print(f"{result.metrics}; latest checkpoint: {result.checkpoint}")


if __name__ == "__main__":
    main()
