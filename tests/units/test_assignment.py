"""Modules of units: sets that users select, and the default units of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_engine.units.assignment import (
    ModuleSet,
    UnitSelector,
    assign,
    collect_records,
    expect,
    find_units,
    reads_weights_in_backward,
)
from tests.models import Block, Transformer


def units_of(model: nn.Module, selectors: Any = None) -> list[ModuleSet]:
    return find_units(model, selectors, collect_records(model))


def owned_by(model: nn.Module, units: list[ModuleSet]) -> dict[str, list[str]]:
    owned = assign(model, units, collect_records(model))
    return {name: [record.name for record in records] for name, records in owned.items()}


class Two(nn.Module):
    """An encoder and a decoder, with something before, between and after their blocks."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.embedding = nn.Embedding(4, 4)
        self.encoder = nn.ModuleDict({"layers": layers})
        self.between = nn.Linear(4, 4)
        self.decoder = nn.ModuleDict(
            {"norm": nn.LayerNorm(4), "layers": nn.Sequential(nn.Linear(4, 4))}
        )
        self.head = nn.Linear(4, 4)
        if tied:
            self.head.weight = layers[0].weight  # type: ignore[assignment]
        self.scale = nn.Parameter(torch.ones(4))


class Stack(nn.ModuleList):
    """A list of layers that is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def with_two_names() -> nn.Module:
    model = Transformer(num_blocks=1)
    model.again = model.embedding
    return model


def with_a_block_in_two_lists() -> nn.Module:
    model, block = nn.Module(), linear()
    model.there, model.back = nn.ModuleList([block, linear()]), nn.ModuleList([block])
    return model


def with_stack() -> nn.Module:
    return nn.ModuleDict({"stack": Stack([linear(), linear()]), "list": nn.ModuleList([linear()])})


def small() -> Transformer:
    return Transformer(num_blocks=2)


OF_TWO = ["embedding", "encoder.layers.0", "between + decoder.norm", "decoder.layers.0", "head"]
# The model; None for the default, or the user's units; the names of the units; parameters of the
# root.
UNITS: dict[str, tuple[Callable[[], nn.Module], Any, list[str], list[str]]] = {
    "before and after blocks": (
        small,
        None,
        ["embedding", "blocks.0", "blocks.1", "norm + head"],
        [],
    ),
    "a tie makes one unit of what it ties": (
        lambda: Transformer(num_blocks=2, tied=True),
        None,
        ["embedding + norm + head", "blocks.0", "blocks.1"],
        [],
    ),
    "the root keeps what its own forward reads": (Two, None, OF_TWO, ["scale"]),
    "and what ties a block and something beside it": (
        lambda: Two(tied=True),
        None,
        OF_TWO,
        ["scale", "encoder.layers.0.weight"],
    ),
    "without blocks all is the root's": (linear, None, [], ["weight", "bias"]),
    "a module of two names": (with_two_names, None, ["embedding", "blocks.0", "norm + head"], []),
    "a block in two lists": (with_a_block_in_two_lists, None, ["there.0", "there.1"], []),
    "a list that is called": (
        lambda: nn.Sequential(Stack([linear(), linear()]), linear()),
        None,
        ["0", "1"],
        [],
    ),
    "a class with a forward": (with_stack, Stack, ["stack"], ["list.0.weight", "list.0.bias"]),
    "its name": (with_stack, "stack", ["stack"], ["list.0.weight", "list.0.bias"]),
}


@pytest.mark.parametrize("name", UNITS)
def test_units_and_what_the_root_keeps(name: str) -> None:
    make, selectors, names, of_root = UNITS[name]
    model = make()
    units = units_of(model, selectors)
    assert [unit.name for unit in units] == names
    assert owned_by(model, units)[""] == of_root


def test_selectors_are_patterns_classes_modules_and_tuples_of_them() -> None:
    model = small()
    named: list[UnitSelector] = [Block, ("embedding", "norm", model.head)]
    for selectors, names in (
        (named, ["embedding + norm + head", "blocks.0", "blocks.1"]),
        (model.blocks[1], ["blocks.1"]),
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ([model.head, "embedding"], ["embedding", "head"]),
    ):
        units = units_of(model, selectors)
        assert [unit.name for unit in units] == names
        assert not any(unit.loose for unit in units)
    assert [unit.name for unit in units_of(model) if unit.loose] == ["embedding", "norm + head"]
    # Norms of blocks belong to the blocks' units; each module is in one unit only.
    every_norm: list[UnitSelector] = [Block, ("embedding", nn.LayerNorm, model.head)]
    assert len(units_of(model, every_norm)[0].modules) == 2 + 1 + 2 * 2


REFUSED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (
        small,
        [("blocks.0", nn.LayerNorm)],
        r"units: expected each module|inside another module of the same unit",
    ),
    (small, [Block, ("blocks.0", "blocks.1")], r"found blocks\.0 in"),
    (small, [("blocks.0", "blocks.0.norm1")], r"found blocks\.0\.norm1 inside blocks\.0"),
    (small, linear(), "expected the given Linear to match"),
    (with_stack, "list", r"expected modules that have a forward; .* list"),
]


@pytest.mark.parametrize(("make", "selectors", "words"), REFUSED)
def test_selectors_of_what_is_no_unit_are_refused(make: Any, selectors: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        units_of(make(), selectors)


def test_a_module_that_blocks_share_goes_where_all_its_places_are() -> None:
    shared, inner = linear(), nn.Sequential(linear(), nn.Tanh())
    model = nn.ModuleDict(
        {
            "first": nn.ModuleDict({"own": linear(), "shared": shared}),
            "both": nn.ModuleDict({"one": nn.ModuleList([inner]), "again": nn.ModuleList([inner])}),
            "last": nn.ModuleDict({"shared": shared}),
        }
    )
    names = ("first", "both", "both.one", "last")
    units = [ModuleSet((name,), [model.get_submodule(name)]) for name in names]
    assert owned_by(model, units) == {
        "": ["first.shared.weight", "first.shared.bias"],
        "first": ["first.own.weight", "first.own.bias"],
        "both": ["both.one.0.0.weight", "both.one.0.0.bias"],
        "both.one": [],
        "last": [],
    }
    # A shared module that is a unit is entered at both of its places.
    own = ModuleSet(("first.shared",), [shared])
    assert len(owned_by(model, [*units, own])["first.shared"]) == 2


# The expected order of execution.


def test_embeddings_and_the_last_unit_are_gathered_once_and_a_tie_for_each_end() -> None:
    for tied, gathers in (
        (False, {"embedding": 1, "blocks.0": 2, "blocks.1": 2, "norm + head": 1}),
        (True, {"embedding + norm + head": 2, "blocks.0": 2, "blocks.1": 2}),
    ):
        model = Transformer(num_blocks=2, tied=tied)
        units = units_of(model)
        expected = expect(model, [[model], *(unit.modules for unit in units)])
        found = {unit.name: expected.num_gathers(at + 1) for at, unit in enumerate(units)}
        assert found == gathers


def test_units_around_a_use_do_not_end_it() -> None:
    inner = nn.Sequential(linear(), linear())
    model = nn.Sequential(inner)
    expected = expect(model, [[model], [inner], [inner[0]], [inner[1]]])
    assert expected.forward == [0, 1, 2, 3]
    assert expected.backward == [0, 1, 3, 2]
    assert [expected.num_gathers(unit) for unit in range(4)] == [1, 1, 2, 1]
    # A module that two units share is inside both.
    shared = linear()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(linear(), shared))
    expected = expect(model, [[model], [model[0]], [model[1]], [shared]])
    assert expected.around == [set(), {0}, {0}, {0, 1, 2}]
    assert expected.containing == {0, 1, 2}
    assert expected.forward == [0, 1, 3, 2]
    # A unit may contain modules within each other, as with tied parameters; it is not around
    # itself.
    assert expect(model, [[model], [model, model[0][0]]]).around == [set(), {0}]


def test_only_embeddings_do_without_their_weights_in_backward() -> None:
    class Initialised(nn.Embedding):
        """Another initialization, the same forward."""

    class Scaled(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.weight.mean()

    patched = nn.Embedding(2, 2)
    patched.forward = lambda x: x @ patched.weight  # type: ignore[method-assign]
    embedding = nn.Embedding(2, 2)
    for module in (embedding, nn.ModuleList([embedding, nn.Embedding(3, 2)]), Initialised(2, 2)):
        assert not reads_weights_in_backward(module)
    norm, bag = nn.LayerNorm(2), nn.EmbeddingBag(2, 2)
    for module in (nn.ModuleList([embedding, norm]), bag, Scaled(2, 2), patched, nn.Tanh()):
        assert reads_weights_in_backward(module)
