"""Models that bend the order of events compute with the right encoding of MXFP8 weights all the
same, and weights that change while they are gathered are gathered again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests.extensions.transformer_engine.te_on_cpu import QuantisedLinear, QuantisedStack
from tests.extensions.transformer_engine.te_training import (
    Watch,
    make_batch,
    make_stack,
    train_watched,
)
from tests.pool import on_ranks

pytestmark = pytest.mark.thorough

CUT = "optim_grads_params"
# Level, whether addresses are planned, elements gathered ahead, whether gathers are issued in
# rounds; the first is what others are compared with.
WAYS = [
    ("no_shard", False, None, False),
    ("optim_grads", False, None, False),
    (CUT, False, 0, False),
    (CUT, False, 10**9, False),
    (CUT, True, None, False),
    (CUT, False, None, True),
    (CUT, True, None, True),
]


class Bent(QuantisedStack):
    """A stack whose blocks are called in an order of its own, ``span`` of them in one checkpoint.

    Attributes:
        order: blocks by number.
        span: 0: no checkpoint.
        reentrant: of the checkpoints.
    """

    order: tuple[int, ...] = (0, 1, 2, 3)
    span = 0
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.to(self.dtype))
        for places in in_groups(self.order, max(self.span, 1)):
            several = partial(self.several, [self.blocks[place] for place in places])
            y = checkpoint(several, y, use_reentrant=self.reentrant) if self.span else several(y)
        return (self.head(self.norm(y)).float() - x.float()).square().mean()

    @staticmethod
    def several(blocks: list[nn.Module], y: Tensor) -> Tensor:
        for block in blocks:
            y = block(y)
        return y


def in_groups(places: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [places[start : start + size] for start in range(0, len(places), size)]


class Around(nn.Module):
    """A unit with a unit inside, and a quantised layer that it calls before and after that."""

    def __init__(self, block: nn.Module, dim: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(block)
        self.own = QuantisedLinear(dim, dim, "mxfp8")

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x + self.own(x)) + self.own(x)


def bent(**habits: Any) -> QuantisedStack:
    model: Any = make_stack("mxfp8", num_blocks=4)
    model.__class__ = Bent
    vars(model).update(habits)
    return model


def nested() -> QuantisedStack:
    model = make_stack("mxfp8", num_blocks=3)
    dim = model.norm.weight.numel()
    model.blocks = nn.ModuleList([Around(block, dim) for block in model.blocks])
    return model


TWICE = (0, 1, 0, 2, 3, 0, 1)
MODELS: dict[str, Callable[[], QuantisedStack]] = {
    "checkpoints of two units": partial(bent, span=2),
    "re-entrant checkpoints of two units": partial(bent, span=2, reentrant=True),
    "checkpoints of one unit": partial(bent, span=1),
    "re-entrant checkpoints of one unit": partial(bent, span=1, reentrant=True),
    "units called several times": partial(bent, order=TWICE),
    "units called several times in checkpoints": partial(bent, order=TWICE, span=1),
    "units in units": nested,
}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_model_trains_bit_by_bit_alike_in_all_ways(name: str) -> None:
    states, losses = [], []
    for level, planned, budget, in_rounds in WAYS:
        model = MODELS[name]()
        config = fe.DistributedDataParallelConfig(
            fsdp_double_buffer=planned, suggested_communication_unit_size=budget
        )
        units = ["blocks.*", "blocks.*.inside.*"] if name == "units in units" else None
        engine = fe.shard(model, strategy=level, config=config, units=units)
        watch = Watch(model, engine)
        with engine.together() if in_rounds else nullcontext():
            losses.append(train_watched(model, engine, watch, num_steps=3))
        states.append(engine.full_state_dict())
        # A layer that is called twice is looked at twice.
        assert watch.looks["rows"] >= watch.looks["columns"] >= 3 * 2 * len(watch.layers)
    assert losses == [losses[0]] * len(losses)
    for state in states[1:]:
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key


@on_ranks(2)
def test_weights_that_are_frozen_and_thawed_train_bit_by_bit_alike() -> None:
    for recipe in ("mxfp8", "block"):
        states = []
        for level in ("no_shard", "optim", CUT):
            model = make_stack(recipe)
            engine = fe.shard(model, strategy=level)
            watch = Watch(model, engine)
            for frozen in (False, True, False):
                model.blocks[0].requires_grad_(not frozen)
                before = engine.full_tensor("blocks.0.up.weight")
                train_watched(model, engine, watch, num_steps=1)
                assert torch.equal(before, engine.full_tensor("blocks.0.up.weight")) == frozen
            states.append(engine.full_state_dict())
        for state in states[1:]:
            assert all(torch.equal(value, states[0][key]) for key, value in state.items())


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
@on_ranks(2)
def test_weights_that_change_while_they_are_full_are_encoded_and_gathered_again(
    recipe: str,
) -> None:
    for level, tied in itertools.product(("optim", CUT), (False, True)):
        model = make_stack(recipe, num_blocks=3)
        if tied:  # the root has it, and stays full
            model.blocks[2].up.weight = model.blocks[0].up.weight
        engine = fe.shard(model, strategy=level)
        watch = Watch(model, engine)
        train_watched(model, engine, watch, num_steps=1)
        for ahead in (False, True, True):
            if ahead:
                engine.start_param_sync()
            else:
                watch.expect()
                model(*make_batch(2, dist.get_rank()))  # its backward never comes
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.3)
            train_watched(model, engine, watch, num_steps=1)


@on_ranks(2)
def test_what_is_gathered_before_forward_is_forward_s_plane() -> None:
    model = make_stack("mxfp8", num_blocks=3)
    engine = fe.shard(model)
    train_watched(model, engine, None, num_steps=1)
    engine.start_param_sync(wait=True)
    held = []
    for unit in engine.units[1:]:
        for buffer in unit.buffers:
            if buffer.weights.num_encodings > 1:
                held.append(
                    tuple(encoding.storage.filled for encoding in buffer.weights._encodings)
                )
    assert held[0] == (True, False)
    assert set(held) <= {(True, False), (False, False)}
