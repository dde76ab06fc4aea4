"""Optimizers train on all meshes as in one process, and docs/internals/optimizers.md says so."""

from __future__ import annotations

import pytest
import torch

from tests.pool import Ranks
from tests.programs import optimizer_catalogue as catalogue
from tests.programs import optimizer_matrix as matrix
from tests.programs.packages import NEEDS_OPTIMIZERS

pytestmark = [*NEEDS_OPTIMIZERS, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def rows(ranks: Ranks) -> dict[str, matrix.Row]:
    return matrix.everything(ranks)


def test_weights_are_those_of_one_process(rows: dict[str, matrix.Row]) -> None:
    assert len(rows) >= 25
    for name, cells in rows.items():
        most = matrix.most_of(name)
        apart = {
            column: value
            for column in matrix.COLUMNS
            if isinstance(value := cells[column], float) and not value <= most
        }
        assert not apart, name
        assert {column for column in matrix.COLUMNS if isinstance(cells[column], str)} <= (
            matrix.REFUSED.get(name, set())
        ), cells


def test_the_page_has_the_table(rows: dict[str, matrix.Row]) -> None:
    text = catalogue.PAGE.read_text(encoding="utf-8")
    write = "run python -m tests.programs.optimizer_matrix --write"
    assert matrix.page(rows) in text, write


def test_weights_of_another_step_are_seen() -> None:
    one, other = {"a": torch.ones(3)}, {"a": torch.ones(3) * 1.1}
    assert matrix.distance(one, other) > matrix.MOST
