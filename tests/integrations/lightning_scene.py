"""Small LightningModules, and Trainers on the ranks of the pool."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# What Lightning says of every run, and its advice on workers and intervals.
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

NUM_SAMPLES = 24
BATCH = 4  # of all ranks


class ThereAlready(ClusterEnvironment):
    """The process group is there: this process is one of its ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(LightningModule):
    """Reads its layers in ``training_step``, and a parameter of its own."""

    def __init__(self, lr: float = 1e-2, calls_forward: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inlet = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 2)
        self.losses: list[float] = []

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.hparams["calls_forward"]:
            return nn.functional.mse_loss(self(x), y)
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x * self.scale), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def make(made: type[Net] = Net, **arguments: Any) -> Net:
    """The same values on every rank and every time."""
    torch.manual_seed(0)
    return made(**arguments)


def data(count: int = NUM_SAMPLES, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    y = torch.randn(count, 2, generator=generator)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return DataLoader(TensorDataset(x, y), BATCH // num_ranks, shuffle=shuffle)


def make_trainer(strategy: Any = "fsdp_engine", **arguments: Any) -> Trainer:
    """Quiet, and without folders, unless something is asked for."""
    import fsdp_engine.integrations.lightning  # noqa: F401 - registers the name

    plugins = [*arguments.pop("more", ())]
    if dist.is_initialized():
        plugins.append(ThereAlready())
    quiet = {
        "logger": False,
        "enable_checkpointing": any(
            isinstance(each, Checkpoint) for each in arguments.get("callbacks", ())
        ),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "max_epochs": 2,
    }
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        plugins=plugins,
        **{**quiet, **arguments},
    )


def fit(model: LightningModule, strategy: Any = "fsdp_engine", **arguments: Any) -> Trainer:
    """Train it on :func:`data`, without Lightning's advice."""
    loaders = {"train_dataloaders": data(), "val_dataloaders": arguments.pop("val", None)}
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = make_trainer(strategy, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, **loaders, ckpt_path=ckpt_path)
    return trainer


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole, on every rank."""
    from fsdp_engine.engine import engine_of

    engine = engine_of(model)
    if engine is not None:
        return engine.full_state_dict()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_equal(found: nn.Module, expected: nn.Module, rtol: float = 1e-5) -> None:
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=rtol, msg=name)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder that all ranks know."""
    name = [tempfile.mkdtemp(prefix="lightning-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])


def by_engine(*levels: str, **arguments: Any) -> Any:
    """The strategy; small units, as many as there are."""
    from fsdp_engine.integrations.lightning import FSDPEngineStrategy

    return FSDPEngineStrategy(*levels, **{"min_unit_size": 0, **arguments})


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder with a complete checkpoint is there."""
    return (Path(path) / ".metadata").is_file()
