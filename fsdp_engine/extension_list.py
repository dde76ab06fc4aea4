"""The extensions of this package.

An extension consists of a folder in ``extensions/``, a folder of tests in ``tests/extensions/``,
and an entry in this list. It can be deleted by deleting these three: the rest of the package does
not import it, and passes its tests without it (``python -m tools.extensions``). The entry lists the
names that the extension adds to the package and to the engine. Each name is imported at its first
use.

The kernel (the package without its extensions) calls an extension at a *seam*: an object for which
the kernel has a plain class, and the extension has a class of its own. ``docs/design.md`` lists the
seams.
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
        names: Public names of the package that are imported from the folder.
        codecs: Public names of ``fsdp_engine.codecs`` that are imported from the folder.
        methods: Attributes of :class:`~.engine.Engine` that are imported from the folder: functions
            whose first argument is the engine, and properties.
        classes: Pairs of two names: a class of the kernel, and the subclass that replaces it, as
            "module.Class" within the folder. See :func:`implementation`.
        places: Names of places of memory, in addition to "device" and "host".
            :meth:`.Engine.memory_bytes` returns the bytes that are held there.
        deprecated: Deprecated arguments of ``fe.shard`` that select the extension, and their
            replacements. ``from_argument(value)`` in the folder returns the selected extensions.
        elsewhere: Pairs of two texts: an argument with which another library selects the same
            feature, and the argument of ``fe.shard`` that selects the extension.
        advice: Pairs of a prefix and a text. The text is added to errors of operations whose names
            begin with the prefix.
        registers: Whether the folder has a function ``register()``, which is called when the
            module ``engine`` is imported.
        files: Modules outside of the folder that belong to the extension, because users import
            names from them.
        words: Other texts by which ``python -m tools.extensions`` finds tests that use the
            extension.
    """

    folder: str
    names: Sequence[str] = ()
    codecs: Sequence[str] = ()
    methods: Sequence[str] = ()
    classes: Sequence[tuple[str, str]] = ()
    places: Sequence[str] = ()
    deprecated: Sequence[tuple[str, str]] = ()
    elsewhere: Sequence[tuple[str, str]] = ()
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
        methods=("together", "ranks_can_differ", "will_use"),
        advice=[
            (
                "all-gather",
                "where ranks use different modules, or evaluate different numbers of batches, use "
                "engine.together()",
            ),
            (
                "together()",
                "within engine.together(), call engine.await_ranks() before collectives of your "
                "own",
            ),
        ],
    ),
    Extension("ema", names=("EMA",)),
    Extension("fixed_order_sums", names=("FixedOrderSums",)),
    Extension(
        "initial_values",
        classes=[("InitialValues", "compared_values.ComparedValues")],
        elsewhere=[("sync_module_states", 'initial_values="rank0"')],
        words=("initial_values=", '"initial_values"', 'device("meta")', 'device="meta"'),
    ),
    Extension(
        "fp8",
        names=("Float8",),
        codecs=("DecodingCodec", "Float8", "Float8Codec", "ScaledCodec", "ScaledEncoding"),
        elsewhere=[("fp8", "extensions=[fe.Float8()]")],
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
        advice=[
            (
                name,
                "where ranks train different numbers of batches, use engine.even_batches(loader)",
            )
            for name in ("all-gather", "reduce-scatter", "all-reduce")
        ],
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
        elsewhere=[
            (name, "extensions=[fe.Offload(...)]") for name in ("cpu_offload", "offload_policy")
        ],
        classes=[("StepPlacement", "offloaded_steps.OffloadedSteps")],
        words=("offload=",),
    ),
    Extension(
        "outer_optimizer",
        names=("OuterOptimizer",),
        advice=[
            (
                "exchange of fragment",
                "all replicas call OuterOptimizer.step, and save, equally often",
            )
        ],
        files=("integrations/torchft_outer.py",),
        words=("torchft_outer",),
    ),
    Extension(
        "pipelines",
        names=("LateGradients",),
        methods=("microbatches",),
        advice=[
            ("view_as", "fsdp_engine.pipelining.PipelineStage"),
            ("split backward", "Use fsdp_engine.pipelining.PipelineStage"),
            (
                "delayed weight gradients",
                "To await them, pass extensions=[fe.LateGradients()], or set "
                "delay_wgrad_compute=True in the config",
            ),
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
    Extension("quantized_reduction", names=("QuantizedReduction",)),
    Extension("reports", methods=("describe", "measure")),
    Extension("replicas", names=("ReplicaReduction",), methods=("set_replica_reduction",)),
    # This entry precedes "tensor_hooks": Transformer Engine's tensor classes can also have
    # all-gather hooks, and the first extension that takes a class handles it.
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
    """Returns the names of one kind that extensions provide.

    Args:
        kind: A field of :class:`Extension`: "names", "codecs" or "methods".
    """
    return iter(_FOLDERS[kind])


def find(kind: str, name: str) -> Any:
    """Returns the object that an extension provides under a name; None: no extension does.

    Args:
        kind: The kind of the name, see :func:`names_of`.
        name: The name.
    """
    folder = _FOLDERS[kind].get(name)
    return folder and getattr(importlib.import_module(f"{_FOLDER}.{folder}"), name)


def find_name(name: str) -> Any:
    """Returns the object of a public name of the package; None: no extension provides it."""
    return find("names", name)


def other_places() -> Iterator[str]:
    """Returns the names of places of memory that extensions add to "device" and "host"."""
    return (place for each in EXTENSIONS for place in each.places)


def deprecated_arguments() -> dict[str, str]:
    """Returns the deprecated arguments of ``fe.shard`` that select extensions, with their
    replacements."""
    return dict(chain.from_iterable(each.deprecated for each in EXTENSIONS))


def arguments_elsewhere() -> dict[str, str]:
    """Returns arguments of other libraries, and how to select an extension that does the same."""
    return dict(chain.from_iterable(each.elsewhere for each in EXTENSIONS))


def from_deprecated(argument: str, value: object) -> list[Any]:
    """Returns the extensions that a deprecated argument of ``fe.shard`` selects.

    Args:
        argument: A key of :func:`deprecated_arguments`.
        value: The value of the argument.

    Raises:
        TypeError, ValueError: The value is not valid.
    """
    folder = next(each.folder for each in EXTENSIONS if argument in dict(each.deprecated))
    found: list[Any] = importlib.import_module(f"{_FOLDER}.{folder}").from_argument(value)
    return found


def advice_for(operation: str) -> str:
    """Returns the advice of extensions for errors of the operation named ``operation``."""
    known = chain.from_iterable(each.advice for each in EXTENSIONS)
    return "; ".join(text for start, text in known if operation.startswith(start))


def implementation(plain: type[T]) -> type[T]:
    """Returns the class to use at a seam: the subclass of an extension, else ``plain``."""
    module, _, name = _CLASS_OF_NAME.get(plain.__name__, "").rpartition(".")
    if not module:
        return plain
    found: type[T] = getattr(importlib.import_module(f"{_FOLDER}.{module}"), name)
    return found


def find_module(path: str, needed_by: str | None = None) -> Any:
    """Returns a module of an extension, for code that uses more than the names in the list; None:
    the package does not have the extension.

    Args:
        path: The path of the module within ``extensions/``, such as "conversion.dtype_conversion".
        needed_by: The name of an argument whose value needs the extension. None: the extension is
            optional.

    Raises:
        ValueError: ``needed_by`` is given, and the package does not have the extension.
    """
    folder = path.partition(".")[0]
    if any(each.folder == folder for each in EXTENSIONS):
        return importlib.import_module(f"{_FOLDER}.{path}")
    if needed_by is not None:
        raise ValueError(
            f"{needed_by}: expected the extension {folder!r} to be installed, since this value "
            "needs it; found none"
        )
    return None


def register() -> None:
    """Let extensions register the objects that the kernel calls, before an engine is built."""
    for each in EXTENSIONS:
        if each.registers:
            importlib.import_module(f"{_FOLDER}.{each.folder}").register()
