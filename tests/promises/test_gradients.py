"""What torch promises of gradients: when they come, from where, and what users do to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.pool import RankError, Ranks
from tests.promises.everywhere import (
    Act,
    Place,
    assert_as_alone,
    everywhere,
    mean_square,
    run_at_places,
)
from tests.runtime.habits import Hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Net(nn.Module):
    """Blocks, a parameter of the root, and a layer that is not always used."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.blocks = nn.Sequential(block(), block())
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Any, everything: bool = False) -> Any:
        out = self.head(self.blocks(x * self.scale))
        return out + self.unused(out) if everything else out


class HidingBlock(Block):
    def forward(self, x: Any) -> Any:
        return Hidden(super().forward(x.tensor if isinstance(x, Hidden) else x))


class HidingNet(Net):
    """Each of its units, and it itself, returns an unknown class."""

    def __init__(self) -> None:
        super().__init__(HidingBlock)
        self.head.register_forward_pre_hook(lambda module, args: (args[0].tensor,))

    def forward(self, x: Any, everything: bool = False) -> Any:
        return Hidden(super().forward(x))


# --- losses ---


def first(model: Any, x: Tensor) -> Tensor:
    return mean_square(model.blocks[0], x)


def encode(model: Any, x: Tensor) -> Tensor:
    return mean_square(model.blocks, x)


def everything(model: Any, x: Tensor) -> Tensor:
    return model(x, everything=True).square().mean()  # type: ignore[no-any-return]


def penalty(model: Any, x: Tensor) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() * 0.1


def before(model: Any, x: Tensor) -> Tensor:
    return penalty(model, x) + mean_square(model, x)


def after(model: Any, x: Tensor) -> Tensor:
    return mean_square(model, x) + penalty(model, x)


# --- what users do to gradients ---


def halve(model: Any, x: Tensor) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def clip(model: Any, x: Tensor) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def drop_some(model: Any, x: Tensor) -> None:
    for param in list(model.parameters())[1::2]:
        param.grad = None


def set_some(model: Any, x: Tensor) -> None:
    for param in list(model.parameters())[::3]:
        param.grad = torch.full_like(param, 0.5, requires_grad=False)


def add(model: Any, x: Tensor) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()
            param.grad.add_(0.25)


def clear(model: Any, x: Tensor) -> None:
    model.zero_grad()


def zero(model: Any, x: Tensor) -> None:
    model.zero_grad(set_to_none=False)


plain = mean_square
edits: list[Act | tuple[Act, bool]]
edits = [plain, halve, plain, drop_some, plain, add, plain, clip, (plain, False), plain, drop_some]
cleared: list[Act | tuple[Act, bool]]
cleared = [(plain, False), clear, (plain, False), zero, (encode, False), encode]
# The acts of a step, and for each step whether zero_grad sets to None.
CASES: dict[str, tuple[list[Act | tuple[Act, bool]], tuple[bool, ...]]] = {
    "a gradient that is truly zero": ([lambda m, x: plain(m, x) * 0.0, plain], (True, True)),
    "a unit outside the root": ([(first, False), (first, False), plain], (True, False)),
    "a unit alone, from zeros on": ([first], (False, False, True, True)),
    "a child in place of the model": (
        [(encode, False), (plain, False), (encode, False), encode],
        (True, False, True),
    ),
    "penalties in microbatches": ([(after, False), (before, False), after], (False, True)),
    "penalties in two backwards": ([before, after], (False, True)),
    "a penalty alone": ([penalty], (True, False)),
    "plain training": ([plain], (True, True)),
    "backwards and microbatches": ([plain, (plain, False), plain], (False, True)),
    "edited": (edits, (True, True)),
    "set": ([set_some, plain, set_some, (plain, False), plain], (True, True)),
    "cleared between microbatches": (cleared, (True, True)),
    "zeros where nothing comes": ([everything, zero, plain], (False, False)),
}


@everywhere
def test_gradients_are_those_of_one_process(place: Place) -> None:
    for name, (acts, to_none) in CASES.items():
        try:
            assert_as_alone(place, Net(), *acts, clear=to_none)
        except Exception as error:
            error.add_note(name)
            raise


@everywhere
def test_an_output_in_a_class_of_the_users_has_its_gradients(place: Place) -> None:
    def hidden(model: Any, x: Tensor) -> Any:
        return model(x).tensor.square().mean()

    def with_evaluation_between(model: Any, x: Tensor) -> Any:
        loss = hidden(model, x)
        with torch.no_grad():
            model(x)
        return loss

    def of_two_calls(model: Any, x: Tensor) -> Any:
        return hidden(model, x) + hidden(model, x.square())

    acts = (hidden, (with_evaluation_between, False), of_two_calls)
    if place.inner != "optim_grads_params":
        assert_as_alone(place, HidingNet(), *acts)
        return
    with pytest.warns(UserWarning, match=r"unit blocks\.0: expected .* found a Hidden"):
        assert_as_alone(place, HidingNet(), *acts, clear=(True, False, True))


@everywhere
def test_what_is_reduced_is_not_rounded_again_by_a_narrow_wire(place: Place) -> None:
    model = nn.Linear(6, 50, bias=False)
    place.shard(model, mp_policy=fe.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    # Added in bf16, each of the small ones would be lost.
    for value in (256.0, 0.5, 0.5, 0.5, 0.5):
        model(torch.full((1, 6), value)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(reference.full(model.weight.grad), torch.full((50, 6), 258.0))


@everywhere
def broken_promise(place: Place) -> None:
    assert place.inner != "optim_grads"


def test_a_place_at_which_a_promise_breaks_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"at Place.*optim_grads'"):
        ranks.run(run_at_places, __name__, "broken_promise", world_size=2)
