"""The commands of ``fsdp-engine`` that plan jobs.

    fsdp-engine plan --model my_package.models:build --batch 4x4096 --world 64 --dtype bf16
    fsdp-engine plan --model llama/config.json --batch 1x8192 --world 1024 --figure plan.png
    fsdp-engine plan --elements 8e9 --world 64 --outer 8 --dtype bf16 --memory 80
    fsdp-engine calibrate machine.json

``plan`` with a batch simulates every strategy and recommends one; without a batch, or with
``--formulas``, it prints the results of formulas. It does not train or allocate tensors.
``calibrate`` measures this machine.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from fsdp_engine.kernel_interface import MixedPrecisionPolicy, Options, allocator, terminal
from fsdp_engine.planner.command_inputs import (
    AUTO,
    batch_shape,
    default_loss,
    example_inputs,
    import_function,
    in_fp8,
    model_builder,
)
from fsdp_engine.planner.command_options import (
    Needs,
    flag,
    option,
    options_of,
    parameters_of,
    parsed,
)
from fsdp_engine.planner.estimates import compare as compare_estimates
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.page import save_page
from fsdp_engine.planner.plan_options import PlanOptions, Where
from fsdp_engine.planner.planner_tables import estimates_table, plan_table
from fsdp_engine.planner.question_output import Questions
from fsdp_engine.planner.simulation.calibrate import calibrate
from fsdp_engine.planner.simulation.simulate import build_meta_module
from fsdp_engine.planner.simulation.simulation_error import SimulationError
from fsdp_engine.planner.state_places import KIND_OF_OFFLOADED, StatePlaces, make_offload
from fsdp_engine.planner.strategy_plan import StrategyPlan, advice
from fsdp_engine.planner.strategy_search import plan as plan_job

with terminal.naming_extra():
    import typer


DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}

# The exit status if no candidate fits, and if it is unknown whether any candidate fits.
NOTHING_FITS, FIT_UNKNOWN = 3, 4

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """A sharded training engine for PyTorch."""


def _dtype(name: str, option: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"{option}: expected one of {', '.join(DTYPES)}; found {name!r}") from None


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """Options of ``plan`` that name the model and the batch."""

    model: str | None = option(
        "module:function that returns the model, or a config.json of transformers", None
    )
    batch: str | None = option(
        "module:function that returns one rank's inputs, or for a model of transformers their "
        "sizes, such as 4x4096; without it activations and times are unknown",
        None,
    )
    elements: float | None = option(
        "instead of a model: its parameter elements, such as 8e9; formulas only", None
    )


@dataclass(frozen=True, kw_only=True)
class _Details:
    """Options of ``plan`` that have another form in ``fe.plan``, or none."""

    outer: int | None = option(
        "ranks on the outer axis; default: one axis, and with --batch also nodes x ranks", None
    )
    fp8: bool = option(
        "linears multiply in fp8, as torchao converts them", False, needs=Needs.simulation
    )
    quick_only: bool = option(
        "print only that of the likeliest candidates", False, needs=Needs.simulation
    )
    dtype: torch.dtype = option(
        "of weights in forward and backward", "fp32", type=str, parse=_dtype
    )
    main_dtype: torch.dtype = option("of the optimizer's weights", "fp32", type=str, parse=_dtype)
    grad_dtype: torch.dtype = option(
        "of gradients between microbatches", "fp32", type=str, parse=_dtype
    )
    reduce_dtype: torch.dtype | None = option(
        "of gradient reductions; default: --grad-dtype", None, type=str | None, parse=_dtype
    )
    optimizer_bytes: float = option(
        "without --batch: bytes of optimizer state per element; AdamW: 8",
        8,
        needs=Needs.no_batch,
    )
    units: list[str] | None = option(
        "with --model: name patterns of units, such as layers.*", None, needs=Needs.model
    )
    min_unit_size: int | None = option(
        "with --model: default units with fewer elements are joined; 0: none",
        None,
        needs=Needs.model,
    )
    num_units: int = option("with --elements: number of equal units", 32, needs=Needs.elements)
    offload_folder: Path | None = option("with --offload disk: a folder of a local disk", None)


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """Files that ``plan`` writes."""

    figure: Path | None = option("save a figure to this file", None, needs=Needs.batch)
    html: Path | None = option(
        "save a page for a browser, one file, to this file", None, needs=Needs.batch
    )
    trace: Path | None = option(
        "write the chosen step's timeline, for ui.perfetto.dev", None, needs=Needs.simulation
    )
    save: Path | None = option(
        "save the plan as JSON, for fe.StrategyPlan.load", None, needs=Needs.batch
    )


_GROUPS = (_Inputs, PlanOptions, _Details, Questions, _Outputs)


def plan(context: typer.Context, **values: Any) -> None:
    """Recommend a strategy: time and memory of each one; only bytes without --batch."""
    try:
        _check_together(_given(context), values)
        inputs, outputs = _Inputs(**parsed(_Inputs, values)), _Outputs(**parsed(_Outputs, values))
        details = _Details(**parsed(_Details, values))
        questions = Questions(**parsed(Questions, values))
        options = parsed(PlanOptions, values)
        options["offload"] = _offload(values["offload"], details.offload_folder)
        options["shard"] = {
            "units": details.units or None,
            "options": Options(min_unit_size=details.min_unit_size),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=details.dtype,
                main_params_dtype=details.main_dtype,
                main_grads_dtype=details.grad_dtype,
                reduce_dtype=details.reduce_dtype,
            ),
        }
        if inputs.batch is None:
            _print_estimates(inputs, options, details)
        planning = _plan(inputs, options, details)
        if planning.chosen is not None:
            questions.answer(planning)
    except SimulationError as error:
        raise typer.BadParameter(f"{error}. (--formulas plans without running it.)") from error
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    _save(planning, outputs)


# typer makes the options of the function's signature.
_CONTEXT = inspect.signature(plan).parameters["context"]
_PARAMETERS = [_CONTEXT, *parameters_of(typer.Option, *_GROUPS)]
plan.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
app.command()(plan)


def _print_estimates(inputs: _Inputs, options: Mapping[str, Any], details: _Details) -> None:
    """Print the results of formulas, and exit."""
    subject: Any = inputs.elements if inputs.model is None else build_on_meta(inputs.model)
    offload = options["offload"]
    estimates = compare_estimates(
        subject,
        world_size=options["world_size"],
        outer_size=details.outer or 1,
        optimizer_bytes_per_element=details.optimizer_bytes,
        num_microbatches=options["microbatches"],
        num_units=details.num_units,
        extensions=[] if offload is None or offload == AUTO else [offload],
        **options["shard"],
    )
    memory = options["memory"]
    terminal.print_whole(
        estimates_table(
            estimates, None if memory is None else memory / 2**30, terminal.terminal_width()
        )
    )
    limit = float("inf") if memory is None else memory
    raise typer.Exit(0 if any(each.peak_bytes <= limit for each in estimates) else NOTHING_FITS)


def _plan(inputs: _Inputs, options: dict[str, Any], details: _Details) -> StrategyPlan:
    """Plan with a batch, print the plan, and return it."""
    assert inputs.model is not None
    assert inputs.batch is not None
    build = model_builder(inputs.model, "--model")
    if details.fp8:
        build = in_fp8(build, "--fp8")
    built = build_on_meta(inputs.model)  # converts errors to messages without a traceback
    degrees, pipelines = options["tensor_parallel"], options["pipeline"]
    if details.outer is not None:
        if AUTO in (degrees, pipelines):
            raise ValueError(
                "--outer: expected numbers for --tensor-parallel and --pipeline with it; found auto"
            )
        options["meshes"] = _meshes(options["world_size"], degrees, pipelines, details.outer)
    options["loss"] = options["loss"] or default_loss
    is_quick_first = options["quick"]
    options["quick"] = is_quick_first or details.quick_only
    asked = PlanOptions(**options, progress=True)
    batch = _batch(
        inputs.batch,
        built,
        has_sizes=asked.microbatch_sizes is not None or asked.global_batch is not None,
        has_lengths=asked.sequences is not None,
    )
    planning = plan_job(build, batch, asked)
    if is_quick_first:
        _print(planning)
        print("\nFull plan:")
        planning = planning.full()
    _print(planning)
    return planning


@app.command("calibrate")
def measure_machine(
    path: Annotated[Path, typer.Argument(help="JSON file for the figures")],
    threads: Annotated[int, typer.Option(help="threads of each rank on a CPU")] = 1,
    seconds: Annotated[float, typer.Option(help="measurement time of each figure")] = 1.0,
    folder: Annotated[
        Path | None, typer.Option(help="of a local disk, to measure that, too")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="measure kernels of torch.compile, too")
    ] = False,
) -> None:
    """Measure this machine in half a minute, with the ranks of torchrun or two gloo ranks."""
    _check_writable(path, "path")
    if threads < 1 or not 0 < seconds < float("inf"):
        raise typer.BadParameter(
            "--threads, --seconds: expected 1 or more, and more than 0; found "
            f"{threads} and {seconds}"
        )
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise typer.BadParameter(f"--folder: expected a folder that can be written; found {folder}")
    machine = calibrate(threads, seconds=seconds, verbose=True, folder=folder, compile=compile)
    if os.environ.get("RANK", "0") == "0":
        machine.save(path)
        print(path.read_text(), end="")


def build_on_meta(spec: str) -> nn.Module:
    """Build a model on the meta device; see
    :func:`~fsdp_engine.planner.command_inputs.model_builder`.

    Raises:
        ValueError: the model cannot be built on the meta device without arguments.
    """
    build = model_builder(spec, "--model")
    try:
        return build_meta_module(build)
    except SimulationError as error:
        where = "" if error.file is None else f" (at {error.file}:{error.line})"
        raise ValueError(
            f"--model: expected {spec} to build a model on the meta device without arguments; "
            f"found {error.reason}{where}"
        ) from error
    except TypeError as error:
        raise ValueError(f"--model: {spec}: {error}") from error


def _print(planning: StrategyPlan) -> None:
    width = terminal.terminal_width()
    terminal.print_whole(plan_table(planning.setting, planning.outcomes, width))
    print(terminal.wrapped(advice(planning.setting, planning.outcomes, planning.trials), width))


def _save(planning: StrategyPlan, outputs: _Outputs) -> None:
    """Write the requested files, and exit with a status for whether any candidate fits."""
    if outputs.save is not None:
        planning.save(outputs.save)
    if outputs.figure is not None:
        save_figure(planning, outputs.figure)
    step = None
    if planning.simulate is not None and (outputs.html or outputs.trace) is not None:
        step = planning.simulate(planning.outcomes[0].candidate)
    if outputs.html is not None:
        save_page(planning, outputs.html, step)
    if outputs.trace is not None and step is not None:
        step.save_trace(outputs.trace)
    raise typer.Exit(_status(planning))


def _status(planning: StrategyPlan) -> int:
    if planning.chosen is not None:
        return 0
    return NOTHING_FITS if planning.outcomes[0].lacking else FIT_UNKNOWN


def _batch(spec: str, model: nn.Module, *, has_sizes: bool, has_lengths: bool) -> Any:
    """The ``batch`` argument of ``fe.plan``."""
    shape = batch_shape(spec)
    if shape is None:
        return import_function(spec, "--batch")
    if has_lengths and len(shape) != 2:
        raise typer.BadParameter(
            f"--sequence: expected a --batch of rows x length, such as 1x8192; found {spec}"
        )
    if not has_sizes and not has_lengths:
        return example_inputs(model, shape)

    def inputs(size: int = shape[0], sequence: int | None = None) -> Any:
        return example_inputs(model, (size, *(shape[1:] if sequence is None else (sequence,))))

    return inputs


def _offload(where: Where, folder: Path | None) -> StatePlaces | str | None:
    """The ``offload`` argument of ``fe.plan``."""
    if where is Where.auto:
        return AUTO
    if where is Where.none:
        return None
    if where is Where.everything:
        return make_offload(**dict.fromkeys(KIND_OF_OFFLOADED, allocator.HOST))
    return make_offload(optimizer_state=where.value, folder=None if folder is None else str(folder))


def _meshes(
    world: int, degrees: Sequence[int], pipelines: Sequence[int], outer: int
) -> list[tuple[int, ...]]:
    meshes: list[tuple[int, ...]] = []
    for count in [world // (degree * pipeline) for degree in degrees for pipeline in pipelines]:
        if outer < 1 or count % outer:
            raise typer.BadParameter(
                f"--outer: expected a divisor of the {count} ranks; found {outer}"
            )
        meshes += [(count,)] if outer == 1 else [(count,), (outer, count // outer)]
    return meshes


def _given(context: typer.Context) -> set[str]:
    """Names of the options on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name
        for name, source in sources.items()
        if source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
    }


def _check_together(given: set[str], values: Mapping[str, Any]) -> None:
    """Check that each option has an effect, and that files can be written, before minutes of
    planning.

    Args:
        given: names of the options on the command line.
        values: The values of all options.

    Raises:
        ValueError: an option has none.
    """
    model, batch = values["model"], values["batch"]
    if (values["elements"] is None) == (model is None):
        raise ValueError("expected one of --elements and --model; found both or neither")
    if batch is not None and model is None:
        raise ValueError("--batch: expected with --model; found with --elements")
    forms = {name: form for _, name, form in options_of(*_GROUPS)}

    def refuse(why: str, *needs: Needs) -> None:
        _refuse([name for name in forms if name in given and forms[name].needs in needs], why)

    if batch is None:
        refuse("expected with --batch; found without", Needs.batch, Needs.simulation)
    else:
        refuse("expected without --batch; found with it", Needs.no_batch, Needs.elements)
    if model is None:
        refuse("expected with --model; found with --elements", Needs.model)
    else:
        refuse("expected with --elements; found with --model", Needs.elements)
    if values["formulas"]:
        refuse("expected without --formulas; found with it", Needs.simulation)
    for name, form in forms.items():
        if name in given and form.requires and not values[form.requires]:
            _refuse([name], f"expected with {flag(form.requires)}; found without")
        if isinstance(values[name], Path) and name != "offload_folder":
            _check_writable(values[name], flag(name))
    for name in ("figure", "scaling_figure"):
        if values[name] is not None:
            _check_figure(values[name], flag(name))
    offload, folder = values["offload"], values["offload_folder"]
    if (offload is Where.disk) != (folder is not None):
        raise ValueError(
            "--offload-folder: expected with --offload disk; found "
            f"--offload {offload} {'with' if folder else 'without'} it"
        )
    if values["quick"] and values["quick_only"]:
        raise ValueError("--quick, --quick-only: expected one of them; found both")
    if values["global_batch"] is not None and "microbatches" in given:
        _refuse(["microbatches"], "expected without --global-batch; found with it")


def _refuse(names: Sequence[str], why: str) -> None:
    """Raise an error for options that would have no effect."""
    if names:
        raise ValueError(f"{', '.join(map(flag, names))}: {why}")


def _check_writable(path: Path, option: str) -> None:
    why = ""
    if path.is_dir():
        why = "a folder"
    elif not path.parent.is_dir():
        why = f"no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "no permission to write"
    if why:
        raise typer.BadParameter(
            f"{option}: expected a file that can be written; found {path}: {why}"
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
