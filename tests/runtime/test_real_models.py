"""Models with the habits of real ones train as one process does, in units of any size."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.runtime.unit import State
from fsdp_engine.strategies import LEVELS
from fsdp_engine.units import assignment
from tests import models, reference
from tests.megatron.configs import config_of, train_wrapped
from tests.models import Block, Chain, Mlp, Small, Transformer, vector_batch
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks
from tests.runtime import habits
from tests.scenario import Scenario
from tests.training import mesh_of

BLOCK = sum(parameter.numel() for parameter in Block().parameters())
MLPS = 2 * sum(parameter.numel() for parameter in Mlp().parameters())


EVERYTHING = 10**6


def sizes(*least: int) -> list[dict[str, Any]]:
    return [{"min_unit_size": each} for each in least]


# Each block is a unit; joined by twos, or with the modules beside them; everything is one unit.
BY_TWOS = sizes(0, MLPS, EVERYTHING)
LANGUAGE = sizes(0, BLOCK, EVERYTHING)
vectors = Scenario(batch=vector_batch, microbatches=(2, 1))
tokens = Scenario(microbatches=(2, 1))
BF16 = {"mp_policy": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def skip_every_other_step(model: Any, step: int) -> None:
    model.skip = step % 2 == 1


def never_calls() -> nn.Module:
    model = models.Skipping()
    model.skip = True
    return model


def change_order(model: Any, step: int) -> None:
    model.turn = step % 3


def switch_identity(model: Any, step: int) -> None:
    model.blocks[1].active = step % 2 == 0


# By name: the run, and options of shard, each of which is tried.
CASES: dict[str, tuple[Scenario, list[dict[str, Any]]]] = {
    "odd sizes": (
        Scenario(model=models.odd_model, batch=partial(vector_batch, width=7)),
        sizes(0, EVERYTHING),
    ),
    "smaller than the world": (
        Scenario(
            model=lambda: Chain(nn.Linear(1, 1), nn.Linear(1, 1)),
            batch=partial(vector_batch, width=1),
        ),
        sizes(0, EVERYTHING),
    ),
    "several dtypes": (
        vectors.but(
            model=models.mixed_model,
            compute_dtype={name: p.dtype for name, p in models.mixed_model().named_parameters()},
            later=1e-2,
        ),
        sizes(0, EVERYTHING),
    ),
    **{
        name: (
            vectors.but(model=make, steps=steps, microbatches=(2, 1, 1)[:steps]),
            BY_TWOS[:1] if name == "a returned table" else BY_TWOS,
        )
        for name, make, steps in [
            ("containers", models.NestedModel, 2),
            ("called twice", models.CalledTwice, 2),
            ("never called", never_calls, 2),
            ("unused parameter", models.unused_model, 2),
            ("shared weight", models.shared_model, 2),
            ("frozen first", models.frozen_first_model, 2),
            ("a memory of every layer", models.EncoderDecoder, 2),
            ("nested units", models.NestedUnits, 2),
            ("changed in place", models.InPlace, 2),
            ("unused output", models.UnusedOutput, 2),
            ("recurrent", lambda: Chain(models.Recurrent(), models.Recurrent()), 2),
            ("hidden output", habits.HidesFirst, 3),
            *((name, make, 2) for name, make in habits.RETURNS.items()),
            ("returned and recomputed", lambda: habits.Reads(habits.Views, False), 2),
            ("returned, re-entrant", lambda: habits.Reads(habits.Skips, True), 2),
        ]
    },
    "called in some steps": (
        vectors.but(
            model=models.Skipping,
            steps=4,
            microbatches=(2, 1, 1, 2),
            before_step=skip_every_other_step,
        ),
        BY_TWOS,
    ),
    "another order in every step": (
        vectors.but(
            model=lambda: habits.Shuffled(*(Mlp() for _ in range(4))),
            steps=5,
            microbatches=(1, 1, 2, 1, 2),
            before_step=change_order,
        ),
        BY_TWOS,
    ),
    "returns its input": (
        vectors.but(
            model=lambda: Chain(Mlp(), models.MaybeIdentity(), Mlp()),
            steps=3,
            microbatches=(2, 1, 1),
            before_step=switch_identity,
        ),
        BY_TWOS,
    ),
    "shared module": (
        vectors.but(model=models.shared_module_model),
        [
            *BY_TWOS,
            {"units": "blocks.*"},
            {"units": [models.WithShared]},
            {"units": [models.WithShared, Mlp]},
        ],
    ),
    # Without prefetch the memory of a unit that is freed too early is lost.
    "adapters": (
        vectors.but(model=models.lora_model),
        [
            *BY_TWOS,
            {"config": fe.DistributedDataParallelConfig(suggested_communication_unit_size=0)},
        ],
    ),
    "recomputed adapters": (
        vectors.but(
            model=lambda: habits.Checkpointed("blocks", False, *(models.LoraLinear(),) * 2)
        ),
        BY_TWOS,
    ),
    **{
        f"recomputed {where}, {reentrant=}": (
            vectors.but(model=partial(habits.Checkpointed, where, reentrant)),
            BY_TWOS,
        )
        for where in ("blocks", "every other block", "inside", "two blocks")
        for reentrant in (False, True)
    },
    **{
        f"transformer, {tied=}": (
            Scenario(model=partial(Transformer, tied=tied), optimizer=reference.adamw, seed=0),
            LANGUAGE,
        )
        for tied in (False, True)
    },
    "any units": (
        tokens.but(model=partial(Transformer, 2, tied=True)),
        [
            {"units": units}
            for units in (
                (Block, nn.Embedding),
                Block,
                ["blocks.*", "embedding"],
                lambda name, module: isinstance(module, nn.Linear),
                (),
            )
        ],
    ),
    **{
        f"bf16, {tied=}": (
            tokens.but(
                model=partial(Transformer, num_blocks=4, tied=tied),
                optimizer=reference.adamw,
                later=5e-2,
                compute_dtype=torch.bfloat16,
                options=BF16,
            ),
            sizes(2 * BLOCK),
        )
        for tied in (False, True)
    },
    **{
        name: (tokens.but(model=make, steps=3, microbatches=(1, 2, 1)), LANGUAGE)
        for name, make in [
            ("reads its embedding", habits.ReadsEmbedding),
            ("reads positions", habits.ReadsPositions),
            ("fused head", habits.FusedHead),
            ("fused tied head", habits.FusedTiedHead),
            ("reads its head later", habits.ReadsLater),
            ("fused head later", habits.FusedLater),
            ("passes a weight", partial(habits.PassesWeight, False)),
            ("passes the embedding", partial(habits.PassesWeight, True)),
        ]
    },
    **{
        f"{name} called from outside": (
            vectors.but(
                model=partial(habits.Diffusion, make, recomputes=name == "layer norm"),
                batch=habits.diffusion_batch,
            ),
            [{"units": [habits.Modulated]}],
        )
        for name, make in habits.MODULATIONS.items()
    },
}
# Everything that depends on the recorded order, or on weights that are read without a call, is
# tried at each level; of the others each level has a share.
AT_EVERY_LEVEL = {
    "called in some steps",
    "another order in every step",
    "hidden output",
    "reads its embedding",
    "reads positions",
}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(
            name,
            level,
            marks=()
            if name in AT_EVERY_LEVEL or level == list(LEVELS)[-1 - number % 4]
            else pytest.mark.thorough,
        )
        for number, name in enumerate(CASES)
        for level in LEVELS
    ],
)
@on_ranks(2)
def test_a_model_trains_as_one_process(name: str, level: str) -> None:
    scenario, ways = CASES[name]
    expected = scenario.alone()
    for options in ways:
        run = scenario.but(pair=(level, "no_shard"), options=options).sharded()
        later = scenario.tolerance if scenario.later is None else scenario.later
        lines = reference.differences(run.steps, expected.steps, later, first=scenario.tolerance)
        assert not lines, "\n".join([str(options), *lines[:12]])


@functools.cache
def expected_of(tied: bool, num_microbatches: int) -> list[reference.Step]:
    return joined(tied, num_microbatches).alone().steps


def joined(tied: bool, num_microbatches: int) -> Scenario:
    model = partial(Transformer, num_blocks=4, tied=tied)
    return tokens.but(model=model, steps=3, microbatches=num_microbatches)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_every_pair_trains_with_joined_units(strategy: str, outer: str, tied: bool) -> None:
    for num_microbatches, least in ((1, 2 * BLOCK), (3, BLOCK)):
        scenario = joined(tied, num_microbatches).but(
            pair=(strategy, outer), mesh=mesh_of(2, 2), options={"min_unit_size": least}
        )
        run = scenario.sharded()
        expected = expected_of(tied, num_microbatches)
        assert not reference.differences(run.steps, expected, scenario.tolerance)
        assert len(unit_names(run.engine)) < 5


def unit_names(engine: fe.Engine) -> list[str]:
    return [unit.name for unit in engine.units if unit.buffers]


@pytest.mark.parametrize("strategy", list(LEVELS)[:3])
@on_ranks(2)
def test_a_block_that_one_rank_skips(strategy: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = models.Skipping()
    alone = copy.deepcopy(model)
    engine = fe.shard(model, strategy=strategy, options=fe.Options(min_unit_size=EVERYTHING))
    assert unit_names(engine) == ["blocks.0-2"]
    optimizers = [reference.sgd(each.parameters()) for each in (model, alone)]
    for step in range(4):
        for each in range(world_size):
            alone.skip = each == step % world_size
            (alone(*vector_batch(2, 10 * step + each)) / world_size).backward()
        model.skip = rank == step % world_size
        model(*vector_batch(2, 10 * step + rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reference.assert_same_weights(model, alone, rtol=2e-5, atol=1e-6)


@on_ranks(2)
def test_containers_keep_their_type_and_shared_weights_are_one() -> None:
    model = models.NestedModel()
    fe.shard(model)
    model(*vector_batch(2, 0)).backward()
    kinds = [dict, models.Output, tuple, models.Pair, models.Bag, defaultdict]
    assert model.types == kinds
    shared: Any = models.shared_model()
    fe.shard(shared)
    assert shared.blocks[0].up.weight is shared.blocks[2].up.weight


@on_ranks(2)
def test_a_sharded_model_keeps_its_classes_names_modules_and_buffers() -> None:
    for strategy, level in LEVELS.items():
        model = Chain(models.Normalised(), models.Normalised())
        alone = copy.deepcopy(model)
        modules, classes = dict(model.named_modules()), [type(m) for m in model.modules()]
        fe.shard(model, strategy=strategy)
        assert dict(model.named_modules()) == modules
        assert [type(module) for module in model.modules()] == classes
        for found, expected in (
            (model.named_parameters(), alone.named_parameters()),
            (model.named_buffers(), alone.named_buffers()),
            (model.state_dict().items(), alone.state_dict().items()),
        ):
            assert [(n, v.shape) for n, v in found] == [(n, v.shape) for n, v in expected]
        sharded = isinstance(next(model.parameters()), fe.FlatDTensor)
        assert sharded == bool(level.value)
        batch = vector_batch(4, seed=1)  # the same on all ranks, and so are its statistics
        torch.testing.assert_close(model(*batch), alone(*batch))
        torch.testing.assert_close(dict(model.named_buffers()), dict(alone.named_buffers()))


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2, timeout=280)
def test_blocks_compiled_before_sharding_train(backend: str) -> None:
    def compiled() -> nn.Module:
        model = Chain(Mlp(), Mlp())
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    for strategy in LEVELS if backend == "aot_eager" else ["optim_grads_params"]:
        vectors.but(model=compiled, pair=(strategy, "no_shard")).check()


class Fragile(Chain):
    """Raises in the forward or in the backward of its middle block, when told to."""

    fails_in = ""

    def predict(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.fails_in == "forward":
                raise ArithmeticError("planted in forward")
            if index == 1 and self.fails_in == "backward":
                x = FailingBackward.apply(x)
        return x


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("planted in backward")


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@on_ranks(2)
def test_after_an_exception_reset_leads_back_with_the_weights_intact(fails_in: str) -> None:
    def fail(model: Any, step: int) -> None:
        engine = fe.engine.engine_of(model)
        if engine is None:  # the one process
            return
        before = reference.full_weights(model)
        model.fails_in = fails_in
        with pytest.raises(ArithmeticError, match="planted"):
            model(*vector_batch(2, seed=1)).backward()
        model.fails_in = ""
        engine.reset()
        engine.reset()  # at rest: changes nothing
        after = reference.full_weights(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(parameter.grad is None for parameter in model.parameters())

    scenario = vectors.but(
        model=lambda: Fragile(*(Mlp() for _ in range(4))),
        optimizer=reference.adamw,
        before_step=fail,
    )
    for strategy in LEVELS:
        scenario.but(pair=(strategy, "no_shard")).check()


class ReadsInputs(Chain):
    """Its blocks get fp32."""

    def __init__(self) -> None:
        super().__init__(Mlp(), Mlp())
        self.norm = nn.LayerNorm(models.DIM)
        self.seen: list[torch.dtype] = []

    def predict(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x.float())
        self.seen.append(x.dtype)
        return self.norm(self.blocks[1](x.float()))


@on_ranks(2)
def test_blocks_get_inputs_in_the_compute_dtype_also_beside_loose_modules() -> None:
    for strategy in LEVELS:
        model = ReadsInputs()
        engine = fe.shard(
            model, strategy=strategy, options=fe.Options(min_unit_size=EVERYTHING), **BF16
        )
        assert unit_names(engine) == ["blocks.0-1 + norm"]
        for step in range(2):
            model(*vector_batch(2, step)).backward()
        assert model.seen == [torch.bfloat16] * 2


def noted(calls: list[str], name: str, real: Callable[..., None], *args: Any) -> None:
    calls.append(name)
    real(*args)


@on_ranks(2)
def test_a_joined_unit_is_gathered_once_for_all_of_its_blocks() -> None:
    for reentrant in (False, True):
        model = Small(num_blocks=4, checkpoints=reentrant)
        engine = fe.shard(model, options=fe.Options(min_unit_size=400))
        first, last = "first + blocks.0-1", "blocks.2-3 + last"
        assert unit_names(engine) == [first, last]
        gathers: list[str] = []
        for unit in engine.units[1:]:
            unit.gather = partial(noted, gathers, unit.name, unit.gather)  # type: ignore[method-assign]
        for step in range(3):
            gathers.clear()
            model(*vector_batch(2, step)).backward()
        # The last one stays full from forward to backward.
        assert gathers == [first, last, first]
        for unit in engine.units:
            assert not unit.uses
            assert unit.state is State.SHARDED or not unit.reshards


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_the_wrapper_joins_units_where_parameters_are_sharded(strategy: str) -> None:
    scenario = joined(False, 2).but(steps=2, max_norm=float("inf"))
    model = scenario.made()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "MIN_UNIT_SIZE", 2 * BLOCK)  # it has no keyword for it
        ddp = fe.DistributedDataParallel(model, config_of(strategy, overlap=True))
    is_sharded = strategy == "optim_grads_params"
    names = ["embedding + blocks.0-1", "blocks.2-3 + norm + head"] if is_sharded else [""]
    assert unit_names(ddp.engine) == names
    found = train_wrapped(ddp, scenario.data())
    assert not reference.differences(found, scenario.alone().steps, 2e-5)
