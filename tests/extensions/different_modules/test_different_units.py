"""Training within ``engine.together()``: ranks use different units, in any order and number."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from different_modules import PATTERNS
from different_modules import loss_of as example_loss
from fsdp_engine.offload import ROLES
from fsdp_engine.runtime.gather_rounds import to_gather
from fsdp_engine.runtime.unit import Unit
from tests import reference
from tests.extensions.offload.offloaded import on_disk
from tests.megatron.configs import LEVEL_NAMES
from tests.pairs import PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of

WIDTH, NUM_BLOCKS = 6, 5
# FSDP_ENGINE_PATTERNS=1000 takes half an hour.
NUM_PATTERNS = int(os.environ.get("FSDP_ENGINE_PATTERNS", "100"))

# What a forward does with a block: calls it, in one of these ways.
WAYS = ("plain", "checkpointed", "re-entrant", "in vain", "without gradients", "reads its weight")
# (block, way) in order.
Route = Sequence[tuple[int, str]]


class Block(nn.Module):
    """Two layers, of which the inner one is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(x)))


class Maze(nn.Module):
    """Goes through its blocks as each batch says; one block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 2)
        self.blocks[1].requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, route: Route) -> Tensor:
        x = self.embed(x)
        for number, way in route:
            block = self.blocks[number]
            if way == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)
            elif way == "re-entrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif way == "in vain":
                block(x)
            elif way == "without gradients":
                with torch.no_grad():
                    extra = block(x)
                x = x + extra
            elif way == "reads its weight":
                x = x + nn.functional.linear(x, block.out.weight)
            else:
                x = block(x)
        result: Tensor = self.head(x)
        return result


UNITS = ["blocks.*", "blocks.*.inner"]


@dataclass(frozen=True)
class Case:
    """Routes by step, microbatch and rank; between steps, routes of evaluations by rank."""

    routes: list[list[list[Route]]]
    evaluations: list[list[list[Route]]]
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"routes={self.routes}, evaluations={self.evaluations}, options={self.options}"


def draw_route(draw: random.Random, ways: Sequence[str], orders: bool) -> Route:
    blocks = draw.choices(range(NUM_BLOCKS), k=draw.randrange(7))
    if not orders:
        blocks = sorted(set(blocks))
    route = [(each, draw.choice(ways)) for each in blocks]
    # A unit's gradients come once in a backward with re-entrant checkpoints (docs/design.md).
    is_repeated = {each for each in blocks if blocks.count(each) > 1}
    return [
        (each, "checkpointed" if way == "re-entrant" and each in is_repeated else way)
        for each, way in route
    ]


def draw_case(draw: random.Random, num_ranks: int) -> Case:
    ways = draw.choice([WAYS[:1], WAYS[:2], WAYS[:2], WAYS])
    orders = draw.random() < 0.6
    num_micro = draw.randrange(1, 4)
    routes = [
        [[draw_route(draw, ways, orders) for _ in range(num_ranks)] for _ in range(num_micro)]
        for _ in range(3)
    ]
    if draw.random() < 0.3:  # all ranks the same
        routes = [[[micro[0]] * num_ranks for micro in step] for step in routes]
    evaluations = [
        [
            [draw_route(draw, WAYS[:1], orders) for _ in range(draw.choice([0, 0, 1, 3]))]
            for _ in range(num_ranks)
        ]
        for _ in range(3)
    ]
    options = {
        "keeps": draw.random() < 0.2,
        "budget": draw.choice([None, None, 0, 1, 10**6]),
        "context": draw.choice(["each microbatch", "forward and backward", "all of training"]),
        "reads_early": draw.random() < 0.3,
    }
    return Case(routes, evaluations, options)


def inputs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, seed: int, route: Route) -> Tensor:
    loss: Tensor = model(inputs(seed), route).square().mean()
    return loss


def gradients_of(alone: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in alone.named_parameters()}


def assert_gradients(
    model: nn.Module, expected: Mapping[str, Tensor | None], where: object
) -> None:
    """Gradients of a sharded model are the expected ones, by name; None where those are."""
    found = reference.full_gradients(model)
    for name, right in expected.items():
        assert (right is None) == (found[name] is None), f"{where}, {name}: {right}"
        if right is not None:
            torch.testing.assert_close(
                found[name], right, msg=lambda text, n=name: f"{where}, {n}: {text}"
            )


def train_alone(case: Case, num_ranks: int) -> Iterator[tuple[dict[str, Tensor | None], nn.Module]]:
    model = Maze()
    optimizer = reference.sgd([param for param in model.parameters() if param.requires_grad])
    for step, micros in enumerate(case.routes):
        for number, routes in enumerate(micros):
            for rank, route in enumerate(routes):
                loss = loss_of(model, 100 * step + 10 * number + rank, route)
                (loss / (num_ranks * len(micros))).backward()
        yield gradients_of(model), model
        optimizer.step()
        optimizer.zero_grad()


def check(case: Case, shape: tuple[int, ...], pair: tuple[str, str]) -> str | None:
    """Trains on this rank; returns the first error."""
    try:
        differs(case, shape, pair)
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def differs(case: Case, shape: tuple[int, ...], pair: tuple[str, str]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, options = Maze(), case.options
    config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=options["budget"])
    outer = pair[1] if len(shape) > 1 else None
    engine = fe.shard(
        model,
        mesh_of(*shape),
        pair[0],
        outer,
        units=UNITS,
        config=config,
        offload=options.get("offload"),
    )
    if options["keeps"]:
        for unit in engine.units[2::3]:
            unit.options.keeps_after_forward = unit.options.keeps_after_backward = True
    optimizer = reference.sgd([param for param in model.parameters() if param.requires_grad])
    fe.shard_optimizer(optimizer)
    each = options["context"]
    around_all = engine.together() if each == "all of training" else nullcontext()
    around = nullcontext if each == "all of training" else engine.together
    with around_all:
        for step, (right, alone) in enumerate(train_alone(case, size)):
            micros = case.routes[step]
            for number, routes in enumerate(micros):
                last = number == len(micros) - 1
                seed = 100 * step + 10 * number + rank
                with engine.no_sync() if not last else nullcontext():
                    if each == "forward and backward":
                        with around():
                            loss = loss_of(model, seed, routes[rank])
                        with around():
                            (loss / len(micros)).backward()
                    else:
                        with around():
                            (loss_of(model, seed, routes[rank]) / len(micros)).backward()
                if options["reads_early"]:
                    [param.grad for param in model.parameters()]
            assert_gradients(model, right, f"step {step}")
            if each != "all of training":
                with engine.together(), torch.no_grad():
                    for number, route in enumerate(case.evaluations[step][rank]):
                        torch.testing.assert_close(
                            model(inputs(number), route), alone(inputs(number), route)
                        )
            optimizer.step()
            optimizer.zero_grad()
    state = engine.full_state_dict()
    assert sorted(state) == sorted(alone.state_dict())


def check_on_disk(folder: str, roles: Sequence[str], shape: tuple[int, ...]) -> list[str | None]:
    offload = on_disk(folder, roles)
    draws = [random.Random(seed) for seed in range(4)]
    cases = [draw_case(draw, dist.get_world_size()) for draw in draws]
    pair = ("optim_grads_params", "no_shard" if len(shape) == 1 else "optim_grads_params")
    return [
        check(replace(case, options={**case.options, "offload": offload}), shape, pair)
        for case in cases
    ]


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("roles", [ROLES[1:2], ROLES[2:], ROLES], ids="+".join)
def test_weights_and_gradients_come_from_files(
    ranks: Ranks, roles: Sequence[str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    found = ranks.run(check_on_disk, str(tmp_path), roles, shape, world_size=math.prod(shape))
    assert not any(error for errors in found for error in errors), found


class Stops(nn.Module):
    """Raises on one rank, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(3))

    def forward(self, x: Tensor, where: str) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and where == "forward":
                raise ArithmeticError("this rank's batch is bad")
            if number == 1 and where == "backward":
                x.register_hook(fail)
        return x.sum()


def fail(grad: Tensor) -> None:
    raise ArithmeticError("this rank's gradient is bad")


@pytest.mark.parametrize("gradients", [True, False])
@on_ranks(2)
def test_an_exception_on_one_rank_is_one_on_all(gradients: bool) -> None:
    rank, model = dist.get_rank(), Stops()
    engine = fe.shard(model, units="blocks.*")
    for step, failing in enumerate((0, 1, None, 1)):
        expected = ArithmeticError if rank == failing else RuntimeError
        text = "batch is bad" if rank == failing else "found one on another rank"
        around = nullcontext() if failing is None else pytest.raises(expected, match=text)
        with around, engine.together(), torch.set_grad_enabled(gradients):
            # The other rank is in a forward, or has left it.
            for _ in range(1 if gradients else 1 + 2 * step):
                loss = model(inputs(step), "forward" if rank == failing else "")
            if gradients:
                loss.backward()
        engine.reset()
        engine.zero_grad_buffer()
    loss = model(inputs(9), "")
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_an_exception_in_the_backward_of_one_rank_is_one_on_all() -> None:
    rank, model = dist.get_rank(), Stops()
    engine = fe.shard(model, units="blocks.*")
    text = "gradient is bad" if rank == 1 else "found one on another rank"
    with pytest.raises((ArithmeticError, RuntimeError), match=text), engine.together():
        model(inputs(0), "backward" if rank == 1 else "").backward()


@on_ranks(2)
def test_the_mean_loss_of_ranks_that_use_different_units_is_exact() -> None:
    rank, model, alone = dist.get_rank(), Maze(), Maze()
    engine = fe.shard(model, units=UNITS)
    routes: list[Route] = [[(0, "plain"), (3, "plain")], [(2, "plain"), (4, "plain")] * 3]
    batches = [inputs(0), torch.cat([inputs(1), inputs(2)])]
    for step in range(2):
        if step:
            model.zero_grad()
            alone.zero_grad()
        with engine.together():
            loss = model(batches[rank], routes[rank]).square().sum()
            engine.mean_loss(loss, len(batches[rank])).backward()
        losses = [
            alone(batch, route).square().sum() for batch, route in zip(batches, routes, strict=True)
        ]
        (torch.stack(losses).sum() / sum(map(len, batches))).backward()
        assert_gradients(model, gradients_of(alone), f"step {step}")


@on_ranks(2)
def test_one_unit_is_gathered_ahead_and_no_more() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(8)))
    engine = fe.shard(model, units=list(model))
    size = engine.units[1].num_elements * 8
    full = []
    for layer in model:
        layer.register_forward_pre_hook(
            lambda *_: full.append(engine.memory_bytes().get("full", 0) // size)
        )
    for _ in range(2):
        full.clear()
        with engine.together(), torch.no_grad():
            model(inputs(0))
    assert full == [2] * 7 + [1]


@pytest.mark.parametrize("backward", [False, True])
@on_ranks(4)
def test_few_units_of_other_ranks_are_kept(backward: bool) -> None:
    """Ranks use all units, each in an order of its own."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(24))
    model = nn.ModuleDict({"layers": layers})
    engine = fe.shard(model, units=list(layers))
    size = engine.units[1].num_elements * 8
    routes = random.Random(dist.get_rank())
    for _ in range(4):
        engine.peak_memory_bytes(reset=True)
        with engine.together(), torch.set_grad_enabled(backward):
            x = inputs(0)
            for index in routes.sample(range(24), 24):
                x = layers[index](x)
            if backward:
                x.sum().backward()
        own, kept, voted = 5, 2, 3  # own: in use, being left, and three ahead
        assert 4 <= engine.peak_memory_bytes()["full"] // size <= own + kept + voted


def routed_step(model: nn.Module, seed: int, route: Route) -> None:
    loss_of(model, seed, route).backward()


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_steps_and_uneven_evaluations_within_one_context(level: str) -> None:
    rank, model, alone = dist.get_rank(), Maze(), Maze()
    engine = fe.shard(model, strategy=level, units=UNITS)
    optimizer, one = (
        reference.sgd([param for param in each.parameters() if param.requires_grad])
        for each in (model, alone)
    )
    routes = [[(0, "plain")], [(3, "plain"), (0, "plain"), (4, "plain")]]
    with engine.together():
        for step in range(4):
            routed_step(model, 10 * step + rank, routes[(rank + step) % 2])
            losses = [
                loss_of(alone, 10 * step + each, routes[(each + step) % 2]) for each in (0, 1)
            ]
            torch.stack(losses).mean().backward()
            if step % 2:
                engine.clip_grad_norm_(0.5)
                nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            with torch.no_grad():  # the other rank may step at once, and none may see its weights
                for number in range(3 * ((rank + step) % 2)):
                    torch.testing.assert_close(
                        model(inputs(number), routes[1]), alone(inputs(number), routes[1])
                    )
            for each in (optimizer, one):
                each.step()
                each.zero_grad()
            with torch.no_grad():
                for number in range(2 * ((rank + step + 1) % 2)):
                    torch.testing.assert_close(
                        model(inputs(number), routes[0]), alone(inputs(number), routes[0])
                    )
    reference.assert_same_weights(model, alone, rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_a_graph_that_is_kept_for_a_second_backward_is_used() -> None:
    model, alone = Maze(), Maze()
    engine = fe.shard(model, units=UNITS)
    for each, context in ((model, engine.together()), (alone, nullcontext())):
        with context:
            first = loss_of(each, 0, [(0, "plain"), (2, "plain")])
            first.backward(retain_graph=True)
            (first + loss_of(each, 1, [(3, "plain")])).backward()
    assert_gradients(model, gradients_of(alone), "after the second backward")


@on_ranks(2)
def test_a_job_goes_further_after_a_backward_that_failed_on_all_ranks() -> None:
    rank, model = dist.get_rank(), Stops()
    engine = fe.shard(model, units="blocks.*")
    with engine.together():
        for step in range(3):
            model.blocks[1].requires_grad_(step != 1 or rank == 0)
            with pytest.raises(ArithmeticError, match="gradient is bad"):
                model(inputs(step), "backward").backward()
            engine.reset()
            model.blocks[1].requires_grad_(True)
            model(inputs(step), "").backward()
            assert all(param.grad is not None for param in model.parameters())
            model.zero_grad()


@on_ranks(4)
def test_an_exception_on_two_axes_is_one_on_all_ranks() -> None:
    rank, model = dist.get_rank(), Maze()
    engine = fe.shard(model, mesh_of(2, 2), outer_strategy="optim", units=UNITS)
    routes: list[Route] = [[(0, "plain")] * (1 + each) for each in range(4)]
    for _ in range(2):
        with engine.together():
            routed_step(model, rank, routes[rank])
        model.zero_grad()
    found = ""
    try:
        with engine.together():
            model(inputs(rank), [*routes[rank], *([(9, "plain")] if rank == 1 else [])])
    except (IndexError, RuntimeError) as error:
        found = type(error).__name__
    assert found == ("IndexError" if rank == 1 else "RuntimeError")


@on_ranks(2)
def test_each_rank_raises_its_own_exception() -> None:
    rank, model = dist.get_rank(), Maze()
    engine = fe.shard(model, units=UNITS)
    routes: list[Route] = [[(0, "plain")], [(0, "plain"), (1, "plain"), (2, "plain")]]
    for _ in range(2):
        with engine.together(), torch.no_grad():
            model(inputs(0), routes[rank])
    for route in ([(9 + rank, "plain")], [(0, "plain"), (9 + rank, "plain")]):
        with pytest.raises(IndexError, match=str(9 + rank)), engine.together(), torch.no_grad():
            model(inputs(0), route)
    engine.reset()
    with engine.together():
        routed_step(model, rank, routes[rank])


@on_ranks(2)
def test_ranks_in_the_forwards_of_two_engines_raise() -> None:
    models = [Maze(), Maze()]
    engines = [fe.shard(model, units=UNITS) for model in models]
    first = dist.get_rank()
    expected = "all ranks in forwards and backwards of one engine; found ranks in those of two"
    with engines[0].together(), engines[1].together(), torch.no_grad():  # one after the other
        for model, engine in zip(models, engines, strict=True):
            model(inputs(0), [(first, "plain")])
            engine.clip_grad_norm_(1.0)
    with (
        pytest.raises(RuntimeError, match=expected),
        engines[0].together(),
        engines[1].together(),
        torch.no_grad(),
    ):
        models[first](inputs(0), [(0, "plain")])


def _other_numbers(engine: fe.Engine, model: nn.Module, case: str, rank: int) -> None:
    """A program whose ranks run different numbers of backwards or calls within a context."""
    optimizer = reference.sgd([param for param in model.parameters() if param.requires_grad])
    route: Route = [(number, "plain") for number in range(NUM_BLOCKS)]
    for number in range(2 + rank):
        if case == "microbatches":
            with engine.no_sync() if number < 1 + rank else nullcontext():
                routed_step(model, number, route)
        elif case == "evaluation on one rank" and number == 2:
            with torch.no_grad():
                loss_of(model, number, route)
            engine.await_ranks()
        elif case == "one backward more within no_sync" and number == 2:
            with engine.no_sync():
                routed_step(model, number, route)
        else:
            routed_step(model, number, route)
            if case == "steps":
                optimizer.step()
                optimizer.zero_grad()
    if case == "microbatches":
        optimizer.step()


_FOUND = {
    "steps": r"rank 1 in the last backward of a step; rank 0 at the end of the context",
    "microbatches": r"rank 1 in a backward that is not the last of a step; "
    r"rank 0 in the last backward",
    "no steps": r"rank 1 in the last backward of a step; rank 0 at the end of the context",
    "one backward more within no_sync": r"rank 1 in a backward that is not the last of a step; "
    r"rank 0 at the end of the context",
    "evaluation on one rank": r"rank 1 at an optimizer step, engine.await_ranks\(\) or another "
    r"call of all ranks; rank 0 at the end of the context",
}


@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
@pytest.mark.parametrize("case", _FOUND)
@on_ranks(2)
def test_different_numbers_of_backwards_are_an_error_on_all_ranks(case: str, level: str) -> None:
    model = Maze()
    engine = fe.shard(model, strategy=level, units=UNITS)
    with pytest.raises(RuntimeError, match=_FOUND[case]), engine.together():
        _other_numbers(engine, model, case, dist.get_rank())


@pytest.mark.parametrize("case", ["steps", "microbatches"])
@on_ranks(4)
def test_different_numbers_of_backwards_on_two_axes(case: str) -> None:
    rank, model = dist.get_rank(), Maze()
    engine = fe.shard(model, mesh_of(2, 2), units=UNITS)
    found = r"rank 2 in .*; ranks 0, 1, 3 (in the last backward|at the end)"
    with pytest.raises(RuntimeError, match=found), engine.together():
        _other_numbers(engine, model, case, int(rank == 2))


@on_ranks(2)
def test_batches_that_are_even_within_one_context() -> None:
    rank, model = dist.get_rank(), Maze()
    engine = fe.shard(model, units=UNITS)
    weights = []
    with engine.together():
        for batch, weight in engine.even_batches(range(2 + 2 * rank)):
            weights.append(weight)
            (weight * loss_of(model, batch, [(rank, "plain")] * (1 + batch))).backward()
            with torch.no_grad():
                for _ in range(2 * rank):
                    model(inputs(0), [(2, "plain")])
            model.zero_grad()
    assert weights == [1.0, 1.0, float(rank), float(rank)]


class Blocks(nn.Module):
    """Blocks, of which it leaves out some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(12))

    def forward(self, x: Tensor, left_out: Sequence[int] = ()) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number in left_out else torch.tanh(block(x))
        return x.square().mean()


@on_ranks(2)
def test_ranks_that_agree_gather_no_more_than_outside() -> None:
    model, rank = Blocks(), dist.get_rank()
    engine = fe.shard(model, min_unit_size=2 * (WIDTH + 1) * WIDTH)  # units of two blocks
    assert len(engine.units[1].modules) == 2
    gather, gathered = Unit.gather, 0

    def counted(unit: Unit, *args: Any) -> None:
        nonlocal gathered
        gathered += 1
        gather(unit, *args)

    def count(around: Any, left_out: Sequence[int] = ()) -> int:
        nonlocal gathered
        gathered = 0
        with around:
            model(inputs(rank), left_out).backward()
        return gathered

    with mock.patch.object(Unit, "gather", counted):
        outside = [count(nullcontext()) for _ in range(3)]
        together = [count(engine.together()) for _ in range(3)]
        one_left_out = [count(engine.together(), (4 * rank, 4 * rank + 1)) for _ in range(3)]
    assert together[1:] == outside[1:]
    # What a rank gathered ahead and left out is gathered for the other one, and may be once more.
    assert max(one_left_out) <= outside[1] + 4


def test_a_unit_that_others_need_soon_is_gathered_with_them() -> None:
    forward, both = b"\1\0", b"\1\1"
    # Ranks need units 1 and 3; the one at 1 comes to 3 later.
    assert to_gather(b"\0\1\0\2", b"\0\0\1\1", forward) == [1]
    # A rank computes ahead of the others, which wait for nothing.
    assert to_gather(b"\0\0\0\1", b"\0\0\1\1", forward) == []
    # Ranks wait for each other's units.
    assert to_gather(b"\0\2\0\2", b"\0\1\0\1", forward) == [1, 3]
    assert to_gather(b"\0\2\0\1", b"\0\1\0\1", forward) == [1]
    # Others are in backward, and go the other way.
    assert to_gather(b"\0\1\0\2", b"\0\0\1\1", both) == [1, 3]
    # They use others.
    assert to_gather(b"\0\1\0\2", bytes(4), forward) == [1, 3]


@on_ranks(4)
def test_ranks_that_leave_out_different_blocks_gather_few_twice() -> None:
    model, rank = Blocks(), dist.get_rank()
    engine = fe.shard(model, units="blocks.*")
    draw = random.Random(rank)
    gather, again, gathered = Unit.gather, Unit.gather_again, 0

    def counted(unit: Unit, *args: Any) -> None:
        nonlocal gathered
        gathered += 1
        gather(unit, *args)

    def counted_again(unit: Unit) -> None:
        nonlocal gathered
        gathered += 1
        again(unit)

    with (
        mock.patch.object(Unit, "gather", counted),
        mock.patch.object(Unit, "gather_again", counted_again),
    ):
        counts = []
        for step in range(12):
            left_out = () if step < 2 else draw.sample(range(12), 3)
            gathered = 0
            with engine.together():
                model(inputs(rank), left_out).backward()
            counts.append(gathered)
    # Almost every block is used by some rank.
    assert sum(counts[2:]) <= 1.15 * 10 * counts[1], counts


def run_cases(ranks: Ranks, seeds: range, shape: tuple[int, ...], pair: tuple[str, str]) -> None:
    size = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    for seed in seeds:
        case = draw_case(random.Random(f"{seed} {pair} {shape}"), size)
        found = ranks.run(check, case, shape, pair, world_size=size)
        wrong = "\n".join(filter(None, found))
        assert not wrong, f"seed {seed}: {wrong}\n{case}"


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_any_routes_give_the_gradients_of_one_process(ranks: Ranks, level: str) -> None:
    run_cases(ranks, range(4), (2,), (level, "no_shard"))


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_random_patterns(ranks: Ranks, pair: tuple[str, str]) -> None:
    share = NUM_PATTERNS // len(PAIRS) // 5
    run_cases(ranks, range(100, 100 + 3 * share), (2, 2), pair)
    run_cases(ranks, range(400, 400 + share), (4,), (pair[0], "no_shard"))
    run_cases(ranks, range(500, 500 + share), (2,), (pair[0], "no_shard"))


@pytest.mark.parametrize("pattern", PATTERNS)
@on_ranks(2)
def test_models_that_leave_out_modules_train_as_in_one_process(pattern: str) -> None:
    rank, models = dist.get_rank(), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(PATTERNS[pattern]())
    model, alone = models
    engine = fe.shard(model, units=model.units, min_unit_size=0)
    optimizer, one = (
        reference.sgd([param for param in each.parameters() if param.requires_grad])
        for each in models
    )
    for step in range(6):
        with engine.together():
            example_loss(model, step, rank).backward()
        (sum(example_loss(alone, step, each) for each in range(2)) / 2).backward()  # type: ignore[union-attr]
        found = reference.full_gradients(model)
        for name, param in alone.named_parameters():
            assert (param.grad is None) == (found[name] is None), name
        for each in (optimizer, one):
            each.step()
            each.zero_grad()
    reference.assert_same_weights(model, alone, rtol=1e-5, atol=1e-6)
