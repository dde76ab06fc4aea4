"""The extensions of this package.

An extension is a folder in ``extensions/``, the folder of its tests in ``tests/extensions/``, and a
line here. It is deleted by deleting these: the rest does not import it, and passes its tests
(``python -m tools.extensions``). A line says which names the package and the engine have from it.
They are imported when they are first used.

An extension meets the kernel at a *seam*: an object that the kernel calls, of which there is a
plain class and the extension's. ``docs/design.md`` lists the seams.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

_FOLDER = "fsdp_engine.extensions"
T = TypeVar("T")


@dataclass(frozen=True)
class Extension:
    """One extension.

    Attributes:
        folder: The name of the folder in ``fsdp_engine/extensions/``.
        names: public names of the package that are imported from the folder.
        codecs: public names of ``fsdp_engine.codecs`` that are imported from the folder.
        methods: attributes of :class:`~.engine.Engine` that are imported from the folder: functions
            whose first argument is the engine, and properties.
        classes: names of classes of the kernel that extensions can replace, and the module and the
            name of the subclass in the folder: see :func:`implementation`.
        places: places of memory beside the device and the host, of which
            :meth:`.Engine.memory_bytes` has the bytes.
        deprecated: deprecated arguments of ``fe.shard`` that select it, and their replacements. The
            folder has a function ``from_argument(value)``, which returns the extensions.
        advice: texts for errors of operations whose names begin so.
        registers: the folder has a function ``register()``, which is called when the engine's
            module is imported.
        files: modules of the package that are part of it, for names that users import from there.
        words: options and arguments by which users ask for it.
    """

    folder: str
    names: Sequence[str] = ()
    codecs: Sequence[str] = ()
    methods: Sequence[str] = ()
    classes: Sequence[tuple[str, str]] = ()
    places: Sequence[str] = ()
    deprecated: Sequence[tuple[str, str]] = ()
    advice: Sequence[tuple[str, str]] = ()
    registers: bool = False
    files: Sequence[str] = ()
    words: Sequence[str] = ()


EXTENSIONS: tuple[Extension, ...] = (
    Extension(
        "activations",
        names=("Checkpointing", "OffloadActivations", "Recompute", "checkpoint_units"),
        deprecated=[
            (
                "checkpointing",
                'extensions=[fe.Recompute()], [fe.Recompute("selective")] or '
                "[fe.OffloadActivations()]",
            )
        ],
        words=("Recompute", "OffloadActivations", "checkpointing="),
    ),
    Extension("adapters", words=("peft",)),
    Extension("arenas", names=("Arenas",), words=("fsdp_double_buffer", "nccl_ub")),
    Extension(
        "checks",
        names=("GradientChecks",),
        words=("check_for_nan_in_grad", "check_for_large_grads"),
    ),
    Extension(
        "conversion",
        classes=[("AppliedFunctions", "dtype_conversion.Conversions")],
        words=("conversion",),
    ),
    Extension(
        "different_modules",
        methods=("together", "ranks_can_differ"),
        advice=[
            ("all-gather", "If ranks use different modules, run the step within engine.together().")
        ],
    ),
    Extension("ema", names=("EMA",)),
    Extension(
        "initial_values",
        classes=[("InitialValues", "compared_values.ComparedValues")],
        words=("initial_values=", '"initial_values"', 'device("meta")', 'device="meta"'),
    ),
    Extension(
        "fp8",
        names=("Float8",),
        codecs=("DecodingCodec", "Float8", "Float8Codec", "ScaledCodec", "ScaledEncoding"),
        words=("fp8_param_gather",),
    ),
    Extension(
        "low_bit_state",
        classes=[("StateFormat", "low_bit_formats.LowBitFormats")],
        registers=True,
        words=("torchao.optim", "bitsandbytes", "FlashAdamW"),
    ),
    Extension(
        "mean_loss",
        methods=("even_batches", "even_steps", "last_mean_loss", "mean_loss", "weighting_losses"),
    ),
    Extension("kept_tensors", classes=[("KeptTensors", "kept_tensors.FoundTensors")]),
    Extension(
        "parameter_guard",
        classes=[("ParameterGuard", "parameter_guard.AssignmentGuard")],
        words=("assign=True",),
    ),
    Extension(
        "offload",
        names=("Offload",),
        methods=("offload",),
        places=("disk",),
        deprecated=[("offload", "extensions=[fe.Offload(...)]")],
        classes=[("StepPlacement", "offloaded_steps.OffloadedSteps")],
        words=("offload=",),
    ),
    Extension(
        "pipelines",
        names=("LateGradients",),
        methods=("microbatches",),
        advice=[
            ("view_as", "fsdp_engine.pipelining.PipelineStage"),
            ("split backward", "fsdp_engine.pipelining.PipelineStage"),
        ],
        files=("pipelining.py",),
        words=("pipeline=", "simulate_pipeline", "pipeline_job", "shard_stages"),
    ),
    Extension(
        "nested_backwards",
        classes=[
            ("Reductions", "reductions.NestedReductions"),
            ("Scheduler", "scheduler.NestedScheduler"),
        ],
    ),
    Extension("reports", methods=("describe", "measure")),
    Extension("replicas", names=("ReplicaReduction",), methods=("set_replica_reduction",)),
    # Before "tensor_hooks": its tensor classes can have such hooks, too.
    Extension(
        "transformer_engine",
        names=("TransformerEngine",),
        codecs=("TransformerEngine", "TransformerEngineCodec"),
        registers=True,
        words=("keep_fp8_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag"),
    ),
    Extension("tensor_hooks", registers=True),
    Extension("unsharded", methods=("is_unsharded", "unsharded")),
    Extension(
        "whole_tensor_optimizers",
        classes=[("WholeTensorSteps", "owned_step.OwnedSteps")],
        words=("whole=True)", "whole=["),
    ),
    Extension(
        "written_weights",
        classes=[
            ("ModelWatch", "written_weights.WrittenWeights"),
            ("UnitWatch", "written_weights.UnitWrites"),
        ],
    ),
    Extension("stall_monitor", registers=True),
)

_FOLDERS = {
    kind: {name: each.folder for each in EXTENSIONS for name in getattr(each, kind)}
    for kind in ("names", "codecs", "methods")
}
_CLASS_OF_NAME = {
    name: f"{each.folder}.{path}" for each in EXTENSIONS for name, path in each.classes
}


def names_of(kind: str) -> Iterator[str]:
    """Returns the names that extensions have.

    Args:
        kind: A field of :class:`Extension`: "names", "codecs" or "methods".
    """
    return iter(_FOLDERS[kind])


def find(kind: str, name: str) -> Any:
    """Returns the object of a name; None: no extension has it.

    Args:
        kind: See :func:`names_of`.
        name: The name.
    """
    folder = _FOLDERS[kind].get(name)
    return folder and getattr(importlib.import_module(f"{_FOLDER}.{folder}"), name)


def find_name(name: str) -> Any:
    """Returns the object of a public name of the package; None: no extension has it."""
    return find("names", name)


def other_places() -> Iterator[str]:
    """Returns the places of memory that extensions have beside the device and the host."""
    return (place for each in EXTENSIONS for place in each.places)


def deprecated_arguments() -> dict[str, str]:
    """Returns the deprecated arguments of ``fe.shard`` that select extensions, with their
    replacements."""
    return dict(chain.from_iterable(each.deprecated for each in EXTENSIONS))


def from_deprecated(argument: str, value: object) -> list[Any]:
    """Returns the extensions that a deprecated argument of ``fe.shard`` selects.

    Args:
        argument: A key of :func:`deprecated_arguments`.
        value: Its value.

    Raises:
        TypeError, ValueError: The value is not valid.
    """
    folder = next(each.folder for each in EXTENSIONS if argument in dict(each.deprecated))
    found: list[Any] = importlib.import_module(f"{_FOLDER}.{folder}").from_argument(value)
    return found


def advice_for(operation: str) -> str:
    """Returns the advice of extensions for the error of an operation of this name."""
    known = chain.from_iterable(each.advice for each in EXTENSIONS)
    return " ".join(text for start, text in known if operation.startswith(start))


def implementation(plain: type[T]) -> type[T]:
    """Returns the class that stands at a seam: that of an extension, else ``plain``."""
    module, _, name = _CLASS_OF_NAME.get(plain.__name__, "").rpartition(".")
    if not module:
        return plain
    found: type[T] = getattr(importlib.import_module(f"{_FOLDER}.{module}"), name)
    return found


def find_module(path: str, needed_by: str | None = None) -> Any:
    """Returns a module of an extension, for interfaces that use more of it than its names; None:
    there is no such extension.

    Args:
        path: such as "conversion.dtype_conversion".
        needed_by: an argument whose value needs the extension.

    Raises:
        ValueError: The value needs an extension that is not there.
    """
    folder = path.partition(".")[0]
    if any(each.folder == folder for each in EXTENSIONS):
        return importlib.import_module(f"{_FOLDER}.{path}")
    if needed_by is not None:
        raise ValueError(
            f"{needed_by}: expected a package with the extension {folder!r}, which this value "
            "needs; found none"
        )
    return None


def register() -> None:
    """Let extensions register what the kernel calls, before the first engine is built."""
    for each in EXTENSIONS:
        if each.registers:
            importlib.import_module(f"{_FOLDER}.{each.folder}").register()
