"""Plans of deep models simulate fewer blocks, and have the results of plans with all blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.planner import job
from fsdp_engine.planner.fewer_blocks import Repeated, find_repeated
from tests.matrices import thorough_but
from tests.planner.made_plans import Words, assert_same_outcome, quick_plan, words

POLICY = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
DEPTH = 22
DEVICE = replace(fe.H100, ranks_per_node=2)
SLOW = replace(DEVICE, between_nodes=replace(DEVICE.between_nodes, bandwidth=2e8))


deep = partial(Words, num_blocks=DEPTH)


def planned(make: Any = fe.plan, **options: Any) -> tuple[fe.StrategyPlan, list[int]]:
    """A plan, and the depths that it has simulated."""
    depths = []
    simulate = job.simulate

    def counted(build: Any, *args: Any, **named: Any) -> fe.Simulation:
        depths.append(len(build().blocks))
        return simulate(build, *args, **named)

    with patch.object(job, "simulate", counted):
        given = {"world_size": 4, "mp_policy": POLICY, "min_unit_size": 0, "offload": None}
        return make(deep, words, **{**given, **options}), depths


JOBS: dict[str, dict[str, Any]] = {
    "quick": {"meshes": [(4,)], "checkpointing": (True,), "make": quick_plan, "fitting": 1},
    "slow nodes": {
        "meshes": [(2, 2)],
        "checkpointing": (False,),
        "machine": SLOW,
        "microbatches": 5,
    },
    "selective": {"checkpointing": ("selective",), "microbatches": 2},
    "on the host": {
        "meshes": [(4,)],
        "checkpointing": (False, "offload"),
        "offload": fe.Offload(optimizer_state="host"),
    },
}


@pytest.mark.parametrize("name", thorough_but(["quick"], JOBS))
def test_a_deep_model_has_the_rows_of_all_of_its_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"machine": DEVICE, "memory": 1e12, **JOBS[name]}
    found, depths = planned(**options)
    assert set(depths) == set(Repeated("blocks", 0, DEPTH, 1).depths)
    monkeypatch.setattr(Repeated, "is_deep", False)
    expected, depths = planned(**options)
    assert set(depths) == {DEPTH}
    rows = {each.candidate: each for each in found.outcomes}
    assert len(rows) == len(expected.outcomes)
    for row in expected.outcomes:
        assert_same_outcome(rows[row.candidate], row)


class Uneven(nn.Module):
    """Each block keeps more activations than the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) + x.repeat(number + 1, 1, 1).exp().sum(0)
        return x.sum()


def test_a_model_whose_blocks_are_not_on_a_line_is_simulated_in_full() -> None:
    options: Any = {"world_size": 2, "machine": DEVICE, "min_unit_size": 0}
    once = {"meshes": [(2,)], "checkpointing": (False,), "offload": None, "fitting": 1}
    plan = quick_plan(Uneven, torch.zeros(4, 8), **once, **options)
    (level_3,) = [each for each in plan.outcomes if each.candidate.strategy == "optim_grads_params"]
    assert level_3.memory == fe.simulate(Uneven, batch=torch.zeros(4, 8), **options).memory


@pytest.mark.parametrize("fails_in_full", [True, False])
@pytest.mark.filterwarnings("ignore:plan. left out")
def test_a_candidate_that_fails_does_not_make_others_run_in_full(
    fails_in_full: bool,
) -> None:
    """Later candidates run in full only if the failing one works with all of its blocks."""
    # Depths of selective candidates (False), of later ones (True).
    depths: dict[bool, list[int]] = {False: [], True: []}
    simulate = job.simulate

    def failing(build: Any, *args: Any, options: Any, **named: Any) -> fe.Simulation:
        depth, policies = len(build().blocks), [each.policy for each in options.shard["extensions"]]
        depths[policies == [None]].append(depth)
        if policies == ["selective"] and (fails_in_full or depth < DEPTH):
            raise fe.SimulationError("forward", "does not recompute")
        return simulate(build, *args, options=options, **named)

    with patch.object(job, "simulate", failing):
        fe.plan(
            *(deep, words),
            world_size=2,
            meshes=[(2,)],
            machine=DEVICE,
            offload=None,
            quick=True,
            **({} if fails_in_full else {"checkpointing": ("selective", True)}),
        )
    assert DEPTH in depths[False]
    assert (DEPTH in depths[True]) is not fails_in_full


def blocks_of(*kinds: Any) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(kinds)
    return model


class Numbered(nn.Module):
    def __init__(self, number: int, window: str = "full") -> None:
        super().__init__()
        self.number = number
        self.window = window
        self.linear = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([Numbered(n) for n in range(30)], Repeated("layers", 0, 30, 1)),
        ([nn.Linear(4, 4)] * 2 + [Numbered(n) for n in range(2, 30)], Repeated("layers", 2, 28, 1)),
        (
            [Numbered(n, "full" if n % 3 == 2 else "sliding") for n in range(40)],
            Repeated("layers", 0, 40, 3),
        ),
        ([Numbered(n) for n in range(29)] + [nn.Linear(4, 4)], Repeated("layers", 29, 1, 1)),
    ],
    ids=["alike", "after others", "every third", "another at the end"],
)
def test_blocks_that_are_alike_are_found(blocks: list[nn.Module], expected: Repeated) -> None:
    model = blocks_of(*blocks)
    found = find_repeated(model)
    assert found == expected
    if found.is_deep:
        depth = found.depths[0]
        assert (found.count - depth) % found.period == 0
        found.shorten(model, depth)
        assert len(model.layers) == found.before + depth


def test_blocks_of_two_lists_are_not_shortened() -> None:
    model = blocks_of(*(Numbered(n) for n in range(30)))
    model.others = nn.ModuleList(nn.Linear(4, 4) for _ in range(30))
    assert find_repeated(model) is None
    assert find_repeated(nn.Linear(4, 4)) is None


def test_blocks_that_are_left_are_numbered_without_gaps() -> None:
    for kind in (
        nn.ModuleList,
        lambda blocks: nn.Sequential(*blocks),
        lambda blocks: nn.ModuleDict({str(number): each for number, each in enumerate(blocks)}),
    ):
        model = nn.Module()
        model.layers = kind([Numbered(number) for number in range(30)])
        found = find_repeated(model)
        assert found == Repeated("layers", 0, 30, 1)
        found.shorten(model, 7)
        left = [(name, each.number) for name, each in model.layers.named_children()]
        assert left == list(zip("0123456", [0, 1, 2, 26, 27, 28, 29], strict=True))
        names = [found.place_of(f"layers.{name}.linear", 7) for name in "236"]
        assert names == ["layers.2.linear", "layers.-4.linear", "layers.-1.linear"]
