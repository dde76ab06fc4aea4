"""Transient memory in arenas: values, memory, steps with another order, schedule."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.memory import allocator as memory_module
from fsdp_engine.memory.arena import SLACK, aligned
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.codecs.half_codec import HalfCodec
from tests.memory.planned_memory import Order, counting_fills, uneven_model
from tests.models import (
    DIM,
    CalledTwice,
    Chain,
    EncoderDecoder,
    Even,
    Mlp,
    NestedUnits,
    Regression,
    Small,
    Transformer,
    lora_model,
    mixed_model,
    odd_model,
    shared_model,
    token_batch,
    unused_model,
    vector_batch,
)
from tests.pairs import PAIRS_AND_WAYS
from tests.pool import Ranks, on_ranks
from tests.scenario import assert_trains_alike
from tests.torch_versions import CAN_PLAN_ADDRESSES, plans_addresses
from tests.training import BUDGETS, POLICIES, mesh_of, traced, train

LEVEL_3 = "optim_grads_params"
PLANNED = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
PAIRS = [*((level, "no_shard") for level in LEVELS), ("optim_grads_params", "optim_grads")]


def config_of(budget: int | None = None, **fields: Any) -> fe.DistributedDataParallelConfig:
    return fe.DistributedDataParallelConfig(
        fsdp_double_buffer=True, suggested_communication_unit_size=budget, **fields
    )


class Halves(nn.Module):
    """Another weight in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(DIM), torch.randn(DIM, DIM)])

    def forward(self, x: Tensor, call: int) -> Tensor:
        weight = self.weights[call]
        return x + torch.tanh(x * weight if call == 0 else x @ weight)


class InHalves(Regression):
    """The first unit gets one gradient before the others' come, and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Halves(), Mlp(), Mlp(hidden=40), Mlp(), Mlp()])

    def predict(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x), 0)
        for block in self.blocks[1:]:
            x = block(x)
        return self.blocks[0](x, 1)


class Spans(Regression):
    """Blocks in checkpoints of several blocks each."""

    def __init__(self, reentrant: bool, per_checkpoint: int, num_blocks: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Mlp(hidden=5 + i) for i in range(num_blocks)])
        self.reentrant = reentrant
        self.per_checkpoint = per_checkpoint

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for first in range(0, len(self.blocks), self.per_checkpoint):
            blocks = nn.Sequential(*self.blocks[first : first + self.per_checkpoint])
            x = checkpoint(blocks, x, use_reentrant=self.reentrant)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unequal units": uneven_model,
    "odd sizes": odd_model,
    "units called twice": CalledTwice,
    "a unit called twice with three between": lambda: Order(0, 1, 2, 3, 0, 4),
    "a unit called twice with other weights": InHalves,
    "called in another order than registered": lambda: Order(4, 2, 0, 1, 3),
    "nested units": NestedUnits,
    "a weight of two units": shared_model,
    "tied weights": lambda: Transformer(num_blocks=4, tied=True),
    "several buffers in a unit": mixed_model,
    "frozen weights": lora_model,
    "unused weights": unused_model,
    "units of two inputs": EncoderDecoder,
    "one unit": lambda: Chain(Mlp()),
    "no unit": lambda: OneLayer(),
    "checkpoints of one unit": lambda: Spans(False, 1),
    "re-entrant checkpoints of one unit": lambda: Spans(True, 1),
    "checkpoints of four units": lambda: Spans(False, 4),
    "re-entrant checkpoints of four units": lambda: Spans(True, 4),
}


class OneLayer(Regression):
    """All of it belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(DIM, DIM)

    def predict(self, x: Tensor) -> Tensor:
        return self.only(x)


def batch_for(name: str) -> Callable[[int, int], Any]:
    if name == "tied weights":
        return token_batch
    width = 7 if name == "odd sizes" else DIM
    return lambda num, seed: vector_batch(num, seed, width)


def train_models(strategy: str, outer: str) -> None:
    for name, make_model in MODELS.items():
        torch.manual_seed(0)
        model = make_model()
        options: dict[str, Any] = {"config": PLANNED, "mesh": mesh_of(2, 2)}
        tolerance, compute_dtype = 2e-5, None
        if name == "several buffers in a unit":
            compute_dtype = {key: p.dtype for key, p in model.named_parameters()}
            tolerance = 2e-3
        try:
            engine = assert_trains_alike(
                model,
                batch_for(name),
                strategy,
                outer,
                num_steps=3,
                tolerance=tolerance,
                compute_dtype=compute_dtype,
                **options,
            )
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        held = engine.memory_bytes()
        assert ("full" in held) == (strategy == LEVEL_3 and CAN_PLAN_ADDRESSES), name


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "outer"), PAIRS)
def test_models_train_as_one_process_does(ranks: Ranks, strategy: str, outer: str) -> None:
    ranks.run(train_models, strategy, outer, timeout=280)


# The same as without, bit for bit, whatever happens between.

Script = Callable[[Any, Any], None]


def run_twice(make_model: Callable[[], nn.Module], script: Script, **options: Any) -> None:
    """``script`` leaves the same weights with planned addresses and without."""
    weights = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = make_model()
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=planned)
        engine = fe.shard(model, config=config, **options)
        script(model, engine)
        weights.append(engine.full_state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return vector_batch(2, 10 * seed + dist.get_rank())


@on_ranks()
@pytest.mark.parametrize("strategy", ["optim_grads", LEVEL_3])
def test_units_that_are_skipped_and_reordered_on_all_ranks_make_no_difference(
    strategy: str,
) -> None:
    def script(model: Any, engine: Any) -> None:
        shuffle = random.Random(7)

        def change(_: int) -> None:
            model.order = shuffle.choices(range(5), k=shuffle.randint(1, 8))

        train(model, engine, [2, 1, 3, 1, 1, 2, 1, 1], change)

    run_twice(Order, script, strategy=strategy)


@on_ranks()
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_units_that_one_rank_skips_make_no_difference(strategy: str) -> None:
    def script(model: Any, engine: Any) -> None:
        shuffle = random.Random(dist.get_rank())

        def change(_: int) -> None:
            model.order = shuffle.sample(range(5), shuffle.randint(1, 5))

        train(model, engine, [1, 2, 1, 1, 2, 1], change)

    run_twice(Order, script, strategy=strategy)


@on_ranks()
def test_evaluation_between_steps_and_before_backward_makes_no_difference() -> None:
    def script(model: Any, engine: Any) -> None:
        optimizer = reference.sgd(model.parameters())
        for number in range(3):
            loss = model(*batch(number))
            with torch.no_grad():
                model(*batch(9))
                model.blocks[1](torch.ones(1, DIM))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(*batch(8))
            with engine.unsharded(model.blocks[2]), torch.no_grad():
                model.blocks[2].up.weight.mul_(0.9)

    run_twice(uneven_model, script)


class Failing(Order):
    """Raises where it is told to."""

    fails_at = -1
    fails_in_backward = False

    def predict(self, x: Tensor) -> Tensor:
        for index in range(5):
            x = self.blocks[index](x)
            if index == self.fails_at:
                if not self.fails_in_backward:
                    raise ArithmeticError
                x.register_hook(fail)
        return x


def fail(grad: Tensor) -> None:
    raise ArithmeticError


@on_ranks()
@pytest.mark.parametrize("in_backward", [False, True])
def test_training_goes_on_after_an_exception_and_a_reset(in_backward: bool) -> None:
    def script(model: Any, engine: Any) -> None:
        train(model, engine, (1,))
        model.fails_in_backward = in_backward
        for model.fails_at in range(5):
            with pytest.raises(ArithmeticError):
                model(*batch(0)).backward()
            engine.reset()
            assert not any(arena._taken for arena in engine._memory.arenas.values())
        model.fails_at = -1
        train(model, engine, (2, 1))

    run_twice(Failing, script)


class Caller(nn.Module):
    """Calls a unit that it does not contain."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Mlp()
        self.others: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            x = other(x)
        return self.own(x)


class Calling(Regression):
    """The first unit calls another one."""

    def __init__(self, callee: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Caller(), Mlp(), Mlp()])
        caller: Any = self.blocks[0]
        caller.others = (self.blocks[callee],)

    def predict(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


class Deaf(nn.Module):
    """Its output does not depend on its input, so the end of its backward is not detected."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.tanh() * self.weight + 0 * x.detach()


class WithDeaf(Regression):
    """A deaf unit beside the first unit."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Mlp(), Mlp(), Deaf()])
        self.checkpoints = checkpoints

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        first = self.blocks[0]
        x = checkpoint(first, x, use_reentrant=True) if self.checkpoints else first(x)
        return x + self.blocks[2](x)


# Addresses and memory.


def assert_settled(model: Any, engine: Any, body: Callable[[], None]) -> None:
    """``body`` is served from the arenas, and the bytes that are held never change in it."""
    arenas = [(arena, arena.memory) for arena in engine._memory.arenas.values()]
    held = engine.memory_bytes()
    engine.peak_memory_bytes(reset=True)
    with counting_fills(engine) as fills, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", no_resize, raising=False)
        body()
    assert fills == []
    assert engine.memory_bytes() == held
    assert engine.peak_memory_bytes() == {**held, "total": sum(held.values())}
    for arena, memory in arenas:
        assert arena.memory is memory


def no_resize(storage: Any, num_bytes: int) -> None:
    raise AssertionError(f"{num_bytes} bytes are allocated")


def settle_pair(strategy: str, outer: str, all_ways: bool) -> None:
    for name, (policy, *_) in POLICIES.items():
        makers = (Even, uneven_model) if name == "bf16 reduced in bf16" else (Even,)
        if not all_ways:  # both kinds of model, each with other dtypes
            makers = {"bf16": (Even,), "bf16 reduced in bf16": (uneven_model,)}.get(name, ())
        for make in makers:
            model, plain_model = make(), make()
            options: dict[str, Any] = {"mesh": mesh_of(2, 2), "mp_policy": policy}
            levels = {"strategy": strategy, "outer_strategy": outer}
            engine = fe.shard(model, config=PLANNED, **levels, **options)
            plain = fe.shard(plain_model, **levels, **options)
            train(model, engine, (2, 2))
            assert_settled(model, engine, functools.partial(train, model, engine, (2, 3, 1)))
            train(plain_model, plain, (1,))
            plain.peak_memory_bytes(reset=True)
            train(plain_model, plain, (2,))
            held, peak = engine.memory_bytes(), plain.peak_memory_bytes()
            for role, arena in engine._memory.arenas.items():
                # The bytes at one time, each storage rounded up to 512 bytes; more only where
                # sizes differ.
                load, length = arena.load, 0 if arena.memory is None else arena.memory.numel()
                assert peak.get(role, 0) <= load <= 2 * peak.get(role, 0), (name, role)
                assert held.pop(role, 0) == length, (name, role)
                assert load <= length <= aligned(int(SLACK * load)), (name, role)
            # Gradients stay, too: else they would be allocated in each step.
            assert held.pop("grad") == peak["grad"]
            rest = plain.memory_bytes()
            rest.pop("grad", None)
            assert held == rest
            assert ("full" in peak) == (strategy == LEVEL_3)


@plans_addresses
@pytest.mark.parametrize(("strategy", "outer", "all_ways"), PAIRS_AND_WAYS)
def test_nothing_is_allocated_after_the_second_step(
    ranks: Ranks, strategy: str, outer: str, all_ways: bool
) -> None:
    ranks.run(settle_pair, strategy, outer, all_ways)


HABITS: dict[str, Callable[[], nn.Module]] = {
    "called twice": lambda: Order(0, 1, 2, 3, 0, 4),
    "other weights in each call": InHalves,
    "another order": lambda: Order(4, 2, 0, 1, 3),
    "checkpoints": lambda: Spans(False, 4),
    "checkpoints of one unit": lambda: Spans(False, 1),
    "re-entrant checkpoints": lambda: Spans(True, 4),
    "frozen weights": lora_model,
    "nested units": NestedUnits,
    "a unit that calls another": lambda: Calling(2),
    "unused weights": unused_model,
}


@plans_addresses
@on_ranks(world_size=2)
@pytest.mark.parametrize("strategy", ["optim_grads", LEVEL_3])
@pytest.mark.parametrize("name", HABITS)
def test_models_that_bend_the_order_of_events_settle_too(name: str, strategy: str) -> None:
    model = HABITS[name]()
    engine = fe.shard(model, strategy=strategy, config=PLANNED)
    train(model, engine, (2, 1))
    assert_settled(model, engine, functools.partial(train, model, engine, (1, 2)))


@plans_addresses
@on_ranks(world_size=2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_allocated_where_gradients_outlast_their_backward(
    level: str, overlap: bool
) -> None:
    """Under the wrapper reductions continue after backward, or begin then."""
    config = fe.DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=level,
        overlap_grad_reduce=overlap,
        fsdp_double_buffer=True,
    )
    model = Order(0, 1, 2, 3, 4)
    wrapped = fe.DistributedDataParallel(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(num_microbatches: int) -> None:
        wrapped.zero_grad_buffer()
        with wrapped.no_sync():
            for number in range(num_microbatches - 1):
                wrapped(*batch(number)).backward()
        wrapped(*batch(9)).backward()
        wrapped.finish_grad_sync()
        optimizer.step()

    for _ in range(2):
        step(2)
    step(1)
    step(1)

    def steps() -> None:
        for number in (1, 2, 1, 3):
            step(number)

    assert_settled(model, wrapped.engine, steps)


@plans_addresses
@on_ranks()
def test_evaluation_is_served_from_the_arenas() -> None:
    model = Order(0, 1, 2, 3, 4)
    engine = fe.shard(model, config=PLANNED)
    train(model, engine, (2, 1))

    def body() -> None:
        with torch.no_grad():
            model(*batch(3))
            model.blocks[3](torch.ones(1, DIM))
        train(model, engine, (2,))
        with torch.no_grad():
            model(*batch(4))

    assert_settled(model, engine, body)


# Steps that leave the record.


@plans_addresses
@on_ranks(world_size=2)
@pytest.mark.parametrize("strategy", ["optim_grads", LEVEL_3])
def test_another_order_is_served_by_ordinary_memory_until_the_arena_grows(strategy: str) -> None:
    model = Order(0, 1, 2, 3, 4)
    engine = fe.shard(model, strategy=strategy, config=PLANNED)
    train(model, engine, (1, 1))
    orders = [(3, 0, 4, 2, 1), (0, 1, 2, 3, 4)]
    for number, model.order in enumerate(orders):
        with counting_fills(engine) as fills:
            train(model, engine, (1, 1, 1, 1))
        # The way back is planned already where both orders have found room together.
        assert number or len(fills) > 0
        assert len(fills) < 40
        assert_settled(model, engine, functools.partial(train, model, engine, (1, 2)))


@plans_addresses
@on_ranks(world_size=2)
def test_orders_that_alternate_settle() -> None:
    model = Order(0, 1, 2, 3, 4)
    engine = fe.shard(model, config=PLANNED)

    def alternate(num_steps: int) -> None:
        for number in range(num_steps):
            model.order = (0, 1, 2, 3, 4) if number % 2 else (0, 1, 3, 4, 2)
            train(model, engine, (1,))

    alternate(16)
    assert_settled(model, engine, functools.partial(alternate, 4))


@plans_addresses
@on_ranks(world_size=2)
def test_an_exception_changes_no_arena() -> None:
    model = Failing()
    engine = fe.shard(model, config=PLANNED)
    train(model, engine, (1, 1))
    for model.fails_in_backward in (False, True):
        for model.fails_at in (0, 2, 4):
            with pytest.raises(ArithmeticError):
                model(*batch(0)).backward()
            engine.reset()
    model.fails_at = -1
    assert_settled(model, engine, functools.partial(train, model, engine, (1, 2)))


@on_ranks(world_size=2)
def test_a_torch_that_cannot_move_memory_trains_alike_and_plans_nothing() -> None:
    def script(model: Any, engine: Any) -> None:
        assert engine._memory.arenas == {}
        train(model, engine, (2, 1, 1))
        assert "full" not in engine.memory_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "_CAN_SWAP", False)
        run_twice(uneven_model, script)


@plans_addresses
@on_ranks()
def test_the_field_changes_what_is_held_and_not_what_is_described() -> None:
    rows, held = [], []
    for planned in (False, True):
        model = uneven_model()
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=planned)
        engine = fe.shard(model, config=config)
        train(model, engine, (1, 1, 1))
        rows.append(engine.describe().rows)
        held.append(engine.memory_bytes())
    assert rows[0] == rows[1]
    assert "full" not in held[0]
    # Three units of the largest: one in use, and two gathered ahead at most.
    assert 0 < held[1]["full"] <= 3 * max(row.full_bytes for row in rows[1])


@on_ranks()
def test_as_many_collectives_are_sent_as_without() -> None:
    numbers = []
    for planned in (False, True):
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=planned)

        tracer = traced(lambda: Small(num_blocks=6), config=config)
        numbers.append(tracer.num_operations)
    assert numbers[0] == numbers[1]


@on_ranks(world_size=2)
@pytest.mark.parametrize("strategy", ["optim_grads", LEVEL_3])
@pytest.mark.parametrize("callee", [1, 2])
def test_a_unit_that_calls_another_makes_no_difference(callee: int, strategy: str) -> None:
    run_twice(
        lambda: Calling(callee),
        lambda model, engine: train(model, engine, (1, 2, 1, 1)),
        strategy=strategy,
    )


@on_ranks(world_size=2)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_unit_whose_end_of_backward_cannot_be_seen_makes_no_difference(
    checkpoints: bool,
) -> None:
    run_twice(
        lambda: WithDeaf(checkpoints),
        lambda model, engine: train(model, engine, (1, 2, 1, 1)),
    )


@on_ranks(world_size=2)
def test_a_backward_of_a_backward_makes_no_difference() -> None:
    """Units unexpectedly stay full between the two."""

    def script(model: Any, engine: Any) -> None:
        optimizer = reference.sgd(model.parameters())
        for number in range(6):
            x, y = batch(number)
            x.requires_grad_(True)
            loss = model(x, y)
            if number % 3 == 2:
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = model(x, y) + slope.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run_twice(uneven_model, script)


# The schedule.


@pytest.mark.thorough
@on_ranks()
@pytest.mark.parametrize(("strategy", "outer"), [*PAIRS, (LEVEL_3, LEVEL_3), ("optim", "optim")])
def test_planned_addresses_make_no_race(strategy: str, outer: str) -> None:
    for budget in BUDGETS.values():
        for dtype, narrow in ((None, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            tracer = traced(
                lambda: Small(num_blocks=5),
                mesh=mesh_of(2, 2),
                strategy=strategy,
                outer_strategy=outer,
                mp_policy=fe.MixedPrecisionPolicy(param_dtype=dtype),
                config=config_of(budget, reduce_scatter_with_fp32_accumulation=narrow),
            )
            # The unit in use, and those gathered ahead; in the first forward also the two layers
            # beside blocks.
            num_full = 3 + {0: 0, 1: 1}.get(budget, 4)
            assert tracer.max_full == (num_full if strategy == LEVEL_3 else 0)


@on_ranks(world_size=2)
@pytest.mark.parametrize(
    "strategy", [pytest.param("optim_grads", marks=pytest.mark.thorough), LEVEL_3]
)
@pytest.mark.parametrize("name", HABITS)
def test_models_that_bend_the_order_of_events_make_no_race(name: str, strategy: str) -> None:
    traced(HABITS[name], strategy=strategy, config=PLANNED)


@plans_addresses
@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "outer", "budget"),
    [
        ("no_shard", "no_shard", "nothing"),
        ("optim", "optim", "everything"),
        (LEVEL_3, LEVEL_3, "one unit"),
        *(
            pytest.param(*pair, budget, marks=pytest.mark.thorough)
            for pair, budgets in {
                ("no_shard", "no_shard"): ("one unit", "everything"),
                ("optim", "optim"): ("nothing", "one unit"),
                (LEVEL_3, LEVEL_3): ("nothing", "everything"),
            }.items()
            for budget in budgets
        ),
    ],
)
def test_wires_that_are_decoded_have_addresses_too(strategy: str, outer: str, budget: str) -> None:
    def body(model: Any, engine: Any) -> None:
        train(model, engine, (2, 1))
        held = engine.memory_bytes()["full"]
        engine.peak_memory_bytes(reset=True)
        train(model, engine, (2, 1))
        assert engine.memory_bytes()["full"] == held
        assert engine.peak_memory_bytes()["full"] == held

    traced(
        lambda: Small(num_blocks=5),
        body,
        mesh=mesh_of(2, 2),
        strategy=strategy,
        outer_strategy=outer,
        codec_rules=[lambda name, param, dtypes: ("half", HalfCodec)],
        config=config_of(BUDGETS[budget]),
    )
