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
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from fsdp_engine.checkpoint.cli import app as checkpoint_app
from fsdp_engine.extras import naming_extra
from fsdp_engine.offload import Offload
from fsdp_engine.planner.candidates import OFFLOAD, SELECTIVE, Activations
from fsdp_engine.planner.command_inputs import (
    batch_shape,
    default_loss,
    example_inputs,
    import_function,
    in_fp8,
    model_builder,
)
from fsdp_engine.planner.comparison import Answers
from fsdp_engine.planner.estimates import compare as compare_estimates
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.machine_changes import changed_machine, named_machines, parsed_changes
from fsdp_engine.planner.page import save_page
from fsdp_engine.planner.plan_request import AUTO, EVERYTHING
from fsdp_engine.planner.planner_tables import estimates_table, plan_table
from fsdp_engine.planner.question_output import Questions
from fsdp_engine.planner.questions import GPU, NODE, parsed_count
from fsdp_engine.planner.strategy_plan import StrategyPlan, advice
from fsdp_engine.planner.strategy_search import plan as plan_job
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.simulation.calibrate import calibrate
from fsdp_engine.simulation.machine import PRESETS, Machine
from fsdp_engine.simulation.simulate import build_meta_module
from fsdp_engine.simulation.simulation_error import SimulationError, check_positive
from fsdp_engine.terminal import print_whole, terminal_width, wrapped

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


class FailureUnit(StrEnum):
    """The part of a machine whose failures ``--mtbf`` counts."""

    gpu = GPU
    node = NODE


@app.callback()
def _root() -> None:
    """A sharded training engine for PyTorch."""


# Options that are only valid with, or without, others.
_OUTPUTS = ("figure", "html", "trace", "save")
_QUESTIONS = (
    *("tokens", "price", "compare", "what_if", "scaling", "scaling_figure"),
    *("checkpoint_bandwidth", "mtbf", "mtbf_of"),
)
_SEARCHES = ("global_batch", "sequence", "quick", "quick_only", "no_cache")
_WITH_BATCH = (
    *("machine", "recompute", "compile", "fp8", "microbatch_sizes", "optimizer", "loss"),
    "formulas",
    *("context_parallel", "tensor_parallel", "pipeline", "schedules"),
    *(*_OUTPUTS, *_QUESTIONS, *_SEARCHES),
)
_WITHOUT_BATCH = ("optimizer_bytes", "num_units")
_OF_A_MODEL = ("units", "min_unit_size")
_OF_A_SIMULATION = (
    *("recompute", "compile", "fp8", "microbatch_sizes", "optimizer", "loss", "trace"),
    *("context_parallel", "tensor_parallel", "pipeline", "schedules"),
    *(*_QUESTIONS, *_SEARCHES),
)


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
    context_parallel: Annotated[
        str,
        typer.Option(
            help="ranks that share each sequence, by torch's context_parallel; several to try, "
            "such as 1,8; auto: all that fit a node, for sequences of 32,768 tokens or more"
        ),
    ] = "1",
    tensor_parallel: Annotated[
        str,
        typer.Option(
            help="ranks that share each matrix, by the plan that a model of transformers has; "
            "several to try, such as 1,8; auto: all that fit a node"
        ),
    ] = "1",
    pipeline: Annotated[
        str,
        typer.Option(
            help="ranks of a pipeline of stages; several to try, such as 1,4; auto: powers of two "
            "up to the number of nodes"
        ),
    ] = "1",
    schedules: Annotated[
        str,
        typer.Option(help="of pipelines, by torch's names, such as 1F1B,ZBVZeroBubble"),
    ] = "1F1B",
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
    global_batch: Annotated[
        str | None,
        typer.Option(
            help="tokens or samples of a step on all ranks, such as 4M (k: 2^10, M: 2^20); finds "
            "the largest microbatch that fits, and the number of microbatches"
        ),
    ] = None,
    sequence: Annotated[
        str | None,
        typer.Option(help="sequence lengths to try, such as 4096,8192"),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="print the plan of the likeliest candidates first, then the full plan"
        ),
    ] = False,
    quick_only: Annotated[
        bool, typer.Option("--quick-only", help="print only that of the likeliest candidates")
    ] = False,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="blocks are compiled by torch.compile (block.compile() on each)"
        ),
    ] = False,
    fp8: Annotated[
        bool,
        typer.Option("--fp8", help="linears multiply in fp8, as torchao converts them"),
    ] = False,
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache", help="simulate rows that are in the cache folder, and keep none there"
        ),
    ] = False,
    tokens: Annotated[
        float | None,
        typer.Option(help="of a training run, such as 15e12: its days, GPU hours and MFU"),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="with --tokens: dollars per GPU hour; one, or one for each of --compare, such as "
            "2.5,3.2"
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="machines to plan for, too, such as h100,h200")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="plan for the machine with other figures, such as outer_bandwidth=0.5x; several "
            "together by commas, several rows by several options; auto: half and twice the compute "
            "and links, for the fastest strategies"
        ),
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="how the time grows from 8 to 4,096 ranks")
    ] = False,
    scaling_figure: Annotated[
        Path | None, typer.Option(help="with --scaling: save a figure of it to this file")
    ] = None,
    checkpoint_bandwidth: Annotated[
        float | None,
        typer.Option(
            help="GB/s to storage of all ranks together: the time of a save, and with --mtbf the "
            "best interval"
        ),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(help="with --checkpoint-bandwidth: mean hours between failures of one GPU"),
    ] = None,
    mtbf_of: Annotated[
        FailureUnit, typer.Option(help="with --mtbf: the part that fails, gpu or node")
    ] = FailureUnit.gpu,
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
    _check_outputs(
        {"figure": figure, "scaling-figure": scaling_figure},
        {"html": html, "trace": trace, "save": save},
    )
    if (offload is Where.disk) != (offload_folder is not None):
        raise typer.BadParameter(
            "--offload-folder: expected with --offload disk; found "
            f"--offload {offload} {'with' if offload_folder else 'without'} it"
        )
    if quick and quick_only:
        raise typer.BadParameter("--quick, --quick-only: expected one of them; found both")
    if global_batch is not None:
        _refuse(given, ("microbatches",), "expected without --global-batch; found with it")
    questions = _questions(
        machine,
        tokens,
        price,
        compare,
        what_if,
        scaling,
        scaling_figure,
        checkpoint_bandwidth,
        mtbf,
        mtbf_of,
        given,
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
            estimates = compare_estimates(
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
        if fp8:
            build = in_fp8(build, "--fp8")
        built = build_on_meta(model)  # converts errors to messages without a traceback
        sizes = None
        if microbatch_sizes is not None:
            sizes = _sizes(microbatch_sizes, "--microbatch-sizes")
        lengths = None if sequence is None else _sizes(sequence, "--sequence")
        contexts: Any = AUTO
        if context_parallel != AUTO:
            contexts = _sizes(context_parallel, "--context-parallel")
        pipelines: Any = AUTO
        if pipeline != AUTO:
            pipelines = _sizes(pipeline, "--pipeline")
        degrees: Any = AUTO
        if tensor_parallel != AUTO:
            degrees = _sizes(tensor_parallel, "--tensor-parallel")
        if outer is not None and AUTO in (pipelines, degrees):
            raise typer.BadParameter(
                "--outer: expected numbers for --tensor-parallel and --pipeline with it; found auto"
            )
        planning = plan_job(
            build,
            _batch(
                batch,
                built,
                has_sizes=sizes is not None or global_batch is not None,
                has_lengths=lengths is not None,
            ),
            machine=machine,
            memory=None if memory is None else memory * 2**30,
            meshes=None if outer is None else _meshes(world, degrees, pipelines, outer),
            checkpointing=_CHECKPOINTING[recompute],
            microbatch_sizes=sizes,
            microbatches=microbatches,
            loss=default_loss if loss is None else import_function(loss, "--loss"),
            optimizer=None if optimizer is None else import_function(optimizer, "--optimizer"),
            formulas=formulas,
            progress=True,
            offload=AUTO if offload is Where.auto else _offload(offload, offload_folder),
            global_batch=None if global_batch is None else parsed_count(global_batch),
            sequences=lengths,
            quick=quick or quick_only,
            cache=not no_cache,
            compile=compile,
            context_parallel=contexts,
            tensor_parallel=degrees,
            pipeline=pipelines,
            schedules=schedules.split(","),
            **options,
        )
        if quick:
            _print(planning)
            print("\nFull plan:")
            planning = planning.full()
        _print(planning)
        answers = None if planning.chosen is None else questions.answer(planning)
    except SimulationError as error:
        raise typer.BadParameter(f"{error}. (--formulas plans without running it.)") from error
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    _save(planning, questions, answers, figure, html, trace, save)


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
    width = terminal_width()
    print_whole(plan_table(planning.setting, planning.outcomes, width))
    print(wrapped(advice(planning.setting, planning.outcomes, planning.trials), width))


def _save(
    planning: StrategyPlan,
    questions: Questions,
    answers: Answers | None,
    figure: Path | None,
    html: Path | None,
    trace: Path | None,
    save: Path | None,
) -> None:
    """Write the requested files, and exit with a status for whether any candidate fits."""
    if save is not None:
        planning.save(save)
    if figure is not None:
        save_figure(planning, figure)
    step = None
    if planning.simulate is not None and (html is not None or trace is not None):
        step = planning.simulate(planning.outcomes[0].candidate)
    if html is not None:
        save_page(planning, html, step, answers, questions)
    if trace is not None and step is not None:
        step.save_trace(trace)
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


def _questions(
    machine: str,
    tokens: float | None,
    price: str | None,
    compare: str | None,
    what_if: list[str] | None,
    scaling: bool,
    scaling_figure: Path | None,
    checkpoint_bandwidth: float | None,
    mtbf: float | None,
    mtbf_of: FailureUnit,
    given: set[str],
) -> Questions:
    """The questions about the plan, checked before it is made."""
    if tokens is None:
        _refuse(given, ("price",), "expected with --tokens; found without")
    if checkpoint_bandwidth is None:
        _refuse(given, ("mtbf",), "expected with --checkpoint-bandwidth; found without")
    if not scaling:
        _refuse(given, ("scaling_figure",), "expected with --scaling; found without")
    if mtbf is None:
        _refuse(given, ("mtbf_of",), "expected with --mtbf; found without")
    numbers = {"tokens": tokens, "checkpoint-bandwidth": checkpoint_bandwidth, "mtbf": mtbf}
    try:
        for name, number in numbers.items():
            if number is not None:
                check_positive(f"--{name}", number, "a number")
        machines = () if compare is None else tuple(compare.split(","))
        prices: list[float | None] = [None]
        if price is not None:
            prices = [float(each) for each in price.split(",")]
            for each in prices:
                check_positive("--price", each, "dollars per GPU hour")
        if len(prices) not in (1, len(machines)):
            raise ValueError(
                f"--price: expected one price, or {len(machines)} for --compare; found {price}"
            )
        changes = tuple(AUTO if each == AUTO else parsed_changes(each) for each in what_if or ())
        for change in changes:
            if not isinstance(change, str):
                changed_machine(Machine.named(machine), change)
        return Questions(
            tokens,
            tuple(prices),
            tuple(name for name, _ in named_machines(machines)),
            changes,
            scaling,
            scaling_figure,
            None if checkpoint_bandwidth is None else 1e9 * checkpoint_bandwidth,
            mtbf,
            mtbf_of.value,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _offload(where: Where, folder: Path | None) -> Offload | None:
    """The ``offload`` argument of ``fe.shard``."""
    if where in (Where.auto, Where.none):
        return None
    if where is Where.everything:
        return EVERYTHING
    return Offload(optimizer_state=where.value, folder=None if folder is None else str(folder))


def _sizes(text: str, option: str) -> list[int]:
    try:
        sizes = [int(each) for each in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"{option}: expected such as 1,2,4; found {text!r}")
    return sizes


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


def _refuse(given: set[str], names: Sequence[str], why: str) -> None:
    """Raise an error for options that would have no effect."""
    found = [f"--{name.replace('_', '-')}" for name in names if name in given]
    if found:
        raise typer.BadParameter(f"{', '.join(found)}: {why}")


def _check_outputs(figures: Mapping[str, Path | None], others: Mapping[str, Path | None]) -> None:
    """Check that files can be written, before minutes of planning. Keys are options' names."""
    for name, path in {**figures, **others}.items():
        if path is not None:
            _check_writable(path, f"--{name}")
    for name, path in figures.items():
        if path is not None:
            _check_figure(path, f"--{name}")


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
