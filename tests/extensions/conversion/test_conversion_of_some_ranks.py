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
from tests.pool import on_ranks

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# A rendezvous checks the places of missing ranks soon, and again after as long; threads of ranks
# answer within half a second.
MOST_SECONDS = 30.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.head.weight.dtype)
        for block in self.blocks:
            y = torch.tanh(block(y))
        return self.head(y)


@contextmanager
def early_checks() -> Iterator[None]:
    usual, rendezvous.FIRST_CHECK_SECONDS = rendezvous.FIRST_CHECK_SECONDS, 0.3
    try:
        yield
    finally:
        rendezvous.FIRST_CHECK_SECONDS = usual


def made(level: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if level is None:
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    fe.shard(model, strategy=level)
    return model


def own_part(param: torch.Tensor) -> torch.Tensor:
    return (param.local if isinstance(param, fe.FlatDTensor) else param).detach()


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(4, 6)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def gathered_texts(error: Exception | None) -> list[str]:
    """Of all ranks, over the default group, whose connections are whole."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, f"{type(error).__name__}: {error}")
    return texts


def check_all_raise(level: str | None, num_before: int, dtypes: dict[int, str]) -> None:
    """Ranks in ``dtypes`` convert the model after ``num_before`` steps; others do not."""
    model = made(level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_before):
        step(model, optimizer)
    began = time.monotonic()
    error: Exception | None = None
    before = [own_part(param).clone() for param in model.parameters()]
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
            assert torch.equal(own_part(param), value)
    for rank, text in enumerate(gathered_texts(error)):
        assert text.startswith("ValueError: "), (rank, text)
        for dtype in dtypes.values():
            assert f"torch.{dtype}, before torch.float32" in text, (rank, text)
        assert "every rank has to make or none" in text
        assert "weight" in text
        assert any(f"on rank {converted} [" in text for converted in dtypes), (rank, text)


@on_ranks(2)
@pytest.mark.parametrize("level", [*LEVELS, None])
def test_one_of_two_ranks_before_the_first_step(level: str | None) -> None:
    check_all_raise(level, 0, {1: "float64"})


@on_ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_one_of_two_ranks_between_steps(level: str) -> None:
    check_all_raise(level, 2, {0: "bfloat16"})


@on_ranks(2)
def test_ranks_that_convert_to_different_dtypes() -> None:
    check_all_raise("optim_grads_params", 1, {0: "float64", 1: "bfloat16"})


@on_ranks(4)
@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_one_of_four_ranks(level: str) -> None:
    check_all_raise(level, 1, {2: "float64"})


@on_ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_a_conversion_of_all_ranks_costs_one_rendezvous(level: str) -> None:
    model = Net()
    fe.shard(model, strategy=level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    found: list[str] = []
    usual = rendezvous._Place.wait_for_all

    def counted(self: Any, *args: Any) -> Any:
        found.append(self._what)
        return usual(self, *args)

    rendezvous._Place.wait_for_all = counted  # type: ignore[method-assign]
    try:
        model.double()
        if dist.get_rank() == 1:
            time.sleep(1.0)  # a rank that is late is waited for
        for _ in range(3):
            step(model, optimizer)
        assert len(found) == 1, found
        if dist.get_rank() == 1:
            model.double()  # they are already
        step(model, optimizer)
        assert len(found) == 1, found
    finally:
        rendezvous._Place.wait_for_all = usual  # type: ignore[method-assign]


@on_ranks(2)
@pytest.mark.parametrize("what", ["norm", "read"])
def test_the_others_may_wait_in_the_norm_or_in_a_read(what: str) -> None:
    model = made("optim_grads_params")
    model(torch.ones(4, 6)).square().mean().backward()
    read = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    if what == "read":
        read = model.head.weight.full_tensor  # type: ignore[assignment, union-attr]
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
            time.sleep(4.0)
        model.double()
        step(model, optimizer)
        other(torch.ones(4, 6))
    assert model.head.weight.dtype == torch.float64
