"""Training within ``engine.together()``: ranks use different units, in any order and number."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from different_modules import PATTERNS
from different_modules import loss_of as example_loss
from fsdp_engine.extensions.different_modules.gather_rounds import to_gather
from fsdp_engine.extensions.offload.places import ROLES
from tests import reference
from tests.extensions.different_modules import maze
from tests.extensions.offload.offloaded import on_disk
from tests.megatron.configs import LEVEL_NAMES
from tests.messages import GATHERS, Messages
from tests.pairs import PAIRS
from tests.pool import Ranks, on_ranks
from tests.scenario import Scenario
from tests.training import mesh_of

# FSDP_ENGINE_PATTERNS=1000 takes half an hour.
NUM_PATTERNS = int(os.environ.get("FSDP_ENGINE_PATTERNS", "100"))
LEVEL_3 = "optim_grads_params"


def check_cases(
    seeds: Sequence[int],
    shape: tuple[int, ...],
    pair: tuple[str, str],
    offload: fe.Offload | None = None,
) -> None:
    mesh = mesh_of(*shape)
    for seed in seeds:
        case = maze.draw_case(random.Random(f"{seed} {pair} {shape}"), dist.get_world_size())
        try:
            maze.check(case, mesh, pair, offload)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}: {case}") from error


def run_cases(ranks: Ranks, seeds: Sequence[int], shape: tuple[int, ...], *args: Any) -> None:
    for first in range(0, len(seeds), 20):
        given = seeds[first : first + 20]
        ranks.run(check_cases, given, shape, *args, world_size=math.prod(shape))


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_any_routes_give_the_gradients_of_one_process(ranks: Ranks, level: str) -> None:
    run_cases(ranks, range(3), (2,), (level, "no_shard"))


@pytest.mark.thorough
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_random_patterns(ranks: Ranks, pair: tuple[str, str]) -> None:
    share = NUM_PATTERNS // len(PAIRS) // 5
    run_cases(ranks, range(100, 100 + 3 * share), (2, 2), pair)
    run_cases(ranks, range(400, 400 + share), (4,), (pair[0], "no_shard"))
    run_cases(ranks, range(500, 500 + share), (2,), (pair[0], "no_shard"))


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("roles", [ROLES[1:2], ROLES[2:], ROLES], ids="+".join)
def test_weights_and_gradients_come_from_files(
    ranks: Ranks, roles: Sequence[str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    pair = (LEVEL_3, "no_shard" if len(shape) == 1 else LEVEL_3)
    run_cases(ranks, range(2), shape, pair, on_disk(tmp_path, roles))


def step_and_rank(rows: int, seed: int) -> tuple[torch.Tensor]:
    """Returns the step and the rank of a seed of ``reference.make_data``, for ``example_loss``."""
    return (torch.tensor([seed // 10_000, seed % 100 - 1]),)


@pytest.mark.parametrize("pattern", PATTERNS)
@on_ranks(2)
def test_models_that_leave_out_modules_train_as_in_one_process(pattern: str) -> None:
    Scenario(
        model=PATTERNS[pattern],
        batch=step_and_rank,
        options={"units": PATTERNS[pattern]().units},
        steps=4,
        microbatches=1,
        loss_of=lambda model, batch: example_loss(model, *batch[0].tolist()),
        around=lambda engine: engine.together(),
        compute_dtype=torch.float32,  # if set, the one process runs ranks' batches one by one
    ).check()


@on_ranks(2)
def test_a_graph_that_is_kept_for_a_second_backward_is_used() -> None:
    model, alone = maze.Maze(), maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    for each, context in ((model, engine.together()), (alone, nullcontext())):
        with context:
            first = maze.loss_of(each, 0, maze.plain(0, 2))
            first.backward(retain_graph=True)
            (first + maze.loss_of(each, 1, maze.plain(3))).backward()
    maze.assert_same_gradients(model, alone)


@on_ranks(2)
def test_batches_that_are_even_within_one_context() -> None:
    rank, model = dist.get_rank(), maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    weights = []
    with engine.together():
        for batch, weight in engine.even_batches(range(2 + 2 * rank)):
            weights.append(weight)
            (weight * maze.loss_of(model, batch, maze.plain(rank) * (1 + batch))).backward()
            with torch.no_grad():
                for _ in range(2 * rank):
                    model(maze.inputs(0), maze.plain(2))
            model.zero_grad()
    assert weights == [1.0, 1.0, float(rank), float(rank)]


# Exceptions.


@pytest.mark.parametrize("gradients", [True, False])
@on_ranks(2)
def test_an_exception_on_one_rank_is_one_on_all(gradients: bool) -> None:
    rank, model = dist.get_rank(), maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    for step, failing in enumerate((0, 1, None, 1)):
        expected = ArithmeticError if rank == failing else RuntimeError
        text = "is bad" if rank == failing else "found one on another rank"
        around = nullcontext() if failing is None else pytest.raises(expected, match=text)
        with around, engine.together(), torch.set_grad_enabled(gradients):
            # The other rank is in a forward, or has left it.
            for _ in range(1 if gradients else 1 + 2 * step):
                way = "raises" if rank == failing else "plain"
                loss = maze.loss_of(model, step, [(0, "plain"), (2, way), (3, "plain")])
            if gradients:
                loss.backward()
        engine.reset()
        engine.zero_grad_buffer()
    model.zero_grad()
    maze.loss_of(model, 9, maze.plain(0, 2)).backward()
    alone = maze.Maze()
    maze.loss_of(alone, 9, maze.plain(0, 2)).backward()
    maze.assert_same_gradients(model, alone)


@on_ranks(2)
def test_a_job_goes_further_after_a_backward_that_failed_on_all_ranks() -> None:
    rank, model = dist.get_rank(), maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    with engine.together():
        for step in range(3):
            model.blocks[2].requires_grad_(step != 1 or rank == 0)
            route = [*maze.plain(0, 2), (3, "raises in backward"), *maze.plain(4)]
            with pytest.raises(ArithmeticError, match="gradient is bad"):
                maze.loss_of(model, step, route).backward()
            engine.reset()
            model.blocks[2].requires_grad_(True)
            maze.loss_of(model, step, maze.plain(0, 2)).backward()
            assert all(param.grad is not None for param in model.blocks[2].parameters())
            model.zero_grad()


@pytest.mark.parametrize("way", ["raises", "raises in backward"])
@on_ranks(4)
def test_an_exception_on_two_axes_is_one_on_all_ranks(way: str) -> None:
    rank, model = dist.get_rank(), maze.Maze()
    engine = fe.shard(model, mesh_of(2, 2), outer_strategy="optim", units=maze.UNITS)
    route = maze.plain(0) * (1 + rank)
    for _ in range(2):
        with engine.together():
            maze.loss_of(model, rank, route).backward()
        model.zero_grad()
    text = "is bad" if rank == 1 else "found one on another rank"
    failing = [*route, (2, way if rank == 1 else "plain"), *maze.plain(3)]
    with pytest.raises((ArithmeticError, RuntimeError), match=text), engine.together():
        maze.loss_of(model, rank, failing).backward()


@on_ranks(2)
def test_each_rank_raises_its_own_exception() -> None:
    rank, model = dist.get_rank(), maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    route = maze.plain(0) if rank == 0 else maze.plain(0, 1, 2)
    for _ in range(2):
        with engine.together(), torch.no_grad():
            model(maze.inputs(0), route)
    for failing in ([(2 + rank, "raises")], [(0, "plain"), (2 + rank, "raises")]):
        text = f"batch {2 + rank}"
        with pytest.raises(ArithmeticError, match=text), engine.together(), torch.no_grad():
            model(maze.inputs(0), failing)
    engine.reset()
    with engine.together():
        maze.loss_of(model, rank, route).backward()


@on_ranks(2)
def test_ranks_in_the_forwards_of_two_engines_raise() -> None:
    models = [maze.Maze(), maze.Maze()]
    engines = [fe.shard(model, units=maze.UNITS) for model in models]
    first = dist.get_rank()
    expected = "all ranks in forwards and backwards of one engine; found ranks in those of two"
    with engines[0].together(), engines[1].together(), torch.no_grad():
        # All ranks use one engine, and then the other.
        for model, engine in zip(models, engines, strict=True):
            model(maze.inputs(0), maze.plain(first))
            engine.clip_grad_norm_(1.0)
    with (
        pytest.raises(RuntimeError, match=expected),
        engines[0].together(),
        engines[1].together(),
        torch.no_grad(),
    ):
        models[first](maze.inputs(0), maze.plain(0))


def run_other_numbers(engine: fe.Engine, model: nn.Module, case: str, rank: int) -> None:
    """A program whose ranks run different numbers of backwards or calls within a context."""
    optimizer = reference.sgd(model.parameters())
    route = maze.plain(*range(maze.NUM_BLOCKS))
    for number in range(2 + rank):
        if case == "microbatches":
            with engine.no_sync() if number < 1 + rank else nullcontext():
                maze.loss_of(model, number, route).backward()
        elif case == "evaluation on one rank" and number == 2:
            with torch.no_grad():
                maze.loss_of(model, number, route)
            engine.await_ranks()
        elif case == "one backward more within no_sync" and number == 2:
            with engine.no_sync():
                maze.loss_of(model, number, route).backward()
        else:
            maze.loss_of(model, number, route).backward()
            if case == "steps":
                optimizer.step()
                optimizer.zero_grad()
    if case == "microbatches":
        optimizer.step()


FOUND = {
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
@pytest.mark.parametrize("case", FOUND)
@on_ranks(2)
def test_different_numbers_of_backwards_are_an_error_on_all_ranks(case: str, level: str) -> None:
    model = maze.Maze()
    engine = fe.shard(model, strategy=level, units=maze.UNITS)
    with pytest.raises(RuntimeError, match=FOUND[case]), engine.together():
        run_other_numbers(engine, model, case, dist.get_rank())


@pytest.mark.parametrize("case", ["steps", "microbatches"])
@on_ranks(4)
def test_different_numbers_of_backwards_on_two_axes(case: str) -> None:
    model = maze.Maze()
    engine = fe.shard(model, mesh_of(2, 2), units=maze.UNITS)
    found = r"rank 2 in .*; ranks 0, 1, 3 (in the last backward|at the end)"
    with pytest.raises(RuntimeError, match=found), engine.together():
        run_other_numbers(engine, model, case, int(dist.get_rank() == 2))


# How much is gathered, and kept.


@on_ranks(2)
def test_one_unit_is_gathered_ahead_and_no_more() -> None:
    model = nn.Sequential(
        *(nn.Linear(maze.WIDTH, maze.WIDTH, bias=False).double() for _ in range(8))
    )
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
            model(maze.inputs(0))
    assert full == [2] * 7 + [1]


@on_ranks(4)
def test_few_units_of_other_ranks_are_kept() -> None:
    layers = nn.ModuleList(
        nn.Linear(maze.WIDTH, maze.WIDTH, bias=False).double() for _ in range(24)
    )
    model = nn.ModuleDict({"layers": layers})
    engine = fe.shard(model, units=list(layers))
    size = engine.units[1].num_elements * 8
    routes = random.Random(dist.get_rank())
    for backward in (False, False, True, True):
        engine.peak_memory_bytes(reset=True)
        with engine.together(), torch.set_grad_enabled(backward):
            x = maze.inputs(0)
            for index in routes.sample(range(24), 24):
                x = layers[index](x)
            if backward:
                x.sum().backward()
        own, kept, voted = 5, 2, 3  # own: in use, about to be freed, 3 prefetched
        assert 4 <= engine.peak_memory_bytes()["full"] // size <= own + kept + voted


def count_gathers(engine: fe.Engine, around: Any, route: maze.Route) -> int:
    messages = Messages()
    with messages.counting(), around:
        maze.loss_of(engine.model, dist.get_rank(), route).backward()
    return sum(n for label, n in messages.operations.items() if label.startswith(GATHERS))


@on_ranks(2)
def test_ranks_that_agree_gather_no_more_than_outside() -> None:
    rank, model, route = dist.get_rank(), maze.Maze(), maze.plain(*range(maze.NUM_BLOCKS))
    engine = fe.shard(model, units="blocks.*")
    outside = [count_gathers(engine, nullcontext(), route) for _ in range(3)]
    together = [count_gathers(engine, engine.together(), route) for _ in range(3)]
    one_left_out = maze.plain(*(n for n in range(maze.NUM_BLOCKS) if n != 2 * rank))
    others = [count_gathers(engine, engine.together(), one_left_out) for _ in range(3)]
    assert together[1:] == outside[1:]
    # A unit that one rank prefetched in vain is gathered for the other, and perhaps once again.
    assert max(others) <= outside[1] + 4


FORWARD, BOTH = b"\1\0", b"\1\1"


@pytest.mark.parametrize(
    ("waits", "soon", "phase", "expected"),
    [
        # Unit 3 is held back, since the rank that votes for unit 1 will use it later.
        (b"\0\1\0\2", b"\0\0\1\1", FORWARD, [1]),
        # A rank computes ahead of the others, which wait for nothing.
        (b"\0\0\0\1", b"\0\0\1\1", FORWARD, []),
        # Ranks wait for each other's units.
        (b"\0\2\0\2", b"\0\1\0\1", FORWARD, [1, 3]),
        (b"\0\2\0\1", b"\0\1\0\1", FORWARD, [1]),
        # Others are in backward, and go the other way.
        (b"\0\1\0\2", b"\0\0\1\1", BOTH, [1, 3]),
        # No rank expects to use these units later.
        (b"\0\1\0\2", bytes(4), FORWARD, [1, 3]),
    ],
)
def test_a_unit_that_others_need_soon_is_gathered_with_them(
    waits: bytes, soon: bytes, phase: bytes, expected: list[int]
) -> None:
    assert to_gather(waits, soon, phase) == expected
