"""Transient memory in slots that units take in turn: values, places, books, order and conflicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.devices.memory import Memory, Place
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.devices.test_memory import POLICIES, Even, real_bytes
from tests.models import (
    DIM,
    CalledTwice,
    Chain,
    EncoderDecoder,
    Mlp,
    NestedUnits,
    Regression,
    Transformer,
    lora_model,
    mixed_model,
    odd_model,
    shared_model,
    token_batch,
    unused_model,
    vector_batch,
)
from tests.pool import Ranks, on_ranks
from tests.runtime.test_equivalence import mesh_of
from tests.runtime.test_schedule import BUDGETS, HalfCodec, Small, traced, train

LEVEL_3 = "optim_grads_params"
TURNS = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
PAIRS = [*((level, "no_shard") for level in LEVELS), ("optim_grads_params", "optim_grads")]


def config_of(budget: int | None = None, **fields: Any) -> fe.DistributedDataParallelConfig:
    return fe.DistributedDataParallelConfig(
        fsdp_double_buffer=True, suggested_communication_unit_size=budget, **fields
    )


def uneven_model() -> Regression:
    """Six units of three sizes."""
    return Chain(*(Mlp(hidden=hidden) for hidden in (5, 40, 17, 3, 29, 11)))


class Order(Regression):
    """Blocks in an order of one's own, which may change, with a layer of the root's before."""

    def __init__(self, *order: int, num_blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Mlp(hidden=3 + 4 * i) for i in range(num_blocks)])
        self.order = order

    def predict(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x


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
        options: dict[str, Any] = {"config": TURNS, "mesh": mesh_of(2, 2)}
        tolerance, compute_dtype = 2e-5, None
        if name == "several buffers in a unit":
            compute_dtype = {key: p.dtype for key, p in model.named_parameters()}
            tolerance = 2e-3
        try:
            engine = reference.assert_trains_alike(
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
        assert ("full" in held) == (strategy == LEVEL_3), name


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "outer"), PAIRS)
def test_models_train_as_one_process_does(ranks: Ranks, strategy: str, outer: str) -> None:
    ranks.run(train_models, strategy, outer, timeout=280)


# The same as without, bit for bit, whatever happens between.

Script = Callable[[Any, Any], None]


def run_twice(make_model: Callable[[], nn.Module], script: Script, **options: Any) -> None:
    """``script`` leaves the same weights with double buffering and without."""
    weights = []
    for turns in (False, True):
        torch.manual_seed(0)
        model = make_model()
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=turns)
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
            assert all(unit.place is None or is_free(unit) for unit in engine.units)
        model.fails_at = -1
        train(model, engine, (2, 1))

    run_twice(Failing, script)


def is_free(unit: Any) -> bool:
    return all(slot.user is None for slot in unit.place.slots.values())


# Where things lie, and what is held.


@on_ranks()
def test_a_unit_is_full_in_one_place_and_shares_it_with_the_next_but_one() -> None:
    model = uneven_model()
    engine = fe.shard(model, config=TURNS)
    places: dict[int, set[int]] = {index: set() for index in range(6)}

    def look(index: int) -> Callable[..., None]:
        return lambda *_: places[index].add(model.blocks[index].up.weight.data_ptr())

    for index, block in enumerate(model.blocks):
        block.up.register_forward_pre_hook(look(index))
        block.down.register_full_backward_hook(look(index))
    staged = [unit.buffers[0].grads._memory.staging for unit in engine.units[1:]]
    for number in range(2):
        model(*batch(number)).backward()
        for param in model.parameters():
            param.grad = None
    assert [len(seen) for seen in places.values()] == [1] * 6
    first = [seen.pop() for seen in places.values()]
    assert first == first[:2] * 3
    assert first[0] != first[1]
    starts = [storage._storage.data_ptr() for storage in staged]
    assert starts == starts[:2] * 3
    assert len({*starts, *first}) == 4


@on_ranks()
def test_every_other_unit_that_contains_no_other_takes_turns() -> None:
    model = NestedUnits()
    engine = fe.shard(model, units=["blocks.*", "blocks.*.inside"], config=TURNS)
    assert [unit.name for unit in engine.units] == [
        "",
        "blocks.0",
        "blocks.0.inside",
        "blocks.1",
        "blocks.1.inside",
    ]
    full = [unit.place.slots["full"] for unit in engine.units if unit.place is not None]
    assert len(set(full)) == 5
    model = Transformer(num_blocks=5)
    engine = fe.shard(model, config=TURNS)
    full = [unit.place.slots["full"] for unit in engine.units if unit.place is not None]
    assert full[1:] == [full[1], full[2]] * 2 + [full[1]]
    assert len(set(full)) == 3


def aligned_sum(sizes: list[int]) -> int:
    total = 0
    for size in sizes:
        total = -(-total // 128) * 128 + size
    return total


def slot_bytes(sizes: list[list[int]]) -> int:
    """Both slots and the root's, for the transient buffers of each unit, the root's first."""
    units = [aligned_sum(unit) for unit in sizes]
    return units[0] + sum(max(units[1 + turn :: 2], default=0) for turn in (0, 1))


def books_of_pair(strategy: str, outer: str) -> list[tuple[str, Any, Any]]:
    """(what, found, expected) for what is held before, during and after steps."""
    pairs: list[tuple[str, Any, Any]] = []
    for name, (policy, compute, _, grad, wire) in POLICIES.items():
        for make in (Even, uneven_model):
            model, plain_model = make(), make()
            options: dict[str, Any] = {"mesh": mesh_of(2, 2), "mp_policy": policy}
            plain = fe.shard(plain_model, strategy=strategy, outer_strategy=outer, **options)
            engine = fe.shard(
                model, strategy=strategy, outer_strategy=outer, config=TURNS, **options
            )
            seen = watch_memory(model, engine)
            for each, its_model in ((plain, plain_model), (engine, model)):
                optimizer = torch.optim.SGD(its_model.parameters(), lr=0.1)
                wide_step(its_model, each, optimizer)
            engine.peak_memory_bytes(reset=True)
            seen.clear()
            wide_step(model, engine, torch.optim.SGD(model.parameters(), lr=0.1))
            cuts_params = strategy == LEVEL_3
            cuts_grads = cuts_params or strategy == "optim_grads"
            lines = [[b.layout.numel for b in unit.buffers] for unit in engine.units]
            expected = dict(plain.memory_bytes())
            if cuts_params:
                expected["full"] = slot_bytes([[compute * n for n in unit] for unit in lines])
            staging = []
            for unit in engine.units:
                sizes = []
                for b in unit.buffers:
                    sizes += [wire * b.layout.numel] if cuts_grads else []
                    # Along axes that gradients are whole on, a copy in the wire's dtype travels.
                    part = b.grads.rest_bytes // grad
                    whole_axes = {LEVEL_3: 1, "optim_grads": 1}.get(strategy, 2)
                    whole_axes -= int(outer in ("optim_grads", LEVEL_3))
                    sizes += [wire * part] if wire != grad and whole_axes else []
                staging.append(sizes)
            if any(staging):
                expected["staging"] = slot_bytes(staging)
            case = f"{name}, {make.__name__}"
            moments = [held for held in seen if held != expected]
            assert len(seen) == 2 * 2 * len(model.blocks)
            pairs.append((f"{case}: in a step", moments, []))
            pairs.append((f"{case}: at rest", engine.memory_bytes(), expected))
            pairs.append((f"{case}: storages", real_bytes(engine), sum(expected.values())))
            peak = {**expected, "total": sum(expected.values())}
            pairs.append((f"{case}: peak", engine.peak_memory_bytes(), peak))
    return pairs


def watch_memory(model: Any, engine: Any) -> list[dict[str, int]]:
    """What is held in the middle of every block's forward and backward, as it comes in."""
    seen: list[dict[str, int]] = []

    def look(*_: Any) -> None:
        seen.append(engine.memory_bytes())

    for block in model.blocks:
        block.up.register_forward_hook(look)
        block.up.register_full_backward_hook(look)
    return seen


def wide_step(model: Any, engine: Any, optimizer: Any) -> None:
    for micro in range(2):
        loss = model(*vector_batch(2, 10 * micro + dist.get_rank()))
        if micro:
            loss.backward()
        else:
            with engine.no_sync():
                loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "outer"), [*PAIRS, (LEVEL_3, LEVEL_3)])
def test_nothing_is_allocated_in_a_step_and_slots_are_as_long_as_their_largest_units(
    ranks: Ranks, strategy: str, outer: str
) -> None:
    for pairs in ranks.run(books_of_pair, strategy, outer):
        for what, found, expected in pairs:
            assert found == expected, what


@on_ranks()
def test_the_field_changes_what_is_held_and_not_what_is_described() -> None:
    rows, held = [], []
    for turns in (False, True):
        model = uneven_model()
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=turns)
        engine = fe.shard(model, config=config)
        rows.append(engine.describe().rows)
        held.append(engine.memory_bytes())
    assert rows[0] == rows[1]
    assert "full" not in held[0]
    assert held[1]["full"] == sum(sorted(row.full_bytes for row in rows[1])[-2:])


@on_ranks()
def test_as_many_collectives_are_sent_as_without() -> None:
    numbers = []
    for turns in (False, True):
        config = fe.DistributedDataParallelConfig(fsdp_double_buffer=turns)

        tracer = traced(lambda: Small(num_blocks=6), config=config)
        numbers.append(tracer.num_operations)
    assert numbers[0] == numbers[1]


# The schedule.


@pytest.mark.thorough
@on_ranks()
@pytest.mark.parametrize(("strategy", "outer"), [*PAIRS, (LEVEL_3, LEVEL_3), ("optim", "optim")])
def test_taking_turns_makes_no_race(strategy: str, outer: str) -> None:
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
            # The root, the unit in use, and one gathered ahead into the other slot.
            cuts = strategy == LEVEL_3
            assert tracer.max_full == ((3 if budget else 2) if cuts else 0)


HABITS: dict[str, Callable[[], nn.Module]] = {
    "called twice": lambda: Order(0, 1, 2, 3, 0, 4),
    "other weights in each call": InHalves,
    "another order": lambda: Order(4, 2, 0, 1, 3),
    "checkpoints": lambda: Spans(False, 4),
    "re-entrant checkpoints": lambda: Spans(True, 4),
    "frozen weights": lora_model,
    "nested units": NestedUnits,
}


@on_ranks(world_size=2)
@pytest.mark.parametrize("strategy", ["optim_grads", LEVEL_3])
@pytest.mark.parametrize("name", HABITS)
def test_models_that_bend_the_order_of_events_make_no_race(name: str, strategy: str) -> None:
    traced(HABITS[name], strategy=strategy, config=TURNS)


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "outer"), [("no_shard", "no_shard"), ("optim", "optim"), (LEVEL_3, LEVEL_3)]
)
def test_wires_that_are_decoded_take_turns_too(strategy: str, outer: str) -> None:
    def body(model: Any, engine: Any) -> None:
        held = engine.memory_bytes()["full"]
        train(model, engine, (2, 1))
        assert engine.memory_bytes()["full"] == held
        assert engine.peak_memory_bytes()["full"] == held

    for budget in BUDGETS.values():
        traced(
            lambda: Small(num_blocks=5),
            body,
            mesh=mesh_of(2, 2),
            strategy=strategy,
            outer_strategy=outer,
            codec_rules=[lambda name, param, dtypes: ("half", HalfCodec)],
            config=config_of(budget),
        )


@on_ranks(world_size=2)
def test_gradients_are_set_aside_only_where_the_order_of_reductions_needs_it() -> None:
    def peaks_above_slots(model: nn.Module) -> list[int]:
        engine = fe.shard(model, config=TURNS)
        found = []
        for _ in range(2):
            train(model, engine, (1,))
            slots = engine.memory_bytes()["staging"]
            found.append(engine.peak_memory_bytes(reset=True)["staging"] - slots)
        return found

    assert peaks_above_slots(Order(0, 1, 2, 3, 4)) == [0, 0]
    # Until all ranks agree on another order, reductions follow the order of modules.
    first, second = peaks_above_slots(Order(4, 2, 0, 1, 3))
    assert first > 0
    assert second == 0
    # The first of its gradients comes before those of all the others, the second one after them.
    model = InHalves()
    assert peaks_above_slots(model) == [4 * 256] * 2


# Conflicts.


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


@on_ranks(world_size=2)
def test_a_unit_that_calls_its_neighbour_in_the_slot_is_refused() -> None:
    model = Calling(2)
    engine = fe.shard(model, config=TURNS)
    with pytest.raises(RuntimeError, match=r"(?s)blocks\.0 .*blocks\.2 .*fsdp_double_buffer=False"):
        model(*batch(0))
    engine.reset()
    for callee, config in ((1, TURNS), (2, None)):
        model = Calling(callee)
        model(*batch(0)) if config else None
        engine = fe.shard(model, config=config)
        train(model, engine, (1, 1))


class Deaf(nn.Module):
    """Its output does not depend on its input, so nobody sees the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.tanh() * self.weight + 0 * x.detach()


class WithDeaf(Regression):
    """A deaf unit beside the first unit, which has the same slot."""

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


@on_ranks(world_size=2)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_unit_whose_end_of_backward_cannot_be_seen_is_refused_not_overwritten(
    checkpoints: bool,
) -> None:
    model = WithDeaf(checkpoints)
    engine = fe.shard(model, config=TURNS)
    with pytest.raises(RuntimeError, match="fsdp_double_buffer=False"):
        model(*batch(0)).backward()
    engine.reset()
    model = WithDeaf(checkpoints)
    train(model, fe.shard(model), (1, 1))


# Slots by themselves.


def test_parts_of_a_unit_lie_one_after_the_other_and_a_slot_has_one_user() -> None:
    memory = Memory(torch.device("cpu"))
    slots = memory.make_slots()
    parts = []
    for unit, numels in ((0, (3, 50)), (1, (70,))):
        with memory.placing(Place(unit, slots)):
            parts.append([memory.transient(n, torch.float32, "full") for n in numels])
    memory.fix_slots()
    assert memory.ledger.held == {"full": 128 + 200, "staging": 0}
    assert memory.ledger.peak == {"full": 128 + 200}
    (small, large), (other,) = parts
    views = [small.view(0, (3,)), large.view(0, (50,)), other.view(0, (70,))]
    assert [view.data_ptr() - views[0].data_ptr() for view in views] == [0, 128, 0]
    version = views[0]._version
    small.fill()
    large.fill()
    with pytest.raises(AssertionError, match="units 0 and 1"):
        other.fill()
    views[0].fill_(1.0)
    small.drain()
    assert slots["full"].user == 0
    large.drain()
    other.fill()
    views[2].fill_(2.0)
    assert views[0].tolist() == [2.0] * 3
    assert views[0]._version == version + 1  # each view has a version counter of its own
    assert memory.ledger.held == {"full": 128 + 200, "staging": 0}
