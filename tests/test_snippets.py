"""Every Python snippet of README and the docs runs as it is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pool import Ranks
from tests.snippets import Program, pages, programs, run

PROGRAMS = [program for page in pages() for program in programs(page)]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_snippets_of_a_page_run(program: Program, ranks: Ranks, tmp_path: Path) -> None:
    program.compile()
    if program.is_compiled_only:
        return
    if program.is_gpu and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if missing := program.missing_packages():
        pytest.skip(f"needs {', '.join(missing)}")
    sides = [program.blocks, program.before] if program.is_changed else [program.blocks]
    losses = [
        ranks.run(run, side, program.page, str(tmp_path), world_size=program.ranks)
        for side in sides
    ]
    if program.is_changed:
        assert losses[0] == [each and pytest.approx(each, rel=1e-4) for each in losses[1]]


def test_programs_of_a_page_are_read(tmp_path: Path, ranks: Ranks) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n<!-- setup\nx = 1\n-->\n```python\ny = x + 1\n```\n```bash\nno python\n```\n"
        "- in a list\n  ```python\n  if y:\n      z = y\n  ```\n"
        "<!-- program: ranks=4 needs=torch,no_such_package gpu -->\n"
        "```python\nraise KeyError\n```\n"
    )
    first, second = programs(page)
    assert [line for line, _ in first.blocks] == [3, 6, 13]
    assert first.blocks[2][1] == "if y:\n    z = y\n"
    assert (first.ranks, second.ranks) == (2, 4)
    assert second.is_gpu
    assert second.missing_packages() == ["no_such_package"]
    ranks.run(run, first.blocks, first.page, str(tmp_path), world_size=2)
    with pytest.raises(RuntimeError, match=r'"page.md", line 18'):
        ranks.run(run, second.blocks, second.page, str(tmp_path), world_size=2)


def test_a_diff_runs_before_and_after_its_change(tmp_path: Path, ranks: Ranks) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- program -->\n```diff\n-rank = 0.0\n+rank = 1.0\n \n final_loss = rank + 1\n```\n"
    )
    (program,) = programs(page)
    assert program.is_changed
    for side, loss in ((program.blocks, 2.0), (program.before, 1.0)):
        assert ranks.run(run, side, program.page, str(tmp_path), world_size=1) == [loss]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<!-- program: rank=4 -->\n", "expected ranks, needs, gpu or compile; found 'rank=4'"),
        ("<!-- setup\nx = 1\n-->\n", "expected a block after setup; found none"),
    ],
)
def test_a_page_that_cannot_be_read_raises(text: str, error: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=error):
        programs(page)
