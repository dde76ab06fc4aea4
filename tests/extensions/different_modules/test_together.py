"""``engine.together()``: ranks run different numbers of forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import on_few_ranks, on_ranks
from tests.runtime.habits import Hidden
from tests.training import mesh_of

WIDTH = 8


class Translator(nn.Module):
    """An encoder that is also called by itself, and a decoder; embeddings that both read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def encode(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x)
        return result

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        x = x + (self.encode(x) if encoded is None else encoded)
        for block in self.decoder:
            x = torch.tanh(block(x))
        result: Tensor = self.head(x)
        return result


UNITS = ["encoder", "decoder.*"]


def inputs(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: list[int]) -> None:
    loss = torch.stack([model(inputs(seed)).square().mean() for seed in seeds]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def forwards(model: Any, kinds: list[str], seed: int) -> list[Tensor]:
    """A text for each kind: "whole" is one forward, "text" of many begins with the encoder."""
    found = []
    for number, kind in enumerate(kinds):
        x = inputs(1000 * seed + number)
        if kind == "whole":
            found.append(model(x))
        else:
            encoded = model.encode(x)
            for _ in range(int(kind)):
                x = torch.cat([x[1:], model(x, encoded).float().mean() + x[:1]])
            found.append(x)
    return found


def check(
    level: str,
    rounds: list[list[list[str]]],
    *,
    policy: fe.MixedPrecisionPolicy | None = None,
    keeps: bool = False,
) -> None:
    """Trains, and evaluates in each round: by rank, the kinds of its forwards.

    Args:
        keeps: Units are kept, and prefetched for a forward of all ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model, alone = Translator(), Translator()
    engine = fe.shard(model, mesh_of(size), level, units=UNITS, mp_policy=policy)
    for unit in engine.units[1::2] if keeps else ():
        unit.options.keeps_after_backward = unit.options.keeps_after_forward = True
    optimizer, one = reference.sgd(model.parameters()), reference.sgd(alone.parameters())
    tolerance = 1e-5 if policy is None else 5e-2
    for number, kinds in enumerate(rounds):
        train_step(model, optimizer, [10 * number + rank])
        train_step(alone, one, [10 * number + each for each in range(size)])
        if keeps:
            engine.start_param_sync()
        with engine.together():
            found = forwards(model, kinds[rank], number)
        for ours, theirs in zip(found, forwards(alone, kinds[rank], number), strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)
    reference.assert_same_weights(model, alone, rtol=tolerance, atol=tolerance)


BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_ranks_evaluate_different_numbers_of_batches(
    policy: fe.MixedPrecisionPolicy | None,
) -> None:
    rounds = [
        [["whole"] * 2, ["whole"] * 5],
        [[], ["2", "whole"]],
        [["whole", "3"], ["1", "4", "whole"]],
        [["2"], []],
        [[], []],
    ]
    for level in LEVEL_NAMES:
        check(level, rounds, policy=policy)


@on_few_ranks
def test_ranks_that_agree_and_one_rank_alone() -> None:
    model = Translator()
    engine = fe.shard(model, units=UNITS, strategy="optim_grads_params")
    with engine.together(), torch.no_grad():
        found = model(inputs(0))
    torch.testing.assert_close(found, Translator()(inputs(0)))
    model(inputs(0)).sum().backward()  # outside of it as ever


@on_ranks(2)
def test_weights_that_travel_in_fp8_are_those_of_forwards_without_it() -> None:
    model = Translator()
    engine = fe.shard(model, units=UNITS, codec_rules=(fe.Float8(),))
    with torch.no_grad():
        expected = [model(inputs(number)) for number in range(3)]
    with engine.together(), torch.no_grad():
        for number in range(1 + 2 * dist.get_rank()):
            assert torch.equal(model(inputs(number)), expected[number])
    with torch.no_grad():
        assert torch.equal(model(inputs(0)), expected[0])


@on_ranks(2)
def test_it_can_stand_between_any_two_steps_with_units_that_are_kept() -> None:
    check("optim_grads_params", [[[], ["whole"]]] * 3, keeps=True)


class Habits(nn.Module):
    """A head that some forwards call, read or leave out, and which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor, head: str) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if head == "reads":
            return nn.functional.linear(x, self.head.weight)
        result: Tensor = self.head(x) if head == "calls" else x
        return result


@pytest.mark.parametrize("trains_first", [False, True])
@pytest.mark.parametrize("there", ["calls", "reads", "omits"])
@pytest.mark.parametrize("here", ["calls", "reads", "omits"])
@on_ranks(2)
def test_training_learns_nothing_from_forwards_that_ranks_did_not_share(
    trains_first: bool, there: str, here: str
) -> None:
    model, alone = Habits(), Habits()
    engine = fe.shard(model, min_unit_size=0)
    for step in range(3):
        if step or trains_first:
            for each in (model, alone):
                each.zero_grad()
                each(inputs(0), there).square().mean().backward()
            torch.testing.assert_close(*map(reference.full_gradients, (model, alone)))
        with engine.together(), torch.no_grad():
            for number in range(2 * dist.get_rank()):
                torch.testing.assert_close(model(inputs(number), here), alone(inputs(number), here))


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(self.frozen(self.trained(x)))


class OfHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(PartlyFrozen() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tensor
        return x


@on_ranks(2)
def test_units_that_are_kept_and_stale_in_part() -> None:
    model, alone = OfHidden(), OfHidden()
    engine = fe.shard(model, units="blocks.*")
    for each in (model, alone):
        train_step(each, reference.sgd(each.parameters()), [0])
    with engine.together(), torch.no_grad():
        for number in range(2 * dist.get_rank()):
            torch.testing.assert_close(model(inputs(number)), alone(inputs(number)))


@on_ranks(2)
def test_nesting_is_refused() -> None:
    for level in LEVEL_NAMES[1:]:
        model = Translator()
        engine = fe.shard(model, units=UNITS, strategy=level)
        with engine.together():
            with pytest.raises(RuntimeError, match="and no such context; found such a context"):
                engine.together().__enter__()
            engine.reset()  # changes nothing about the context
            with torch.no_grad():
                torch.testing.assert_close(model(inputs(0)), Translator()(inputs(0)))
