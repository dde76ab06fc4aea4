"""Small LightningModules, and Trainers on the ranks of the pool."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp_engine.engine import engine_of
from fsdp_engine.integrations.lightning import FSDPEngineFabricStrategy, FSDPEngineStrategy

# Silences messages that Lightning logs in every run, and its advice on workers and intervals.
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

NUM_SAMPLES = 24
BATCH = 4  # rows over all ranks


class ThereAlready(LightningEnvironment):
    """An environment whose process group exists already: this process is one of its ranks."""

    creates_processes_externally = True  # type: ignore[assignment]

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    local_rank = global_rank

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Layers:
    def build(self: Any) -> None:
        self.inlet = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 2)

    def reset_parameters(self: Any) -> None:
        nn.init.ones_(self.scale)

    def apply_layers(self: Any, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_layers(x)


class Net(Layers, LightningModule):
    def __init__(self, lr: float = 1e-2, calls_forward: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        # By default ``forward`` of the module itself is not called.
        predict = self if self.hparams["calls_forward"] else self.apply_layers
        return nn.functional.mse_loss(predict(x), y)

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


class OneOfTheBlocks:
    """A batch goes through one block; its loss is not logged."""

    def loss(self: Any, batch: Any) -> Tensor:
        x, y = batch
        block = self.blocks[int(1000 * x.abs().sum()) % 3]
        return nn.functional.mse_loss(self.head(block(self.inlet(x)) * self.scale), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss


def make(made: type[Net] = Net, **arguments: Any) -> Net:
    """A module whose initial values are the same on every rank and in every call."""
    torch.manual_seed(0)
    return made(**arguments)


def data(count: int = NUM_SAMPLES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    y = torch.randn(count, 2, generator=generator)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return DataLoader(TensorDataset(x, y), BATCH // num_ranks)


def make_trainer(strategy: Any = "fsdp_engine", **arguments: Any) -> Trainer:
    """A trainer without output and folders, except for those that ``arguments`` request."""
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
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
    }
    return Trainer(strategy=strategy, accelerator="cpu", plugins=plugins, **{**quiet, **arguments})


def fit(model: LightningModule, strategy: Any = "fsdp_engine", **arguments: Any) -> Trainer:
    """Train the model on :func:`data`, or on ``train=``, without Lightning's advice."""
    names = ("train", "val", "ckpt_path")
    train, val, ckpt_path = (arguments.pop(name, None) for name in names)
    trainer = make_trainer(strategy, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data() if train is None else train, val, ckpt_path=ckpt_path)
    return trainer


def weights(model: nn.Module) -> dict[str, Tensor]:
    engine = engine_of(model)
    if engine is not None:
        return engine.full_state_dict()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_equal(found: nn.Module, expected: nn.Module, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(weights(found), weights(expected), rtol=rtol, atol=rtol)


def make_fabric(*levels: str, strategy: Any = None, **arguments: Any) -> Any:
    """A Fabric that is launched, over the engine with small units unless a strategy is given."""
    strategy = strategy or FSDPEngineFabricStrategy(*levels, min_unit_size=0)
    arguments |= {"accelerator": "cpu", "devices": dist.get_world_size(), "strategy": strategy}
    fabric = Fabric(plugins=[ThereAlready()], **arguments)
    fabric.launch()
    return fabric


def by_engine(*levels: str, **arguments: Any) -> Any:
    """The engine's strategy; small units are not joined."""
    return FSDPEngineStrategy(*levels, **{"min_unit_size": 0, **arguments})


def is_checkpoint(path: str | Path) -> bool:
    return (Path(path) / ".metadata").is_file()
