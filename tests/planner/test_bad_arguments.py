"""Invalid values for every argument of the planner: the error names the argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.planner.estimates import estimate


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


NO_COUNT: tuple[object, ...] = (0, -1, 2.5, "2", None, True, [], float("nan"))
NO_FUNCTION: tuple[object, ...] = (3, [], 1.5)
NO_SIZES: tuple[object, ...] = (3, [3], [(3,)], [("4",)], [(2.0, 2.0)], [(-2, -2)], "4", [None])
NO_BYTES: tuple[object, ...] = ("80GB", 0, -1.0, float("nan"), float("inf"), [], True)
PLAN: dict[str, tuple[object, ...]] = {
    "world_size": NO_COUNT,
    "microbatches": NO_COUNT,
    "machine": (3, None, "abacus", [], b"h100"),
    "memory": NO_BYTES,
    "meshes": NO_SIZES,
    "checkpointing": (True, "yes", [1], [None], 3),
    "microbatch_sizes": (3, "12", [0], [-1], ["2"], [1.5], [True], []),
    "build": (None, *NO_FUNCTION, "no colon", "nowhere:f"),
    "batch": (None, 3, "x", ()),
    "loss": NO_FUNCTION,
    "optimizer": NO_FUNCTION,
    "formulas": (1, "no", None),
    "progress": (1, "no", None),
    "config": (3, "x", {}),
    "units": ("missing.*", 3),
    "mp_policy": (3, "bf16"),
    "min_unit_size": (-1, "x"),
}
SIMULATE: dict[str, tuple[object, ...]] = {
    "world_size": NO_COUNT,
    "microbatches": NO_COUNT,
    "machine": (3, None, "h100"),
    "mesh": (3, (3,), ("4",), (2.0, 2.0), (-2, -2), "4", (), (1, 2, 2)),
    "build": (None, *NO_FUNCTION),
    "loss": NO_FUNCTION,
    "optimizer": NO_FUNCTION,
    "known": (3, {}),
    "config": (3, "x", {}),
    "strategy": (3, "zero"),
    "outer_strategy": (3, "zero"),
}
ESTIMATE: dict[str, tuple[object, ...]] = {
    "model": (None, "8B", 0, -1.0, float("nan"), True, []),
    "world_size": NO_COUNT,
    "outer_size": (*NO_COUNT, 3),
    "strategy": (3, None, "zero", []),
    "outer_strategy": (3, None, "zero"),
    "mp_policy": (3, "bf16"),
    "config": (3, {}),
    "codec_rules": (3, "x"),
    "granule": NO_FUNCTION,
    "optimizer_bytes_per_element": (-1, "8", None, float("nan")),
    "num_microbatches": NO_COUNT,
    "num_units": NO_COUNT,
    "dtype": ("bf16", 3),
}


def cases(table: dict[str, tuple[object, ...]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value!r}")
        for name, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("name", "value"), cases(PLAN))
def test_a_plan_names_the_argument_that_it_does_not_take(name: str, value: object) -> None:
    given: dict[str, Any] = {"build": Small, "batch": torch.zeros(2, 4), "world_size": 4}
    with pytest.raises((TypeError, ValueError), match=rf"{name}.*expected(?s:.*)found"):
        fe.plan(**{**given, name: value})
    assert not dist.is_initialized()


@pytest.mark.parametrize(("name", "value"), cases(SIMULATE))
def test_a_simulation_names_the_argument_that_it_does_not_take(name: str, value: object) -> None:
    given: dict[str, Any] = {"build": Small, "batch": torch.zeros(2, 4), "world_size": 4}
    with pytest.raises((TypeError, ValueError), match=rf"{name}.*expected(?s:.*)found"):
        fe.simulate(**{**given, name: value})
    assert not dist.is_initialized()


@pytest.mark.parametrize(("name", "value"), cases(ESTIMATE))
def test_an_estimate_names_the_argument_that_it_does_not_take(name: str, value: object) -> None:
    given: dict[str, Any] = {"model": 1e6, "world_size": 4}
    with pytest.raises((TypeError, ValueError), match=rf"{name}.*expected(?s:.*)found"):
        estimate(**{**given, name: value})


@pytest.mark.parametrize("value", NO_BYTES)
def test_a_limit_that_is_no_number_of_bytes(value: Any) -> None:
    planning = fe.plan(Small, torch.zeros(2, 4), world_size=1, formulas=True)
    with pytest.raises((TypeError, ValueError), match=r"memory: expected(?s:.*)found"):
        planning.within(value)


FILES = {
    "binary": b"\x80\xff\x00PK",
    "empty": b"",
    "no object": b"[1, 2]",
    "nested": b"[" * 100_000,
    "other": b'{"setting": 3, "outcomes": "x", "trials": {}, "processor": 7}',
}


@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_a_file_that_is_something_else_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for load, expected in ((fe.StrategyPlan.load, "a plan"), (fe.Machine.load, "a machine")):
        with pytest.raises(ValueError, match=rf"file\.json: expected {expected}.*found"):
            load(path)
    for wrong in (3, None, [], b"x"):
        with pytest.raises(TypeError, match="path: expected the path of"):
            fe.StrategyPlan.load(wrong)  # type: ignore[arg-type]


def test_values_of_other_types_in_a_saved_planning_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    fe.plan(Small, torch.zeros(2, 4), world_size=2, formulas=True).save(path)
    whole = json.loads(path.read_text())
    fe.StrategyPlan.load(path)
    for place in (
        ("setting", "memory"),
        ("setting", "world_size"),
        ("outcomes", 0, "memory"),
        ("outcomes", 0, "lacking"),
        ("outcomes", 0, "candidate"),
        ("outcomes", 0, "candidate", "mesh"),
        ("outcomes", 0, "candidate", "strategy"),
        ("outcomes", 0, "sent"),
    ):
        for value in (None, "x", [[]], {"a": "b"}):
            damaged = json.loads(json.dumps(whole))
            target = damaged
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = value
            path.write_text(json.dumps(damaged))
            with pytest.raises(ValueError, match=r"plan\.json: expected a plan.*found"):
                fe.StrategyPlan.load(path)
