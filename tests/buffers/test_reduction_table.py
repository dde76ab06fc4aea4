"""The table of reductions in docs/internals/levels.md equals the traced steps."""

from __future__ import annotations

import dataclasses

from tests.buffers import reduction_table
from tests.buffers.reduction_table import WORLD, Step, all_reductions, table
from tests.pool import Ranks


def test_the_page_has_the_reductions_of_every_strategy(ranks: Ranks) -> None:
    found = ranks.run(all_reductions, world_size=WORLD)[0]
    assert table(found) == reduction_table.page_table()


def test_a_collective_from_another_buffer_makes_another_table() -> None:
    step = Step("inner", "each microbatch", "1/4 -> 1/2", "all-reduce: copy fp32 1 -> copy fp32 1")
    other = dataclasses.replace(step, collectives="all-reduce: staging fp32 1 -> copy fp32 1")
    assert table({"a": [[step]] * 3, "b": [[other]] * 3}).count("inner") == 2 + 1
    assert table({"a": [[step]] * 3, "b": [[step]] * 3}).count("inner") == 1 + 1
