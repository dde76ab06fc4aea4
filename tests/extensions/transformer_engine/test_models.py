"""Models that bend the order of events compute with the right encoding of MXFP8 weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests.extensions.transformer_engine.te_on_cpu import QuantisedLinear, QuantisedStack
from tests.extensions.transformer_engine.te_training import (
    CUT,
    Watch,
    assert_all_same,
    make_stack,
    scenario_of,
)
from tests.pool import on_ranks

pytestmark = pytest.mark.thorough

# Level, whether addresses are planned, elements gathered ahead, whether gathers are issued in
# rounds.
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
        order: Blocks by number.
        span: 0: no checkpoint.
        reentrant: The kind of the checkpoints.
    """

    order: tuple[int, ...] = (0, 1, 2, 3)
    span = 0
    reentrant = False

    def run_blocks(self, y: Tensor) -> Tensor:
        size = max(self.span, 1)
        for start in range(0, len(self.order), size):
            several = nn.Sequential(*(self.blocks[i] for i in self.order[start : start + size]))
            y = checkpoint(several, y, use_reentrant=self.reentrant) if self.span else several(y)
        return y


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
    runs = []
    for level, planned, budget, in_rounds in WAYS:
        config = fe.DistributedDataParallelConfig(
            fsdp_double_buffer=planned, suggested_communication_unit_size=budget
        )
        units = ["blocks.*", "blocks.*.inside.*"] if name == "units in units" else None
        scenario = scenario_of(
            "mxfp8",
            model=MODELS[name],
            pair=(level, "no_shard"),
            options={"config": config, "units": units},
        )
        if in_rounds:
            scenario = scenario.but(around=lambda engine: engine.together())
        watch = Watch(*scenario.sharded_model())
        runs.append(watch.train(scenario, num_forwards=None))
        # A layer that is called twice is looked at twice.
        assert watch.looks["rows"] >= watch.looks["columns"] >= 3 * 2 * len(watch.layers)
    assert_all_same(runs)
