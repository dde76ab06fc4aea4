"""Checkpoints of offloaded state that another job loads."""

from __future__ import annotations

from typing import Any

import torch

import fsdp_engine as fe
from tests.checkpoint import moved_state
from tests.pool import on_few_ranks

ON_HOST = fe.Offload(optimizer_state="host")


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


def wrapped(parameters: Any) -> Any:
    return fe.shard_optimizer(adamw(parameters))


@moved_state.with_moves
@on_few_ranks
def test_state_follows_its_parameter_into_a_wider_dtype(moves: list[moved_state.Move]) -> None:
    moved_state.check_wider_dtypes(wrapped, moves, adamw, offload=ON_HOST)


@on_few_ranks
def test_an_optimizer_whose_state_is_a_plain_dict() -> None:
    moved_state.check_plain_dict_state(fe.shard_optimizer, offload=ON_HOST)


@on_few_ranks
def test_state_without_one_of_its_tensors_is_refused_by_name() -> None:
    moved_state.check_missing_state(wrapped, "exp_avg", keeps_optimizer=False, offload=ON_HOST)
