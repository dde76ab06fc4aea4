"""The commands of ``fsdp-engine`` that plan jobs.

    fsdp-engine plan --model my_package.models:build --batch 4x4096 --world 64 --dtype bf16
    fsdp-engine plan --model llama/config.json --batch 1x8192 --world 1024 --figure plan.png
    fsdp-engine plan --elements 8e9 --world 64 --outer 8 --dtype bf16 --memory 80
    fsdp-engine calibrate machine.json

``plan`` with a batch simulates strategies and recommends one; without a batch, or with
``--formulas``, it prints the results of formulas. ``plan`` neither trains nor allocates tensors.
``calibrate`` measures this machine.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdp_engine.planner.command_fields import (
    Details,
    Inputs,
    Outputs,
    PlanFields,
    QuestionFields,
    Where,
)
from fsdp_engine.planner.command_options import Needs, flag, options_of, parameters_of

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
_GROUPS = (Inputs, PlanFields, Details, QuestionFields, Outputs)


@app.callback()
def _root() -> None:
    """A sharded training engine for PyTorch."""


def plan(context: typer.Context, **values: Any) -> None:
    """Recommend a strategy by its time and memory. Without --batch, print only bytes.

    Example: fsdp-engine plan --model llama/config.json --batch 1x8192 --world 64 --dtype bf16
    """
    try:
        _check_together(_given(context), values)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    from fsdp_engine.planner.plan_command import run_plan  # imports torch

    run_plan(values)


# typer makes the options from the function's signature.
_CONTEXT = inspect.signature(plan).parameters["context"]
_PARAMETERS = [_CONTEXT, *parameters_of(typer.Option, *_GROUPS)]
plan.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
app.command()(plan)


@app.command("calibrate")
def measure_machine(
    path: Annotated[Path, typer.Argument(help="JSON file to write the figures to")],
    threads: Annotated[int, typer.Option(help="number of threads of each rank on a CPU")] = 1,
    seconds: Annotated[float, typer.Option(help="seconds to measure each figure")] = 1.0,
    folder: Annotated[Path | None, typer.Option(help="folder on the local disk to measure")] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="also measure kernels of torch.compile")
    ] = False,
) -> None:
    """Measure this machine in half a minute, with the ranks of torchrun or with two gloo ranks."""
    _check_writable(path, "path")
    if threads < 1:
        raise typer.BadParameter(f"--threads: expected 1 or more; found {threads}")
    if not 0 < seconds < float("inf"):
        raise typer.BadParameter(f"--seconds: expected a number, more than 0; found {seconds}")
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise typer.BadParameter(f"--folder: expected a folder that can be written; found {folder}")
    from fsdp_engine.planner.simulation.calibrate import calibrate  # imports torch

    machine = calibrate(threads, seconds=seconds, verbose=True, folder=folder, compile=compile)
    if os.environ.get("RANK", "0") == "0":
        machine.save(path)
        print(path.read_text(), end="")


def _given(context: typer.Context) -> set[str]:
    """Returns the names of the options given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name
        for name, source in sources.items()
        if source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
    }


def _check_together(given: set[str], values: Mapping[str, Any]) -> None:
    """Check that each option has an effect, and that files can be written, before planning, which
    may take minutes.

    Args:
        given: Names of the options on the command line.
        values: The values of all options.

    Raises:
        ValueError: An option has no effect, or a required option is missing.
        typer.BadParameter: A file cannot be written, or a figure cannot be saved to it.
    """
    model, batch = values["model"], values["batch"]
    if (values["elements"] is None) == (model is None):
        found = "neither" if model is None else "both"
        raise ValueError(f"--model, --elements: expected one of them; found {found}")
    if batch is not None and model is None:
        raise ValueError("--batch: expected only with --model; found with --elements")
    forms = {name: form for _, name, form in options_of(*_GROUPS)}

    def refuse(why: str, *needs: Needs) -> None:
        _refuse([name for name in forms if name in given and forms[name].needs in needs], why)

    if batch is None:
        refuse("expected only with --batch; found without it", Needs.batch, Needs.simulation)
    else:
        refuse("expected only without --batch; found with it", Needs.no_batch, Needs.elements)
    if model is None:
        refuse("expected only with --model; found with --elements", Needs.model)
    else:
        refuse("expected only with --elements; found with --model", Needs.elements)
    if values["formulas"]:
        refuse("expected only without --formulas; found with it", Needs.simulation)
    for name, form in forms.items():
        if name in given and form.requires and not values[form.requires]:
            _refuse([name], f"expected only with {flag(form.requires)}; found without it")
        if isinstance(values[name], Path) and name != "offload_folder":
            _check_writable(values[name], flag(name))
    for name in ("figure", "scaling_figure"):
        if values[name] is not None:
            _check_figure(values[name], flag(name))
    offload, folder = values["offload"], values["offload_folder"]
    if offload is Where.disk and folder is None:
        raise ValueError("--offload-folder: expected a folder with --offload disk; found none")
    if offload is not Where.disk and folder is not None:
        _refuse(["offload_folder"], f"expected only with --offload disk; found --offload {offload}")
    if "schedules" in given and values["pipeline"] == "1":
        _refuse(["schedules"], "expected only with --pipeline; found one rank in a pipeline")
    if values["global_batch"] is not None and "microbatches" in given:
        _refuse(["microbatches"], "expected only without --global-batch; found with it")


def _refuse(names: Sequence[str], why: str) -> None:
    """Raise an error that names options without effect, if there are any."""
    if names:
        raise ValueError(f"{', '.join(map(flag, names))}: {why}")


def _check_writable(path: Path, option: str) -> None:
    why = ""
    if path.is_dir():
        why = "which is a folder"
    elif not path.parent.is_dir():
        why = f"but no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "which this user may not write"
    if why:
        raise typer.BadParameter(
            f"{option}: expected a file that can be written; found {path}, {why}"
        )


def _check_figure(path: Path, option: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise typer.BadParameter(
            f"{option}: expected matplotlib installed; found {error}"
        ) from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise typer.BadParameter(
            f"{option}: expected a file that ends with one of {', '.join(known)}; found {path}"
        )
