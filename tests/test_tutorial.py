"""The files of ``examples/tutorial`` run on one and on two ranks, and their page shows them."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.pool import Ranks
from tests.snippets import ROOT, execute

FILES = sorted((ROOT / "examples" / "tutorial").glob("*.py"))
# The step that each step continues.
CONTINUES = {2: 1, 3: 2, 4: 2, 5: 4, 6: 5, 7: 6, 8: 7}
LOSS = re.compile(r"\d\.\d{3}\b")
UNTRAINED_LOSS = 4.85  # ln(128), the loss of equal probabilities


class Tutorial:
    """Runs of the steps, each run once.

    Args:
        ranks: The pool of ranks.
        folder: The folder that the files write into.
    """

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks = ranks
        self.folder = folder
        self._printed: dict[tuple[int, int, int], str] = {}

    def run(self, step: int, num_ranks: int, num_steps: int = 20) -> str:
        """Returns what rank 0 prints in a run of ``num_steps`` training steps."""
        key = (step, num_ranks, num_steps)
        if key not in self._printed:
            file = FILES[step - 1]
            source = re.sub(
                r"^(STEPS\b.* = )\d+,", rf"\g<1>{num_steps},", file.read_text(), flags=re.M
            )
            arguments = [str(num_steps)] if step in (6, 7) else []
            call = (execute, source, file.name, str(self.folder), arguments)
            printed = self._ranks.run(*call, world_size=num_ranks, group=num_ranks > 1)
            assert set(printed[1:]) <= {""}
            self._printed[key] = printed[0]
        return self._printed[key]


@pytest.fixture(scope="module")
def tutorial(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Tutorial:
    return Tutorial(ranks, tmp_path_factory.mktemp("tutorial"))


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def losses(text: str) -> list[float]:
    return [float(each) for each in LOSS.findall(text)]


def changes(before: Path, after: Path) -> list[str]:
    """Lines of a unified diff of two files, without their docstrings, numbers and context."""
    texts = [path.read_text(encoding="utf-8").splitlines()[1:] for path in (before, after)]
    lines = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
    return ["@@" if line.startswith("@@") else line for line in lines]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_the_loss_falls(tutorial: Tutorial, step: int) -> None:
    first, last = losses(tutorial.run(step, num_ranks=min(step, 2)))
    assert UNTRAINED_LOSS - 2 > first > last


def test_steps_1_to_4_have_the_same_losses_on_one_rank_and_on_two(tutorial: Tutorial) -> None:
    expected = losses(tutorial.run(1, 1))
    for step, num_ranks in ((2, 1), (2, 2), (4, 2)):
        assert losses(tutorial.run(step, num_ranks)) == pytest.approx(expected, abs=2e-3)
    assert losses(tutorial.run(5, 2)) == pytest.approx(expected, abs=0.05)  # bf16


def test_no_level_fits_the_budget_on_one_rank(tutorial: Tutorial) -> None:
    assert tutorial.run(3, 1).startswith("no level fits 6 MiB a rank: {'no_shard': 9.4, ")
    assert "chosen: optim_grads_params\n" in tutorial.run(3, 2)


def test_a_run_resumed_on_another_number_of_ranks_continues_at_the_saved_step(
    tutorial: Tutorial,
) -> None:
    begun = tutorial.run(6, 2, 10)
    resumed = tutorial.run(6, 1, 20)
    assert begun.startswith("begin after step 0\nstep 10 ")
    assert resumed.startswith("begin after step 10\nstep 20 ")
    # Step 6 trains as step 5 does.
    continued = losses(begun) + losses(resumed)
    assert continued == pytest.approx(losses(tutorial.run(5, 2)), abs=0.02)


@pytest.mark.thorough
def test_exported_weights_have_the_loss_of_the_averages(tutorial: Tutorial) -> None:
    *_, trained, averaged = losses(tutorial.run(7, 2))
    assert averaged < UNTRAINED_LOSS - 2
    assert trained < UNTRAINED_LOSS - 2
    for num_ranks in (1, 2):
        (exported,) = losses(tutorial.run(8, num_ranks))
        assert exported == pytest.approx(averaged, abs=0.02)  # fp32 weights in place of bf16 ones

    definitions, _ = FILES[7].read_text(encoding="utf-8").split("torch.manual_seed(0)\n")
    names: dict[str, Any] = {}
    exec(definitions, names)
    folder = tutorial.folder / "runs" / "export"
    for state in (torch.load(folder / "model.pt"), load_file(folder / "model.safetensors")):
        model = names["GPT"]()
        model.load_state_dict(state)
        with torch.no_grad():
            loss = model.eval()(names["batch"](names["HELD_OUT"], 0))
        assert f"{loss.item():.3f}" == f"{exported:.3f}"


def test_the_page_shows_the_lines_of_the_files(page: str) -> None:
    assert blocks(page, "python")[0] == FILES[0].read_text(encoding="utf-8")
    expected = {
        step: changes(FILES[before - 1], FILES[step - 1]) for step, before in CONTINUES.items()
    }
    # The page leaves out the lines that step 8 removes.
    expected[8] = [line for line in expected[8] if line.startswith("+")]
    shown = [block.rstrip("\n").split("\n") for block in blocks(page, "diff")]
    assert shown == list(expected.values())


@pytest.mark.parametrize("exports", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_page_shows_what_the_files_print(page: str, tutorial: Tutorial, exports: bool) -> None:
    """The page shows outputs of longer runs than the test's."""
    runs = [(1, 1), (2, 2), (3, 1), (3, 2), (4, 2), (5, 2), (6, 2), (6, 1), (7, 2), (8, 2)]
    for (step, num_ranks), text in zip(runs, blocks(page, "text"), strict=True):
        if exports != (step > 6):
            continue
        num_steps = 10 if (step, num_ranks) == (6, 2) else 20
        printed, shown = (
            [LOSS.sub("#", line.rstrip()) for line in each.splitlines()]
            for each in (tutorial.run(step, num_ranks, num_steps), text)
        )
        if step < 6:
            assert shown[: len(printed)] == printed
            expected = losses(text)[: len(losses(tutorial.run(step, num_ranks)))]
            assert losses(tutorial.run(step, num_ranks)) == pytest.approx(expected, abs=0.05)
        else:
            names = [{re.sub(r"\d+", "#", line) for line in lines} for lines in (printed, shown)]
            assert names[0] == names[1]
