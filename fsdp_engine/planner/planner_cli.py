"""The command line ``fsdp-engine``, also as ``python -m fsdp_engine``.

    fsdp-engine plan --model my_package.models:build --batch 4x4096 --world 64 --dtype bf16
    fsdp-engine plan --model llama/config.json --batch 1x8192 --world 1024 --figure plan.png
    fsdp-engine plan --elements 8e9 --world 64 --outer 8 --dtype bf16 --memory 80
    fsdp-engine calibrate machine.json
    fsdp-engine checkpoint inspect PATH

``plan`` with a batch simulates every strategy and recommends one; without a batch, or with
``--formulas``, it prints the results of formulas. It does not train or allocate tensors.
``calibrate`` measures this machine. ``checkpoint`` inspects checkpoints
(``checkpoint/cli.py``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from fsdp_engine.checkpoint.cli import app as checkpoint_app
from fsdp_engine.extras import naming_extra
from fsdp_engine.offload import Offload
from fsdp_engine.planner.command_inputs import (
    batch_shape,
    default_loss,
    example_inputs,
    import_function,
    model_builder,
)
from fsdp_engine.planner.estimates import compare
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.page import save_page
from fsdp_engine.planner.planner_tables import estimates_table, plan_table
from fsdp_engine.planner.strategy_plan import StrategyPlan, advice
from fsdp_engine.planner.strategy_search import AUTO, EVERYTHING, meta_model
from fsdp_engine.planner.strategy_search import plan as plan_job
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.activations import OFFLOAD, Activations
from fsdp_engine.simulation.calibrate import calibrate
from fsdp_engine.simulation.machine import PRESETS
from fsdp_engine.simulation.simulation_error import SimulationError
from fsdp_engine.terminal import print_whole, terminal_width, wrapped
from fsdp_engine.units.checkpointing import SELECTIVE

with naming_extra():
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
app.add_typer(checkpoint_app, name="checkpoint")


class Where(StrEnum):
    """The place of optimizer state between steps; everything: also of main weights and gradients,
    on the host."""

    auto = "auto"
    none = "none"
    host = "host"
    everything = "everything"
    disk = "disk"


class Recompute(StrEnum):
    """The candidates' activation checkpointing, of whole blocks or selective; offload: their
    activations are on the host; auto: off, selective and on, and offload where that may be the
    fastest."""

    auto = "auto"
    both = "both"
    on = "on"
    selective = "selective"
    off = "off"
    offload = "offload"


_CHECKPOINTING: dict[Recompute, tuple[Activations, ...] | None] = {
    Recompute.auto: None,
    Recompute.both: (False, True),
    Recompute.on: (True,),
    Recompute.selective: (SELECTIVE,),
    Recompute.off: (False,),
    Recompute.offload: (OFFLOAD,),
}


@app.callback()
def _root() -> None:
    """A sharded training engine for PyTorch."""


# Options that are only valid with, or without, others.
_OUTPUTS = ("figure", "html", "trace", "save")
_WITH_BATCH = (
    *("machine", "recompute", "microbatch_sizes", "optimizer", "loss", "formulas"),
    *_OUTPUTS,
)
_WITHOUT_BATCH = ("optimizer_bytes", "num_units")
_OF_A_MODEL = ("units", "min_unit_size")
_OF_A_SIMULATION = ("recompute", "microbatch_sizes", "optimizer", "loss", "trace")


@app.command()
def plan(
    context: typer.Context,
    world: Annotated[int, typer.Option(help="ranks in all")],
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function that returns the model, or a config.json of transformers"
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="module:function that returns one rank's inputs, or for a model of transformers "
            "their sizes, such as 4x4096; without it activations and times are unknown"
        ),
    ] = None,
    elements: Annotated[
        float | None,
        typer.Option(help="instead of a model: its parameter elements, such as 8e9; formulas only"),
    ] = None,
    machine: Annotated[
        str, typer.Option(help=f"{', '.join(PRESETS)}, or a file written by calibrate")
    ] = "h100",
    memory: Annotated[
        float | None,
        typer.Option(help="memory limit of a rank in GiB; default: 0.9 of the machine's memory"),
    ] = None,
    outer: Annotated[
        int | None,
        typer.Option(
            help="ranks on the outer axis; default: one axis, and with --batch also nodes x ranks"
        ),
    ] = None,
    recompute: Annotated[
        Recompute,
        typer.Option(
            help="candidates with activation checkpointing of each block, or without; selective: "
            "but for attention and every second product; offload: with their activations on the "
            "host; auto: off, selective and on, and offload where it may be the fastest, but with "
            "--offload none"
        ),
    ] = Recompute.auto,
    microbatch_sizes: Annotated[
        str | None, typer.Option(help="sizes to try, such as 1,2,4; --batch is called with each")
    ] = None,
    microbatches: Annotated[int, typer.Option(help="microbatches per step")] = 1,
    dtype: Annotated[str, typer.Option(help="of weights in forward and backward")] = "fp32",
    main_dtype: Annotated[str, typer.Option(help="of the optimizer's weights")] = "fp32",
    grad_dtype: Annotated[str, typer.Option(help="of gradients between microbatches")] = "fp32",
    reduce_dtype: Annotated[
        str | None, typer.Option(help="of gradient reductions; default: --grad-dtype")
    ] = None,
    optimizer_bytes: Annotated[
        float, typer.Option(help="without --batch: bytes of optimizer state per element; AdamW: 8")
    ] = 8,
    optimizer: Annotated[
        str | None,
        typer.Option(help="with --batch: module:function of the parameters; default: AdamW"),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="with --batch: module:function of the model's output")
    ] = None,
    formulas: Annotated[
        bool,
        typer.Option(
            "--formulas",
            help="with --batch: do not run the model; activations, times and whether it fits are "
            "unknown",
        ),
    ] = False,
    units: Annotated[
        list[str] | None,
        typer.Option(help="with --model: name patterns of units, such as layers.*"),
    ] = None,
    min_unit_size: Annotated[
        int | None,
        typer.Option(help="with --model: default units with fewer elements are joined; 0: none"),
    ] = None,
    num_units: Annotated[int, typer.Option(help="with --elements: number of equal units")] = 32,
    offload: Annotated[
        Where,
        typer.Option(
            help="optimizer state on the host or on a disk; everything: also main weights and "
            "gradients on the host; auto: with --batch, the first of none, host and everything "
            "with which something fits"
        ),
    ] = Where.auto,
    offload_folder: Annotated[
        Path | None, typer.Option(help="with --offload disk: a folder of a local disk")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="save a figure to this file")] = None,
    html: Annotated[
        Path | None, typer.Option(help="save a page for a browser, one file, to this file")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="write the chosen step's timeline, for ui.perfetto.dev")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="save the plan as JSON, for fe.StrategyPlan.load")
    ] = None,
) -> None:
    """Recommend a strategy: time and memory of each one; only bytes without --batch."""
    if (elements is None) == (model is None):
        raise typer.BadParameter("expected one of --elements and --model; found both or neither")
    if batch is not None and model is None:
        raise typer.BadParameter("--batch: expected with --model; found with --elements")
    given = _given(context)
    if batch is None:
        _refuse(given, _WITH_BATCH, "expected with --batch; found without")
    else:
        _refuse(given, _WITHOUT_BATCH, "expected without --batch; found with it")
    if model is None:
        _refuse(given, _OF_A_MODEL, "expected with --model; found with --elements")
    else:
        _refuse(given, ("num_units",), "expected with --elements; found with --model")
    if formulas:
        _refuse(given, _OF_A_SIMULATION, "expected without --formulas; found with it")
    _check_outputs(figure, html, trace, save)
    if (offload is Where.disk) != (offload_folder is not None):
        raise typer.BadParameter(
            "--offload-folder: expected with --offload disk; found "
            f"--offload {offload} {'with' if offload_folder else 'without'} it"
        )
    if memory is not None and not 0 < memory < float("inf"):
        raise typer.BadParameter(f"--memory: expected GiB, more than 0; found {memory}")
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(dtype, "--dtype"),
        main_params_dtype=_dtype(main_dtype, "--main-dtype"),
        main_grads_dtype=_dtype(grad_dtype, "--grad-dtype"),
        reduce_dtype=None if reduce_dtype is None else _dtype(reduce_dtype, "--reduce-dtype"),
    )
    options: dict[str, Any] = {
        "world_size": world,
        "units": units or None,
        "min_unit_size": min_unit_size,
        "mp_policy": policy,
    }
    try:
        if batch is None:
            subject: Any = elements if model is None else build_on_meta(model)
            estimates = compare(
                subject,
                outer_size=outer or 1,
                optimizer_bytes_per_element=optimizer_bytes,
                num_microbatches=microbatches,
                num_units=num_units,
                offload=_offload(offload, offload_folder),
                **options,
            )
            print_whole(estimates_table(estimates, memory, terminal_width()))
            limit = float("inf") if memory is None else memory * 2**30
            raise typer.Exit(
                0 if any(each.peak_bytes <= limit for each in estimates) else NOTHING_FITS
            )
        assert model is not None
        build = model_builder(model, "--model")
        built = build_on_meta(model)  # converts errors to messages without a traceback
        sizes = None if microbatch_sizes is None else _sizes(microbatch_sizes)
        planning = plan_job(
            build,
            _batch(batch, built, has_sizes=sizes is not None),
            machine=machine,
            memory=None if memory is None else memory * 2**30,
            meshes=None if outer is None else _meshes(world, outer),
            checkpointing=_CHECKPOINTING[recompute],
            microbatch_sizes=sizes,
            microbatches=microbatches,
            loss=default_loss if loss is None else import_function(loss, "--loss"),
            optimizer=None if optimizer is None else import_function(optimizer, "--optimizer"),
            formulas=formulas,
            progress=True,
            offload=AUTO if offload is Where.auto else _offload(offload, offload_folder),
            **options,
        )
    except SimulationError as error:
        raise typer.BadParameter(f"{error}. (--formulas plans without running it.)") from error
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    _print_and_save(planning, figure, html, trace, save)


@app.command("calibrate")
def measure_machine(
    path: Annotated[Path, typer.Argument(help="JSON file for the figures")],
    threads: Annotated[int, typer.Option(help="threads of each rank on a CPU")] = 1,
    seconds: Annotated[float, typer.Option(help="measurement time of each figure")] = 1.0,
    folder: Annotated[
        Path | None, typer.Option(help="of a local disk, to measure that, too")
    ] = None,
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
    machine = calibrate(threads, seconds=seconds, verbose=True, folder=folder)
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
        return meta_model(build)
    except SimulationError as error:
        where = "" if error.file is None else f" (at {error.file}:{error.line})"
        raise ValueError(
            f"--model: expected {spec} to build a model on the meta device without arguments; "
            f"found {error.reason}{where}"
        ) from error
    except TypeError as error:
        raise ValueError(f"--model: {spec}: {error}") from error


def _print_and_save(
    planning: StrategyPlan,
    figure: Path | None,
    html: Path | None,
    trace: Path | None,
    save: Path | None,
) -> None:
    """Print the plan, write the requested files, and exit with a status for whether any candidate
    fits."""
    width = terminal_width()
    print_whole(plan_table(planning.setting, planning.outcomes, width))
    print(wrapped(advice(planning.setting, planning.outcomes, planning.trials), width))
    if save is not None:
        planning.save(save)
    if figure is not None:
        save_figure(planning, figure)
    step = None
    if planning.simulate is not None and (html is not None or trace is not None):
        step = planning.simulate(planning.outcomes[0].candidate)
    if html is not None:
        save_page(planning, html, step)
    if trace is not None and step is not None:
        step.save_trace(trace)
    raise typer.Exit(_status(planning))


def _status(planning: StrategyPlan) -> int:
    if planning.chosen is not None:
        return 0
    return NOTHING_FITS if planning.outcomes[0].lacking else FIT_UNKNOWN


def _batch(spec: str, model: nn.Module, *, has_sizes: bool) -> Any:
    """The ``batch`` argument of ``fe.plan``."""
    shape = batch_shape(spec)
    if shape is None:
        return import_function(spec, "--batch")
    if has_sizes:
        return lambda size: example_inputs(model, (size, *shape[1:]))
    return example_inputs(model, shape)


def _offload(where: Where, folder: Path | None) -> Offload | None:
    """The ``offload`` argument of ``fe.shard``."""
    if where in (Where.auto, Where.none):
        return None
    if where is Where.everything:
        return EVERYTHING
    return Offload(optimizer_state=where.value, folder=None if folder is None else str(folder))


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(each) for each in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"--microbatch-sizes: expected such as 1,2,4; found {text!r}")
    return sizes


def _meshes(world: int, outer: int) -> list[tuple[int, ...]]:
    if outer < 1 or world % outer:
        raise typer.BadParameter(f"--outer: expected a divisor of the {world} ranks; found {outer}")
    return [(world,)] if outer == 1 else [(world,), (outer, world // outer)]


def _given(context: typer.Context) -> set[str]:
    """Names of the options on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name
        for name, source in sources.items()
        if source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
    }


def _refuse(given: set[str], names: Sequence[str], why: str) -> None:
    """Raise an error for options that would have no effect."""
    found = [f"--{name.replace('_', '-')}" for name in names if name in given]
    if found:
        raise typer.BadParameter(f"{', '.join(found)}: {why}")


def _check_outputs(
    figure: Path | None, html: Path | None, trace: Path | None, save: Path | None
) -> None:
    """Check that files can be written, before minutes of planning."""
    outputs = {"--figure": figure, "--html": html, "--trace": trace, "--save": save}
    for option, path in outputs.items():
        if path is not None:
            _check_writable(path, option)
    if figure is not None:
        _check_figure(figure)


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


def _check_figure(path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise typer.BadParameter(
            f"--figure: expected matplotlib installed; found {error}"
        ) from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise typer.BadParameter(
            f"--figure: expected a file that ends with one of {', '.join(known)}; found {path}"
        )


def _dtype(name: str, option: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise typer.BadParameter(
            f"{option}: expected one of {', '.join(DTYPES)}; found {name!r}"
        ) from None


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="fsdp-engine")
