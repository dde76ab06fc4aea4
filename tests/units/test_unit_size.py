"""Default units that are too small are joined with their neighbours; users can say otherwise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fsdp_engine as fe
from fsdp_engine.patterns import joined_names
from fsdp_engine.units import assignment
from fsdp_engine.units.assignment import (
    ModuleSet,
    assign,
    collect_records,
    find_units,
    join_small,
    split_by_least,
)
from tests import MIN_UNIT_SIZE
from tests.models import Block, Mlp, Transformer
from tests.pool import on_ranks
from tests.units.refusals import refused


def joined(model: nn.Module, least: int | None) -> list[ModuleSet]:
    records = collect_records(model)
    return join_small(model, find_units(model, None, records), records, least)


def names_of(model: nn.Module, least: int | None) -> list[str]:
    return [unit.name for unit in joined(model, least)]


def sizes_of(model: nn.Module, units: list[ModuleSet]) -> dict[str, int]:
    owned = assign(model, units, collect_records(model))
    return {name: sum(r.param.numel() for r in records) for name, records in owned.items()}


BLOCK = sum(parameter.numel() for parameter in Block().parameters())
EMBEDDING = Transformer(1).embedding.weight.numel()


# Which units are joined.


def test_the_worked_example_of_the_module_holds() -> None:
    sizes = [2, 3, 9, 1, 2]
    assert split_by_least(sizes, 5) == [range(2), range(2, 5)]
    assert split_by_least([*sizes, 9], 5) == [range(2), range(2, 3), range(3, 6)]


@pytest.mark.parametrize(
    ("least", "names"),
    [
        (1, ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm + head"]),
        (EMBEDDING + 1, ["embedding + blocks.0", "blocks.1", "blocks.2", "norm + head"]),
        (BLOCK, ["embedding + blocks.0", "blocks.1", "blocks.2 + norm + head"]),
        (BLOCK + EMBEDDING + 1, ["embedding + blocks.0-1", "blocks.2 + norm + head"]),
        (10 * BLOCK, ["embedding + blocks.0-2 + norm + head"]),
    ],
)
def test_small_sets_join_their_neighbours_until_they_are_large_enough(
    least: int, names: list[str]
) -> None:
    # The norm and the head have more elements than the embedding.
    assert names_of(Transformer(num_blocks=3), least) == names


def test_what_ties_small_sets_is_in_one_unit_with_them() -> None:
    model = Transformer(num_blocks=2, tied=True)
    assert names_of(model, BLOCK) == ["embedding + blocks.0 + norm + head", "blocks.1"]
    (first, second) = joined(model, BLOCK)
    assert first.modules == [model.embedding, model.blocks[0], model.norm, model.head]
    assert set(first.loose) == {model.embedding, model.norm, model.head}
    assert second.loose == ()
    assert sizes_of(model, [first, second])[""] == 0
    model = Transformer(num_blocks=3)
    weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    model.blocks[1].up.weight = weight  # type: ignore[union-attr]
    assert sizes_of(model, joined(model, 0))[""] == weight.numel()
    assert sizes_of(model, joined(model, 2 * BLOCK))[""] == 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(0, 300), st.booleans())
def test_every_parameter_is_in_one_unit_and_units_are_large_enough(
    widths: list[int], least: int, has_ends: bool
) -> None:
    model = nn.Module()
    if has_ends:
        model.before = nn.Linear(3, 3)
    model.blocks = nn.ModuleList(Mlp(4, width) for width in widths)
    if has_ends:
        model.after = nn.Linear(2, 5)
    units = joined(model, least)
    sizes = sizes_of(model, units)
    assert sum(sizes.values()) == sum(p.numel() for p in model.parameters())
    assert sizes.pop("") == 0
    assert len(sizes) == 1 or all(size >= least for size in sizes.values())
    modules = [module for unit in units for module in unit.modules]
    assert [id(each) for each in modules] == [
        id(each) for unit in joined(model, 0) for each in unit.modules
    ]


class Nested(nn.Module):
    """Its second list's block lies within a block of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList([Mlp(), nn.Sequential(Mlp(), Mlp()), Mlp(), Mlp()])
        self.inner = nn.ModuleList([self.outer[1][0]])


def test_units_within_units_are_left_alone() -> None:
    names = names_of(Nested(), 10**6)
    assert names == ["outer.0", "outer.1", "inner.0", "outer.2-3"]
    sizes = sizes_of(Nested(), joined(Nested(), 10**6))
    assert sizes["outer.1"] == sizes["inner.0"] == sizes["outer.0"]


def test_a_block_whose_parameters_are_all_the_roots_is_left_alone() -> None:
    model = Transformer(num_blocks=3)
    second = model.blocks[1]
    for name, module in model.blocks[0].named_modules():
        for key in list(module._parameters):
            second.get_submodule(name)._parameters[key] = module._parameters[key]
    assert names_of(model, 10**6) == ["embedding", "blocks.0", "blocks.1", "blocks.2 + norm + head"]


# Names.


NAMES: list[tuple[list[str], str]] = [
    ([], ""),
    ([""], ""),
    (["blocks.0"], "blocks.0"),
    (["a", "blocks.9", "blocks.10", "blocks.11", "b"], "a + blocks.9-11 + b"),
    (["blocks.0", "blocks.2", "blocks.3"], "blocks.0 + blocks.2-3"),
    (["a.0", "b.1", "0", "1"], "a.0 + b.1 + 0-1"),
    (["a.0.x", "a.1.x"], "a.0.x + a.1.x"),
    (
        [*(f"base_model.model.{name}" for name in ("x", "a.0", "a.1", "b"))],
        "base_model.model.{x + a.0-1 + b}",
    ),
    (["base_model.modela", "base_model.modelb", "c"], "base_model.modela + base_model.modelb + c"),
    (["a.00", "a.1", "a.01"], "a.00-1 + a.01"),
]


def test_numbered_neighbours_are_shown_as_a_run() -> None:
    assert [joined_names(names) for names, _ in NAMES] == [name for _, name in NAMES]


# Users' settings.


def test_the_default_leaves_the_blocks_of_usual_models_alone_and_joins_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assignment, "MIN_UNIT_SIZE", MIN_UNIT_SIZE)
    with torch.device("meta"):
        # The width of the smallest GPT-2, with a smaller vocabulary.
        usual = Transformer(num_blocks=3, dim=768)
        small = Transformer(num_blocks=3, dim=64)
    names = names_of(usual, None)
    assert names == ["embedding + blocks.0", "blocks.1", "blocks.2 + norm + head"]
    assert names_of(small, None) == ["embedding + blocks.0-2 + norm + head"]


@on_ranks(1)
def test_what_is_said_is_what_is_built() -> None:
    for least in (None, 0, BLOCK, 10**9):
        model = Transformer(num_blocks=3)
        engine = fe.shard(model, options=fe.Options(min_unit_size=least))
        assert [unit.name for unit in engine.units[1:]] == names_of(model, least or 0)
    model = Transformer(num_blocks=2)
    with refused(model, "min_unit_size: expected None or 0 with units=", "found 5"):
        fe.shard(model, units="blocks.*", options=fe.Options(min_unit_size=5))
    engine = fe.shard(model, units="blocks.*", options=fe.Options(min_unit_size=0))
    assert [unit.name for unit in engine.units] == ["", "blocks.0", "blocks.1"]
