"""A conversion that only some ranks make is an error on all of them, before parameters are sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm import rendezvous
from fsdp_engine.fsdp2 import fully_shard
from fsdp_engine.strategies import LEVELS
from tests.models import Chain, Mlp, vector_batch
from tests.pool import Ranks, on_ranks
from tests.reference import held

# A rendezvous checks the places of missing ranks soon, and again after as long; threads of ranks
# answer within half a second.
MOST_SECONDS = 30.0


@contextmanager
def early_checks() -> Iterator[None]:
    usual, rendezvous.FIRST_CHECK_SECONDS = rendezvous.FIRST_CHECK_SECONDS, 0.3
    try:
        yield
    finally:
        rendezvous.FIRST_CHECK_SECONDS = usual


def made(level: str) -> Any:
    torch.manual_seed(0)
    model = Chain(Mlp(), Mlp())
    if level != "fully_shard":
        fe.shard(model, strategy=level)
        return model
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def step(model: nn.Module, optimizer: Any) -> None:
    x, y = vector_batch(4, 0)
    model(x.to(next(model.parameters()).dtype), y).backward()
    optimizer.step()
    optimizer.zero_grad()


# Level, number of steps before, dtypes that ranks convert the model to, number of ranks.
BEFORE, BETWEEN = (0, {1: "float64"}, 2), (2, {0: "bfloat16"}, 2)
WAYS: list[Any] = [
    *((level, *(BETWEEN if number % 2 else BEFORE)) for number, level in enumerate(LEVELS)),
    ("fully_shard", *BEFORE),
    ("fully_shard", *BETWEEN),
    ("optim_grads_params", 1, {0: "float64", 1: "bfloat16"}, 2),
    ("optim_grads_params", 1, {2: "float64"}, 4),
]


@pytest.mark.parametrize(("level", "num_before", "dtypes", "world_size"), WAYS)
def test_a_conversion_that_other_ranks_do_not_make_is_an_error_on_all(
    ranks: Ranks, level: str, num_before: int, dtypes: dict[int, str], world_size: int
) -> None:
    for rank, text in enumerate(
        ranks.run(error_of, level, num_before, dtypes, world_size=world_size)
    ):
        assert text.startswith("ValueError: "), (rank, text)
        for dtype in dtypes.values():
            assert f"torch.{dtype}, before torch.float32" in text, (rank, text)
        assert "every rank has to make or none" in text
        assert "weight" in text
        assert any(f"on rank {converted} [" in text for converted in dtypes), (rank, text)


def error_of(level: str, num_before: int, dtypes: dict[int, str]) -> str:
    """Ranks in ``dtypes`` convert the model after ``num_before`` steps; others do not."""
    model = made(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_before):
        step(model, optimizer)
    began = time.monotonic()
    error: Exception | None = None
    before = [held(param).clone() for param in model.parameters()]
    try:
        with early_checks():
            if dist.get_rank() in dtypes:
                model.to(getattr(torch, dtypes[dist.get_rank()]))
            step(model, optimizer)
    except (RuntimeError, ValueError) as caught:
        error = caught
    assert time.monotonic() - began < MOST_SECONDS
    if dist.get_rank() in dtypes:  # it has changed nothing
        for param, value in zip(model.parameters(), before, strict=True):
            assert param.dtype == torch.float32
            assert torch.equal(held(param), value)
    return f"{type(error).__name__}: {error}"


@on_ranks(2)
def test_a_conversion_of_all_ranks_costs_one_rendezvous() -> None:
    found: list[str] = []
    usual = rendezvous._Place.wait_for_all

    def counted(self: Any, *args: Any) -> Any:
        found.append(self._what)
        return usual(self, *args)

    for level in LEVELS:
        model = made(level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous._Place, "wait_for_all", counted)
            found.clear()
            model.double()
            if dist.get_rank() == 1:
                time.sleep(0.2)  # a rank that is late is waited for
            step(model, optimizer)
            step(model, optimizer)
            assert len(found) == 1, found
            if dist.get_rank() == 1:
                model.double()  # they are already
            step(model, optimizer)
            assert len(found) == 1, found


@on_ranks(2)
@pytest.mark.parametrize("what", ["norm", "read"])
def test_the_others_may_wait_in_the_norm_or_in_a_read(what: str) -> None:
    model = made("optim_grads_params")
    model(*vector_batch(4, 0)).backward()
    read = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    if what == "read":
        read = model.blocks[0].up.weight.full_tensor
    if dist.get_rank() == 1:
        read = model.double
    with early_checks(), pytest.raises(ValueError, match=r"torch\.float64, before torch\.float32"):
        read()
    dist.barrier()


@on_ranks(2)
def test_two_models_of_one_shape_are_told_apart() -> None:
    first, second = made("optim"), made("optim")
    with pytest.raises(ValueError, match="expected the same on all ranks"):
        (first if dist.get_rank() == 0 else second).double()
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_is_slow_is_not_taken_for_one_that_does_not_convert() -> None:
    model, other = made("optim_grads_params"), made("optim_grads_params")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with early_checks():
        if dist.get_rank() == 0:
            time.sleep(1.5)
        model.double()
        step(model, optimizer)
        step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert {param.dtype for param in model.parameters()} == {torch.float64}
