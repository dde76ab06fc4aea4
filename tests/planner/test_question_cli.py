"""Searches and questions of ``fsdp-engine plan``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest
from typer.testing import CliRunner

from fsdp_engine.planner import job, plan_cache, strategy_search
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.comparison import Comparison
from fsdp_engine.planner.outcome import Outcome, Times
from fsdp_engine.planner.planner_cli import app
from fsdp_engine.planner.progress import plan_progress
from fsdp_engine.planner.strategy_plan import StrategyPlan
from tests.planner.made_plans import LLAMA

OF_LLAMA = "plan --model config.json --batch 1x64 --world 16 --recompute off"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the config of a model."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_cache, "_STARTED_NS", 2**63)
    monkeypatch.setattr(strategy_search, "QUICK_SECONDS", 600.0)
    return tmp_path


def run(arguments: str, *, status: int = 0, columns: int = 80) -> str:
    env = {"COLUMNS": str(columns), "TERM": "dumb"}
    result = CliRunner().invoke(app, f"{OF_LLAMA} {arguments}".split(), env=env)
    assert result.exit_code == status, result.output
    return result.output


def test_questions_are_answered_below_the_plan_within_the_terminal(folder: Path) -> None:
    output = run(
        "--quick-only --tokens 1e12 --price 2.5,3 --compare h100,a100 --checkpoint-bandwidth 10 "
        "--mtbf 50000 --mtbf-of node --what-if outer_bandwidth=0.5x,memory_bytes=2x "
        "--what-if inner_latency=1e-3 --html plan.html"
    )
    plan, rest = output.split("Training on 1T tokens takes 976,562,500 steps, ")
    assert "This is a quick plan, of" in plan
    assert "saving it takes" in rest
    assert "2 nodes, each fails once in 50,000 hours" in " ".join(rest.split())
    tables = rest[rest.index("LlamaForCausalLM") :]
    assert max(map(len, tables.splitlines())) <= 80
    for label in ("h100", "a100", "as planned", "outer_bandwidth=0.5x,", "inner_latency=1e-3"):
        assert any(line.startswith(label) for line in tables.splitlines()), label
    assert "…" not in tables
    assert tables.count("$") == 5  # of two machines, and of three rows of changes
    page = (folder / "plan.html").read_text(encoding="utf-8")
    for text in (
        "<h2>Machines</h2>",
        "<h2>What if</h2>",
        "Training on 1T tokens",
        "2 nodes, each fails once",
        '<option value="node" selected>',
        'id="tokens" min="0" step="any" value="1e+12"',
        'id="mtbf" min="0" step="any" value="50000"',
    ):
        assert page.count(text) == 1


def test_automatic_changes_are_asked_for_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    what_if = StrategyPlan.what_if

    def record(planning: StrategyPlan, *changes: Mapping[str, object] | str) -> Comparison:
        asked.extend(changes)
        return what_if(planning)

    monkeypatch.setattr(StrategyPlan, "what_if", record)
    output = run("--quick-only --what-if auto --what-if memory_bytes=2x")
    assert asked == ["auto", {"memory_bytes": "2x"}]
    assert "as planned" in output


@pytest.mark.thorough
def test_scaling_has_a_row_and_a_bar_for_8_to_4096_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    output = run(f"--quick-only --scaling --no-cache --scaling-figure {tmp_path}/scaling.svg")
    starts = [line.split()[0] for line in output.splitlines() if "%" in line and line[:1].isdigit()]
    assert starts == [f"{2**power:,}" for power in range(3, 13)]
    assert "efficiency" in output
    figure = (tmp_path / "scaling.svg").read_text()
    assert [f">{start}<" in figure for start in starts] == [True] * len(starts)
    assert "tokens/s of one rank" in figure


@pytest.mark.thorough
def test_quick_prints_a_quick_plan_and_then_the_full_one() -> None:
    output = run("--quick")
    quick, full = output.split("Full plan:")
    assert "This is a quick plan" in quick
    assert "This is a quick plan" not in full
    assert "With a microbatch twice as large" in full


def test_a_terminal_shows_rows_as_they_are_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    found = [Outcome(Candidate((8,), "optim", "no_shard", True), {"weights": 2**30}, {}, 2**20)]
    found += [replace(found[0], lacking=0.0, items=100, times=Times(0.5, 0.4, {}))]
    with plan_progress(True) as shown:
        shown.add(2)
        shown.trying(str(found[0].candidate))
        for each in found:
            shown.found(each, "tokens")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    rows = "".join(line.rstrip() + " " for line in text.splitlines())
    candidate = "optim on 8 ranks, activation checkpointing"
    assert f"{candidate}: 1.0 GiB; 1.0 MiB too much" in rows
    assert f"{candidate}: 500.0 ms, 200 tokens/s, 1.0 GiB" in rows
    assert "2/2" in rows


def test_nothing_is_shown_if_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with plan_progress(True) as shown:
        shown.add(1)
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
def test_a_global_batch_and_sequences_are_searched() -> None:
    output = run("--quick-only --global-batch 4k --sequence 32,64", columns=200)
    assert "4,096 tokens per step" in output
    rows = [line for line in output.splitlines() if "optim" in line and "│" in line]
    assert any("1 x 8" in line for line in rows)  # 8 rows of 32 tokens a rank
    assert any("1 x 4" in line for line in rows)


def test_rows_come_from_the_cache_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("--quick-only")

    def fails(*args: object, **options: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(job, "simulate", fails)
    assert run("--quick-only") == first
    result = CliRunner().invoke(app, f"{OF_LLAMA} --quick-only --no-cache".split())
    assert isinstance(result.exception, AssertionError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--price 2", "--price: expected with --tokens; found without"),
        ("--mtbf 2", "--mtbf: expected with --checkpoint-bandwidth; found without"),
        ("--tokens -1", "--tokens: expected a number, more than 0; found -1.0"),
        ("--tokens 1e9 --price 2,3,4 --compare h100,h200", "one price, or 2 for --compare"),
        ("--compare h100,p100", "machine: expected one of a100"),
        ("--what-if bandwidth=2x", "what-if: expected one of"),
        ("--quick --quick-only", "expected one of them; found both"),
        ("--global-batch 4M --microbatches 2", "--microbatches: expected without --global-batch"),
        ("--global-batch 600", "global_batch: expected a multiple of 1,024 tokens"),
        ("--scaling-figure a.png", "--scaling-figure: expected with --scaling; found without"),
        ("--scaling --scaling-figure a.txt", "--scaling-figure: expected a file that ends with"),
        ("--formulas --scaling", "--scaling: expected without --formulas; found with it"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_planned(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(job, "simulate", fails)
    output = run(arguments, status=2)
    assert message in " ".join(output.replace("│", " ").split())
