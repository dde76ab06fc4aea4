"""``examples/stream_weights.py``: the receiver has the trainer's weights after every round."""

from __future__ import annotations

import pytest

from tests.processes import ROOT, printed, torchrun

SMALL = "--steps 4 --send-every 2 --layers 1 --width 16 --sequence-length 32 --batch-size 2"


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [(), torchrun(2)], ids=["one rank", "two ranks"])
def test_it_prints_a_line_for_each_round_and_raises_where_checksums_differ(
    launcher: tuple[str, ...],
) -> None:
    text = printed(*launcher, str(ROOT / "examples" / "stream_weights.py"), *SMALL.split())
    rounds = [line for line in text.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in rounds] == ["0", "2", "4"]
    assert all("the same weights" in line for line in rounds)
