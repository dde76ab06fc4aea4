"""Programs that clear, freeze, hook or replace gradients between calls, compared with plain torch.
Also several forwards within one ``torch.autocast``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.models import Chain, Mlp, Skipping, Transformer, token_batch, vector_batch
from tests.pool import Ranks, on_few_ranks, on_ranks
from tests.reference import full_gradients, nothing, rank_and_size, relative_error
from tests.runtime.habits import Choosing


class Side:
    """A model that one process trains on the batches of all ranks, or a sharded one on this rank's.

    ``prepare(model, rank)`` is called before the forward of a rank's batch.
    """

    def __init__(self, model: nn.Module, engine: fe.Engine | None = None) -> None:
        self.model: Any = model
        self.engine = engine
        self.make_batch = token_batch if isinstance(model, Transformer) else vector_batch

    def loss(self, seed: int, prepare: Callable[[Any, int], object] = nothing) -> Tensor:
        rank, size = rank_and_size()
        losses = []
        for each in range(size) if self.engine is None else [rank]:
            prepare(self.model, each)
            losses.append(self.model(*self.make_batch(4, seed + each)).float())
        return torch.stack(losses).mean()

    def backward(self, seed: int, prepare: Callable[[Any, int], object] = nothing) -> None:
        self.loss(seed, prepare).backward()

    def reset(self) -> None:
        if self.engine is not None:
            self.engine.reset()

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.engine is None else self.engine.no_sync()


# A program yields wherever gradients are to be compared.
Program = Callable[[Side], Iterator[None]]

CLEAR: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "optimizer to none": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model to none": lambda model, optimizer: model.zero_grad(),
    "model to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


def cleared(side: Side, way: str, wraps: bool = False) -> Iterator[None]:
    for foreach in (True, False) if "optimizer" in way else (True,):
        optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1, foreach=foreach)
        if wraps and side.engine is not None:
            fe.shard_optimizer(optimizer)
        for seed in (10, 20):
            side.backward(seed)
            yield
            optimizer.step()
            CLEAR[way](side.model, optimizer)
            yield


def zeroed_and_reset_or_made_none(side: Side) -> Iterator[None]:
    for clear in (side.reset, side.model.zero_grad):
        side.backward(0)
        side.model.zero_grad(set_to_none=False)
        clear()
        for seed in (10, 20):
            side.backward(seed)
            yield
        side.model.zero_grad()


def no_sync_nests_and_ends_with_an_exception(side: Side) -> Iterator[None]:
    with side.no_sync():
        with side.no_sync():
            side.backward(10)
        side.backward(20)
    with pytest.raises(KeyError), side.no_sync():
        raise KeyError("a user's own")
    side.backward(30)
    yield


def two_forwards_first(side: Side) -> Iterator[None]:
    for swapped in (False, True):
        losses = [side.loss(seed) for seed in (10, 20)]
        first, second = reversed(losses) if swapped else losses
        with side.no_sync():
            first.backward()
        second.backward()
        yield
        side.model.zero_grad()
    (side.loss(10) + side.loss(20)).backward()
    yield


def retained_graph(side: Side) -> Iterator[None]:
    loss = side.loss(10)
    with side.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()
    yield


def retained_graph_and_another_forward(side: Side) -> Iterator[None]:
    first = side.loss(10)
    first.backward(retain_graph=True)
    second = side.loss(20)
    (first + second).backward(retain_graph=True)
    yield
    side.model.zero_grad()
    (second + side.loss(30)).backward(retain_graph=True)
    yield
    first.backward()
    yield


SETS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "attribute": lambda param, grad: setattr(param, "grad", grad),
    "descriptor": lambda param, grad: Tensor.grad.__set__(param, grad),  # type: ignore[attr-defined]
}


def given_after_clearing(side: Side, way: str) -> Iterator[None]:
    side.backward(0)
    ones = [torch.ones_like(param.grad) for param in side.model.parameters()]
    side.model.zero_grad()
    for param, one in zip(side.model.parameters(), ones, strict=True):
        SETS[way](param, one)
    side.backward(10)
    yield


# Modules and ranks without gradients.


def told(*which: str) -> Callable[[Any, int], None]:
    """Select the linears that blocks use: those of ``which[r]`` on rank r."""
    return lambda model, rank: model.choose(which[rank % len(which)])


def missing_on_one_rank_or_all(side: Side) -> Iterator[None]:
    for step, which in enumerate((("left", "right"), ("right", "left"), ("left",))):
        side.backward(10 * step, told(*which))
        yield
        side.model.zero_grad(set_to_none=step > 0)


def in_one_microbatch_only(side: Side, first: str, second: str) -> Iterator[None]:
    for turn in range(2):
        with side.no_sync():
            side.backward(10 + turn, told(first))
        side.backward(20 + turn, told(second))
        yield
        side.model.zero_grad(set_to_none=turn == 1)


def unit_that_one_rank_skips(side: Side) -> Iterator[None]:
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        side.backward(
            10 * step, lambda model, rank, step=step: setattr(model, "skip", rank == step % 2)
        )
        yield
        optimizer.step()
        optimizer.zero_grad()


# Freezing.

FREEZE: dict[str, Callable[[nn.Module, bool], object]] = {
    "module": lambda module, wanted: module.requires_grad_(wanted),
    "attribute": lambda module, wanted: [
        setattr(param, "requires_grad", wanted) for param in module.parameters()
    ],
    "function": lambda module, wanted: [
        Tensor.requires_grad_(param, wanted) for param in module.parameters()
    ],
}


def frozen_between_steps(side: Side, way: str) -> Iterator[None]:
    for step, wanted in enumerate((True, False, True, False)):
        FREEZE[way](side.model.blocks[0], wanted)
        side.backward(10 * step)
        yield
        side.model.zero_grad()


def frozen_and_thawed(side: Side) -> Iterator[None]:
    """Freeze a linear for an evaluation between forward and backward; then also during a
    backward."""
    left = side.model.blocks[0].left
    for step in range(2):
        side.model.zero_grad()
        loss = side.loss(step)
        left.requires_grad_(False)
        with torch.no_grad():
            side.loss(step + 1)
        left.requires_grad_(True)
        loss.backward()
        yield
    side.model.zero_grad()
    loss = side.loss(0)
    left.requires_grad_(False)
    loss.backward()
    left.requires_grad_(True)
    yield


def thawed_in_time(side: Side) -> Iterator[None]:
    """Freeze the model for an evaluation between two forwards; thaw it before their backward."""
    first = side.loss(0)
    side.model.requires_grad_(False)
    with torch.no_grad():
        side.loss(10)
    side.model.requires_grad_(True)
    (first + side.loss(20)).backward()
    yield


# Hooks on gradients see the new gradient alone.


def hooked(side: Side) -> Iterator[None]:
    side.model.blocks[0].left.weight.register_hook(lambda grad: grad * 0.5)
    side.model.blocks[1].right.bias.register_hook(lambda grad: grad * 3)
    for clear in (side.model.zero_grad, lambda: side.model.zero_grad(set_to_none=False)):
        for seed in (0, 10, 20):
            side.backward(seed)
            yield
        clear()
    side.backward(30)
    yield


def all_hooked(side: Side) -> Iterator[None]:
    for param in side.model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    for seed in (0, 10, 20):
        side.backward(seed)
        yield


def hooked_with_penalty_and_given_gradient(side: Side) -> Iterator[None]:
    """A penalty's gradient passes the hook; a gradient that was assigned before does not."""
    weight = side.model.blocks[0].left.weight
    weight.register_hook(lambda grad: grad * 0.5)
    for seed in (0, 10):
        (side.loss(seed) + weight.square().sum()).backward()
        yield
    weight.grad = torch.ones_like(weight)
    side.backward(20)
    yield


# Within ``torch.autocast``, whose cache of casted weights outlives a forward.


def evaluated_before_and_between(side: Side) -> Iterator[None]:
    with torch.no_grad():
        side.loss(0)
    loss = side.loss(10)
    with torch.no_grad():
        side.loss(20)
    loss.backward()
    side.backward(30)
    yield


def recomputed(side: Side) -> Iterator[None]:
    for block in side.model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for seed in (0, 10):
        side.backward(seed)
    yield


ORDERS = [("left", "right"), ("right", "left"), ("both", "left"), ("left", "both")]
PROGRAMS: dict[str, Program] = {
    **{f"cleared: {way}": functools.partial(cleared, way=way) for way in CLEAR},
    **{
        f"cleared, sharded: {way}": functools.partial(cleared, way=way, wraps=True)
        for way in ("optimizer to none", "optimizer to zero")
    },
    **{f"given: {way}": functools.partial(given_after_clearing, way=way) for way in SETS},
    **{f"frozen: {way}": functools.partial(frozen_between_steps, way=way) for way in FREEZE},
    **{
        f"in one microbatch: {first}, {second}": functools.partial(
            in_one_microbatch_only, first=first, second=second
        )
        for first, second in ORDERS
    },
    **{
        program.__name__: program
        for program in (
            zeroed_and_reset_or_made_none,
            no_sync_nests_and_ends_with_an_exception,
            two_forwards_first,
            retained_graph,
            retained_graph_and_another_forward,
            missing_on_one_rank_or_all,
            unit_that_one_rank_skips,
            frozen_and_thawed,
            thawed_in_time,
            hooked,
            all_hooked,
            hooked_with_penalty_and_given_gradient,
            evaluated_before_and_between,
            recomputed,
        )
    },
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("cleared"):
        return Transformer(num_blocks=1, tied=True)
    return Skipping() if name == unit_that_one_rank_skips.__name__ else Choosing()


def assert_same_gradients(
    name: str, tolerance: float = 2e-6, autocast: bool = False, **options: Any
) -> None:
    """Compare at each level; the error is relative to the largest element."""
    # Where parameters are sharded all ranks run the same units.
    levels = list(LEVELS)[:3] if name == unit_that_one_rank_skips.__name__ else LEVELS
    for level in levels:
        alone, model = Side(model_of(name)), model_of(name)
        side = Side(model, fe.shard(model, strategy=level, **options))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            all_expected = []
            for _ in PROGRAMS[name](alone):
                all_expected.append(
                    {
                        n: p.grad.clone()
                        for n, p in alone.model.named_parameters()
                        if p.grad is not None
                    }
                )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for place, _ in enumerate(PROGRAMS[name](side)):
                for each, found in full_gradients(model).items():
                    expected = all_expected[place].get(each)
                    if found is None or expected is None:
                        assert found is expected, f"{level}, {place}: {each}: {found}"
                    else:
                        error = relative_error(found, expected)
                        assert error < tolerance, f"{level}, {place}: {each} is off by {error:.1e}"
        assert place == len(all_expected) - 1


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_gradients_are_those_of_one_process(name: str) -> None:
    assert_same_gradients(name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_so_they_are_on_one_rank_and_on_three(ranks: Ranks, world_size: int) -> None:
    for name in ("frozen_and_thawed", "hooked", "missing_on_one_rank_or_all"):
        ranks.run(assert_same_gradients, name, world_size=world_size)


# Programs, the tolerance, and arguments.
WAYS: dict[str, tuple[tuple[str, ...], float, dict[str, Any]]] = {
    "in one unit": (
        ("hooked", "unit_that_one_rank_skips", "frozen_and_thawed"),
        2e-6,
        {"options": fe.Options(min_unit_size=10**6)},
    ),
    "within autocast": (
        ("two_forwards_first", "evaluated_before_and_between", "recomputed"),
        2e-2,
        {"autocast": True},
    ),
    "with sums in bf16": (
        ("hooked", "all_hooked", "zeroed_and_reset_or_made_none"),
        3e-2,
        {"mp_policy": fe.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)},
    ),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_so_they_are(way: str) -> None:
    names, tolerance, arguments = WAYS[way]
    for name in names:
        assert_same_gradients(name, tolerance, **arguments)


@on_ranks(2)
def test_autocast_casts_weights_anew_after_a_step() -> None:
    for level in LEVELS:
        model = Chain(Mlp(), Mlp())
        fe.shard(model, strategy=level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                loss = model(*vector_batch(4, 1)).float()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[2] < losses[1] < losses[0]


@on_ranks(2)
def test_each_step_of_a_recurrence_runs_the_retained_graphs_of_earlier_steps() -> None:
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected: list[Tensor] = []
    for level in (None, *LEVELS):
        torch.manual_seed(0)
        cell: Any = nn.GRUCell(6, 8).double()
        if level is not None:
            fe.shard(cell, strategy=level)
        for _ in range(2):
            hidden = torch.zeros(3, 8, dtype=torch.float64)
            for _ in range(3):
                hidden = cell(x, hidden)
                hidden.square().mean().backward(retain_graph=True)
        if level is None:
            expected = [param.grad for param in cell.parameters()]
        for found, grad in zip(full_gradients(cell).values(), expected, strict=True):
            torch.testing.assert_close(found, grad)


@on_few_ranks
def test_a_gradient_of_a_parameter_with_a_graph_is_refused() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for level in LEVELS:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        model = copy.deepcopy(plain)
        engine = fe.shard(model, strategy=level)
        plain(x).square().mean().backward()
        for accumulates in (False, True):
            for is_penalty in (False, True):
                if accumulates:
                    model(x).square().mean().backward()
                loss = (model[2].bias ** 3).sum() if is_penalty else model(x).square().mean()
                with pytest.raises(RuntimeError, match=r"expected a gradient of 2\.bias without a"):
                    loss.backward(create_graph=True)
                engine.reset()
                model.zero_grad()
        # A graph that a failed backward has retained may be freed after the next forward.
        model(x).square().mean().backward()
        for found, param in zip(full_gradients(model).values(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, param.grad)
