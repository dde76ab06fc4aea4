"""A model whose batches say which blocks they go through, and random training runs of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests import reference
from tests.models import Mlp

WIDTH, NUM_BLOCKS = 6, 5
# Ways in which a forward uses a block.
WAYS = ("plain", "checkpointed", "re-entrant", "in vain", "without gradients", "reads its weight")
# (block, way) in order.
Route = Sequence[tuple[int, str]]


class Maze(nn.Module):
    """Goes through its blocks as each batch says; one block is frozen.

    Attributes:
        before_block: Called before each block of a route. None: nothing is called.
    """

    before_block: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 2)
        self.blocks[1].requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, route: Route) -> Tensor:
        x = self.embed(x)
        for number, way in route:
            block = self.blocks[number]
            if self.before_block is not None:
                self.before_block()
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
                x = x + nn.functional.linear(x, block.down.weight)
            elif way == "raises":
                raise ArithmeticError(f"batch {number} is bad")
            elif way == "raises in backward":
                x.register_hook(fail)
            else:
                x = block(x)
        result: Tensor = self.head(x)
        return result


def fail(grad: Tensor) -> None:
    raise ArithmeticError("gradient is bad")


def plain(*blocks: int) -> Route:
    return [(number, "plain") for number in blocks]


UNITS = ["blocks.*", "blocks.*.up"]


@dataclass(frozen=True)
class Case:
    """Routes by step, microbatch and rank; between steps, routes of evaluations by rank."""

    routes: list[list[list[Route]]]
    evaluations: list[list[list[Route]]]
    options: dict[str, Any]


def draw_route(draw: random.Random, ways: Sequence[str], orders: bool) -> Route:
    blocks = draw.choices(range(NUM_BLOCKS), k=draw.randrange(7))
    if not orders:
        blocks = sorted(set(blocks))
    route = [(each, draw.choice(ways)) for each in blocks]
    # A parameter in several re-entrant checkpoints may raise (docs/internals/limits.md).
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
        "names": draw.random() < 0.5,
    }
    return Case(routes, evaluations, options)


def inputs(seed: int, model: nn.Module | None = None) -> Tensor:
    """Returns a batch of the dtype and on the device of ``model``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    like = x if model is None else next(model.parameters())
    return x.to(like.device, like.dtype)


def loss_of(model: nn.Module, seed: int, route: Route) -> Tensor:
    loss: Tensor = model(inputs(seed, model), route).square().mean()
    return loss


def assert_same_gradients(model: nn.Module, alone: nn.Module) -> None:
    grads = map(reference.full_gradients, (model, alone))
    torch.testing.assert_close(*grads, check_device=False)


def train_alone(case: Case, num_ranks: int) -> Iterator[Maze]:
    model = Maze()
    optimizer = reference.sgd(model.parameters())
    for step, micros in enumerate(case.routes):
        for number, routes in enumerate(micros):
            for rank, route in enumerate(routes):
                loss = loss_of(model, 100 * step + 10 * number + rank, route)
                (loss / (num_ranks * len(micros))).backward()
        yield model
        optimizer.step()
        optimizer.zero_grad()


def check(
    case: Case,
    mesh: DeviceMesh,
    pair: tuple[str, str],
    offload: fe.Offload | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Trains on this rank as :func:`train_alone` does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, options = Maze().to(device), case.options
    config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=options["budget"])
    outer = pair[1] if mesh.ndim > 1 else None
    engine = fe.shard(model, mesh, pair[0], outer, units=UNITS, config=config, offload=offload)
    if options["keeps"]:
        for unit in engine.units[2::3]:
            unit.options.keeps_after_forward = unit.options.keeps_after_backward = True
    if options["names"]:
        model.before_block = name_blocks(engine, random.Random(rank))
    optimizer = reference.sgd(model.parameters())
    fe.shard_optimizer(optimizer)
    for_all = options["context"] == "all of training"
    apart = options["context"] == "forward and backward"
    around = nullcontext if for_all else engine.together
    with engine.together() if for_all else nullcontext():
        for step, alone in enumerate(train_alone(case, size)):
            micros = case.routes[step]
            for number, routes in enumerate(micros):
                last = number == len(micros) - 1
                with nullcontext() if last else engine.no_sync():
                    with around():
                        loss = loss_of(model, 100 * step + 10 * number + rank, routes[rank])
                        if not apart:
                            (loss / len(micros)).backward()
                    if apart:
                        with around():
                            (loss / len(micros)).backward()
                if options["reads_early"]:
                    [param.grad for param in model.parameters()]
            assert_same_gradients(model, alone)
            if options["keeps"]:
                engine.start_param_sync()
            # Other ranks may step meanwhile; this evaluation must not read their new weights.
            with around(), torch.no_grad():
                for number, route in enumerate(case.evaluations[step][rank]):
                    assert_same_results(model, alone, number, route)
                    # A block that is called by itself.
                    assert_same_results(model.blocks[number % 2], alone.blocks[number % 2], number)
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(engine.full_state_dict()) == sorted(alone.state_dict())


def assert_same_results(model: nn.Module, alone: nn.Module, seed: int, *route: Route) -> None:
    found, expected = (each(inputs(seed, each), *route) for each in (model, alone))
    torch.testing.assert_close(found, expected, check_device=False)


def name_blocks(engine: fe.Engine, draw: random.Random) -> Callable[[], None]:
    """Returns a function that sometimes calls ``will_use`` with random blocks. This rank does not
    use most of them next."""

    def name() -> None:
        if draw.random() < 0.4:
            blocks = draw.sample(list(engine.model.blocks), draw.randrange(NUM_BLOCKS))
            engine.will_use(blocks, max_elements=draw.choice([None, 1, 100]))

    return name
