"""Models with features of real models train as one process does, in units of any size."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from fsdp_engine.units import assignment
from tests import models, reference
from tests.megatron.configs import config_of, train_wrapped
from tests.messages import count_step
from tests.models import Block, Chain, Mlp, Small, Transformer, vector_batch
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks
from tests.runtime import habits
from tests.scenario import Run, Scenario

BLOCK = sum(parameter.numel() for parameter in Block().parameters())
MLPS = 2 * sum(parameter.numel() for parameter in Mlp().parameters())


EVERYTHING = 10**6
Case = tuple[Scenario, list[dict[str, Any]]]


def sizes(*least: int) -> list[dict[str, Any]]:
    return [{"min_unit_size": each} for each in least]


# Minimum sizes of units: none; two blocks, or a block with the modules beside it; the whole model.
BY_TWOS = sizes(0, MLPS, EVERYTHING)
LANGUAGE = sizes(0, BLOCK, EVERYTHING)
BF16 = {"mp_policy": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def vectors(model: Any, ways: list[dict[str, Any]] = BY_TWOS, **changes: Any) -> Case:
    return Scenario(model=model, batch=vector_batch, microbatches=(2, 1)).but(**changes), ways


def tokens(model: Any, ways: list[dict[str, Any]] = LANGUAGE, **changes: Any) -> Case:
    return Scenario(model=model, microbatches=(2, 1)).but(**changes), ways


def never_calls() -> nn.Module:
    model = models.Skipping()
    model.skip = True
    return model


def skip_every_other_step(model: Any, step: int) -> None:
    model.skip = step % 2 == 1


def change_order(model: Any, step: int) -> None:
    model.turn = step % 3


def switch_identity(model: Any, step: int) -> None:
    model.blocks[1].active = step % 2 == 0


# By name: the run, and several options of shard; each of these is tested.
CASES: dict[str, Case] = {
    "odd sizes": vectors(
        models.odd_model, sizes(0, EVERYTHING), batch=partial(vector_batch, width=7), microbatches=2
    ),
    "smaller than the world": vectors(
        lambda: Chain(nn.Linear(1, 1), nn.Linear(1, 1)),
        sizes(0, EVERYTHING),
        batch=partial(vector_batch, width=1),
        microbatches=2,
    ),
    "several dtypes": vectors(
        models.mixed_model,
        sizes(0, EVERYTHING),
        compute_dtype={name: p.dtype for name, p in models.mixed_model().named_parameters()},
        later=1e-2,
    ),
    "containers": vectors(models.NestedModel),
    "called twice": vectors(models.CalledTwice),
    "never called": vectors(never_calls),
    "unused parameter": vectors(models.unused_model),
    "shared weight": vectors(models.shared_model),
    "frozen first": vectors(models.frozen_first_model),
    "a memory of every layer": vectors(models.EncoderDecoder),
    "nested units": vectors(
        models.NestedUnits,
        [*BY_TWOS, {"units": [models.SequentialBlock, nn.Sequential, nn.Linear]}],
    ),
    "changed in place": vectors(models.InPlace),
    "unused output": vectors(models.UnusedOutput),
    "recurrent": vectors(lambda: Chain(models.Recurrent(), models.Recurrent())),
    "hidden output": vectors(habits.HidesFirst, steps=3, microbatches=(2, 1, 1)),
    **{
        name: vectors(make, BY_TWOS[: 1 if name == "a returned table" else None])
        for name, make in habits.RETURNS.items()
    },
    "returned and recomputed": vectors(lambda: habits.Reads(habits.Views, False)),
    "returned, re-entrant": vectors(lambda: habits.Reads(habits.Skips, True)),
    "called in some steps": vectors(
        models.Skipping, steps=4, microbatches=(2, 1, 1, 2), before_step=skip_every_other_step
    ),
    "another order in every step": vectors(
        lambda: habits.Shuffled(*(Mlp() for _ in range(4))),
        steps=5,
        microbatches=(1, 1, 2, 1, 2),
        before_step=change_order,
    ),
    "returns its input": vectors(
        lambda: Chain(Mlp(), models.MaybeIdentity(), Mlp()),
        steps=3,
        microbatches=(2, 1, 1),
        before_step=switch_identity,
    ),
    "shared module": vectors(
        models.shared_module_model,
        [
            *BY_TWOS,
            {"units": "blocks.*"},
            {"units": [models.WithShared]},
            {"units": [models.WithShared, Mlp]},
        ],
    ),
    # The run without prefetch fails if a unit is freed too early, since its memory is gone.
    "adapters": vectors(
        models.lora_model,
        [
            *BY_TWOS,
            {"config": fe.DistributedDataParallelConfig(suggested_communication_unit_size=0)},
        ],
    ),
    "recomputed adapters": vectors(
        lambda: habits.Checkpointed("blocks", False, *(models.LoraLinear(),) * 2)
    ),
    **{
        f"recomputed {where}, {reentrant=}": vectors(partial(habits.Checkpointed, where, reentrant))
        for where in ("blocks", "every other block", "inside", "two blocks")
        for reentrant in (False, True)
    },
    **{
        f"transformer, {tied=}": tokens(
            partial(Transformer, tied=tied), optimizer=reference.adamw, microbatches=2, seed=0
        )
        for tied in (False, True)
    },
    "any units": tokens(
        partial(Transformer, 2, tied=True),
        [
            {"units": (Block, nn.Embedding)},
            {"units": Block},
            {"units": ["blocks.*", "embedding"]},
            {"units": lambda name, module: isinstance(module, nn.Linear)},
            {"units": ()},
        ],
    ),
    **{
        f"bf16, {tied=}": tokens(
            partial(Transformer, num_blocks=4, tied=tied),
            sizes(2 * BLOCK),
            optimizer=reference.adamw,
            later=5e-2,
            compute_dtype=torch.bfloat16,
            options=BF16,
        )
        for tied in (False, True)
    },
    **{
        name: tokens(make, steps=3, microbatches=(1, 2, 1))
        for name, make in habits.LANGUAGES.items()
    },
    **{
        f"{name} called from outside": vectors(
            partial(habits.Diffusion, make, recomputes=name == "layer norm"),
            [{"units": [habits.Modulated]}],
            batch=habits.diffusion_batch,
        )
        for name, make in habits.MODULATIONS.items()
    },
}
# By default each case runs at one of the levels. Cases that depend on the recorded order, or on
# weights that are read without a call, also run at a level that gathers in backward and at one that
# does not.
AT_MORE_LEVELS = {
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
            if (name in AT_MORE_LEVELS and level in ("optim", "optim_grads_params"))
            or level == list(LEVELS)[-1 - number % 4]
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
        scenario.but(pair=(level, "no_shard"), options=options).check(expected)


def joined(tied: bool, num_microbatches: int) -> Scenario:
    model = partial(Transformer, num_blocks=4, tied=tied)
    return Scenario(model=model, steps=3, microbatches=num_microbatches)


@functools.cache
def expected_of(tied: bool, num_microbatches: int) -> Run:
    return joined(tied, num_microbatches).alone()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_every_pair_trains_with_joined_units(strategy: str, outer: str, tied: bool) -> None:
    for num, least in ((1, 2 * BLOCK), (3, BLOCK)):
        options = {"min_unit_size": least}
        scenario = joined(tied, num).but(pair=(strategy, outer), mesh=(2, 2), options=options)
        run = scenario.check(expected_of(tied, num))
        assert len(unit_names(run.engine)) < 5


def unit_names(engine: fe.Engine) -> list[str]:
    return [unit.name for unit in engine.units if unit.buffers]


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

    def fragile() -> nn.Module:
        return Fragile(*(Mlp() for _ in range(4)))

    scenario, _ = vectors(fragile, optimizer=reference.adamw, before_step=fail)
    for strategy in LEVELS:
        scenario.but(pair=(strategy, "no_shard")).check()


class ReadsInputs(Chain):
    """Records the dtype of inputs: blocks must get fp32."""

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


@on_ranks(2)
def test_a_joined_unit_is_gathered_once_for_all_of_its_blocks() -> None:
    for reentrant in (False, True):
        model = Small(num_blocks=4, checkpoints=reentrant)
        engine = fe.shard(model, options=fe.Options(min_unit_size=400))
        first, last = "first + blocks.0-1", "blocks.2-3 + last"
        assert unit_names(engine) == [first, last]
        optimizer = reference.sgd(model.parameters())
        for _ in range(3):
            operations = count_step(model, engine, optimizer, 1).operations
        gathers = [operations[f"all-gather of {name}"] for name in (first, last)]
        assert gathers == [2, 1]  # the last unit stays full from forward to backward


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_the_wrapper_joins_units_where_parameters_are_sharded(strategy: str) -> None:
    scenario = joined(False, 2).but(steps=2, max_norm=float("inf"))
    model = scenario.made()
    with pytest.MonkeyPatch.context() as patch:
        # The wrapper has no argument for this size.
        patch.setattr(assignment, "MIN_UNIT_SIZE", 2 * BLOCK)
        ddp = fe.DistributedDataParallel(model, config_of(strategy, overlap=True))
    is_sharded = strategy == "optim_grads_params"
    names = ["embedding + blocks.0-1", "blocks.2-3 + norm + head"] if is_sharded else [""]
    assert unit_names(ddp.engine) == names
    found = train_wrapped(ddp, scenario.data())
    assert not reference.differences(found, scenario.alone().steps, 2e-5)
