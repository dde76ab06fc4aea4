"""``python -m fsdp_engine plan``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.planner import job, plan_cache, plan_command, strategy_search
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.command_inputs import default_loss
from fsdp_engine.planner.outcome import Outcome, Times
from fsdp_engine.planner.plan_command import FIT_UNKNOWN, NOTHING_FITS, build_on_meta
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.planner_cli import app
from fsdp_engine.planner.progress import plan_progress
from fsdp_engine.planner.state_places import offloads_to_host
from fsdp_engine.planner.strategy_plan import StrategyPlan
from fsdp_engine.strategies import ALL_STRATEGIES, LEVELS
from tests.planner.made_plans import LLAMA, made_plan

_, EVERYTHING = offloads_to_host()
MODELS = """
import torch
from torch import nn

from tests.planner.made_plans import Words, words


def build():
    assert torch.empty(0).is_meta
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


def number():
    return 7


def fails():
    raise KeyError("config.json")


def needs(argument):
    return nn.Linear(2, 2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def negated(output):
    return -output


class Narrow(Words):
    def forward(self, tokens):
        return super().forward(tokens) + torch.ones(3) @ torch.ones(4)


class Branching(Words):
    def forward(self, tokens):
        return super().forward(tokens) if tokens.sum() > 0 else self.embedding(tokens).sum()
"""
OF_WORDS = "--world 16 --model planned_models:Words --batch planned_models:words"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module ``planned_models`` and the config of a model in it."""
    (tmp_path / "planned_models.py").write_text(MODELS)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Do not read thousands of source files for each row.
    monkeypatch.setattr(plan_cache, "loaded_sources", dict)
    monkeypatch.setattr(strategy_search, "QUICK_FITTING", 600)
    yield tmp_path
    sys.modules.pop("planned_models", None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the plan, whose result is made by hand."""
    found: dict[str, Any] = {}

    def plan(build: Any, batch: Any, options: PlanOptions) -> StrategyPlan:
        found.update(build=build, batch=batch, **vars(options), **options.shard)
        return made_plan()

    monkeypatch.setattr(plan_command, "plan_job", plan)
    return found


def run(arguments: str, *, status: int = 0, columns: int = 60) -> str:
    env = {"COLUMNS": str(columns), "TERM": "dumb"}
    result = CliRunner().invoke(app, f"plan {arguments}".split(), env=env)
    assert result.exit_code == status, result.output
    return result.output


def joined(output: str) -> str:
    """The words of an output. The box around an error breaks lines."""
    return " ".join(re.sub("[│|╭╮╰╯─]", " ", output).split())


def cells(output: str) -> list[list[str]]:
    """The table's rows, one list of cells for each."""
    lines = [line for line in output.splitlines() if line.startswith(("│", "|"))]
    return [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in lines]


def test_elements_give_a_row_for_each_level_or_pair() -> None:
    output = run("--elements 8e9 --world 64 --dtype bf16")
    table = cells(output)
    assert [row[0] for row in table] == list(LEVELS)
    assert table[0][1:5] == ["44.7 GiB", "29.8 GiB", "59.6 GiB", "134.1 GiB"]
    assert table[3][1:6] == ["476.8 MiB", "476.8 MiB", "953.7 MiB", "1.9 GiB", "953.7 MiB"]
    assert "8,000,000,000 elements" in output
    assert "Activations are not included" in " ".join(output.split())
    table = cells(run("--elements 1e9 --world 64 --outer 8 --memory 16"))
    assert [(row[0], row[1]) for row in table] == [
        (strategy.inner.name, strategy.outer.name) for strategy in ALL_STRATEGIES
    ]
    table = cells(run("--elements 8e9 --world 64 --memory 80"))
    assert [row[-1].startswith("-") for row in table] == [True, False, False, False]
    assert len(cells(run("--elements 8e9 --world 8 --memory 1", status=NOTHING_FITS))) == 4


def test_precision_optimizer_and_offload_change_the_bytes_of_elements() -> None:
    low = "--dtype bf16 --main-dtype bf16 --grad-dtype bf16 --optimizer-bytes 4"
    (row, *_) = cells(run(f"--elements {2**30} --num-units 1 --world 1 {low}"))
    assert row[1:5] == ["2.0 GiB", "2.0 GiB", "4.0 GiB", "8.0 GiB"]
    many = "--elements 8e9 --world 64 --dtype bf16"
    kept, reduced, host = (
        cells(run(f"{many} {each}")) for each in ("", "--reduce-dtype bf16", "--offload host")
    )
    assert reduced[3][-1] != kept[3][-1]
    assert [row[-1] for row in host] == [row[3] for row in kept]
    assert host[0][3] == "3.7 GiB"  # chunks of two of 32 units
    (row,) = cells(run("--elements 8e9 --world 64 --offload everything"))
    gib = 8e9 / 64 / 2**30
    # Nothing at rest, chunks of two of 32 units, and all 16 bytes of an element elsewhere.
    assert row[:4] == ["optim_grads_params", "0 B", "0 B", f"{gib * 1024:.1f} MiB"]
    assert row[-1] == f"{16 * gib:.1f} GiB"


def test_a_model_is_built_on_the_meta_device() -> None:
    model = "--model planned_models:build --world 4"
    assert f"{4 * 1024**2:,} elements" in run(model)
    *_, one_unit_each = cells(run(model))
    *_, all_in_the_root = cells(run(f"{model} --units 3"))
    assert one_unit_each[5] == "8.0 MiB"  # the unit in use and two prefetched ones, 4 MiB each
    assert all_in_the_root[5] == "16.0 MiB"
    before = len(sys.path)
    build_on_meta("planned_models:build")
    assert len(sys.path) == before


def test_with_a_batch_every_strategy_is_simulated(folder: Path) -> None:
    output = run(
        f"{OF_WORDS} --full --recompute off --figure plan.svg --html plan.html --trace step.json "
        "--save plan.json --outer 1"
    )
    table = cells(output)
    assert sorted(row[0] for row in table) == sorted(LEVELS)
    assert "Words, 4.16k parameters in float32, on 16 ranks of 8 x H100" in output
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


FLOATS = fe.MixedPrecisionPolicy(
    torch.bfloat16, **dict.fromkeys(("main_params_dtype", "main_grads_dtype"), torch.float32)
)
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("--offload none", {"offload": None}),
    ("--offload host", {"offload": fe.Offload("host")}),
    ("--offload everything", {"offload": EVERYTHING}),
    ("--offload disk --offload-folder .", {"offload": fe.Offload("disk", folder=".")}),
    ("--recompute both", {"checkpointing": (False, True)}),
    ("--recompute off", {"checkpointing": (False,)}),
    ("--recompute offload", {"checkpointing": ("offload",)}),
    ("--microbatch-sizes 1,2 --microbatches 3", {"microbatch_sizes": [1, 2], "microbatches": 3}),
    ("--global-batch 4k --sequence 32,64", {"global_batch": 4096, "sequences": [32, 64]}),
    ("--context-parallel auto", {"context_parallel": "auto"}),
    ("--context-parallel 4 --pipeline 1,2", {"context_parallel": [4], "pipeline": [1, 2]}),
    ("--pipeline 2 --schedules 1F1B,GPipe", {"pipeline": [2], "schedules": ["1F1B", "GPipe"]}),
    ("--full", {"quick": False}),
    ("--dtype bfloat16", {"mp_policy": FLOATS}),
    ("--outer 1", {"meshes": [(16,)]}),
    ("--outer 2 --tensor-parallel 1,2", {"meshes": [(16,), (2, 8), (8,), (2, 4)]}),
    (  # degrees whose product does not divide the ranks are left out; no mesh occurs twice
        "--outer 2 --tensor-parallel 1,8 --pipeline 1,4",
        {"meshes": [(16,), (2, 8), (4,), (2, 2), (2,), (2, 1)]},
    ),
    (
        "--outer 2 --tensor-parallel 2,4 --pipeline 2,1",
        {"meshes": [(4,), (2, 2), (8,), (2, 4), (2,), (2, 1)]},
    ),
    ("--memory 2 --machine a100", {"memory": 2.0**31, "machine": fe.A100}),
    ("--no-cache --compile", {"quick": True, "cache": False, "compile": True}),
    (
        "--units blocks.* --min-unit-size 7",
        {"units": ["blocks.*"], "options": fe.Options(min_unit_size=7)},
    ),
    (
        "--dtype bf16 --main-dtype fp64 --grad-dtype fp16 --reduce-dtype bf16",
        {
            "mp_policy": fe.MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                main_params_dtype=torch.float64,
                main_grads_dtype=torch.float16,
                reduce_dtype=torch.bfloat16,
            )
        },
    ),
]


def test_options_are_arguments_of_the_plan(asked: dict[str, Any]) -> None:
    for options, expected in ARGUMENTS:
        run(f"{OF_WORDS} {options}")
        assert {name: asked[name] for name in expected} == expected, options


def test_without_options_arguments_are_those_of_the_plan(asked: dict[str, Any]) -> None:
    run(OF_WORDS)
    ours = {"world_size": 16, "loss": default_loss, "schedules": ["1F1B"]}
    ours |= {name: [1] for name in ("context_parallel", "tensor_parallel", "pipeline")}
    ours |= {"progress": True, "cache": True, "quick": True}
    expected = {**vars(PlanOptions(world_size=16)), "shard": asked["shard"], **ours}
    assert {name: asked[name] for name in expected} == expected
    assert (asked["units"], asked["options"]) == (None, fe.Options())


def test_functions_are_named_and_inputs_of_transformers_have_sizes(asked: dict[str, Any]) -> None:
    run(f"{OF_WORDS} --optimizer planned_models:sgd --loss planned_models:negated")
    models = sys.modules["planned_models"]
    assert asked["optimizer"] is models.sgd
    assert asked["loss"] is models.negated
    assert asked["batch"] is models.words
    assert type(asked["build"]()) is models.Words
    run(f"{OF_WORDS} --optimizer sgd")
    assert asked["optimizer"] is torch.optim.SGD
    run("--model config.json --batch 2x16 --world 4")
    assert type(asked["build"]()).__name__ == "LlamaForCausalLM"
    shapes = {name: tuple(each.shape) for name, each in asked["batch"].items()}
    assert shapes == {"input_ids": (2, 16), "labels": (2, 16)}
    run("--model config.json --batch 2x16 --world 4 --microbatch-sizes 1 --sequence 8")
    assert asked["batch"](3, sequence=8)["labels"].shape == (3, 8)


def test_a_model_that_fails_is_an_error_and_whether_formulas_fit_is_unknown() -> None:
    narrow, branching = (
        f"--model planned_models:{each} --batch planned_models:words --world 2"
        for each in ("Narrow", "Branching")
    )
    output = run(narrow, status=2)
    assert "per step" not in joined(output)  # no recommendation
    assert "planned_models.py" in joined(output).replace(" ", "")
    assert "--formulas" in joined(output)
    assert len(cells(run(f"{narrow} --formulas", status=FIT_UNKNOWN))) == 4
    assert "Whether any candidate fits is therefore unknown" in run(branching, status=FIT_UNKNOWN)
    output = run(f"{branching} --memory 0.000001 --tokens 1e9", status=NOTHING_FITS)
    assert "No candidate fits" in output
    assert "Training" not in output


def test_a_quick_plan_is_the_default_and_the_recommendation_is_above_the_best_rows(
    simulated: list[Any],
) -> None:
    quick = run(OF_WORDS, columns=120)
    assert quick.startswith("Use ")
    assert "This is a quick plan" in joined(quick)
    lacking = run(f"{OF_WORDS} --memory 0.000001", status=NOTHING_FITS, columns=120)
    assert "`planning.full()`) may find one that fits." in joined(lacking)
    full, every = (run(f"{OF_WORDS} --full{more}", columns=120) for more in ("", " --all"))
    assert "This is a quick plan" not in joined(full)
    assert "With a microbatch twice as large" in joined(full)
    assert full.index("Use ") < full.index("engine = fe.shard(") < full.index("Words, 4.16k")
    assert len(cells(full)) == 8
    assert f"--all prints {len(cells(every)) - 8} more candidates." in full


def test_the_printed_call_has_the_arguments_of_the_plan(simulated: list[Any]) -> None:
    options = "--full --outer 2 --recompute on --dtype bf16 --main-dtype bf16 --min-unit-size 7"
    output = run(f"{OF_WORDS} {options} --save plan.json")
    code = textwrap.dedent(output[output.index("    engine =") : output.index("    )\n") + 6])
    found: dict[str, Any] = {}
    names = {each: getattr(fe, each) for each in ("Options", "MixedPrecisionPolicy", "Recompute")}
    shard = types.SimpleNamespace(shard=lambda model, **given: found.update(given), **names)
    exec(code, {"fe": shard, "torch": torch, "model": None})
    chosen = fe.StrategyPlan.load("plan.json").arguments()
    assert found == {
        **{name: chosen[name] for name in ("strategy", "extensions")},
        **({name: chosen[name] for name in ("mesh", "outer_strategy")} if "mesh" in found else {}),
        "mp_policy": fe.MixedPrecisionPolicy(torch.bfloat16, main_params_dtype=torch.bfloat16),
        "options": fe.Options(min_unit_size=7),
    }


def test_help_and_errors_of_usage_are_printed_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['fsdp_engine', *sys.argv[1:]]; "
        "import runpy; runpy.run_module('fsdp_engine', run_name='__main__')"
    )
    for arguments, status, text in (
        (["--help"], 0, "checkpoint"),
        (["plan", "--help"], 0, "Candidates"),
        (["plan", "--worlds", "8"], 2, "No such option: --worlds"),
        (["plan", "--world", "8"], 2, "--model, --elements: expected one of them"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == status, ended.stderr
        assert text in ended.stdout + ended.stderr


def test_questions_are_answered_below_the_plan_within_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[Any]
) -> None:
    mpl: Any = pytest.importorskip("matplotlib")
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    output = run(
        f"{OF_WORDS} --recompute off --tokens 1e12 --price 2.5,3 --compare h100,a100 "
        "--checkpoint-bandwidth 10 --scaling --scaling-figure scaling.svg",
        columns=80,
    )
    plan, rest = output.split("Training on 1T tokens takes 976,562,500 steps, ")
    assert "This is a quick plan, of" in plan
    assert "saving it takes" in rest
    tables = rest[rest.index("Words, ") :]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in tables
    firsts = [line.split()[0] for line in tables.splitlines() if line.strip()]
    assert {"h100", "a100"} <= {*firsts}
    sizes = [f"{2**power:,}" for power in range(3, 13)]
    assert [each for each in firsts if each in sizes] == sizes
    assert "efficiency" in tables
    figure = (folder / "scaling.svg").read_text()
    assert all(f">{each}<" in figure for each in sizes)
    assert "tokens/s per rank, relative to 8 ranks" in figure


def test_the_planned_machine_has_its_own_price(simulated: list[Any]) -> None:
    """It is used in the cost of a run and for other numbers of ranks. Without a price no cost is
    printed."""
    asked = f"{OF_WORDS} --recompute off --tokens 1e12 --scaling"
    for machine, price in (("a100", 3), ("h100", 2.5), ("h200", None)):
        one = "" if price is None else f"--price {price}"
        expected, found = (
            run(f"{asked} --machine {machine} {options}", columns=120)
            for options in (one, "--compare h100,a100 --price 2.5,3")
        )
        for first in ("Training on", "Words, "):  # the sentence, and the last table
            assert (
                found[found.rindex(first) :].split("\n\n")[0]
                == (expected[expected.rindex(first) :].split("\n\n")[0])
            )


def test_a_plan_by_formulas_has_no_timeline(folder: Path) -> None:
    of_values = "--model planned_models:Branching --batch planned_models:words --world 2"
    output = run(f"{of_values} --trace trace.json", status=FIT_UNKNOWN, columns=200)
    assert "--trace: expected a plan by simulations; found one by formulas" in output
    assert not (folder / "trace.json").exists()


def test_a_terminal_shows_rows_as_they_are_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with plan_progress(True) as shown:
        shown.add(1)
    assert capfd.readouterr().err == ""  # stderr is no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    lacking = Outcome(Candidate((8,), "optim", "no_shard", True), {"weights": 2**30}, {}, 2**20)
    fitting = replace(lacking, lacking=0.0, items=100, times=Times(0.5, 0.4, {}))
    with plan_progress(True) as shown:
        shown.add(2)
        for each in (lacking, fitting):
            shown.trying(str(each.candidate))
            shown.found(each, "tokens")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    rows = "".join(line.rstrip() + " " for line in text.splitlines())
    candidate = "optim on 8 ranks, activation checkpointing"
    assert f"{candidate}: 1.0 GiB; 1.0 MiB too much" in rows
    assert f"{candidate}: 500.0 ms, 200 tokens/s, 1.0 GiB" in rows
    assert "2/2" in rows


# By common first arguments: other arguments, and the message.
WRONG: dict[str, list[tuple[str, str]]] = {
    "": [
        ("--elements 1e9", "Missing option '--world'"),
        ("--world 8", "--model, --elements: expected one of them; found neither"),
        ("--world 8 --model nowhere_at_all:f", "found 'nowhere_at_all' (No module named"),
        ("--world 8 --model me/llama --batch 2x16", "found 'me/llama', which is not a folder. Dow"),
        ("--world 8 --model nowhere.json --batch 2x16", "config.json of transformers; found no"),
        ("--world 8 --model binary.json --batch 2x16", "binary.json: expected a config.json of"),
    ],
    "--world 8 --elements": [
        ("1 --model a:b", "--model, --elements: expected one of them; found both"),
        ("1 --outer 0", "outer_size: expected a number of ranks, 1 or more; found 0"),
        ("1e9 --dtype int8", "--dtype: expected one of fp32 (float32), fp16"),
        ("many", "Invalid value for '--elements'"),
        ("1 --figure a.png --save b", "--figure, --save: expected only with --batch"),
        ("1 --compile --fp8", "--compile, --fp8: expected only with --batch; found without"),
        ("1 --units x", "--units: expected only with --model; found with --elements"),
    ],
    "--world 8 --model": [
        ("planned_models:number", "that returns a torch.nn.Module; found int"),
        ("planned_models:fails", "found KeyError: 'config.json'"),
        ("planned_models:needs", "without arguments; found TypeError"),
        ("planned_models:build --num-units 2", "--num-units: expected only with"),
        ("planned_models:build --batch 2x1024", "not of transformers; found the"),
    ],
    OF_WORDS: [
        ("--outer 3", "--outer: expected a divisor of the 16 ranks; found 3"),
        ("--tensor-parallel auto --outer 2", "--outer: expected numbers for --tensor-parallel"),
        ("--machine wrong.json", "line 3, processor: expected memory_bandwidth: a number"),
        ("--machine binary.json", "binary.json: expected a machine as"),
        (
            "--microbatch-sizes 1,x",
            "--microbatch-sizes: expected positive numbers, such as 1,2,4; found '1,x'",
        ),
        ("--memory -1", "--memory: expected GiB, more than 0; found -1.0"),
        ("--figure nowhere/a.png", "--figure: expected a file that can be written; found"),
        ("--figure a.words", "--figure: expected a file that ends with one of"),
        ("--trace nowhere/a.json", "found nowhere/a.json, but no folder nowhere"),
        ("--save .", "--save: expected a file that can be written; found ., which is a folder"),
        ("--optimizer-bytes 4", "--optimizer-bytes: expected only without --batch; found with"),
        ("--optimizer sdg", "expected a class of torch.optim, such as AdamW, or module:function"),
        ("--formulas --trace a.json", "--trace: expected only without --formulas"),
        ("--formulas --scaling", "--scaling: expected only without --formulas; found with it"),
        ("--offload disk", "--offload-folder: expected a folder with --offload disk; found none"),
        ("--offload-folder .", "--offload-folder: expected only with --offload disk; found"),
        ("--offload tape", "Invalid value for '--offload'"),
        ("--tokens -1", "--tokens: expected a number, more than 0; found -1.0"),
        ("--tokens 1e9 --price 2,3,4 --compare h100,h200", "one price, or 2 for --compare"),
        ("--tokens 1e9 --price 2,3", "--price: expected one price without --compare; found"),
        ("--schedules GPipe", "--schedules: expected only with --pipeline; found one rank in a"),
        ("--global-batch 4M --microbatches 2", "--microbatches: expected only without"),
        ("--scaling-figure a.png", "--scaling-figure: expected only with --scaling; found"),
        ("--scaling --scaling-figure a.txt", "--scaling-figure: expected a file that ends with"),
        ("--fp8", "expected torchao installed"),
    ],
}


@pytest.mark.parametrize("start", WRONG)
def test_errors_are_printed_without_a_traceback_before_anything_is_planned(
    folder: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "simulate", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    (folder / "binary.json").write_bytes(b"\x80\xffPK")
    fe.H100.save(folder / "wrong.json")
    text = (folder / "wrong.json").read_text().replace("memory_bandwidth", "bandwidth", 1)
    (folder / "wrong.json").write_text(text)
    for rest, message in WRONG[start]:
        output = run(f"{start} {rest}", status=2)
        assert " ".join(message.split()) in joined(output), rest
        assert "Traceback" not in output, rest


def test_fp8_plans_the_linears_that_torchao_converts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
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
    run("--world 8 --model config.json --batch 1x16 --fp8")
    asked["build"]()
    # Only attention is in fp8: the MLP has 72 columns, and the head is left out.
    projections = [f"self_attn.{each}_proj" for each in "qkvo"]
    expected = [f"model.layers.{layer}.{each}" for layer in range(2) for each in projections]
    assert found[0] == expected
