"""Checkpoints of owners' state that another job loads."""

from __future__ import annotations

from typing import Any

import torch

import fsdp_engine as fe
from tests.checkpoint import moved_state
from tests.pool import on_few_ranks


def nadam(parameters: Any) -> Any:
    return torch.optim.NAdam(parameters, lr=1e-2)


def owned(optimizer: Any) -> Any:
    return fe.shard_optimizer(optimizer, whole=True)


@moved_state.with_moves
@on_few_ranks
def test_state_follows_its_parameter_into_a_wider_dtype(moves: list[moved_state.Move]) -> None:
    moved_state.check_wider_dtypes(lambda parameters: owned(nadam(parameters)), moves, nadam)


@on_few_ranks
def test_an_optimizer_whose_state_is_a_plain_dict() -> None:
    moved_state.check_plain_dict_state(owned)
