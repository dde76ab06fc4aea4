"""The schedule has no race: see ``trace_lanes.py``, which judges it.

Every pair of levels on 2 x 2 ranks, with a prefetch of nothing, of one unit and of everything;
models and loops that change the order of events; and schedules that are broken on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.buffers import weights
from fsdp_engine.runtime import hooks
from tests.codecs.reading_codec import ReadingCodec
from tests.comm.happens_before import COMPUTE, RaceError
from tests.comm.trace_lanes import AnnotationError, Forgets
from tests.models import Skipping, Small, lora_model, vector_batch
from tests.pairs import PAIRS_AND_WAYS
from tests.pool import Ranks, on_ranks
from tests.training import BUDGETS, config_of, mesh_of, traced, train

BLOCK = 256  # elements of a block's flat buffer when sharded over up to four ranks
POLICIES = {
    "fp32": (fe.MixedPrecisionPolicy(), False),
    "bf16": (fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16), False),
    # Gradients are sent in another dtype than they are kept in.
    "bf16 on the wire": (fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16), True),
}


# (budget, dtypes): each at least once.
FEW_WAYS = [("nothing", "fp32"), ("one unit", "bf16 on the wire"), ("everything", "bf16")]
ALL_WAYS = [
    (budget, dtypes)
    for budget in BUDGETS
    for dtypes in (POLICIES if budget == "one unit" else ("fp32", "bf16"))
]


@pytest.mark.parametrize(("strategy", "outer", "all_ways"), PAIRS_AND_WAYS)
@on_ranks(4)
def test_a_pair_of_levels_has_no_race(strategy: str, outer: str, all_ways: bool) -> None:
    few = FEW_WAYS if strategy == "optim_grads_params" else FEW_WAYS[1:2]
    for budget, dtypes in ALL_WAYS if all_ways else few:
        policy, narrow = POLICIES[dtypes]
        tracer = traced(
            Small,
            mesh=mesh_of(2, 2),
            strategy=strategy,
            outer_strategy=outer,
            mp_policy=policy,
            config=config_of(BUDGETS[budget], narrow),
        )
        expected = {"inner_reduce", "outer_reduce"}  # gradients are always reduced along both axes
        expected |= {"inner_gather"} if strategy != "no_shard" else set()
        expected |= {"copy_in"} if dtypes != "fp32" else set()
        expected |= {"outer_gather"} if outer != "no_shard" else set()
        assert set(tracer.num_operations) == expected, (budget, dtypes)
        # Of three blocks, the one in use and the prefetched ones are full; in the first forward
        # also the two layers beside blocks, whose weights may be read without a call.
        cuts = strategy == "optim_grads_params"
        num_full = {"nothing": 3, "one unit": 4, "everything": 5}[budget]
        assert tracer.max_full == (num_full if cuts else 0), (budget, dtypes)


# Models and loops that change the order of events.


class Failing(Small):
    fails = False

    def predict(self, x: Tensor) -> Tensor:
        x = super().predict(x)
        if self.fails:
            raise ArithmeticError
        return x


def skip_on_one_rank(model: Any, engine: Any) -> None:
    def skip(step: int) -> None:
        model.skip = step == 1 and dist.get_rank() == 1

    train(model, engine, (1, 1, 1), skip)


def read_and_edit(model: Any, engine: Any) -> None:
    def look(step: int) -> None:
        engine.full_state_dict()
        engine.full_tensor("blocks.0.up.weight")
        with engine.unsharded(), torch.no_grad():
            model.blocks[0].up.weight.mul_(0.9)
        with torch.no_grad():
            model(*vector_batch(2, dist.get_rank()))

    train(model, engine, (1, 2), look)


def fail_and_reset(model: Any, engine: Any) -> None:
    train(model, engine, (1,))
    model.fails = True
    with pytest.raises(ArithmeticError):
        model(*vector_batch(2, 0))
    engine.reset()
    model.fails = False
    train(model, engine, (2,))


CODEC = {"codec_rules": [lambda name, param, dtypes: ("reading", ReadingCodec)]}
LEVEL_3 = "optim_grads_params"
# By name: the model, the loop, other options, and levels on one axis or on two.
Bend = tuple[Callable[[], nn.Module], Any, dict[str, Any], list[tuple[str, ...]]]
BENDS: dict[str, Bend] = {
    "a unit that one rank skips": (Skipping, skip_on_one_rank, {}, [("optim",), ("optim_grads",)]),
    "checkpoints": (partial(Small, checkpoints=False), train, {}, [(LEVEL_3,)]),
    "re-entrant checkpoints": (partial(Small, checkpoints=True), train, {}, [(LEVEL_3,)]),
    "frozen weights under adapters": (lora_model, train, {}, [("optim_grads",), (LEVEL_3,)]),
    "a reset after an exception": (Failing, fail_and_reset, {}, [(LEVEL_3,)]),
    "a codec": (Small, train, CODEC, [("optim",)]),
    "a codec on two axes": (
        Small,
        train,
        CODEC,
        [(LEVEL_3, LEVEL_3), ("no_shard", "no_shard"), ("optim", "optim")],
    ),
    "reading and editing": (Small, read_and_edit, {}, [("optim",)]),
    "reading and editing on two axes": (Small, read_and_edit, {}, [(LEVEL_3, "optim")]),
}


@pytest.mark.parametrize("name", BENDS)
@on_ranks(4)
def test_what_bends_the_order_of_events_makes_no_race(name: str) -> None:
    make_model, body, options, pairs = BENDS[name]
    for strategy, *outer in pairs:
        levels = {"strategy": strategy, "outer_strategy": outer[0] if outer else None}
        traced(make_model, body, mesh=mesh_of(2, 2) if outer else None, **levels, **options)


# How many units are full.


@on_ranks(world_size=2)
@pytest.mark.parametrize(("budget", "ahead"), [(0, 0), (1, 1), (2 * BLOCK, 2), (10**9, 5)])
def test_only_what_is_in_use_and_gathered_ahead_is_full_whatever_the_order(
    budget: int, ahead: int
) -> None:
    shuffle = random.Random(3)

    def body(model: Any, engine: Any) -> None:
        assert {unit.num_elements for unit in engine.units[1:]} == {BLOCK}

        def change(step: int) -> None:
            model.order = shuffle.sample(range(6), shuffle.randint(1, 6))
            if step % 3 == 0:
                model.order += model.order[:2]  # these units are called twice

        train(model, engine, [1] * 5, change)

    tracer = traced(lambda: Small(num_blocks=6), body, units="blocks.*", config=config_of(budget))
    # The root is in use all along.
    assert tracer.max_full <= 1 + 1 + ahead
    assert tracer.max_full >= min(3, 2 + ahead)


# Schedules that are broken on purpose.


def never(waiter: str, awaited: str) -> bool:
    return False


def free_on_inner_gather(self: Any, storage: Any) -> None:
    self._context.lanes.inner_gather.manage("free too early", storage.free, storage)


def fill_on_outer_reduce(self: Any, storages: Any) -> bool:
    for storage in storages:
        self._context.lanes.outer_reduce.manage("allocate", storage.fill, storage)
    return True


def mark_no_boundary(self: Any, calls: Any, tensor: Tensor) -> Tensor:
    return tensor


def compute_forgets(kind: str) -> Forgets:
    return lambda waiter, awaited: waiter == COMPUTE and awaited.startswith(kind)


def forgets_compute(kind: str) -> Forgets:
    return lambda waiter, awaited: waiter.startswith(kind) and awaited == COMPUTE


def forgets_axis(before: str, after: str) -> Forgets:
    return lambda waiter, awaited: (
        waiter.endswith(f"{after} axis") and awaited.endswith(f"{before} axis")
    )


SABOTAGE: dict[str, tuple[Any, str, Any]] = {
    "gather before memory is there": (weights.Weights, "_fill", fill_on_outer_reduce),
    "free on another lane": (weights.Weights, "_free", free_on_inner_gather),
    "reshard at the last gradient": (hooks.ModuleHooks, "_listen", mark_no_boundary),
}
# By name: levels, waits to forget, words of the error.
BROKEN: dict[str, tuple[tuple[str, ...], Forgets, list[str]]] = {
    "use before the gather is over": (
        (LEVEL_3,),
        compute_forgets("all-gather"),
        ["full parameters", "all-gather of", "compute"],
    ),
    "use before the refresh is over": (
        ("optim",),
        compute_forgets("all-gather"),
        ["all-gather of", "compute"],
    ),
    "gather before the optimizer is done": (
        (LEVEL_3,),
        forgets_compute("all-gather"),
        ["main weights", "aten.", "[all-gather of"],
    ),
    "reduce before gradients are written": (
        (LEVEL_3,),
        forgets_compute("reduce-scatter"),
        ["staging", "compute", "[reduce-scatter of"],
    ),
    "step before gradients are reduced": (
        ("no_shard",),
        compute_forgets("all-reduce"),
        ["gradients of", "[all-reduce of", "compute"],
    ),
    "free gradients before they are reduced": (
        ("optim_grads",),
        compute_forgets("reduce-scatter"),
        ["staging", "[reduce-scatter", "[free"],
    ),
    "second axis gathers before the first": (
        (LEVEL_3, LEVEL_3),
        forgets_axis("outer", "inner"),
        ["full parameters", "over the inner axis"],
    ),
    "second axis reduces before the first": (
        ("optim", "no_shard"),
        forgets_axis("inner", "outer"),
        ["gradients", "compute", "over the outer axis"],
    ),
    "gather before memory is there": (
        (LEVEL_3, LEVEL_3),
        never,
        ["allocation of", "[all-gather of"],
    ),
    "free on another lane": (
        (LEVEL_3,),
        never,
        ["freed on inner_gather that was allocated on compute"],
    ),
    "reshard at the last gradient": (
        (LEVEL_3,),
        never,
        ["used after it was freed", "full parameters"],
    ),
}


def run_broken(name: str) -> str:
    """The tracer's error for a broken schedule; "" if there is none."""
    (strategy, *outer), forgets, _ = BROKEN[name]
    with pytest.MonkeyPatch.context() as patched:
        if name in SABOTAGE:
            patched.setattr(*SABOTAGE[name])
        try:
            traced(
                lora_model if name == "reshard at the last gradient" else Small,
                forgets=forgets,
                mesh=mesh_of(*[2] * (1 + len(outer))),
                strategy=strategy,
                outer_strategy=outer[0] if outer else None,
                config=config_of(1),
            )
        except (RaceError, AnnotationError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_caught(ranks: Ranks, name: str) -> None:
    levels, _, expected = BROKEN[name]
    for said in ranks.run(run_broken, name, world_size=2 ** len(levels)):
        for part in expected:
            assert part in said, f"expected {part!r} in:\n{said}"
