"""Engines of real models hold, and the planner estimates, the bytes in the tables of
docs/internals/fp8.md and in the columns on fp8 of levels.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.planner.estimates import estimate
from tests import reference
from tests.extensions.transformer_engine.te_on_cpu import QuantisedLinear
from tests.pool import Ranks

ROOT = Path(__file__).parents[3]
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# By row of the tables: the recipe of the model (None: plain bf16 weights), and codec rules.
ROWS = {
    "bf16": (None, ()),
    "native": (None, (fe.Float8(granularity="tensor"),)),
    "TE": ("current", ()),
    "TE, MXFP8": ("mxfp8", ()),
}
DIM, BLOCKS = 64, 3
UNIT = 2 * DIM * DIM
NUM_ELEMENTS = BLOCKS * UNIT


class Block(nn.Module):
    """Two weights and nothing else: no padding, nothing beside matrices."""

    def __init__(self, recipe: str | None) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16)
            if recipe is None
            else QuantisedLinear(DIM, DIM, recipe, bias=False)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


def make_model(recipe: str | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(recipe) for _ in range(BLOCKS)))


def value_of(formula: str, **names: float) -> float:
    """The value of a formula like "5 P + 12 P/n"."""
    product = re.sub(r"(?<=[\w)]) (?=[\w(])|(?<=\d)(?=[a-z])", "*", formula.replace("f'", "g"))
    found: float = eval(product, {"__builtins__": {}}, names)
    return found


def table_after(text: str, start: str) -> dict[str, list[str]]:
    """The formulas of each row of the table, by the first cell of the row."""
    rows = {}
    for line in text[text.index(start) :].splitlines()[1:]:
        if line.startswith("|"):
            first, *others = (cell.strip() for cell in line.strip("|").split("|"))
            rows[first.strip("`")] = [cell.strip("`") for cell in others]
        elif rows and not line.strip():
            break
    return rows


def tables() -> list[dict[str, list[str]]]:
    text = (ROOT / "docs" / "internals" / "fp8.md").read_text()
    starts = ("**At rest**", "**For a moment**", "**Sent in gathers**")
    return [table_after(text, start) for start in starts]


def held(row: str, level: str) -> dict[str, int]:
    """Bytes on this rank: all at rest, full parameters at the peak, transposes at rest and in
    backward."""
    recipe, rules = ROWS[row]
    model = make_model(recipe)
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    weights: list[Any] = [layer.weight for layer in layers]
    config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=0)
    engine = fe.shard(model, strategy=level, config=config, codec_rules=rules)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, DIM, dtype=torch.bfloat16)
    transposes: list[int] = []
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: transposes.append(transposed(weights)))
    for _ in range(2):
        engine.peak_memory_bytes(reset=True)
        model(x.clone().requires_grad_()).float().square().mean().backward()
        optimizer.step()
        rest = sum(engine.memory_bytes().values())  # gradients are there
        optimizer.zero_grad()
    peak = engine.peak_memory_bytes()
    values = [value for each in optimizer.state.values() for value in each.values() if value.ndim]
    return {
        "rest": rest + sum(reference.held(value).nbytes for value in values),
        "full": peak.get("full", 0),
        "transposes": transposed(weights),
        "transposes in use": max(transposes, default=0),
    }


def transposed(weights: list[Any]) -> int:
    return sum(
        each._transpose.numel() for each in weights if getattr(each, "_transpose", None) is not None
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("row", ROWS)
def test_engines_hold_what_the_tables_say(ranks: Ranks, row: str, world: int) -> None:
    at_rest, for_a_moment, _ = tables()
    for level, rest, moment in zip(LEVELS, at_rest[row], for_a_moment[row], strict=True):
        for found in ranks.run(held, row, level, world_size=world):
            assert found["rest"] == value_of(rest, P=NUM_ELEMENTS, n=world), level
            assert found["full"] == value_of(moment, U=UNIT), level


def test_transposes_take_what_the_tables_say(ranks: Ranks) -> None:
    at_rest, for_a_moment, _ = tables()
    formulas = zip(LEVELS, at_rest["its transposes"], for_a_moment["its transposes"], strict=True)
    for level, rest, moment in formulas:
        (found, _) = ranks.run(held, "TE", level, world_size=2)
        wanted = value_of(rest, P=NUM_ELEMENTS, n=2)
        assert found["transposes"] == wanted, level
        assert found["transposes in use"] == wanted + value_of(moment, U=UNIT), level


@pytest.mark.parametrize("row", ROWS)
def test_the_planner_sends_what_the_table_says(row: str) -> None:
    *_, sent = tables()
    recipe, rules = ROWS[row]
    model = make_model(recipe)
    page = (ROOT / "docs" / "internals" / "levels.md").read_text()
    all_sent = table_after(page, "**Bytes sent per step**")
    for level, formula in zip(LEVELS, sent[row], strict=True):
        gradients = all_sent[level][1]  # elements, which travel in fp32
        for n, k in ((2, 1), (4, 3)):
            found = estimate(
                model, world_size=n, strategy=level, codec_rules=rules, num_microbatches=k
            )
            names = {"P": NUM_ELEMENTS, "f": (n - 1) / n, "k": k}
            gathers = value_of(formula, **names)
            if level == LEVELS[-1] and row != "TE, MXFP8":
                # The last block stays full between forward and backward.
                gathers *= 1 - 1 / (2 * BLOCKS)
            wanted = gathers + 4 * value_of(gradients, **names)
            assert found.inner_traffic_bytes == wanted, level


def test_the_columns_on_fp8_of_all_levels_are_what_estimates_say() -> None:
    text = (ROOT / "docs" / "internals" / "levels.md").read_text()
    rest = table_after(text, "**Bytes at rest**")
    sent = table_after(text, "**Bytes sent per step**")
    n, m, k = 8, 2, 3
    names: dict[str, Any] = {"P": NUM_ELEMENTS, "n": n, "m": m, "k": k, "f": (n - 1) / n}
    model = make_model("current")
    for level in LEVELS:
        found = estimate(model, world_size=n, strategy=level, num_microbatches=k)
        assert found.rest_bytes == value_of(rest[level][2], **names), level
        wanted = value_of(sent[level][5], **names)
        if level == LEVELS[-1]:
            wanted -= k * UNIT * names["f"]  # the last block stays full for its backward
        assert found.inner_traffic_bytes == wanted, level
    pairs = {
        "HSDP: `optim_grads_params`, outer `no_shard": "no_shard",
        "HFSDP: `optim_grads_params`, outer `optim": "optim",
    }
    for row, outer in pairs.items():
        found = estimate(model, world_size=n * m, outer_size=m, outer_strategy=outer)
        assert found.rest_bytes == value_of(rest[row][2], **names), row
        name = row.split(":")[0]
        key = next(each for each in sent if each.startswith(name))
        wanted = value_of(sent[key][5], g=(m - 1) / m, **names)
        assert found.outer_traffic_bytes == wanted, row


def test_a_formula_is_read_as_people_write_it() -> None:
    assert value_of("5 P + 12 P/n", P=16, n=4) == 128
    assert value_of("(1+4k) (P/n) f'", P=8, n=2, k=2, g=0.5) == 18
    rows = table_after("x\n**T**\n\n| | `a` |\n|---|---|\n| r | `2 P` |\n\nend", "**T**")
    assert rows["r"] == ["2 P"]
