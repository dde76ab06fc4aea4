"""Weights: the next forward uses every change of the main weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import models
from tests.models import Transformer, token_batch, vector_batch
from tests.pairs import EVERY_PAIR, PAIRS
from tests.pool import on_ranks
from tests.reference import full_weights
from tests.training import mesh_of

POLICIES = [fe.MixedPrecisionPolicy(param_dtype=dtype) for dtype in (None, torch.bfloat16)]


def scale_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def held(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, fe.FlatDTensor) else parameter


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "scaled": scale_each,
    "new values": lambda model: [p.copy_(p * 0.25 + 0.125) for p in model.parameters()],
    "some": lambda model: [p.fill_(0.0625) for p in model.blocks[0].parameters()],  # type: ignore[index, union-attr]
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.75),
    "initialised": lambda model: [
        nn.init.constant_(parameter, 0.5)
        for parameter in model.norm.parameters()  # type: ignore[union-attr]
    ],
    "through the local tensor": lambda model: [held(p).add_(0.125) for p in model.parameters()],
}


def sharded(
    make: Callable[[], nn.Module] = lambda: Transformer(num_blocks=2, tied=True),
) -> Iterator[tuple[Any, Any, fe.Engine]]:
    """A sharded model, the same one alone, and the engine, at each level and in each dtype."""
    for strategy, policy in itertools.product(LEVELS, POLICIES):
        model = make()
        alone = copy.deepcopy(model)
        yield model, alone, fe.shard(model, strategy=strategy, mp_policy=policy)


def assert_answers(model: Any, alone: nn.Module, tokens: Tensor) -> None:
    """The model's output equals that of ``alone``, converted to the output's dtype."""
    found = model(tokens)
    expected = copy.deepcopy(alone).to(found.dtype)(tokens)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("edit", EDITS)
@on_ranks(2)
@torch.no_grad()
def test_an_edit_in_place_takes_effect_in_the_very_next_forward(edit: str) -> None:
    tokens, _ = token_batch(2, seed=1)
    for model, alone, _ in sharded():
        for _ in range(3):
            EDITS[edit](model)
            EDITS[edit](alone)
            assert_answers(model, alone, tokens)


@on_ranks(4)
def test_an_edit_takes_effect_at_every_pair_of_levels() -> None:
    mesh = mesh_of(2, 2)
    tokens, targets = token_batch(2, seed=1)
    for strategy, outer in PAIRS:
        model = Transformer(num_blocks=1)
        alone = copy.deepcopy(model)
        fe.shard(model, mesh, strategy, outer)
        for each in (model, alone):
            each(tokens, targets).backward()
            with torch.no_grad():
                scale_each(each)
        torch.testing.assert_close(model(tokens), alone(tokens), msg=f"{strategy}, {outer}")


@on_ranks(2)
@torch.no_grad()
def test_an_edit_of_a_unit_that_the_last_forward_skipped_takes_effect() -> None:
    x, _ = vector_batch(2, seed=1)
    for model, alone, _ in sharded(models.Skipping):
        fe.register_forward_method(model, "predict")
        model.skip = True
        model.predict(x)
        for each in (model, alone):
            each.blocks[1].down.weight.mul_(3.0)
        model.skip = False
        found = model.predict(x)
        expected = alone.to(found.dtype).predict(x.to(found.dtype))
        torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_loaded_weights_take_effect_in_the_very_next_forward() -> None:
    tokens, targets = token_batch(2, seed=1)
    other = Transformer(num_blocks=2, tied=True)
    for (model, _, _), (twin, _, _) in zip(
        sharded(), sharded(lambda: copy.deepcopy(other)), strict=True
    ):
        model(tokens, targets).backward()
        expected = twin(tokens).detach()
        assert not torch.equal(model(tokens), expected)
        model.load_state_dict(twin.state_dict())
        assert torch.equal(model(tokens), expected)
    for model, _, engine in sharded():
        with engine.unsharded():
            model.load_state_dict(other.state_dict())
        for name, weight in full_weights(model).items():
            assert torch.equal(weight, other.state_dict()[name]), name
        assert_answers(model, other, tokens)


@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_within_unsharded_modules_hold_full_main_weights(strategy: str, outer: str) -> None:
    for model in (Transformer(num_blocks=2, tied=True), models.odd_model()):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = fe.shard(model, mesh_of(2, 2), strategy, outer)
        sharded = dict(model.named_parameters())
        with engine.unsharded(), torch.no_grad():
            for name, parameter in model.named_parameters():
                assert not isinstance(parameter, fe.FlatDTensor)
                assert torch.equal(parameter, before[name]), name
                parameter.mul_(2.0)
        for name, weight in full_weights(model).items():
            assert torch.equal(weight, 2 * before[name]), name
        assert all(parameter is sharded[name] for name, parameter in model.named_parameters())


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
@torch.no_grad()
def test_within_unsharded_the_model_runs_on_main_weights() -> None:
    tokens, _ = token_batch(2, seed=1)
    for model, alone, engine in sharded():
        with engine.unsharded():
            torch.testing.assert_close(model(tokens), alone(tokens))
        assert_answers(model, alone, tokens)


@on_ranks(2)
def test_an_exception_within_unsharded_writes_nothing_back() -> None:
    for strategy in list(LEVELS)[1:]:  # at the first one the full weights are the main weights
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


def tied_with_buffers() -> nn.Module:
    model = models.Chain(models.Normalised(), models.Normalised())
    first, second = (block.linear for block in model.blocks)
    first.weight = second.weight  # type: ignore[union-attr]
    return model


@on_ranks(2)
def test_full_tensors_and_full_state_are_the_weights_by_all_their_names() -> None:
    for _, alone, engine in sharded(tied_with_buffers):
        state, expected = engine.full_state_dict(), alone.state_dict()
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert type(state[name]) is Tensor
            assert state[name].device.type == "cpu"
            assert torch.equal(state[name], value), name
        for name, parameter in alone.named_parameters(remove_duplicate=False):
            assert torch.equal(engine.full_tensor(name), parameter), name
        state["blocks.0.linear.weight"].zero_()
        found = engine.full_tensor("blocks.0.linear.weight")
        assert torch.equal(found, expected["blocks.0.linear.weight"])


@on_ranks(2)
def test_only_rank_zero_keeps_the_full_state_when_asked_to() -> None:
    engine = fe.shard(Transformer(num_blocks=1))
    state = engine.full_state_dict(rank0_only=True)
    assert bool(state) == (dist.get_rank() == 0)


@on_ranks(2)
def test_values_that_are_put_into_other_memory_are_the_weights() -> None:
    model = nn.Linear(4, 4)
    engine = fe.shard(model, strategy="no_shard")
    old = model.bias.data
    values = old.clone()
    model.bias.data = torch.full((4,), 3.0)
    assert torch.equal(engine.full_state_dict()["bias"], model.bias)
    with engine.unsharded():
        assert torch.equal(model.bias, torch.full((4,), 3.0))
        with torch.no_grad():
            model.bias += 1
    assert torch.equal(model.bias, torch.full((4,), 4.0))
    model.bias.data = torch.full((4,), dist.get_rank() + 5.0)
    engine.broadcast_params()
    assert torch.equal(model.bias, torch.full((4,), 5.0))
    assert torch.equal(old, values), "the user's tensor must not change"
    model.bias.data = old
    assert torch.equal(engine.full_state_dict()["bias"], values)


@on_ranks(2)
def test_a_model_that_to_empty_gives_memory_after_it_was_sharded_is_saved() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    engine = fe.shard(model, strategy="no_shard")
    model.to_empty(device="cpu")
    nn.init.ones_(model.bias)
    assert torch.equal(engine.full_state_dict()["bias"], torch.ones(4))
