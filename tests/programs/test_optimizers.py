"""docs/internals/optimizers.md lists the outcome of each optimizer; none gives wrong weights
silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pool import Ranks
from tests.programs import optimizer_catalogue as catalogue
from tests.programs.packages import NEEDS_OPTIMIZERS

pytestmark = [*NEEDS_OPTIMIZERS, pytest.mark.timeout(1800)]
Everything = dict[str, dict[str, catalogue.Found]]


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> Everything:
    return catalogue.everything(ranks)


def test_every_library_has_optimizers_that_are_exact_at_every_level(found: Everything) -> None:
    for library, outcomes in found.items():
        exact = [name for name, each in outcomes.items() if "exact" in uses(each)]
        assert exact, library


def test_no_optimizer_trains_other_weights_without_an_error(found: Everything) -> None:
    differ = {
        f"{library}.{name}"
        for library, outcomes in found.items()
        for name, each in outcomes.items()
        if "differs" in uses(each)
    }
    assert differ == catalogue.KNOWN_TO_DIFFER


def test_the_page_says_what_was_found(found: Everything) -> None:
    text = catalogue.PAGE.read_text(encoding="utf-8")
    write = "run python -m tests.programs.optimizer_catalogue --write"
    assert catalogue.page(found) in text, write


def test_a_step_with_other_values_is_seen(ranks: Ranks) -> None:
    assert ranks.run(outcome_of_a_wrong_step, world_size=2) == ["differs", "differs"]


def uses(found: catalogue.Found) -> set[str]:
    """The words for the outcomes of both ways at all levels."""
    if isinstance(found, str):
        return set()
    ways = (found[way] for way in catalogue.WAYS[:2])
    return {word for by_level in ways for word, _ in by_level.values()}


class Doubled(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=2 * lr)


def outcome_of_a_wrong_step() -> str:
    alone = catalogue.in_one_process(torch.optim.SGD)
    assert not isinstance(alone, str)
    use, expected = alone
    outcome: tuple[str, str] = catalogue.tried(Doubled, use, expected, "optim", catalogue.WAYS[0])
    return outcome[0]
