"""Transient memory in arenas: values, memory, steps with another order, schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.extensions.arenas.arena import SLACK, aligned
from fsdp_engine.memory import allocator as memory_module
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.checkpoint.scene import update
from tests.extensions.arenas.planned_memory import Order, arenas_of, counting_fills, uneven_model
from tests.extensions.fp8.int8_codec import Int8
from tests.pairs import PAIRS_AND_WAYS
from tests.pool import on_ranks
from tests.torch_versions import plans_addresses
from tests.training import BUDGETS, POLICIES, mesh_of, traced, train

LEVEL_3 = "optim_grads_params"
PLANNED = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
PAIRS = [*((level, "no_shard") for level in LEVELS), (LEVEL_3, "optim_grads")]
FIVE = (0, 1, 2, 3, 4)


def config_of(budget: int | None = None, **fields: Any) -> fe.DistributedDataParallelConfig:
    return fe.DistributedDataParallelConfig(
        fsdp_double_buffer=True, suggested_communication_unit_size=budget, **fields
    )


class Halves(nn.Module):
    """Uses another weight in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [torch.randn(models.DIM), torch.randn(models.DIM, models.DIM)]
        )

    def forward(self, x: Tensor, call: int) -> Tensor:
        weight = self.weights[call]
        return x + torch.tanh(x * weight if call == 0 else x @ weight)


class InHalves(models.Regression):
    """The first unit gets one gradient before those of the other units, and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.DIM, models.DIM)
        self.blocks = nn.ModuleList(
            [Halves(), models.Mlp(), models.Mlp(hidden=40), models.Mlp(), models.Mlp()]
        )

    def predict(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x), 0)
        for block in self.blocks[1:]:
            x = block(x)
        return self.blocks[0](x, 1)


class Spans(models.Small):
    """Runs its six blocks in two checkpoints, of four blocks and of two."""

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for blocks in (self.blocks[:4], self.blocks[4:]):
            x = checkpoint(nn.Sequential(*blocks), x, use_reentrant=self.checkpoints)
        return self.last(x)


class Failing(Order):
    """Raises behind one of its blocks, in forward or in backward."""

    fails_at = -1
    fails_in_backward = False

    def predict(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.fails_at:
                x.register_hook(fail) if self.fails_in_backward else fail()
        return x


def fail(*_: Any) -> None:
    raise ArithmeticError


class Caller(nn.Module):
    """Calls a unit that it does not contain."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.own = models.Mlp()
        self.others = (other,)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.others[0](x))


class Calling(models.Regression):
    """The first unit calls another one."""

    def __init__(self, callee: int) -> None:
        super().__init__()
        others = [models.Mlp(), models.Mlp()]
        self.blocks = nn.ModuleList([Caller(others[callee - 1]), *others])

    def predict(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


class Deaf(nn.Module):
    """Its output does not depend on its input, so the end of its backward is not detected."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models.DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.tanh() * self.weight + 0 * x.detach()


class WithDeaf(models.Small):
    """A deaf unit beside blocks that may run in re-entrant checkpoints."""

    def __init__(self, checkpoints: bool | None) -> None:
        super().__init__(2, checkpoints)
        self.deaf = nn.ModuleList([Deaf()])

    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x) + self.deaf[0](x)


HABITS: dict[str, Callable[[], nn.Module]] = {
    "called twice": lambda: Order(0, 1, 2, 3, 0, 4),
    "other weights in each call": InHalves,
    "another order": lambda: Order(4, 2, 0, 1, 3),
    "checkpoints": lambda: Spans(6, checkpoints=False),
    "checkpoints of one unit": lambda: models.Small(6, checkpoints=False),
    "re-entrant checkpoints": lambda: Spans(6, checkpoints=True),
    "frozen weights": models.lora_model,
    "nested units": models.NestedUnits,
    "a unit that calls another": lambda: Calling(2),
    "unused weights": models.unused_model,
    "called twice in a row": models.CalledTwice,
    "a weight of two units": models.shared_model,
    "several buffers in a unit": models.mixed_model,
    "units of two inputs": models.EncoderDecoder,
    "re-entrant checkpoints of one unit": lambda: models.Small(6, checkpoints=True),
    "one unit": lambda: models.Chain(models.Mlp()),
    "no unit": lambda: models.Small(0),
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return models.vector_batch(2, 10 * seed + dist.get_rank())


def skip_and_reorder(model: Any, engine: Any) -> None:
    shuffle = random.Random(7)

    def change(_: int) -> None:
        model.order = shuffle.choices(range(5), k=shuffle.randint(1, 8))

    train(model, engine, [2, 1, 3, 1, 1, 2], change)


def skip_on_one_rank(model: Any, engine: Any) -> None:
    shuffle = random.Random(dist.get_rank())

    def change(_: int) -> None:
        model.order = shuffle.sample(range(5), shuffle.randint(1, 5))

    train(model, engine, [1, 2, 1, 1, 2], change)


def evaluate_between(model: Any, engine: Any) -> None:
    optimizer = reference.sgd(model.parameters())
    for number in range(3):
        loss = model(*batch(number))
        with torch.no_grad():
            model(*batch(9))
            model.blocks[1](torch.ones(1, models.DIM))
        update(loss, optimizer)
        with torch.no_grad():
            model(*batch(8))
        with engine.unsharded(model.blocks[2]), torch.no_grad():
            model.blocks[2].up.weight.mul_(0.9)


def fail_everywhere(model: Any, engine: Any) -> None:
    for model.fails_in_backward in (False, True):
        for model.fails_at in range(5):
            with pytest.raises(ArithmeticError):
                model(*batch(0)).backward()
            engine.reset()
            assert not any(arena._taken for arena in arenas_of(engine).values())
    model.fails_at = -1


def evaluate_and_train(model: Any, engine: Any) -> None:
    with torch.no_grad():
        model(*batch(3))
        model.blocks[3](torch.ones(1, models.DIM))
    train(model, engine, (2,))
    with torch.no_grad():
        model(*batch(4))


def fail_and_go_on(model: Any, engine: Any) -> None:
    train(model, engine, (2, 1))
    settle(model, engine, partial(evaluate_and_train, model, engine))
    fail_everywhere(model, engine)
    settle(model, engine, partial(evaluate_and_train, model, engine))


def backward_of_backward(model: Any, engine: Any) -> None:
    """Units unexpectedly stay full between the first and the second backward."""
    optimizer = reference.sgd(model.parameters())
    for number in range(6):
        x, y = batch(number)
        x.requires_grad_(True)
        loss = model(x, y)
        if number % 3 == 2:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = model(x, y) + slope.square().sum()
        update(loss, optimizer)


def assert_settled(model: Any, engine: Any, body: Callable[[], object]) -> None:
    """``body`` is served from the arenas, and the bytes that are held never change in it."""
    arenas = [(arena, arena.memory) for arena in arenas_of(engine).values()]
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


def settle(model: Any, engine: Any, body: Callable[[], object]) -> None:
    """``body`` allocates nothing if there are arenas."""
    if arenas_of(engine):
        assert_settled(model, engine, body)
    else:
        body()


def train_and_settle(model: Any, engine: Any) -> None:
    train(model, engine, (2, 1))
    settle(model, engine, partial(train, model, engine, (1, 2)))


def train_on(model: Any, engine: Any) -> None:
    train(model, engine, (1, 2, 1))


def train_without_arenas(model: Any, engine: Any) -> None:
    assert arenas_of(engine) == {}
    train(model, engine, (2, 1))
    assert "full" not in engine.memory_bytes()


Script = Callable[[Any, Any], None]
SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Script]] = {
    **{name: (make, train_and_settle) for name, make in HABITS.items()},
    "units that are skipped and reordered": (Order, skip_and_reorder),
    "units that one rank skips": (Order, skip_on_one_rank),
    "evaluation": (uneven_model, evaluate_between),
    "exceptions and resets": (Failing, fail_and_go_on),
    "a backward of a backward": (uneven_model, backward_of_backward),
    "a unit that calls the next": (lambda: Calling(1), train_on),
    "a backward without an end": (lambda: WithDeaf(None), train_on),
    "a recomputed one without an end": (lambda: WithDeaf(True), train_on),
    "a torch that cannot move memory": (uneven_model, train_without_arenas),
}


@plans_addresses
@pytest.mark.parametrize("level", ["optim_grads", LEVEL_3])
@pytest.mark.parametrize("name", SCRIPTS)
@on_ranks(2)
def test_addresses_make_no_difference(name: str, level: str) -> None:
    make_model, script = SCRIPTS[name]
    if script is skip_on_one_rank:
        level = "optim_grads"  # where parameters are sharded, all ranks gather together
    weights = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = make_model()
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=planned)
        with pytest.MonkeyPatch.context() as patch:
            if script is train_without_arenas:
                patch.setattr(memory_module, "CAN_SWAP", False)
            engine = fe.shard(model, config=config, strategy=level)
            script(model, engine)
        weights.append(engine.full_state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@plans_addresses
@pytest.mark.parametrize(("strategy", "outer", "all_ways"), PAIRS_AND_WAYS)
@on_ranks()
def test_nothing_is_allocated_after_the_second_step(
    strategy: str, outer: str, all_ways: bool
) -> None:
    for name, (policy, *_) in POLICIES.items():
        makers = (models.Even, uneven_model) if name == "bf16 reduced in bf16" else (models.Even,)
        if not all_ways:  # both kinds of model, each with other dtypes
            makers = {"bf16": (models.Even,), "bf16 reduced in bf16": (uneven_model,)}.get(name, ())
        for make in makers:
            model, plain_model = make(), make()
            options: dict[str, Any] = {"mesh": mesh_of(2, 2), "mp_policy": policy}
            levels = {"strategy": strategy, "outer_strategy": outer}
            engine = fe.shard(model, config=PLANNED, **levels, **options)
            plain = fe.shard(plain_model, **levels, **options)
            train(model, engine, (2, 2))
            assert_settled(model, engine, partial(train, model, engine, (2, 3, 1)))
            train(plain_model, plain, (1,))
            plain.peak_memory_bytes(reset=True)
            train(plain_model, plain, (2,))
            held, peak = engine.memory_bytes(), plain.peak_memory_bytes()
            for role, arena in arenas_of(engine).items():
                # The load is the peak, with each storage rounded up to 512 bytes. The length is
                # larger than the load only where sizes differ.
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
@on_ranks(world_size=2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_allocated_where_gradients_outlast_their_backward(
    level: str, overlap: bool
) -> None:
    """Under the wrapper, reductions continue or begin after backward."""
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

    for number in (2, 2, 1, 1):
        step(number)
    assert_settled(model, wrapped.engine, lambda: [step(number) for number in (1, 2, 1, 3)])


@plans_addresses
@on_ranks(2)
@pytest.mark.parametrize(
    "strategy", [pytest.param("optim_grads", marks=pytest.mark.thorough), LEVEL_3]
)
def test_other_orders_are_served_by_ordinary_memory_until_the_arena_grows(strategy: str) -> None:
    model = Order(*FIVE)
    engine = fe.shard(model, strategy=strategy, config=PLANNED)
    train(model, engine, (1, 1))
    for number, model.order in enumerate([(3, 0, 4, 2, 1), FIVE]):
        with counting_fills(engine) as fills:
            train(model, engine, (1, 1, 1, 1))
        # On the return to FIVE, the arena may already have room for both orders.
        assert number or len(fills) > 0
        assert len(fills) < 40
        assert_settled(model, engine, partial(train, model, engine, (1, 2)))

    def alternate(num_steps: int) -> None:
        for number in range(num_steps):
            model.order = FIVE if number % 2 else (0, 1, 3, 4, 2)
            train(model, engine, (1,))

    alternate(16)
    assert_settled(model, engine, partial(alternate, 4))


@pytest.mark.thorough
@on_ranks()
@pytest.mark.parametrize(("strategy", "outer"), [*PAIRS, (LEVEL_3, LEVEL_3), ("optim", "optim")])
def test_planned_addresses_make_no_race(strategy: str, outer: str) -> None:
    for budget in BUDGETS.values():
        for dtype, narrow in ((None, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            tracer = traced(
                lambda: models.Small(num_blocks=5),
                mesh=mesh_of(2, 2),
                strategy=strategy,
                outer_strategy=outer,
                mp_policy=fe.MixedPrecisionPolicy(param_dtype=dtype),
                config=config_of(budget, reduce_scatter_with_fp32_accumulation=narrow),
            )
            # Units are full while in use or prefetched. In the first forward, the two layers
            # outside of blocks are full, too.
            num_full = 3 + {0: 0, 1: 1}.get(budget, 4)
            assert tracer.max_full == (num_full if strategy == LEVEL_3 else 0)


@on_ranks(2)
@pytest.mark.parametrize("name", list(HABITS)[:10])
def test_models_that_bend_the_order_of_events_make_no_race(name: str) -> None:
    traced(HABITS[name], strategy=LEVEL_3, config=PLANNED)


@on_ranks(2)
def test_addresses_do_not_change_what_is_sent() -> None:
    configs = (PLANNED, fe.DistributedDataParallelConfig())
    planned, plain = (traced(uneven_model, config=config).num_operations for config in configs)
    assert planned == plain


@plans_addresses
@on_ranks()
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("pair", [("no_shard", "no_shard"), ("optim", "optim"), (LEVEL_3, LEVEL_3)])
def test_wires_that_are_decoded_have_addresses_too(pair: tuple[str, str], budget: str) -> None:
    def body(model: Any, engine: Any) -> None:
        train(model, engine, (2, 1))
        held = engine.memory_bytes()["full"]
        engine.peak_memory_bytes(reset=True)
        train(model, engine, (2, 1))
        assert engine.memory_bytes()["full"] == engine.peak_memory_bytes()["full"] == held

    traced(
        lambda: models.Small(num_blocks=5),
        body,
        mesh=mesh_of(2, 2),
        strategy=pair[0],
        outer_strategy=pair[1],
        codec_rules=[Int8()],
        config=config_of(BUDGETS[budget]),
    )
