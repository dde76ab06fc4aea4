"""``python -m fsdp_engine plan``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.planner.planner_cli import FIT_UNKNOWN, NOTHING_FITS, app, build_on_meta
from fsdp_engine.strategies import ALL_STRATEGIES, LEVELS
from fsdp_engine.terminal import format_bytes
from tests.planner.made_plans import LLAMA

MODELS = """
import torch
from torch import nn

not_callable = 3


def build():
    assert torch.empty(0).is_meta
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


def number():
    return 7


def fails():
    raise KeyError("config.json")


def needs(argument):
    return nn.Linear(2, 2)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def batch(size=4):
    return torch.zeros(size, 16, dtype=torch.long)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def negated(output):
    return -output


class Narrow(Counting):
    def forward(self, tokens):
        return super().forward(tokens) + torch.ones(3) @ torch.ones(4)


class Branching(Counting):
    def forward(self, tokens):
        return super().forward(tokens) if tokens.sum() > 0 else self.embedding(tokens).sum()


class Dropping(Counting):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module ``planned_models`` in it."""
    (tmp_path / "planned_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    # A loaded file that is newer than the process turns caches of plans off.
    sys.modules.pop("planned_models", None)


def run(arguments: str, *, status: int = 0) -> str:
    result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "60", "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


def cells(output: str) -> list[list[str]]:
    """The table's rows, one list of cells for each."""
    lines = [line for line in output.splitlines() if line.startswith(("│", "|"))]
    return [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in lines]


def test_elements_give_a_row_for_each_level() -> None:
    output = run("plan --elements 8e9 --world 64 --dtype bf16")
    table = cells(output)
    assert [row[0] for row in table] == list(LEVELS)
    assert table[0][1:5] == ["44.7 GiB", "29.8 GiB", "59.6 GiB", "134.1 GiB"]
    assert table[3][1:6] == ["476.8 MiB", "476.8 MiB", "953.7 MiB", "1.9 GiB", "953.7 MiB"]
    assert "8,000,000,000 elements" in output
    assert "Activations are not included" in " ".join(output.split())


def test_two_axes_give_a_row_for_each_of_the_ten_pairs() -> None:
    table = cells(run("plan --elements 1e9 --world 64 --outer 8 --memory 16"))
    assert [(row[0], row[1]) for row in table] == [
        (strategy.inner.name, strategy.outer.name) for strategy in ALL_STRATEGIES
    ]
    left = [row[-1] for row in table]
    assert left[0].endswith("GiB")
    assert not left[-1].startswith("-")


def test_memory_that_does_not_suffice_is_shown_as_missing() -> None:
    table = cells(run("plan --elements 8e9 --world 64 --memory 80"))
    assert [row[-1].startswith("-") for row in table] == [True, False, False, False]


def test_if_no_candidate_fits_the_table_is_printed_and_the_status_differs() -> None:
    assert len(cells(run("plan --elements 8e9 --world 8 --memory 1", status=NOTHING_FITS))) == 4


def test_a_narrow_terminal_does_not_truncate_the_table() -> None:
    output = run("plan --elements 1e9 --world 64 --outer 8")
    assert "…" not in output
    assert all(len(row) == 11 for row in cells(output))


def test_precision_and_optimizer_change_the_bytes() -> None:
    low = "--dtype bf16 --main-dtype bf16 --grad-dtype bf16 --optimizer-bytes 4"
    (row, *_) = cells(run(f"plan --elements {2**30} --num-units 1 --world 1 {low}"))
    assert row[1:5] == ["2.0 GiB", "2.0 GiB", "4.0 GiB", "8.0 GiB"]
    reduced = cells(run("plan --elements 1e9 --world 8 --dtype bf16 --reduce-dtype bf16"))
    plain = cells(run("plan --elements 1e9 --world 8 --dtype bf16"))
    assert reduced[3][-1] != plain[3][-1]


def test_a_model_is_built_on_the_meta_device(folder: Path) -> None:
    model = "plan --model planned_models:build --world 4"
    assert f"{4 * 1024**2:,} elements" in run(model)
    *_, one_unit_each = cells(run(model))
    *_, all_in_the_root = cells(run(f"{model} --units 3"))
    assert one_unit_each[5] == "8.0 MiB"  # its own and two gathered ahead, of 4 MiB
    assert all_in_the_root[5] == "16.0 MiB"


COUNTING = "plan --model planned_models:Counting --batch planned_models:batch --world 2"


def test_with_a_batch_every_strategy_is_simulated(folder: Path) -> None:
    output = run(
        f"{COUNTING} --figure plan.svg --html plan.html --trace step.json --save plan.json"
    )
    table = cells(output)
    assert sorted(row[:2] for row in table) == sorted(
        [level, recompute] for level in LEVELS for recompute in ("blocks", "no", "selective")
    )
    assert "Counting, 4.16k parameters, on 2 ranks of 8 x H100" in output
    assert "Use " in output
    assert "Bottleneck: " in output
    assert "plan.svg" in {path.name for path in folder.iterdir()}
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    page = (folder / "plan.html").read_text()
    assert page.count("<tr class=") + page.count("<tr data-order=") == len(table)
    assert "One step of the chosen candidate" in page
    planning = fe.StrategyPlan.load(folder / "plan.json")
    assert planning.chosen is not None
    assert f"Use {planning.chosen.candidate}: " in output


def test_a_model_that_fails_is_an_error_with_its_line(folder: Path) -> None:
    narrow = "plan --model planned_models:Narrow --batch planned_models:batch --world 2"
    output = run(narrow, status=2)
    assert "Use " not in output
    words = " ".join(re.sub("[│|╭╮╰╯─]", " ", output).split())
    assert "planned_models.py" in words.replace(" ", "")
    assert "--formulas" in words
    asked = run(f"{narrow} --formulas", status=FIT_UNKNOWN)
    assert len(cells(asked)) == 4
    assert "Whether any candidate fits is therefore unknown" in asked


def test_a_forward_that_depends_on_data_is_planned_by_formulas_and_whether_it_fits_is_unknown(
    folder: Path,
) -> None:
    branching = "plan --model planned_models:Branching --batch planned_models:batch --world 2"
    output = run(branching, status=FIT_UNKNOWN)
    assert "if tokens.sum() > 0" in output
    assert "Whether any candidate fits is therefore unknown" in output
    assert "Use " not in output
    assert "No candidate fits" in run(f"{branching} --memory 0.000001", status=NOTHING_FITS)


def test_a_model_that_reads_a_row_of_numbers_while_it_is_built_is_planned(folder: Path) -> None:
    dropping = "plan --model planned_models:Dropping --world 2 --recompute off"
    assert "Use " in run(f"{dropping} --batch planned_models:batch")


def test_too_little_memory_prints_the_table_and_sets_the_status(folder: Path) -> None:
    output = run(f"{COUNTING} --recompute off --memory 0.000001", status=NOTHING_FITS)
    assert len(cells(output)) == 4
    assert "No candidate fits 1.0 KiB." in output


def test_sizes_optimizer_and_loss_may_be_named(folder: Path) -> None:
    named = "--optimizer planned_models:sgd --loss planned_models:negated"
    output = run(f"{COUNTING} {named} --microbatch-sizes 1,2 --recompute off")
    table = cells(output)
    assert sorted(row[2] for row in table) == ["1"] * 4 + ["2"] * 4
    assert {row[5] for row in table} == {"0"}  # SGD has no state


def test_state_on_the_host_is_shown_with_its_bytes(folder: Path) -> None:
    output = run(f"{COUNTING} --offload host --recompute off --save plan.json")
    table = cells(output)
    assert {row[2] for row in table} == {"optimizer state on the host"}
    assert "optimizer state on the host: " in output
    assert "Each node keeps" in output
    planning = fe.StrategyPlan.load(folder / "plan.json")
    assert planning.best["offload"] == fe.Offload(optimizer_state="host")
    estimates = run("plan --elements 8e9 --world 64 --dtype bf16 --offload host")
    kept = cells(run("plan --elements 8e9 --world 64 --dtype bf16 --offload none"))
    for row, before in zip(cells(estimates), kept, strict=True):
        assert row[-1] == before[3]
    assert cells(estimates)[0][3] == "3.7 GiB"  # of two units of 32


def test_selective_checkpointing_is_planned_alone(folder: Path) -> None:
    output = run(f"{COUNTING} --recompute selective --save plan.json")
    assert {row[1] for row in cells(output)} == {"selective"}
    planning = fe.StrategyPlan.load(folder / "plan.json")
    assert planning.best["checkpointing"] == "selective"


def test_activations_on_the_host_are_shown_as_what_they_are(folder: Path) -> None:
    output = run(f"{COUNTING} --recompute offload --save plan.json")
    assert {tuple(row[1:3]) for row in cells(output)} == {("no", "activations on the host")}
    planning = fe.StrategyPlan.load(folder / "plan.json")
    assert planning.best["checkpointing"] == "offload"


def test_everything_on_the_host_is_shown_for_levels_that_allow_it(folder: Path) -> None:
    output = run(f"{COUNTING} --offload everything --dtype bf16 --recompute off --save plan.json")
    table = cells(output)
    assert {row[2] for row in table} == {"everything on the host"}
    assert {row[0] for row in table} == {"optim_grads", "optim_grads_params"}
    everything = fe.Offload(optimizer_state="host", main_weights="host", gradients="host")
    assert fe.StrategyPlan.load(folder / "plan.json").best["offload"] == everything
    (row,) = cells(run("plan --elements 8e9 --world 64 --offload everything"))
    gib = 8e9 / 64 / 2**30
    # Nothing at rest, chunks of two of 32 units, and all 16 bytes of an element elsewhere.
    assert row[:4] == ["optim_grads_params", "0 B", "0 B", f"{gib * 1024:.1f} MiB"]
    assert row[-1] == f"{16 * gib:.1f} GiB"


def test_a_config_of_transformers_needs_no_code(folder: Path) -> None:
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    output = run("plan --model llama --batch 2x16 --world 4 --recompute off")
    assert len(cells(output)) == 4
    assert "LlamaForCausalLM" in output
    assert "tokens/s" in output


OF_COUNTING = "--world 8 --model planned_models:Counting --batch planned_models:batch"
BAD: list[tuple[str, str]] = [
    ("--elements 1e9", "Missing option '--world'"),
    ("--world 8", "expected one of --elements and --model; found both or neither"),
    ("--world 8 --elements 1 --model a:b", "found both or neither"),
    ("--world 8 --elements 1e9 --dtype int8", "--dtype: expected one of fp32, fp16, bf16, fp64"),
    ("--world 8 --elements 1e9 --outer 3", "outer_size: expected a divisor of the 8 ranks"),
    ("--world 8 --elements -1", "model: expected 1 or more; found -1.0"),
    ("--world 8 --elements many", "Invalid value for '--elements'"),
    ("--world 8 --model planned_models", "expected module:function; found 'planned_models'"),
    ("--world 8 --model nowhere_at_all:f", "found 'nowhere_at_all' (No module named"),
    ("--world 8 --model planned_models:f", "expected a function 'f' in planned_models; found None"),
    ("--world 8 --model planned_models:not_callable", "found 3"),
    ("--world 8 --model planned_models:number", "that returns a torch.nn.Module; found int"),
    ("--world 8 --model planned_models:fails", "found KeyError: 'config.json'"),
    ("--world 8 --model planned_models:needs", "without arguments; found TypeError"),
    ("--world 8 --model planned_models:build --units x.*", "units: expected pattern 'x.*'"),
    ("--world 8 --elements 1 --batch 4x16", "--batch: expected with --model; found with"),
    ("--world 8 --elements 1 --figure a.png --save b", "--figure, --save: expected with --batch"),
    ("--world 8 --model planned_models:build --batch 2x1024", "not of transformers; found the"),
    ("--world 8 --model planned_models:build --batch a", "--batch: expected module:function"),
    ("--world 8 --model nowhere.json --batch 2x16", "config.json of transformers; found no"),
    ("--world 8 --model planned_models:fails --batch 2x16", "found KeyError: 'config.json'"),
    (
        "--world 8 --model planned_models:Counting --batch planned_models:batch --outer 3",
        "--outer: expected a divisor of the 8 ranks; found 3",
    ),
    (
        "--world 8 --model planned_models:Counting --batch planned_models:batch --machine abacus",
        "machine: expected one of a100, h100, h200, b200, or a file of `calibrate`",
    ),
    (
        "--world 8 --model planned_models:Counting --batch planned_models:batch "
        "--microbatch-sizes 1,x",
        "--microbatch-sizes: expected such as 1,2,4; found '1,x'",
    ),
    *(
        (f"{OF_COUNTING} {options}", message)
        for options, message in (
            ("--memory -1", "--memory: expected GiB, more than 0; found -1.0"),
            ("--memory 80GB", "Invalid value for '--memory'"),
            ("--microbatches 0", "microbatches: expected at least 1; found 0"),
            ("--figure nowhere/a.png", "--figure: expected a file that can be written; found"),
            ("--figure a.words", "--figure: expected a file that ends with one of"),
            ("--trace nowhere/a.json", "nowhere/a.json: no folder nowhere"),
            ("--html nowhere/a.html", "--html: expected a file that can be written; found nowhere"),
            ("--machine wrong.json", "line 3, processor: expected memory_bandwidth: a number"),
            ("--save .", "--save: expected a file that can be written; found .: a folder"),
            ("--optimizer-bytes 4", "--optimizer-bytes: expected without --batch; found with it"),
            ("--num-units 4", "--num-units: expected without --batch"),
            ("--formulas --trace a.json", "--trace: expected without --formulas"),
            ("--formulas --recompute on", "--recompute: expected without --formulas"),
            ("--machine binary.json", "binary.json: expected a machine as"),
            ("--offload disk", "--offload-folder: expected with --offload disk; found"),
            ("--offload-folder .", "expected with --offload disk; found --offload auto with it"),
            ("--offload tape", "Invalid value for '--offload'"),
        )
    ),
    ("--world 8 --elements 1 --machine a100", "--machine: expected with --batch; found without"),
    ("--world 8 --elements 1 --loss a:b", "--loss: expected with --batch; found without"),
    ("--world 8 --elements 1 --formulas", "--formulas: expected with --batch; found without"),
    ("--world 8 --elements 1 --units x", "--units: expected with --model; found with --elements"),
    ("--world 8 --model planned_models:build --num-units 2", "--num-units: expected with"),
    ("--world 0 --elements 1e9", "world_size: expected a number of ranks, 1 or more; found 0"),
    ("--world 8 --elements 1e9 --microbatches 0", "num_microbatches: expected 1 or more; found 0"),
    ("--world 8 --model binary.json --batch 2x16", "binary.json: expected a config.json of"),
    (
        "--world 8 --model planned_models:build --min-unit-size -1",
        "min_unit_size: expected 0 or more elements",
    ),
]


def test_a_folder_that_cannot_be_measured_is_an_error(folder: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "machine.json", "--folder", "nowhere"])
    assert result.exit_code == 2
    assert "--folder: expected a folder that can be written; found" in result.output


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_errors_are_printed_without_a_traceback(folder: Path, arguments: str, message: str) -> None:
    (folder / "binary.json").write_bytes(b"\x80\xffPK")
    fe.H100.save(folder / "wrong.json")
    text = (folder / "wrong.json").read_text().replace("memory_bandwidth", "bandwidth", 1)
    (folder / "wrong.json").write_text(text)
    output = run(f"plan {arguments}", status=2)
    # The box around an error breaks lines; only the words matter.
    assert " ".join(message.split()) in " ".join(re.sub("[│|╭╮╰╯─]", " ", output).split())
    assert "Traceback" not in output


def test_a_module_in_the_working_directory_is_found(folder: Path) -> None:
    before = len(sys.path)
    build_on_meta("planned_models:build")
    build_on_meta("planned_models:build")
    assert len(sys.path) <= before + 1


def test_bytes_are_shown_in_units_that_suit_them() -> None:
    counts = [0, 1023, 1024, 1.5 * 2**20, 2**30, 2**40, 5000 * 2**40]
    assert [format_bytes(count) for count in counts] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "1.5 MiB",
        "1.0 GiB",
        "1.0 TiB",
        "5,000.0 TiB",
    ]


def test_python_dash_m_runs_it() -> None:
    command = [sys.executable, "-m", "fsdp_engine", "plan", "--elements", "1e9", "--world", "8"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    assert [row[0] for row in cells(result.stdout)] == list(LEVELS)


def test_fp8_plans_the_linears_that_torchao_converts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []

    def convert(model: nn.Module, *, module_filter_fn: Any) -> nn.Module:
        linears = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
        found.append([name for name, each in linears.items() if module_filter_fn(each, name)])
        return model

    module: Any = types.ModuleType("torchao.float8")
    module.convert_to_float8_training = convert
    package = types.ModuleType("torchao")
    package.__spec__ = ModuleSpec("torchao", None)  # transformers looks at it
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "intermediate_size": 72}))
    run("plan --world 8 --model config.json --batch 1x16 --fp8 --quick-only --no-cache")
    # Not the MLP's three, of 72 columns, nor the head.
    projections = [f"self_attn.{each}_proj" for each in "qkvo"]
    expected = [f"model.layers.{layer}.{each}" for layer in range(2) for each in projections]
    assert found[0] == expected


def test_fp8_needs_torchao_and_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    command = "plan --world 8 --model planned_models:Counting --fp8"
    said = " ".join(run(f"{command} --batch 4x16", status=2).split())
    assert "expected torchao installed" in said
    assert "expected with --batch" in " ".join(run(command, status=2).split())
