"""All public names are in the catalogue, nothing is wrong, and the page has the outcomes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.pool import Ranks
from tests.promises import catalogue, catalogue_tensor
from tests.promises.catalogue import ByLevel
from tests.promises.trial import Difference, Outcome, Verdict, compare, is_clear, judge

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
# Each of the calls behind the fixtures tries hundreds of things.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1500)]
Tensors = dict[str, list[tuple[str, Outcome]]]


def _is_pinned() -> bool:
    """Whether this torch is the one that the page was written with."""
    found = re.search(r"^torch==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)
    return found is not None and torch.__version__.split("+")[0] == found[1]


@pytest.fixture(scope="module")
def tensors(ranks: Ranks) -> Tensors:
    found: Tensors = ranks.run(catalogue.run_tensor, world_size=2, timeout=1200)[0]
    return found


@pytest.fixture(scope="module")
def by_level(ranks: Ranks) -> ByLevel:
    found: ByLevel = ranks.run(catalogue.run_entries, world_size=2, timeout=1200)[0]
    return found


def test_a_new_name_of_torch_must_be_in_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(self: object) -> None:
        """Belongs to another package first, and then to torch."""

    assert not _is_pinned() or not catalogue.uncovered()
    assert len([name for name in catalogue.names_to_cover() if name.startswith("Module.")]) > 40
    before = catalogue.uncovered()
    monkeypatch.setattr(torch.nn.Module, "added", added, raising=False)
    monkeypatch.setattr(torch.Tensor, "added", added, raising=False)
    assert catalogue.uncovered() == before
    added.__module__ = "torch.nn.modules.module"
    assert catalogue.uncovered() == [*before, "Module.added"]
    assert "Tensor.added" in catalogue_tensor.public_names()


def test_every_function_of_tensors_is_right_or_has_a_reason(tensors: Tensors) -> None:
    untried = [name for name, outcomes in tensors.items() if not outcomes]
    assert not _is_pinned() or not untried
    wrong = [
        f"{name}({what}): {outcome.note}"
        for name, outcomes in tensors.items()
        for what, outcome in outcomes
        if outcome.verdict is Verdict.WRONG
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_done_to_a_model_is_wrong(by_level: ByLevel) -> None:
    wrong = [
        f"{name} at {level}: {outcome.note}"
        for level, outcomes in by_level.items()
        for name, outcome in outcomes.items()
        if outcome.verdict is Verdict.WRONG
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_says_what_was_found(tensors: Tensors, by_level: ByLevel) -> None:
    write = "run python -m tests.promises.catalogue --write"
    text = catalogue.PAGE.read_text()
    if not _is_pinned() or f"{catalogue.BEGIN}\n{catalogue.END}" in text:
        pytest.skip(f"written with another torch, or not yet: {write}")
    assert catalogue.page(by_level, tensors) in text, write


# --- the judge is itself tried ---


def test_a_wrong_value_a_silent_acceptance_and_an_unclear_error_are_seen() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    refused, clear = RuntimeError("no"), ValueError("x: expected a; found b")
    assert judge((one, None), (one.clone(), None)).verdict is Verdict.RIGHT
    assert judge((one, None), (two, None)).verdict is Verdict.WRONG
    assert judge((None, refused), (two, None)).verdict is Verdict.WRONG
    assert judge((one, None), (None, AssertionError())).verdict is Verdict.WRONG
    assert judge((one, None), (None, RuntimeError("size mismatch"))).verdict is Verdict.WRONG
    assert judge((one, None), (None, clear)).verdict is Verdict.RAISES
    assert judge((None, refused), (None, clear)).verdict is Verdict.DOES_NOT_APPLY
    assert not is_clear(AssertionError("expected x; found y"))


def test_shapes_dtypes_and_nothing_at_all_are_compared() -> None:
    others = (torch.ones(3), torch.ones(2, dtype=torch.float64), None, [torch.ones(2)])
    pairs = ({"a": 1}, {"b": 1}), ([1], [1, 2]), (0.1, 0.2), (1, None)
    for found, expected in (*((other, torch.ones(2)) for other in others), *pairs):
        with pytest.raises(Difference):
            compare(found, expected)
