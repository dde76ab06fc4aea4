"""Checkpoints that tests damage."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from tests.checkpoint.scene import Values, update


class Net(nn.Module):
    """A tensor of several blocks, some small ones, a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(300, 500)
        self.norm = nn.BatchNorm1d(500)
        self.head = nn.Linear(500, 2)
        self.calls: Any = {"calls": [0]}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.wide(x))).square().sum()

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def trained(seed: int, strategy: str = "optim_grads_params") -> tuple[Net, fe.Engine, Any]:
    torch.manual_seed(seed)
    model = Net()
    model.calls = {"calls": [seed]}
    engine = fe.shard(model, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    update(model(torch.rand(4, 300)), optimizer)
    return model, engine, optimizer


def save(folder: str, seed: int, manifest: bool) -> None:
    _, engine, optimizer = trained(seed)
    if manifest:
        extra = {"n": Values(seed)}
        with contextlib.closing(fe.Checkpointer(folder, engine, optimizer, extra=extra)) as each:
            each.save(1)
    else:
        fe.save_checkpoint(folder, engine, optimizer, {"n": seed})


def without_sums(folder: Path) -> None:
    """As plain DCP, or an older version of the engine, would have written it."""
    metadata = read_metadata(folder)
    vars(metadata).pop("fsdp_engine_sums")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
