"""The command line ``fsdp-engine``, also as ``python -m fsdp_engine``.

    fsdp-engine plan --elements 8e9 --world 64 --outer 8 --dtype bf16 --memory 80
    fsdp-engine plan --model my_package.models:build --world 8 --dtype bf16
    fsdp-engine calibrate machine.json
    fsdp-engine checkpoint inspect PATH

``plan`` tells what a rank would hold and send. Nothing is trained or allocated: a model is built on
the meta device. ``calibrate`` measures this machine for ``fe.simulate``. ``checkpoint`` looks into
checkpoints (``checkpoint/command_line.py``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from fsdp_engine.checkpoint.command_line import app as checkpoint_app
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.simulation.calibrate import calibrate
from fsdp_engine.simulation.planner import NOT_INCLUDED, Estimate, compare
from fsdp_engine.terminal import format_bytes, print_whole

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(checkpoint_app, name="checkpoint")


@app.callback()
def _root() -> None:
    """A sharded training engine for PyTorch."""


@app.command()
def plan(
    world: Annotated[int, typer.Option(help="ranks in all")],
    elements: Annotated[
        float | None, typer.Option(help="parameter elements of the model, such as 8e9")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="module:factory, a function without arguments that returns the model"),
    ] = None,
    outer: Annotated[int, typer.Option(help="how many of the ranks are on the outer axis")] = 1,
    dtype: Annotated[str, typer.Option(help="of weights in forward and backward")] = "fp32",
    main_dtype: Annotated[str, typer.Option(help="of the optimizer's weights")] = "fp32",
    grad_dtype: Annotated[str, typer.Option(help="of gradients between microbatches")] = "fp32",
    reduce_dtype: Annotated[
        str | None, typer.Option(help="of gradients on the wire; as --grad-dtype unless given")
    ] = None,
    optimizer_bytes: Annotated[
        float, typer.Option(help="optimizer state, bytes an element: AdamW 8, SGD momentum 4")
    ] = 8,
    microbatches: Annotated[int, typer.Option(help="microbatches of a step")] = 1,
    units: Annotated[
        list[str] | None,
        typer.Option(help="with --model: name patterns of units, such as layers.*"),
    ] = None,
    min_unit_size: Annotated[
        int | None,
        typer.Option(help="with --model: elements below which default units are joined; 0: never"),
    ] = None,
    num_units: Annotated[int, typer.Option(help="with --elements: how many equal units")] = 32,
    memory: Annotated[
        float | None, typer.Option(help="GiB of a rank; shows what is left for activations")
    ] = None,
) -> None:
    """Bytes and traffic of one rank for every strategy."""
    if (elements is None) == (model is None):
        raise typer.BadParameter("expected one of --elements and --model; found both or neither")
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(dtype, "--dtype"),
        main_params_dtype=_dtype(main_dtype, "--main-dtype"),
        main_grads_dtype=_dtype(grad_dtype, "--grad-dtype"),
        reduce_dtype=None if reduce_dtype is None else _dtype(reduce_dtype, "--reduce-dtype"),
    )
    subject: Any = build_on_meta(model) if model is not None else elements
    try:
        estimates = compare(
            subject,
            world_size=world,
            outer_size=outer,
            units=units or None,
            min_unit_size=min_unit_size,
            mp_policy=policy,
            optimizer_bytes_per_element=optimizer_bytes,
            num_microbatches=microbatches,
            num_units=num_units,
        )
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    print_whole(estimates_table(estimates, memory))


@app.command("calibrate")
def measure_machine(
    path: Annotated[Path, typer.Argument(help="where its figures are written, as JSON")],
    threads: Annotated[int, typer.Option(help="of each rank on a CPU")] = 1,
    seconds: Annotated[float, typer.Option(help="how long to measure each figure")] = 1.0,
) -> None:
    """Measure this machine, in half a minute: the ranks of torchrun, else two gloo ranks."""
    machine = calibrate(threads, seconds=seconds, tell=True)
    if os.environ.get("RANK", "0") == "0":
        machine.save(path)
        print(path.read_text(), end="")


def build_on_meta(spec: str) -> nn.Module:
    """The model that ``module:factory`` names, built on the meta device.

    Modules are looked for in the working directory too.

    Raises:
        typer.BadParameter: there is no such module or factory, or it returns no module.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise typer.BadParameter(f"--model: expected module:factory; found {spec!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise typer.BadParameter(
            f"--model: expected a module that can be imported; found {module_name!r} ({error})"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise typer.BadParameter(
            f"--model: expected a function {attribute!r} in {module_name}; found {factory!r}"
        )
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise typer.BadParameter(
            f"--model: expected {spec} to build a model on the meta device without arguments; "
            f"found {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise typer.BadParameter(
            f"--model: expected {spec} to return a torch.nn.Module; found {type(model).__name__}"
        )
    return model


def estimates_table(estimates: Sequence[Estimate], memory_gib: float | None = None) -> Table:
    """A row for each estimate.

    Args:
        estimates: of one model on one number of ranks.
        memory_gib: memory of a rank; adds what is left of it.
    """
    first = estimates[0]
    padding = max(each.padding for each in estimates)
    table = Table(
        title=(
            f"{first.num_elements:,} elements (and at most {padding:,} of padding) on "
            f"{first.outer_size} x {first.inner_size} ranks (outer x inner); bytes of one rank"
        ),
        caption=f"+: for a moment, at most. Sent: in a step, at most. {NOT_INCLUDED}",
        title_justify="left",
        caption_justify="left",
    )
    has_outer = first.outer_size > 1
    table.add_column("strategy", no_wrap=True)
    if has_outer:
        table.add_column("outer", no_wrap=True)
    columns = ["weights", "gradients", "optimizer", "at rest", "+ full", "+ staging", "at most"]
    columns += ["sent inner", "sent outer"] if has_outer else ["sent"]
    if memory_gib is not None:
        columns.append("left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for each in estimates:
        cells = [each.strategy.inner.name]
        if has_outer:
            cells.append(each.strategy.outer.name)
        counts = [each.weight_bytes, each.grad_bytes, each.optimizer_bytes, each.rest_bytes]
        counts += [each.full_bytes, each.staging_bytes, each.peak_bytes, each.inner_traffic_bytes]
        if has_outer:
            counts.append(each.outer_traffic_bytes)
        cells += [format_bytes(count) for count in counts]
        if memory_gib is not None:
            left = memory_gib * 2**30 - each.peak_bytes
            cells.append(format_bytes(left) if left > 0 else f"[red]-{format_bytes(-left)}[/red]")
        table.add_row(*cells)
    return table


def _dtype(name: str, option: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise typer.BadParameter(
            f"{option}: expected one of {', '.join(DTYPES)}; found {name!r}"
        ) from None


def main() -> None:
    """What the console script calls."""
    app(prog_name="fsdp-engine")
