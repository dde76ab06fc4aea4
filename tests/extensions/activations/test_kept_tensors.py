"""Tensors that a recomputed or offloaded unit keeps beside its output."""

from __future__ import annotations

from tests.pool import on_ranks
from tests.promises.keeping import LEVEL_3, LOSSES, Net, after_output, check, of_both, within_output


@on_ranks(2)
def test_tensors_that_units_keep_have_their_gradients() -> None:
    for loss in LOSSES:
        for run in (after_output, within_output):
            check(LEVEL_3, Net(run), loss, checkpointing="offload")
    check(LEVEL_3, Net(after_output), of_both, checkpointing=True)
