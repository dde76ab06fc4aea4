"""Weights: the next forward uses every change of the main weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.runtime.unit import State
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.models import Transformer, token_batch, vector_batch
from tests.pairs import EVERY_PAIR, PAIRS
from tests.pool import on_ranks
from tests.reference import full_weights

DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def scale_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def copy_new_values(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter * 0.25 + 0.125)


def fill_some(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "blocks.0" in name:
            parameter.fill_(0.0625)


def foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.75)


def initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.weight)
            nn.init.ones_(module.bias)


def through_local(model: nn.Module) -> None:
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, fe.FlatDTensor) else parameter
        local.add_(0.125)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    function.__name__: function
    for function in (scale_each, copy_new_values, fill_some, foreach, initialise, through_local)
}


@pytest.mark.parametrize("edit", EDITS)
@on_ranks(2)
def test_an_edit_in_place_takes_effect_in_the_very_next_forward(edit: str) -> None:
    for strategy, dtype in itertools.product(LEVELS, DTYPES.values()):
        torch.manual_seed(0)
        model = Transformer(num_blocks=2, tied=True)
        alone = copy.deepcopy(model)
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        fe.shard(model, strategy=strategy, mp_policy=policy)
        tokens, _ = token_batch(2, seed=1)
        for turn in range(3):
            with torch.no_grad():
                EDITS[edit](model)
                EDITS[edit](alone)
                found = model(tokens)
                expected = copy.deepcopy(alone).to(found.dtype)(tokens)
            torch.testing.assert_close(found, expected, msg=f"{strategy}, {dtype}, {turn}")


@on_ranks(4)
def test_an_edit_takes_effect_at_every_pair_of_levels() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for strategy, outer in PAIRS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=1)
        alone = copy.deepcopy(model)
        fe.shard(model, mesh, strategy, outer)
        tokens, targets = token_batch(2, seed=1)
        for each in (model, alone):
            each(tokens, targets).backward()
            with torch.no_grad():
                scale_each(each)
        found, expected = model(tokens), alone(tokens)
        torch.testing.assert_close(found, expected, msg=f"{strategy}, {outer}")


@on_ranks(2)
def test_an_edit_of_a_unit_that_the_last_forward_skipped_takes_effect() -> None:
    for strategy, dtype in itertools.product(LEVELS, DTYPES.values()):
        torch.manual_seed(0)
        model = models.Skipping()
        alone = copy.deepcopy(model)
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        fe.shard(model, strategy=strategy, mp_policy=policy)
        x, _ = vector_batch(2, seed=1)
        fe.register_forward_method(model, "predict")
        with torch.no_grad():
            model.skip = True
            model.predict(x)
            for each in (model, alone):
                each.blocks[1].down.weight.mul_(3.0)  # type: ignore[union-attr, operator]
            model.skip = False
            found = model.predict(x)
            expected = copy.deepcopy(alone).to(found.dtype).predict(x.to(found.dtype))
        torch.testing.assert_close(found, expected, msg=f"{strategy}, {dtype}")


@on_ranks(2)
def test_loaded_weights_take_effect_in_the_very_next_forward() -> None:
    for strategy, dtype in itertools.product(LEVELS, DTYPES.values()):
        torch.manual_seed(0)
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        model, other = Transformer(num_blocks=2), Transformer(num_blocks=2)
        fe.shard(model, strategy=strategy, mp_policy=policy)
        fe.shard(other, strategy=strategy, mp_policy=policy)
        tokens, targets = token_batch(2, seed=1)
        model(tokens, targets).backward()
        expected = other(tokens).detach()
        assert not torch.equal(model(tokens), expected)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(tokens), expected), f"{strategy}, {dtype}"


@on_ranks(2)
def test_full_weights_can_be_loaded_within_unsharded() -> None:
    for strategy, dtype in itertools.product(LEVELS, DTYPES.values()):
        torch.manual_seed(0)
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        model, plain = Transformer(num_blocks=2), Transformer(num_blocks=2)
        engine = fe.shard(model, strategy=strategy, mp_policy=policy)
        with engine.unsharded():
            model.load_state_dict(plain.state_dict())
        for name, weight in full_weights(model).items():
            assert torch.equal(weight, plain.state_dict()[name]), name
        tokens, _ = token_batch(2, seed=1)
        found = model(tokens)
        expected = copy.deepcopy(plain).to(found.dtype)(tokens)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_within_unsharded_modules_hold_full_main_weights(strategy: str, outer: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for model in (Transformer(num_blocks=2, tied=True), models.odd_model()):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = fe.shard(model, mesh, strategy, outer)
        with engine.unsharded():
            for name, parameter in model.named_parameters():
                assert not isinstance(parameter, fe.FlatDTensor)
                assert torch.equal(parameter, before[name]), name
        sharded = dict(model.named_parameters())
        with engine.unsharded(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        for name, weight in full_weights(model).items():
            assert torch.equal(weight, 2 * before[name]), name
        after = dict(model.named_parameters())
        assert all(after[name] is sharded[name] for name in sharded)


@on_ranks(2)
def test_unsharding_one_module_leaves_the_others_sharded() -> None:
    model = Transformer(num_blocks=2)
    engine = fe.shard(model)
    block = model.blocks[0]
    with engine.unsharded(block), torch.no_grad():
        assert not any(isinstance(p, fe.FlatDTensor) for p in block.parameters())
        assert all(isinstance(p, fe.FlatDTensor) for p in model.blocks[1].parameters())
        block.out.weight.zero_()  # type: ignore[union-attr, operator]
    assert not engine.full_tensor("blocks.0.out.weight").any()


@on_ranks(2)
def test_within_unsharded_the_model_runs_on_main_weights() -> None:
    for strategy in LEVELS:
        torch.manual_seed(0)
        model = Transformer(num_blocks=2)
        alone = copy.deepcopy(model)
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        engine = fe.shard(model, strategy=strategy, mp_policy=policy)
        tokens, _ = token_batch(2, seed=1)
        with engine.unsharded(), torch.no_grad():
            found = model(tokens)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, alone(tokens))
        assert model(tokens).dtype == torch.bfloat16


@on_ranks(2)
def test_an_exception_within_unsharded_writes_nothing_back() -> None:
    for strategy in LEVELS:
        if strategy == "no_shard":
            continue  # the full weights are the main weights
        model = Transformer(num_blocks=2)
        engine = fe.shard(model, strategy=strategy)
        before = full_weights(model)
        with pytest.raises(KeyError):
            zero_and_fail(model, engine)
        after = full_weights(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        model(*token_batch(2, 1)).backward()


def zero_and_fail(model: nn.Module, engine: fe.Engine) -> None:
    with engine.unsharded(), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        raise KeyError("a user's own")


@on_ranks(2)
def test_full_tensors_and_full_state_are_the_weights_by_their_names() -> None:
    for strategy, dtype in itertools.product(LEVELS, DTYPES.values()):
        torch.manual_seed(0)
        model = models.Chain(models.Normalised(), models.Normalised())
        alone = copy.deepcopy(model)
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        engine = fe.shard(model, strategy=strategy, mp_policy=policy)
        state, expected = engine.full_state_dict(), alone.state_dict()
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert type(state[name]) is Tensor
            assert state[name].device.type == "cpu"
            assert torch.equal(state[name], value), name
        for name, parameter in alone.named_parameters():
            assert torch.equal(engine.full_tensor(name), parameter), name
        state["blocks.0.linear.weight"].zero_()
        assert torch.equal(engine.full_tensor("blocks.0.linear.weight"), parameter_of(alone))


def parameter_of(model: models.Chain) -> Tensor:
    return model.state_dict()["blocks.0.linear.weight"]


@on_ranks(2)
def test_a_tied_weight_has_all_its_names() -> None:
    for strategy in LEVELS:
        model = Transformer(num_blocks=1, tied=True)
        weight = model.head.weight.detach().clone()
        engine = fe.shard(model, strategy=strategy)
        state = engine.full_state_dict()
        for name in ("head.weight", "embedding.weight"):
            assert torch.equal(state[name], weight)
            assert torch.equal(engine.full_tensor(name), weight)


@on_ranks(2)
def test_only_rank_zero_keeps_the_full_state_when_asked_to() -> None:
    engine = fe.shard(Transformer(num_blocks=1))
    state = engine.full_state_dict(rank0_only=True)
    assert bool(state) == (dist.get_rank() == 0)


@on_ranks(2)
def test_all_ranks_start_from_the_values_of_one_where_they_are_asked_to() -> None:
    for strategy in LEVELS:
        torch.manual_seed(dist.get_rank())
        model = Transformer(num_blocks=1)
        engine = fe.shard(model, strategy=strategy, initial_values="rank0")
        for name, weight in engine.full_state_dict().items():
            others = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(others, weight.contiguous())
            assert torch.equal(others[0], others[1]), f"{strategy}: {name}"


class Watch:
    """Notes the most units that hold full parameters at once, beside the root."""

    def __init__(self, engine: fe.Engine) -> None:
        self.units = [unit for unit in engine.units if unit.name]
        self.most = 0
        for unit in self.units:
            for module in unit.modules:
                module.register_forward_pre_hook(self.before)
                module.register_forward_hook(self.after)

    def look(self) -> None:
        full = sum(unit.state is not State.SHARDED for unit in self.units)
        self.most = max(self.most, full)

    def before(self, module: nn.Module, args: Any) -> None:
        self.look()

    def after(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.look()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.look())


class Wandering(models.Chain):
    """Calls its blocks in a given order."""

    route: tuple[int, ...] = ()

    def predict(self, x: Tensor) -> Tensor:
        for index in self.route:
            x = self.blocks[index](x)
        return x


ROUTES = {
    "in_order": [(0, 1, 2, 3, 4)] * 3,
    "backwards": [(4, 3, 2, 1, 0)] * 3,
    "another_each_time": [(0, 1, 2, 3, 4), (3, 0, 4), (2, 2, 1), (4, 0, 1, 3, 2), (1,)],
    "back_and_forth": [(0, 1, 0, 1, 2, 3, 4, 3)] * 3,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@on_ranks(2)
def test_no_more_units_are_full_than_the_one_in_use_and_those_gathered_ahead(
    num_ahead: int, route: str
) -> None:
    torch.manual_seed(0)
    model = Wandering(*(models.Mlp() for _ in range(5)))
    alone = copy.deepcopy(model)
    size = 640  # what a unit takes with its gaps on two ranks
    options = fe.Options(prefetch_window=num_ahead * size, staging_limit=num_ahead * size)
    engine = fe.shard(model, options=options)
    assert {unit.num_elements for unit in engine.units if unit.name} == {size}
    watch = Watch(engine)
    optimizer, alone_optimizer = reference.once(reference.sgd), reference.once(reference.sgd)
    data = reference.make_data(vector_batch, len(ROUTES[route]), 1, 2)
    for path, step in zip(ROUTES[route], data, strict=True):
        model.route = alone.route = path
        found = reference.train_sharded(model, engine, [step], optimizer)
        expected = reference.train(alone, [step], alone_optimizer)
        lines = reference.differences(found, expected, 2e-5)
        assert not lines, f"{path}: {lines}"
    assert 1 <= watch.most <= 1 + num_ahead


@on_ranks(2)
def test_at_rest_nothing_is_full_at_the_last_level() -> None:
    model = Transformer(num_blocks=3)
    engine = fe.shard(model)
    units = [unit for unit in engine.units if unit.buffers]
    assert all(unit.state is State.SHARDED for unit in units)
    model(*token_batch(2, 1)).backward()
    assert all(unit.state is State.SHARDED for unit in units)
    with torch.no_grad():
        model(*token_batch(2, 1))
    assert all(unit.state is State.SHARDED for unit in units)
