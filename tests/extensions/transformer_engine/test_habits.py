"""Transformer Engine's weights in models that recompute, or that call units in unusual orders, in
Megatron-Core's wrapper, after exceptions, and read or changed between steps."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine.quantized_codec import TransformerEngineCodec
from tests import reference
from tests.extensions.transformer_engine.te_on_cpu import (
    RECIPES,
    QuantisedBlock,
    QuantisedLinear,
    QuantisedStack,
)
from tests.extensions.transformer_engine.te_training import (
    CUT,
    LEVELS,
    Watch,
    assert_all_same,
    bent,
    counting,
    make_batch,
    make_stack,
    partly_recomputed,
    scenario_of,
    watched,
)
from tests.megatron.configs import config_of, train_wrapped
from tests.pool import on_ranks
from tests.scenario import Run
from tests.training import mesh_of

pytestmark = pytest.mark.thorough

Config = fe.DistributedDataParallelConfig
both_kinds = pytest.mark.parametrize("recipe", ["block", "mxfp8"])


class AdaptedBlock(QuantisedBlock):
    def adapt(self) -> None:
        self.requires_grad_(False)
        dim = self.norm.weight.numel()
        self.narrow = nn.Linear(dim, 4, bias=False, dtype=torch.bfloat16)
        self.wide = nn.Linear(4, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wide(self.narrow(x))


def adapted(recipe: str) -> QuantisedStack:
    model = make_stack(recipe)
    for block in model.blocks:
        block.__class__ = AdaptedBlock
        block.adapt()
    return model


def tied(recipe: str) -> QuantisedStack:
    model = make_stack(recipe, num_blocks=3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def mixed(recipe: str) -> QuantisedStack:
    """Blocks have weights of two recipes, and plain ones."""
    model = make_stack(recipe)
    for block in model.blocks:
        hidden, dim = block.up.weight.shape
        block.down = QuantisedLinear(hidden, dim, "current", bias=False)
    return model


class Around(nn.Module):
    """A unit that calls a quantised layer of its own before and after an inner unit."""

    def __init__(self, block: QuantisedBlock) -> None:
        super().__init__()
        dim = block.norm.weight.numel()
        self.inside, self.own = nn.Sequential(block), QuantisedLinear(dim, dim, block.up.recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x + self.own(x)) + self.own(x)


def nested(recipe: str) -> QuantisedStack:
    model = make_stack(recipe, num_blocks=3)
    model.blocks = nn.ModuleList([Around(block) for block in model.blocks])
    return model


def freeze(model: Any, step: int) -> None:
    model.blocks[0].requires_grad_(step != 1)


TWICE = (0, 1, 0, 2, 3, 0, 1)
# Models and other attributes of the scenario. Those in RECOMPUTED compute the same as four blocks.
RECOMPUTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "checkpoints of two units": (partial(bent, span=2), {}),
    "re-entrant checkpoints of two units": (partial(bent, span=2, reentrant=True), {}),
    "checkpoints of one unit": (partial(bent, span=1), {}),
    "re-entrant checkpoints of one unit": (partial(bent, span=1, reentrant=True), {}),
    "checkpoints within units": (partly_recomputed, {}),
    "re-entrant checkpoints within units": (partial(partly_recomputed, reentrant=True), {}),
}
HABITS: dict[str, tuple[Any, dict[str, Any]]] = {
    **RECOMPUTED,
    "units called several times": (partial(bent, order=TWICE), {}),
    "units called several times in checkpoints": (partial(bent, order=TWICE, span=1), {}),
    "units in units": (nested, {"options": {"units": ["blocks.*", "blocks.*.inside.*"]}}),
    "tied weights": (tied, {}),
    "two recipes and plain weights in a unit": (mixed, {}),
    "weights that are frozen and thawed": (make_stack, {"before_step": freeze}),
    "frozen weights under adapters": (adapted, {}),
}
# Level, whether addresses are planned, elements gathered ahead, whether gathers are issued in
# rounds.
WAYS = [
    ("no_shard", False, None, False),
    ("optim", False, None, False),
    ("optim_grads", False, None, False),
    (CUT, False, 0, False),
    (CUT, False, 10**9, False),
    (CUT, True, None, False),
    (CUT, False, None, True),
    (CUT, True, None, True),
]


@both_kinds
@pytest.mark.parametrize("name", HABITS)
@on_ranks(2)
def test_a_model_trains_bit_by_bit_alike_in_all_ways(name: str, recipe: str) -> None:
    make, changes = HABITS[name]
    # True: each microbatch is reduced. False: each rank adds its microbatches first, so the order
    # of sums differs, and sometimes the last digit.
    runs: dict[bool, list[Run]] = {True: [], False: []}
    if name in RECOMPUTED:
        runs[True].append(scenario_of(recipe, num_blocks=4).sharded())
    ways = WAYS if recipe == "mxfp8" else WAYS[::3]
    with counting(TransformerEngineCodec, "encode") as encode:
        for level, planned, budget, in_rounds in ways:
            config = Config(fsdp_double_buffer=planned, suggested_communication_unit_size=budget)
            scenario = scenario_of(recipe, pair=(level, "no_shard"), model=partial(make, recipe))
            scenario = scenario.but(**changes).but(options={"config": config})
            if in_rounds:
                scenario = scenario.but(around=lambda engine: engine.together())
            watch = Watch(*scenario.sharded_model())
            reduces_each = level not in ("no_shard", "optim")
            runs[reduces_each].append(watch.train(scenario, num_forwards=None))
            # A layer that is called twice is looked at twice.
            assert watch.looks["rows"] >= watch.looks["columns"] >= 3 * 2 * len(watch.layers)
    for each in runs.values():
        assert_all_same(each)
    assert_all_same([runs[True][0], runs[False][0]], tolerance=1e-6)
    if make is adapted:
        assert encode.call_count == len(ways) * 2  # each block once


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_the_wrapper_trains_as_the_engine_does_from_the_first_rank_s_weights_and_scales(
    recipe: str,
) -> None:
    for level, (overlap, bucket_size) in itertools.product(
        ("no_shard", "optim", CUT), ((False, None), (True, 4000))
    ):
        scenario = scenario_of(recipe, pair=(level, "no_shard"))
        expected, _ = watched(scenario.but(options={"config": Config(fp8_param_gather=True)}))
        model = make_stack(recipe, seed=1 + dist.get_rank())
        config = config_of(
            level,
            overlap=overlap,
            bucket_size=bucket_size,
            fp8_param_gather=True,
            grad_reduce_in_fp32=True,  # or the wrapper keeps gradients in bf16
        )
        ddp = fe.DistributedDataParallel(model, config, mesh_of(2))
        watch = Watch(model, ddp.engine)

        def finish(ddp: fe.DistributedDataParallel, model: Any = model) -> None:
            ddp.finish_grad_sync()
            model.update_scales()  # the next bytes are made right after the step

        found, make = [], reference.once(reference.sgd)
        for step in scenario.data():
            watch.expect()
            found += train_wrapped(ddp, [step], make, finish=finish)
        count = 3 * 2 * len(watch.layers)
        assert watch.looks == {"rows": count, "columns": count}
        # Gradients may be added in another order.
        lines = reference.differences(found, expected.steps, 3e-2, first=2e-5)
        assert not lines, (level, overlap, lines[:6])
        for name, scale in watch.scales().items():
            first_one_s = scale.clone()
            dist.broadcast(first_one_s, 0)
            assert torch.equal(scale, first_one_s), (level, name)
        if bucket_size is not None:
            codecs = [buffer.weights.codec for buffer in ddp.engine.buffers]
            assert sum(isinstance(each, TransformerEngineCodec) for each in codecs) > 1


class Fails(Exception):
    pass


@both_kinds
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_after_an_exception_and_a_reset_training_is_as_if_nothing_had_been(
    recipe: str, where: str
) -> None:
    def fail(*_: Any) -> None:
        raise Fails

    def fail_later(module: Any, args: Any, y: Tensor) -> None:
        y.register_hook(fail)

    for level in ("optim", CUT):
        scenario = scenario_of(recipe, num_blocks=3, pair=(level, "no_shard"), steps=1)
        runs = []
        for fails in (False, True):
            _, watch = watched(scenario)
            if fails:
                watch.expect()
                hook = fail if where == "forward" else fail_later
                handle = watch.model.blocks[1].down.register_forward_hook(hook)
                with pytest.raises(Fails):
                    watch.model(*make_batch(2, 3)).backward()
                handle.remove()
                watch.engine.reset()
            runs.append(watch.train(scenario.but(steps=2)))
        assert_all_same(runs)


@both_kinds
@on_ranks(2)
def test_edits_of_full_weights_are_encoded_and_parameters_stay_what_they_are(recipe: str) -> None:
    for level in LEVELS:
        scenario = scenario_of(recipe, pair=(level, "no_shard"), steps=1)
        run, watch = watched(scenario)
        own = dict(watch.weights)
        with watch.engine.unsharded(), torch.no_grad():
            for name, layer in watch.layers.items():
                assert torch.equal(layer.weight, run.weights[name])
                assert layer.weight.dtype == torch.float32
                layer.weight.mul_(1.7)
        after = watch.engine.full_state_dict()
        for name in watch.layers:
            assert torch.equal(after[name], run.weights[name] * 1.7)
        watch.train(scenario)
        assert all(watch.weights[name] is weight for name, weight in own.items())


@both_kinds
@on_ranks(2)
def test_looks_between_steps_change_nothing(recipe: str) -> None:
    def look(model: Any, step: int, watch: Watch) -> None:
        if step:
            watch.engine.start_param_sync(wait=step == 2)
        state = watch.engine.full_state_dict()
        assert state.keys() == model.state_dict().keys()
        for name in watch.layers:
            assert state[name].dtype == torch.float32
            assert torch.equal(watch.engine.full_tensor(name), state[name])
        watch.expect(state)
        with torch.no_grad():
            model(*make_batch(2, 77))
        model.eval()
        model(*make_batch(2, 78))  # its backward is never called
        model.train()
        watch.engine.start_param_sync()  # nothing has changed, but sharded units are prefetched

    def loss_of(model: nn.Module, batch: reference.Batch) -> Tensor:
        loss: Tensor = model(*batch)
        with torch.no_grad():  # between forward and backward
            model(*make_batch(2, 79))
        return loss

    for level in LEVELS:
        scenario = scenario_of(recipe, pair=(level, "no_shard"), microbatches=1)
        watch = Watch(*scenario.sharded_model())
        looking = scenario.but(
            before_step=lambda model, step, watch=watch: look(model, step, watch), loss_of=loss_of
        )
        assert_all_same([watch.train(looking, num_forwards=4), scenario.sharded()])


@both_kinds
@on_ranks(2)
def test_weights_that_change_while_they_are_full_are_encoded_and_gathered_again(
    recipe: str,
) -> None:
    for level, make in itertools.product(("optim", CUT), (make_stack, tied)):
        scenario = scenario_of(
            recipe, pair=(level, "no_shard"), steps=1, model=partial(make, recipe)
        )
        model, engine = scenario.sharded_model()  # a root with tied weights stays full
        watch = Watch(model, engine)
        watch.train(scenario)
        for ahead in (False, True, True):
            if ahead:
                watch.engine.start_param_sync()
            else:
                watch.expect()
                model(*make_batch(2, dist.get_rank()))  # its backward is never called
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.3)
            watch.train(scenario)
