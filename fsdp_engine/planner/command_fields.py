"""The options of ``fsdp-engine plan``, each declared once, as a field of a dataclass.

The command line builds its parameters from these fields. :class:`~.plan_options.PlanOptions`, the
options of ``fe.plan``, inherits those of :class:`PlanFields`. This module does not import torch, so
that help texts and usage errors are printed without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_engine.planner.command_options import Needs, option
from fsdp_engine.planner.option_values import (
    AUTO,
    OFFLOAD,
    PRESET_NAMES,
    SELECTIVE,
    import_function,
    import_optimizer,
    parsed_bytes,
    parsed_count,
    parsed_degrees,
    parsed_dtype,
    parsed_names,
    parsed_number,
    parsed_prices,
    parsed_sizes,
)
from fsdp_engine.planner.simulation.given_options import GivenOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fsdp_engine.planner.candidates import Activations
    from fsdp_engine.planner.simulation.causal_lm_stages import Stages
    from fsdp_engine.planner.simulation.machine import Machine
    from fsdp_engine.planner.simulation.step_options import MakeOptimizer, Parallelize
    from fsdp_engine.planner.state_places import StatePlaces


_CANDIDATES = "Candidates"
_SIMULATION = "Simulation"


class Where(StrEnum):
    """Where optimizer state is stored between steps. ``everything`` also stores main weights and
    gradients on the host."""

    auto = "auto"
    none = "none"
    host = "host"
    everything = "everything"
    disk = "disk"


class Recompute(StrEnum):
    """How candidates handle the activations of blocks. ``on`` recomputes whole blocks in backward,
    ``selective`` some of their operations, ``off`` nothing, and ``both`` tries off and on.
    ``offload`` stores activations on the host. ``auto`` tries off, selective and on, and also
    offload where it may be the fastest."""

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


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Options of ``plan`` that name the model and the batch."""

    panel: ClassVar[str] = "Model and batch"

    model: str | None = option(
        "module:function that returns the model, or a config.json of transformers", None
    )
    batch: str | None = option(
        "module:function that returns one rank's inputs, or for a model of transformers their "
        "sizes, such as 4x4096; without it activations and times are unknown",
        None,
    )
    elements: float | None = option(
        "instead of a model: its number of parameter elements, such as 8e9; formulas only", None
    )


@dataclass(frozen=True, kw_only=True)
class PlanFields(GivenOptions):
    """Options of ``fe.plan``; :class:`~.plan_options.PlanOptions` describes and checks them."""

    functions: ClassVar[str] = "plan()"
    panel: ClassVar[str] = "Job"

    world_size: int = option("number of ranks of the job", name="world")
    machine: Machine | str = option(
        f"{', '.join(PRESET_NAMES)}, or a file written by calibrate",
        "h100",
        type=str,
        needs=Needs.batch,
    )
    memory: float | None = option(
        "memory limit of a rank in GiB; default: 0.9 of the machine's memory",
        None,
        parse=parsed_bytes,
    )
    meshes: Iterable[Sequence[int]] | None = None
    context_parallel: int | Sequence[int] | str = option(
        "number of ranks that share each sequence (torch's context_parallel), or several numbers "
        "to try, such as 1,8; auto: 1, and for sequences of 32,768 tokens or more the powers of "
        "two that fit a node",
        1,
        type=str,
        shown="1",
        parse=parsed_degrees,
        needs=Needs.simulation,
        panel=_CANDIDATES,
    )
    tensor_parallel: int | Sequence[int] | str = option(
        "number of ranks that share each matrix, by the tp_plan of a model of transformers, or "
        "several numbers to try, such as 1,8; auto: 1, and the powers of two that fit a node",
        1,
        type=str,
        shown="1",
        parse=parsed_degrees,
        needs=Needs.simulation,
        panel=_CANDIDATES,
    )
    parallelize: Parallelize | None = None
    pipeline: int | Sequence[int] | str = option(
        "number of ranks in a pipeline of stages, or several numbers to try, such as 1,4; auto: 1, "
        "and the powers of two up to the number of nodes",
        1,
        type=str,
        shown="1",
        parse=parsed_degrees,
        needs=Needs.simulation,
        panel=_CANDIDATES,
    )
    schedules: str | Sequence[str] = option(
        "pipeline schedules to try, by torch's names, such as 1F1B,ZBVZeroBubble",
        "1F1B",
        type=str,
        parse=lambda text, _: text.split(","),
        needs=Needs.simulation,
        panel=_CANDIDATES,
    )
    stages: Stages | None = None
    stage_loss: Callable[[Any, Any], Tensor] | None = None
    checkpointing: Iterable[Activations] | None = option(
        "recompute whole blocks (on), some operations (selective) or nothing (off) in backward; "
        "both: try off and on; offload: store activations on the host; auto: try off, selective "
        "and on, and with --full also offload where it may be the fastest, unless --offload none",
        None,
        name="recompute",
        type=Recompute,
        shown=Recompute.auto,
        parse=lambda value, _: _CHECKPOINTING[value],
        needs=Needs.simulation,
        panel=_CANDIDATES,
    )
    microbatch_sizes: Sequence[int] | None = option(
        "microbatch sizes to try, such as 1,2,4; a function given as --batch is called with each",
        None,
        type=str | None,
        parse=parsed_sizes,
        needs=Needs.simulation,
    )
    microbatches: int = option("number of microbatches per step", 1)
    global_batch: float | None = option(
        "tokens or samples of a step on all ranks, such as 4M (k: 2^10, M: 2^20); the planner "
        "finds the largest microbatch that fits, and the number of microbatches",
        None,
        type=str | None,
        parse=parsed_count,
        needs=Needs.simulation,
    )
    sequences: Sequence[int] | None = option(
        "sequence lengths to try, such as 4096,8192",
        None,
        name="sequence",
        type=str | None,
        parse=parsed_sizes,
        needs=Needs.simulation,
    )
    quick: bool = option(
        "simulate all candidates, which takes minutes, instead of the likeliest ones",
        False,
        name="full",
        shown=False,
        parse=lambda is_full, _: not is_full,
        needs=Needs.simulation,
        panel=_SIMULATION,
    )
    compile: bool = option(
        "simulate blocks as compiled by torch.compile (block.compile() on each)",
        False,
        needs=Needs.simulation,
        panel=_SIMULATION,
    )
    cache: bool = option(
        "neither read results from the cache folder nor write them",
        False,
        name="no_cache",
        parse=lambda is_off, _: not is_off,
        needs=Needs.simulation,
        panel=_SIMULATION,
    )
    progress: bool = False
    optimizer: MakeOptimizer | None = option(
        "with --batch: a class of torch.optim, such as SGD, or module:function that takes the "
        "parameters; default: AdamW",
        None,
        type=str | None,
        parse=import_optimizer,
        needs=Needs.simulation,
    )
    loss: Callable[[Any], Tensor] | None = option(
        "with --batch: module:function that takes the model's output; default: the output's loss, "
        "its only scalar, or the sum of its first tensor",
        None,
        type=str | None,
        parse=import_function,
        needs=Needs.simulation,
    )
    formulas: bool = option(
        "with --batch: do not run the model; activations, times and whether it fits are unknown",
        False,
        needs=Needs.batch,
        panel=_SIMULATION,
    )
    offload: StatePlaces | str | None = option(
        "store optimizer state on the host or on a disk; everything: also main weights and "
        "gradients on the host; auto: none; with --full or --formulas, if nothing fits, also host, "
        "then everything",
        AUTO,
        type=Where,
        shown=Where.auto,
        panel=_CANDIDATES,
    )


@dataclass(frozen=True, kw_only=True)
class Details:
    """Options of the command ``plan`` that ``fe.plan`` takes in another form, or does not have."""

    panel: ClassVar[str] = "Precision and units"

    outer: int | None = option(
        "number of ranks on the outer axis; default: one axis, and with --batch also nodes x "
        "ranks per node",
        None,
        panel=_CANDIDATES,
    )
    fp8: bool = option(
        "convert linears by torchao, so that they multiply in fp8",
        False,
        needs=Needs.simulation,
        panel=_SIMULATION,
    )
    dtype: torch.dtype = option(
        "dtype of weights in forward and backward, such as bf16 or bfloat16",
        "fp32",
        type=str,
        parse=parsed_dtype,
    )
    main_dtype: torch.dtype = option(
        "dtype of the optimizer's weights", "fp32", type=str, parse=parsed_dtype
    )
    grad_dtype: torch.dtype = option(
        "dtype of gradients between microbatches", "fp32", type=str, parse=parsed_dtype
    )
    reduce_dtype: torch.dtype | None = option(
        "dtype of gradient reductions; default: --grad-dtype",
        None,
        type=str | None,
        parse=parsed_dtype,
    )
    optimizer_bytes: float = option(
        "without --batch: bytes of optimizer state per element; AdamW with fp32 weights: 8",
        8,
        needs=Needs.no_batch,
    )
    units: list[str] | None = option(
        "with --model: name patterns of units, such as layers.*", None, needs=Needs.model
    )
    min_unit_size: int | None = option(
        "with --model: join default units of fewer elements with their neighbours; 0: join none",
        None,
        needs=Needs.model,
    )
    num_units: int = option("with --elements: number of equal units", 32, needs=Needs.elements)
    offload_folder: Path | None = option(
        "with --offload disk: a folder on a local disk", None, panel=_CANDIDATES
    )


@dataclass(frozen=True, kw_only=True)
class QuestionFields:
    """Options that ask questions about a plan. :class:`~.question_output.Questions` answers
    them."""

    panel: ClassVar[str] = "Questions"

    tokens: float | None = option(
        "length of a training run in tokens, such as 15e12; prints its days, GPU hours and MFU",
        None,
        parse=parsed_number,
        needs=Needs.simulation,
    )
    price: tuple[float, ...] | None = option(
        "with --tokens: dollars per GPU hour; one price, or one for each machine of --compare, "
        "such as 2.5,3.2",
        None,
        type=str | None,
        parse=parsed_prices,
        needs=Needs.simulation,
        requires="tokens",
    )
    compare: tuple[str, ...] | None = option(
        "also plan for these machines, such as h100,h200",
        None,
        type=str | None,
        parse=parsed_names,
        needs=Needs.simulation,
    )
    scaling: bool = option(
        "also plan for other numbers of ranks, from 8 to 4,096", False, needs=Needs.simulation
    )
    scaling_figure: Path | None = option(
        "with --scaling: save a figure of it to this file",
        None,
        needs=Needs.simulation,
        requires="scaling",
    )
    checkpoint_bandwidth: float | None = option(
        "bandwidth of all ranks together to storage in GB/s; prints the time to save a checkpoint",
        None,
        parse=parsed_number,
        needs=Needs.simulation,
    )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Options that select the rows that ``plan`` prints and the files that it writes."""

    panel: ClassVar[str] = "Output"

    every: bool = option("print all candidates", False, name="all", needs=Needs.batch)
    figure: Path | None = option("save a figure to this file", None, needs=Needs.batch)
    html: Path | None = option(
        "save a page for a browser to this HTML file", None, needs=Needs.batch
    )
    trace: Path | None = option(
        "write the timeline of the best candidate's step to this file, for ui.perfetto.dev",
        None,
        needs=Needs.simulation,
    )
    save: Path | None = option(
        "save the plan to this JSON file, for fe.StrategyPlan.load", None, needs=Needs.batch
    )
