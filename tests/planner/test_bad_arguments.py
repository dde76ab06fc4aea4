"""Invalid values for every argument of the planner: the error names the argument."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.estimates import estimate
from tests.composition.tensor_parallel import cut
from tests.models import Chain, vector_batch
from tests.planner.made_plans import llama_batch
from tests.planner.simulation.memory_runs import HOST
from tests.planner.simulation.small_llama import llama

SMALL: dict[str, Any] = {"batch": vector_batch(2, 0, 4), "world_size": 4}
SMALL["build"] = lambda: Chain(nn.Linear(4, 4))
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
    "model": (None, "8B", 0, -1.0, float("nan"), float("inf"), True, [], nn.ReLU()),
    "world_size": NO_COUNT,
    "outer_size": (*NO_COUNT, 3),
    "strategy": (3, None, "zero", []),
    "outer_strategy": (3, None, "zero"),
    "mp_policy": (3, "bf16"),
    "config": (3, {}),
    "codec_rules": (3, "x"),
    "granule": NO_FUNCTION,
    "optimizer_bytes_per_element": (-1, "8", [], float("nan")),
    "num_microbatches": NO_COUNT,
    "num_units": NO_COUNT,
    "dtype": ("bf16", 3),
    "units": (["layers.*"], nn.Linear),  # classes are not allowed with a number of elements
}


def within(memory: Any) -> fe.StrategyPlan:
    return fe.plan(**{**SMALL, "formulas": True}).within(memory)


CALLS: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[object, ...]]]] = {
    "plan": (fe.plan, SMALL, PLAN),
    "simulate": (fe.simulate, SMALL, SIMULATE),
    "estimate": (estimate, {"model": 1e6, "world_size": 4}, ESTIMATE),
    "within": (within, {}, {"memory": NO_BYTES}),
}


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, (*_, table) in CALLS.items() for name in table]
)
def test_an_argument_that_is_not_taken_is_named(call: str, name: str) -> None:
    function, given, table = CALLS[call]
    for value in table[name]:
        with pytest.raises((TypeError, ValueError), match=rf"{name}.*expected(?s:.*)found"):
            function(**{**given, name: value})
        assert not dist.is_initialized()


def test_a_deprecated_argument_is_reported_at_the_line_that_gives_it() -> None:
    stages = {"pipeline": 2, "microbatches": 2, "batch": torch.zeros(2, 4), "target": TARGET}
    stages |= {"stages": lambda index, count: nn.Linear(4, 4), "loss": nn.functional.mse_loss}
    for function, given in (
        (fe.plan, {**SMALL, "formulas": True}),
        (fe.simulate, SMALL),
        (fe.simulate_pipeline, {"world_size": 4, **stages}),
        (estimate, {"model": nn.Linear(4, 4), "world_size": 4}),
    ):
        with pytest.warns(DeprecationWarning, match="min_unit_size= is deprecated") as found:
            function(**given, min_unit_size=0)
        assert [each.filename for each in found] == [__file__], function


TARGET = torch.zeros(2, 4)
LLAMA: dict[str, Any] = {
    "build": llama,
    "batch": llama_batch,
    "machine": replace(fe.H100, ranks_per_node=2),
}
PIPELINE = {**LLAMA, "quick": True, "pipeline": 2, "microbatches": 4}
TOKENS = torch.zeros(4, 32, dtype=torch.long)
GLOBAL = {"batch": lambda size, sequence=4: torch.zeros(size, 4), "global_batch": 24}
BATCH = "batch: expected a function that .* as "
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"meshes": [(3,)]}, "meshes: expected one or two sizes of 4 ranks each; found"),
    ({"meshes": []}, "expected at least one candidate; found none"),
    ({"microbatch_sizes": (1,)}, "batch: expected a function of the microbatch size"),
    ({"batch": torch.zeros(0, 4)}, r"batch: expected 1 or more samples; found shape \(0, 4\)"),
    ({"build": "tests.models:nothing"}, "build: expected a function 'nothing'"),
    ({"compile": "blocks"}, "compile: expected True or False; found 'blocks'"),
    ({"offload": "host"}, r"offload: expected an fe\.Offload, 'auto' or None"),
    # Searches.
    ({"global_batch": 4}, "batch: expected a function of the microbatch size"),
    ({"global_batch": -1}, "global_batch: expected tokens or samples of a step, more than 0"),
    ({**GLOBAL, "microbatches": 2}, "microbatches: expected 1, the default, with"),
    ({**GLOBAL, "formulas": True}, "global_batch: expected formulas=False, since"),
    ({"formulas": True, "optimizer": torch.optim.SGD}, "optimizer: expected None with formulas"),
    ({"schedules": "Interleaved1F1B"}, "schedules: expected a pipeline of more than 1 rank"),
    ({**GLOBAL, "microbatch_sizes": (4,)}, "expected a divisor of a rank's 6 rows in a step"),
    ({"sequences": (0,)}, "sequences: expected lengths of 1 or more"),
    (
        {"batch": lambda size: TOKENS},
        BATCH + r"batch\(\); found: missing a required argument: 'size'",
    ),
    ({"batch": lambda: TOKENS, "microbatch_sizes": (1, 2)}, BATCH + r"batch\(size\), .* too many"),
    (
        {"batch": lambda: TOKENS, "sequences": (8,)},
        BATCH + r"batch\(sequence=length\), .* unexpected",
    ),
    # Degrees of other parallelism.
    ({**LLAMA, "tensor_parallel": 3}, "tensor_parallel: expected a divisor of the 4 ranks; fou"),
    ({**LLAMA, "tensor_parallel": ()}, "tensor_parallel: expected a divisor of the 4 ranks"),
    ({**LLAMA, "tensor_parallel": "all"}, "tensor_parallel: expected numbers of ranks, such as"),
    ({**LLAMA, "tensor_parallel": 2, "formulas": True}, "tensor_parallel: expected 1 with form"),
    ({**LLAMA, "tensor_parallel": "auto", "parallelize": cut}, "numbers of ranks with parallelize"),
    ({**LLAMA, "tensor_parallel": (1, 2), "meshes": ((3,),)}, "sizes of 4 or 2 ranks each"),
    ({**LLAMA, "context_parallel": 3}, "context_parallel: expected a divisor of the 4 ranks; fou"),
    ({**LLAMA, "context_parallel": 4, "meshes": [(2, 2)]}, "of the inner axis .* 2 ranks; found 4"),
    ({**LLAMA, "context_parallel": 2, "formulas": True}, "context_parallel: expected 1 with form"),
    ({**LLAMA, "context_parallel": 2, "machine": HOST}, "no ring attention for CPUs; found 2"),
    ({**PIPELINE, "pipeline": 3}, "pipeline: expected a divisor of the 4 ranks; found 3"),
    ({**PIPELINE, "batch": TOKENS}, "batch: expected a dict with input_ids and labels, or a tuple"),
    ({**PIPELINE, "formulas": True, "quick": False}, "pipeline: expected 1 with formulas"),
]


@pytest.mark.parametrize(("changes", "message"), MESSAGES)
def test_an_error_of_a_plan_says_what_was_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fe.plan(**{**SMALL, **changes})
    assert not dist.is_initialized()


OTHER_PLAN = b'{"setting": 3, "outcomes": "x", "trials": {}, "processor": 7}'
# Binary, empty, no object, nested too deep.
FILES = (b"\x80\xff\x00PK", b"", b"[1, 2]", b"[" * 100_000, OTHER_PLAN)


def test_a_file_that_is_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for content in FILES:
        path.write_bytes(content)
        for load, expected in ((fe.StrategyPlan.load, "a plan"), (fe.Machine.load, "a machine")):
            with pytest.raises(ValueError, match=rf"file\.json: expected {expected}.*found"):
                load(path)
    for wrong in (3, None, [], b"x"):
        with pytest.raises(TypeError, match="path: expected the path of"):
            fe.StrategyPlan.load(wrong)  # type: ignore[arg-type]


def test_values_of_other_types_in_a_saved_planning_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    within(1e9).save(path)
    whole = path.read_text()
    fe.StrategyPlan.load(path)
    for changes in (
        {"outcomes": []},
        {"trials": [{"change": "more rows", "speedup": "2", "lacking": 0}]},
        {"trials": [{"change": "more rows", "speedup": 2, "lacking": None}]},
    ):
        path.write_text(json.dumps({**json.loads(whole), **changes}))
        with pytest.raises(ValueError, match=r"plan\.json: expected a plan.*found"):
            fe.StrategyPlan.load(path)
    outcome = ("memory", "lacking", "candidate", "sent")
    candidate = ("mesh", "strategy", "tensor_parallel")
    damaged = json.loads(whole)
    damaged["outcomes"][0]["candidate"]["microbatch_size"] = "2"
    path.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"expected numbers; found \['2'\]"):
        fe.StrategyPlan.load(path)
    for place in (
        *(("setting", name) for name in ("memory", "world_size")),
        *(("outcomes", 0, name) for name in outcome),
        *(("outcomes", 0, "candidate", name) for name in candidate),
    ):
        for value in (None, "x", [[]], {"a": "b"}):
            target = damaged = json.loads(whole)
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = value
            path.write_text(json.dumps(damaged))
            with pytest.raises(ValueError, match=r"plan\.json: expected a plan.*found"):
                fe.StrategyPlan.load(path)
