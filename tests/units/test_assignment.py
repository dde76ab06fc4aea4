"""Which modules are units: sets that people name, and what the default makes of a model."""

from __future__ import annotations

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


def units_of(
    model: nn.Module, selectors: UnitSelector | list[UnitSelector] | None = None
) -> list[ModuleSet]:
    return find_units(model, selectors, collect_records(model))


def names_of(
    model: nn.Module, selectors: UnitSelector | list[UnitSelector] | None = None
) -> list[str]:
    return [unit.name for unit in units_of(model, selectors)]


def owned_by(model: nn.Module) -> dict[str, list[str]]:
    owned = assign(model, units_of(model), collect_records(model))
    return {name: [record.name for record in records] for name, records in owned.items()}


class Two(nn.Module):
    """An encoder and a decoder, with something before, between and after their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.encoder = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
        self.between = nn.Linear(4, 4)
        self.decoder = nn.ModuleDict(
            {"norm": nn.LayerNorm(4), "layers": nn.Sequential(nn.Linear(4, 4))}
        )
        self.head = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


# The default.


def test_what_lies_before_and_after_blocks_is_a_unit_each() -> None:
    model = Transformer(num_blocks=2)
    assert names_of(model) == ["embedding", "blocks.0", "blocks.1", "norm + head"]
    assert owned_by(model)[""] == []
    loose = [unit.name for unit in units_of(model) if unit.loose]
    assert loose == ["embedding", "norm + head"]


def test_a_tie_makes_one_unit_of_what_it_ties() -> None:
    model = Transformer(num_blocks=2, tied=True)
    assert names_of(model) == ["embedding + norm + head", "blocks.0", "blocks.1"]
    assert owned_by(model)[""] == []
    assert owned_by(model)["embedding + norm + head"] == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
    ]


def test_the_root_keeps_what_its_own_forward_reads_itself() -> None:
    model = Two()
    units = ["embedding", "encoder.layers.0", "between + decoder.norm", "decoder.layers.0", "head"]
    assert names_of(model) == units
    assert owned_by(model)[""] == ["scale"]


def test_a_tie_between_a_block_and_something_beside_it_goes_to_the_root() -> None:
    model = Two()
    model.head.weight = model.encoder["layers"][0].weight  # type: ignore[index]
    assert owned_by(model)[""] == ["scale", "encoder.layers.0.weight"]


def test_a_model_without_blocks_is_the_roots() -> None:
    assert units_of(Block()) == []
    assert units_of(nn.Linear(2, 2)) == []


def test_a_module_of_two_names_is_in_one_unit() -> None:
    model = Transformer(num_blocks=1)
    model.again = model.embedding
    assert names_of(model) == ["embedding", "blocks.0", "norm + head"]


def test_a_module_that_blocks_share_goes_where_all_its_places_are() -> None:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = nn.ModuleDict(
        {
            "first": nn.ModuleDict({"own": nn.Linear(2, 2), "shared": shared}),
            "both": nn.ModuleDict({"one": nn.ModuleList([inner]), "again": nn.ModuleList([inner])}),
            "last": nn.ModuleDict({"shared": shared}),
        }
    )
    records = collect_records(model)
    units = [
        ModuleSet((name,), [model.get_submodule(name)])
        for name in ("first", "both", "both.one", "last")
    ]
    owned = {
        unit: [record.name for record in records]
        for unit, records in assign(model, units, records).items()
    }
    assert owned[""] == ["first.shared.weight", "first.shared.bias"]
    assert owned["first"] == ["first.own.weight", "first.own.bias"]
    assert owned["both"] == ["both.one.0.0.weight", "both.one.0.0.bias"]
    assert owned["both.one"] == owned["last"] == []
    # A unit of its own is entered at each of its places.
    own = ModuleSet(("first.shared",), [shared])
    assert len(assign(model, [*units, own], records)["first.shared"]) == 2


def test_a_block_in_two_lists_is_one_unit() -> None:
    block = nn.Linear(2, 2)
    model = nn.Module()
    model.there, model.back = nn.ModuleList([block, nn.Linear(2, 2)]), nn.ModuleList([block])
    assert names_of(model) == ["there.0", "there.1"]


# What people name.


def test_a_tuple_of_patterns_classes_and_modules_is_one_unit() -> None:
    model = Transformer(num_blocks=2)
    selectors: list[UnitSelector] = [Block, ("embedding", nn.LayerNorm, model.head)]
    # The blocks' own norms lie in blocks; each module is in one unit only.
    with pytest.raises(ValueError, match=r"units: expected each module|beside each other"):
        units_of(model, [("blocks.0", nn.LayerNorm)])
    with pytest.raises(ValueError, match=r"found blocks\.0 in"):
        units_of(model, [Block, ("blocks.0", "blocks.1")])
    named: list[UnitSelector] = [Block, ("embedding", "norm", model.head)]
    assert names_of(model, named) == ["embedding + norm + head", "blocks.0", "blocks.1"]
    assert not any(unit.loose for unit in units_of(model, named))
    assert len(units_of(model, selectors)[0].modules) == 2 + 1 + 2 * 2


def test_modules_and_single_selectors_are_units() -> None:
    model = Transformer(num_blocks=2)
    assert names_of(model, model.blocks[1]) == ["blocks.1"]
    assert names_of(model, "blocks.*") == ["blocks.0", "blocks.1"]
    assert names_of(model, [model.head, "embedding"]) == ["embedding", "head"]
    with pytest.raises(ValueError, match="expected a Linear to match"):
        units_of(model, nn.Linear(2, 2))


class Stack(nn.ModuleList):
    """A list of layers that is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_lists_and_dicts_of_modules_are_units_if_they_have_a_forward() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.ModuleDict({"stack": Stack(layers), "list": nn.ModuleList([nn.Linear(2, 2)])})
    assert names_of(model, Stack) == names_of(model, "stack") == ["stack"]
    assert names_of(nn.Sequential(Stack(layers), nn.Linear(2, 2))) == ["0", "1"]
    with pytest.raises(ValueError, match=r"expected modules that have a forward; .* list"):
        units_of(model, "list")


def test_a_module_within_another_of_the_same_unit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found blocks\.0\.norm1, which lies in blocks\.0"):
        units_of(Transformer(), [("blocks.0", "blocks.0.norm1")])


# The expected order of execution.


def expected_gathers(model: nn.Module) -> dict[str, int]:
    units = units_of(model)
    expected = expect(model, [[model], *(unit.modules for unit in units)])
    return {unit.name: expected.num_gathers(place + 1) for place, unit in enumerate(units)}


def test_embeddings_are_gathered_once_and_the_last_unit_once() -> None:
    found = expected_gathers(Transformer(num_blocks=2))
    assert found == {"embedding": 1, "blocks.0": 2, "blocks.1": 2, "norm + head": 1}


def test_a_tied_embedding_is_gathered_for_each_end_of_forward() -> None:
    found = expected_gathers(Transformer(num_blocks=2, tied=True))
    assert found == {"embedding + norm + head": 2, "blocks.0": 2, "blocks.1": 2}


def test_units_around_a_use_do_not_end_it() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential(inner)
    modules: list[list[nn.Module]] = [[model], [inner], [inner[0]], [inner[1]]]
    expected = expect(model, modules)
    assert expected.forward == [0, 1, 2, 3]
    assert expected.backward == [0, 1, 3, 2]
    assert [expected.num_gathers(unit) for unit in range(4)] == [1, 1, 2, 1]


def test_a_module_that_two_units_share_lies_in_both() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.Linear(2, 2), shared))
    expected = expect(model, [[model], [model[0]], [model[1]], [shared]])
    assert expected.around == [set(), {0}, {0}, {0, 1, 2}]
    assert expected.containing == {0, 1, 2}
    assert expected.forward == [0, 1, 3, 2]


def test_a_unit_of_modules_within_each_other_does_not_contain_itself() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    # As a bucket's holders may be, of a parameter that ties them.
    assert expect(model, [[model], [model, model[0][0]]]).around == [set(), {0}]


def test_only_embeddings_do_without_their_weights_in_backward() -> None:
    assert not reads_weights_in_backward(nn.Embedding(2, 2))
    assert not reads_weights_in_backward(nn.ModuleList([nn.Embedding(2, 2), nn.Embedding(3, 2)]))
    assert reads_weights_in_backward(nn.ModuleList([nn.Embedding(2, 2), nn.LayerNorm(2)]))
    assert reads_weights_in_backward(nn.EmbeddingBag(2, 2))

    class Initialised(nn.Embedding):
        """Another beginning, the same forward."""

    class Scaled(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.weight.mean()

    assert not reads_weights_in_backward(Initialised(2, 2))
    assert reads_weights_in_backward(Scaled(2, 2))
    patched = nn.Embedding(2, 2)
    patched.forward = lambda x: x @ patched.weight  # type: ignore[method-assign]
    assert reads_weights_in_backward(patched)
    assert reads_weights_in_backward(nn.Tanh())
