"""``engine.describe()``: bytes and collectives of each unit, and its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fsdp_engine as fe
from fsdp_engine.extensions.reports.reports import Description, UnitRow, count_gathers
from fsdp_engine.strategies import Strategy
from tests.messages import GATHERS, REDUCTIONS, expected_collectives
from tests.models import Block, Stack, Transformer, lora_model
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks
from tests.processes import printed
from tests.runtime.habits import Language
from tests.training import mesh_of

BLOCK = sum(parameter.numel() for parameter in Block().parameters())
BFLOAT16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_collectives_of_a_step_follow_from_the_levels(strategy: str, outer: str) -> None:
    for policy in (None, BFLOAT16):
        engine = fe.shard(Stack(), mesh_of(2, 2), strategy, outer, mp_policy=policy)
        counts, _ = expected_collectives(engine, Strategy.from_names(strategy, outer), 1)
        rows = engine.describe().rows
        units = [unit for unit in engine.units if unit.buffers]  # the root may have none
        for unit, row in zip(units, rows, strict=True):
            for kind, said in ((GATHERS, row.num_gathers), (REDUCTIONS, row.num_reductions)):
                expected = sum(
                    count
                    for label, count in counts.items()
                    if label.startswith(kind) and f" of {unit.label} over " in label
                )
                assert said == expected, (policy, kind, unit.label)
        held = sum(engine.memory_bytes().get(role, 0) for role in ("main", "model"))
        assert sum(row.weight_bytes for row in rows) == held, policy


@on_ranks(2)
def test_an_axis_of_one_rank_has_no_collectives() -> None:
    engine = fe.shard(Stack(), mesh_of(2, 1), "optim_grads_params", "optim")
    levels = Strategy.from_names("optim", "optim")
    assert [count_gathers(levels, engine.mesh, num_uses) for num_uses in (1, 2)] == [1, 1]


@on_ranks(2)
def test_weights_of_an_embedding_are_gathered_for_forward_alone() -> None:
    rows = {row.name: row for row in fe.shard(Language()).describe().rows}
    assert rows["embedding"].num_gathers == 1


@on_ranks(4)
@pytest.mark.parametrize(
    ("level", "outer", "axes"), [("optim", "no_shard", 1), ("optim_grads", "optim_grads", 2)]
)
def test_frozen_weights_are_not_gathered_again(level: str, outer: str, axes: int) -> None:
    engine = fe.shard(lora_model(), mesh_of(2, 2), level, outer, mp_policy=BFLOAT16)
    trainable = sum(len(unit.trainable) for unit in engine.units)
    assert sum(row.num_gathers for row in engine.describe().rows) == axes * trainable


@pytest.mark.parametrize("module", ["self_attention", "x" * 90])
def test_the_table_of_an_engine_folds_long_names_after_dots(module: str) -> None:
    names = [f"base_model.vision_tower.layers.{n}.mlp.experts.{module}.{n}" for n in (1, 2)]
    rows = tuple(UnitRow(name, 4, 10**9, 0, 10**9, 10**9, 0, 0, 2, 1) for name in names)
    table = str(Description("", rows)).splitlines()
    lines = [line.split("│")[1].strip() for line in table if "│" in line]
    assert all(name in "".join(lines) for name in names)
    modules = {part for name in names for part in name.split(".")}
    assert set(re.findall(r"\w+", " ".join(lines))) == modules | {"all"}
    # The table is wider only for a module whose own name does not fit.
    assert max(map(len, table)) <= max(132, 115 + len(module))


@on_ranks(2)
def test_joined_units_are_described_by_runs_of_names() -> None:
    engine = fe.shard(Transformer(num_blocks=6), min_unit_size=2 * BLOCK)
    rows = {row.name: row for row in engine.describe().rows}
    names = ["embedding + blocks.0-1", "blocks.2-3", "blocks.4-5 + norm + head"]
    assert list(rows) == names
    assert [rows[name].num_gathers for name in names] == [2, 2, 1]
    assert rows["blocks.2-3"].num_elements == 2 * BLOCK
    assert "blocks.4-5 + norm + head" in str(engine.describe())


@on_ranks(2)
def test_a_model_of_small_modules_says_that_they_are_one_unit() -> None:
    joined = "All modules are one unit, because small units are joined"
    for size, expected in ((1000, True), (0, False)):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        options = fe.Options(min_unit_size=size)
        engine = fe.shard(model, options=options, initial_values="rank0")
        assert (joined in " ".join(str(engine.describe()).split())) is expected


DRAWS = """
import random, sys, torch, fsdp_engine as fe
from fsdp_engine.terminal import terminal_width
engine = fe.shard(torch.nn.Linear(2, 2)) if sys.argv[1] != "plan" else None
reports = {
    "describe": lambda: str(engine.describe()),
    "width": terminal_width,
    "plan": lambda: str(fe.plan(lambda: torch.nn.Linear(2, 2), (torch.ones(1, 2),), world_size=2)),
}
before = random.getstate()
assert "rich" not in sys.modules
reports[sys.argv[1]]()
assert sys.argv[1] == "width" or "rich" in sys.modules
assert random.getstate() == before
"""


@pytest.mark.parametrize("report", ["describe", "width", "plan"])
def test_a_report_of_one_rank_draws_no_random_numbers(report: str, tmp_path: Path) -> None:
    """Ranks that print nothing would otherwise draw other numbers afterwards."""
    program = tmp_path / "draws.py"
    program.write_text(DRAWS, encoding="utf-8")
    printed(str(program), report)
