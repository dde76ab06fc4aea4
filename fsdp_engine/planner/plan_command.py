"""Runs the command ``plan``: parses its options, prints the plan and writes its files."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from fsdp_engine import terminal
from fsdp_engine.kernel_interface import MixedPrecisionPolicy, Options, allocator
from fsdp_engine.planner.command_fields import Details, Inputs, Outputs, PlanFields, Where
from fsdp_engine.planner.command_inputs import (
    batch_shape,
    default_loss,
    example_inputs,
    in_fp8,
    model_builder,
)
from fsdp_engine.planner.command_options import parsed
from fsdp_engine.planner.estimates import compare as compare_estimates
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.option_values import AUTO, import_function
from fsdp_engine.planner.page import save_page
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.planner_tables import estimates_table, plan_table
from fsdp_engine.planner.question_output import Questions
from fsdp_engine.planner.simulation.simulate import build_meta_module
from fsdp_engine.planner.simulation.simulation_error import SimulationError
from fsdp_engine.planner.state_places import KIND_OF_OFFLOADED, StatePlaces, make_offload
from fsdp_engine.planner.strategy_plan import StrategyPlan, advice
from fsdp_engine.planner.strategy_search import plan as plan_job

# Exit statuses: no candidate fits; it is unknown whether one fits.
NOTHING_FITS, FIT_UNKNOWN = 3, 4
# Number of rows of the table without --all.
_MOST_ROWS = 8


def run_plan(values: Mapping[str, Any]) -> None:
    """Plan, print the plan, write files, and exit with a status that says whether a candidate fits.

    Args:
        values: The values of all options, by name.

    Raises:
        typer.BadParameter: An option is invalid, or the model cannot be simulated.
    """
    try:
        inputs, outputs = Inputs(**parsed(Inputs, values)), Outputs(**parsed(Outputs, values))
        details = Details(**parsed(Details, values))
        questions = Questions(**parsed(Questions, values))
        options = parsed(PlanFields, values)
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
        _print(planning, every=outputs.every)
        if planning.chosen is not None:
            questions.answer(planning)
    except SimulationError as error:
        raise typer.BadParameter(
            f"{error}. Use --formulas to plan without running the model."
        ) from error
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    _save(planning, outputs)


def _print_estimates(inputs: Inputs, options: Mapping[str, Any], details: Details) -> None:
    """Print a table of estimates by formulas, and exit with a status that says whether one fits."""
    subject: Any = inputs.elements if inputs.model is None else build_on_meta(inputs.model)
    offload = options["offload"]
    estimates = compare_estimates(
        subject,
        world_size=options["world_size"],
        outer_size=1 if details.outer is None else details.outer,
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


def _plan(inputs: Inputs, options: dict[str, Any], details: Details) -> StrategyPlan:
    """Make a plan for the given batch, by simulations unless ``--formulas`` is given."""
    assert inputs.model is not None
    assert inputs.batch is not None
    build = model_builder(inputs.model, "--model")
    if details.fp8:
        build = in_fp8(build, "--fp8")
    built = build_on_meta(inputs.model)  # turns errors into messages without a traceback
    degrees, pipelines = options["tensor_parallel"], options["pipeline"]
    if details.outer is not None:
        if AUTO in (degrees, pipelines):
            raise ValueError(
                "--outer: expected numbers for --tensor-parallel and --pipeline with it; found auto"
            )
        options["meshes"] = _meshes(options["world_size"], degrees, pipelines, details.outer)
    options["loss"] = options["loss"] or default_loss
    if options["formulas"]:
        options["quick"] = False  # formulas take no time
    asked = PlanOptions(**options, progress=True)
    batch = _batch(
        inputs.batch,
        built,
        has_sizes=asked.microbatch_sizes is not None or asked.global_batch is not None,
        has_lengths=asked.sequences is not None,
    )
    return plan_job(build, batch, asked)


def build_on_meta(spec: str) -> nn.Module:
    """Build a model on the meta device; see
    :func:`~fsdp_engine.planner.command_inputs.model_builder`.

    Raises:
        ValueError: The model cannot be built on the meta device without arguments.
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


def _print(planning: StrategyPlan, *, every: bool) -> None:
    """Print the recommendation, the call that follows it, and the table of the best candidates."""
    width = terminal.terminal_width()
    print(terminal.wrapped(advice(planning.setting, planning.outcomes, planning.trials), width))
    if planning.chosen is not None and planning.chosen.candidate.is_data_parallel:
        print(f"\n{textwrap.indent(shard_call(planning), '    ')}\n")
    shown = planning.outcomes if every else planning.outcomes[:_MOST_ROWS]
    terminal.print_whole(plan_table(planning.setting, shown, width))
    if left := len(planning.outcomes) - len(shown):
        print(f"--all prints {left} more candidates.")


def shard_call(planning: StrategyPlan) -> str:
    """Returns the call of ``fe.shard`` that uses the chosen candidate, as Python code."""
    given = planning.arguments()
    is_on_two_axes = len(given["mesh"]) == 2
    texts = [f"mesh={tuple(given['mesh'])}"] if is_on_two_axes else []
    texts.append(f"strategy={given['strategy']!r}")
    if is_on_two_axes:
        texts.append(f"outer_strategy={given['outer_strategy']!r}")
    if given.get("units"):
        texts.append(f"units={given['units']!r}")
    # The plan assumes a model in fp32, so fp32 is the default of each dtype.
    for name, default in (("mp_policy", torch.float32), ("options", None)):
        if name in given and (changed := _changed(given[name], default)):
            texts.append(f"{name}={_constructor(given[name], changed)}")
    if extensions := [_constructor(each, _changed(each)) for each in given["extensions"]]:
        texts.append(f"extensions=[{', '.join(extensions)}]")
    lines = "".join(f"    {each},\n" for each in ["model", *texts])
    return f"engine = fe.shard(\n{lines})".replace("'", '"')


def _changed(value: Any, default: Any = None) -> dict[str, Any]:
    """Returns the fields whose values are neither their own default, nor None, nor ``default``."""
    fields = {each.name: each.default for each in dataclasses.fields(value) if each.init}
    found = {name: getattr(value, name) for name in fields}
    return {name: each for name, each in found.items() if each not in (fields[name], None, default)}


def _constructor(value: Any, arguments: Mapping[str, Any]) -> str:
    texts = ", ".join(f"{name}={each!r}" for name, each in arguments.items())
    return f"fe.{type(value).__name__}({texts})"


def _save(planning: StrategyPlan, outputs: Outputs) -> None:
    """Write the requested files, and exit with a status that says whether a candidate fits."""
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
    elif outputs.trace is not None:
        typer.echo(
            "--trace: expected a plan by simulations; found one by formulas, which have no "
            f"timeline. {outputs.trace} was not written.",
            err=True,
        )
    raise typer.Exit(_status(planning))


def _status(planning: StrategyPlan) -> int:
    if planning.chosen is not None:
        return 0
    return NOTHING_FITS if planning.outcomes[0].lacking else FIT_UNKNOWN


def _batch(spec: str, model: nn.Module, *, has_sizes: bool, has_lengths: bool) -> Any:
    """Returns the ``batch`` argument of ``fe.plan``."""
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
    """Returns the ``offload`` argument of ``fe.plan``."""
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
    """Returns the meshes to try for the numbers of ranks of tensor and pipeline parallelism. Pairs
    of numbers that do not divide the ranks are left out, as in :func:`plan_job`."""
    meshes: list[tuple[int, ...]] = []
    for taken in [degree * pipeline for degree in degrees for pipeline in pipelines]:
        if world % taken:
            continue
        count = world // taken
        if outer < 1 or count % outer:
            raise typer.BadParameter(
                f"--outer: expected a divisor of the {count} ranks; found {outer}"
            )
        meshes += [(count,)] if outer == 1 else [(count,), (outer, count // outer)]
    return list(dict.fromkeys(meshes))
