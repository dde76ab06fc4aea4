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
from typing import Any, TypeVar

_FOLDER = "fsdp_engine.extensions"
T = TypeVar("T")


@dataclass(frozen=True)
class Extension:
    """One extension.

    Attributes:
        folder: of ``fsdp_engine/extensions/``.
        names: public names of the package that are imported from the folder.
        codecs: public names of ``fsdp_engine.codecs`` that are imported from the folder.
        methods: attributes of :class:`~.engine.Engine` that are imported from the folder: functions
            whose first argument is the engine, and properties.
        classes: names of classes of the kernel that extensions can replace, and the module and the
            name of the subclass in the folder: see :func:`implementation`.
        registers: the folder has a function ``register()``, which is called when the package is
            imported.
        files: modules of the package that are part of it, for names that users import from there.
        words: options and arguments by which users ask for it.
    """

    folder: str
    names: Sequence[str] = ()
    codecs: Sequence[str] = ()
    methods: Sequence[str] = ()
    classes: Sequence[tuple[str, str]] = ()
    registers: bool = False
    files: Sequence[str] = ()
    words: Sequence[str] = ()


EXTENSIONS = (
    Extension(
        "activations",
        names=("Checkpointing", "OffloadActivations", "Recompute", "checkpoint_units"),
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
    Extension("different_modules", methods=("together", "ranks_can_differ")),
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
        "mean_loss",
        methods=("even_batches", "even_steps", "last_mean_loss", "mean_loss", "weighting_losses"),
    ),
    Extension(
        "parameter_guard",
        classes=[("ParameterGuard", "parameter_guard.AssignmentGuard")],
        words=("assign=True",),
    ),
    Extension(
        "offload",
        names=("Offload",),
        methods=("offload",),
        classes=[("StepPlacement", "offloaded_steps.OffloadedSteps")],
        words=("offload=",),
    ),
    Extension(
        "pipelines",
        names=("LateGradients",),
        methods=("microbatches",),
        files=("pipelining.py",),
        words=("pipeline=", "simulate_pipeline", "pipeline_job", "shard_stages"),
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
        "written_weights",
        classes=[
            ("ModelWatch", "written_weights.WrittenWeights"),
            ("UnitWatch", "written_weights.UnitWrites"),
        ],
    ),
    Extension("stall_monitor", registers=True),
)

_FOLDER_OF_NAME = {name: each.folder for each in EXTENSIONS for name in each.names}
_FOLDER_OF_CODEC = {name: each.folder for each in EXTENSIONS for name in each.codecs}
_FOLDER_OF_METHOD = {name: each.folder for each in EXTENSIONS for name in each.methods}
_CLASS_OF_NAME = {
    name: f"{each.folder}.{path}" for each in EXTENSIONS for name, path in each.classes
}


def public_names() -> Iterator[str]:
    """Returns the names of the package that extensions have."""
    return iter(_FOLDER_OF_NAME)


def find_name(name: str) -> Any:
    """Returns the object of a public name of the package; None: no extension has it."""
    return _find(_FOLDER_OF_NAME, name)


def codec_names() -> Iterator[str]:
    """Returns the names of ``fsdp_engine.codecs`` that extensions have."""
    return iter(_FOLDER_OF_CODEC)


def find_codec(name: str) -> Any:
    """Returns the object of a name of ``fsdp_engine.codecs``; None: no extension has it."""
    return _find(_FOLDER_OF_CODEC, name)


def method_names() -> Iterator[str]:
    """Returns the attributes of engines that extensions have."""
    return iter(_FOLDER_OF_METHOD)


def find_method(name: str) -> Any:
    """Returns the function or property that is an attribute of engines; None: no extension has
    it."""
    return _find(_FOLDER_OF_METHOD, name)


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
    """Let extensions register what the kernel calls. Called when the package is imported."""
    for each in EXTENSIONS:
        if each.registers:
            importlib.import_module(f"{_FOLDER}.{each.folder}").register()


def _find(folders: dict[str, str], name: str) -> Any:
    folder = folders.get(name)
    return folder and getattr(importlib.import_module(f"{_FOLDER}.{folder}"), name)
