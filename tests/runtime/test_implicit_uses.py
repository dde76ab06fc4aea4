"""Parameters read outside of their unit's forward: when they are full, and the extra gathers.

``test_real_models.py`` tests that such models train as one process does. A caller that read freed
memory would end its process, so all tests here run in processes of the pool.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine import fsdp2
from fsdp_engine.runtime.unit import State
from tests import reference
from tests.megatron.configs import LEVEL_NAMES
from tests.messages import Messages
from tests.models import DIM, token_batch, vector_batch
from tests.pool import on_few_ranks, on_ranks
from tests.runtime import habits
from tests.runtime.habits import MODULATIONS, RETURNS, Diffusion, Language, Product, Skips, fused
from tests.scenario import Scenario

# Weights that are read without a call.


@on_ranks(2)
def test_a_function_of_ones_own_that_gets_a_slice_raises() -> None:
    for strategy in LEVEL_NAMES[1:]:
        model = Language(fused, calls_first=True)
        fe.shard(model, strategy=strategy)
        model(*token_batch(2, 0)).backward()
        kept = model.head.weight  # outside the forward: a slice
        model.use_head = lambda model, x, kept=kept: Product.apply(x, kept)
        with pytest.raises(RuntimeError, match=r"gradient of head\.weight.*autograd\.Function"):
            model(*token_batch(2, 1)).backward()


@pytest.mark.parametrize(
    ("make", "first", "later"),
    [
        # In the first forward it is unknown which units are read.
        (Language, ["embedding", "blocks.0", "norm + head"], ["blocks.0"]),
        (
            partial(Language, fused),
            ["embedding", "blocks.0", "norm + head"],
            ["blocks.0", "norm + head"],
        ),
    ],
    ids=["called", "never called"],
)
@on_ranks(2)
def test_units_in_use_as_the_first_block_is_entered(
    make: Callable[[], Language], first: list[str], later: list[str]
) -> None:
    model = make()
    engine = fe.shard(model)
    seen: list[list[str]] = []

    def look(*_: Any) -> None:
        seen.append([unit.name for unit in engine.units if unit.name and unit.uses])

    model.blocks[0].register_forward_pre_hook(look)
    for step in range(3):
        model(*token_batch(2, step)).backward()
    assert seen == [first, later, later]
    # Outside the forward the weight is a slice.
    with pytest.raises(ValueError, match=r"embedding\.weight"):
        model.embedding.weight.numpy()


@on_ranks(2)
def test_an_embedding_is_not_gathered_for_backward() -> None:
    model = Language()
    fe.shard(model)
    gathered = []
    for step in range(3):
        messages = Messages()
        with messages.counting():
            model(*token_batch(2, step)).backward()
        gathered.append(messages.operations["all-gather of embedding"])
    # During the first forward any unit may be read, so it is gathered again.
    assert gathered == [2, 1, 1]


# Parameters that units return.


@on_few_ranks
def test_without_autograd_callers_read_returned_parameters_too() -> None:
    for make in RETURNS.values():
        model = make()
        alone = copy.deepcopy(model)
        engine = fe.shard(model)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                batch = vector_batch(2, 0)
                torch.testing.assert_close(model(*batch), alone(*batch))
        assert not any(
            unit.reshards and unit.state is not State.SHARDED and unit.name for unit in engine.units
        )


@pytest.mark.parametrize("reshard", [True, False])
@on_few_ranks
def test_callers_read_them_under_fully_shard(reshard: bool) -> None:
    def shard(model: Any, *args: Any, **options: Any) -> Any:
        for block in [*model.blocks, model.last]:
            fsdp2.fully_shard(block, reshard_after_forward=reshard)
        fsdp2.fully_shard(model)
        with torch.no_grad():
            model(*vector_batch(2, 0))  # makes the engine
        return fe.engine.engine_of(model)

    Scenario(model=RETURNS["returned views"], batch=vector_batch, shard=shard).check()


@on_ranks(2)
def test_what_the_model_returns_can_be_read_after_backward_or_is_as_it_was() -> None:
    class Returns(Skips):
        def forward(self, x: Tensor) -> Any:
            self.made = x @ self.weight.t(), torch.eye(2).to_sparse(), [x.detach()]
            return self.made

    model = Skips()
    bias = model.bias.detach().clone()
    engine = fe.shard(model)
    out, found = model(torch.ones(2, DIM))
    out.sum().backward()
    assert all(unit.state is State.SHARDED for unit in engine.units if unit.reshards)
    torch.testing.assert_close(found.detach(), bias)
    other = Returns()
    fe.shard(other)
    assert other(torch.ones(2, DIM)) is other.made


@on_ranks(2)
def test_returned_parameters_gather_no_hooks_over_steps() -> None:
    for strategy in LEVEL_NAMES[1:]:
        model = RETURNS["returned parameters"]()
        engine = fe.shard(model, strategy=strategy)
        for step in range(3):
            model(*vector_batch(2, step)).backward()
        full = [param for unit in engine.units for b in unit.buffers for param in b.full_params]
        assert [len(param._backward_hooks or ()) for param in full] == [0] * len(full)


# Modules of a unit that are called outside of its forward.


def by_fsdp2(model: Any) -> None:
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)


def by_level(level: str, *units: Any) -> Callable[[nn.Module], Any]:
    return lambda model: fe.shard(model, strategy=level, units=[habits.Modulated, *units])


# By name: how the model is sharded, its modulation, and the number of warnings.
SHARDS: dict[str, tuple[Callable[[nn.Module], Any], str, int]] = {
    "no_shard": (by_level("no_shard"), "linear", 0),
    "optim": (by_level("optim"), "linear", 0),
    "optim_grads": (by_level("optim_grads"), "linear", 0),
    "optim_grads_params": (by_level("optim_grads_params"), "linear", 2),
    "a unit of its own": (by_level("optim_grads_params", nn.Conv1d), "convolution", 0),
    "fsdp2": (by_fsdp2, "layer norm", 2),
}


@pytest.mark.parametrize("name", SHARDS)
@on_ranks(2)
def test_the_cost_of_a_call_from_outside_is_said_once_for_each_unit(name: str) -> None:
    shard, modulation, num_warnings = SHARDS[name]
    model = Diffusion(MODULATIONS[modulation])
    alone = copy.deepcopy(model)
    shard(model)
    batch = habits.diffusion_batch(2, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loss = model(*batch)
            torch.testing.assert_close(loss, alone(*batch))
            loss.backward()
    for (_, param), grad in zip(
        alone.named_parameters(), reference.full_gradients(model).values(), strict=True
    ):
        assert grad is not None
        torch.testing.assert_close(grad, 3 * torch.autograd.grad(alone(*batch), param)[0])
    texts = [str(each.message) for each in caught]
    said = [text for text in texts if "expected reads of its parameters" in text]
    assert len(said) == num_warnings
    for number, text in enumerate(said):
        assert f"unit blocks.{number}" in text
        assert "stays unsharded until the model's forward returns" in text


@on_ranks(2)
def test_outside_the_models_forward_a_module_of_a_unit_raises() -> None:
    model = Diffusion(MODULATIONS["layer norm"])
    fe.shard(model, units=[habits.Modulated])
    with pytest.raises(
        ValueError, match=r"full blocks\.0\.modulation\.weight only during the model's"
    ):
        model.blocks[0].modulation(torch.ones(2, 3, 6))  # type: ignore[operator]


class Boxed(nn.Module):
    """Returns nothing: the output is put into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, box: list[Tensor]) -> None:
        box.append(self.linear(x))


class OfBoxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            box: list[Tensor] = []
            block(x, box)
            (x,) = box
        return x.square().sum()


@on_ranks(2)
def test_modules_that_return_nothing_train_within_the_handling_of_an_exception() -> None:
    torch.manual_seed(0)
    model = OfBoxed()
    plain = copy.deepcopy(model)
    fe.shard(model, strategy="optim_grads_params", options=fe.Options(min_unit_size=0))
    try:
        raise KeyError("planted")
    except KeyError:
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 4)).backward()
    plain(torch.ones(2, 4)).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)
