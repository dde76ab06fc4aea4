"""What torch promises of ordinary training; and that a promise which does not hold is seen."""

from __future__ import annotations

import pytest
from torch import nn

from tests.pool import RankError, Ranks
from tests.promises.everywhere import Place, _run_at_places, assert_as_alone, everywhere


@everywhere
def test_two_steps_of_training_are_those_of_one_process(place: Place) -> None:
    assert_as_alone(place, nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))


@everywhere
def broken_promise(place: Place) -> None:
    assert place.inner != "optim_grads"


def test_a_place_at_which_a_promise_breaks_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"at Place.*optim_grads'"):
        ranks.run(_run_at_places, __name__, "broken_promise", world_size=2)
