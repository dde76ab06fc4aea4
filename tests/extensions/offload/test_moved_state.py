"""Checkpoints of offloaded state that another job loads."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

import fsdp_engine as fe
from tests.checkpoint import moved_state
from tests.pool import Ranks

ON_DISK = fe.Offload("disk", tempfile.gettempdir())


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


def wrapped(parameters: Any) -> Any:
    return fe.shard_optimizer(adamw(parameters))


def check() -> None:
    moved_state.check_wider_dtypes(wrapped, moved_state.MOVES, adamw, offload=ON_DISK)
    moved_state.check_plain_dict_state(fe.shard_optimizer, offload=ON_DISK)
    moved_state.check_missing_state(wrapped, "exp_avg", keeps_optimizer=False, offload=ON_DISK)


@pytest.mark.parametrize(
    ("world_size", "group"),
    [(2, True), *(pytest.param(1, each, marks=pytest.mark.thorough) for each in (True, False))],
)
def test_offloaded_state_follows_its_parameter_and_is_resumed_or_refused_by_name(
    ranks: Ranks, world_size: int, group: bool
) -> None:
    ranks.run(check, world_size=world_size, group=group)
