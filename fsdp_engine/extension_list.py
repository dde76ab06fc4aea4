"""The extensions of this package.

An extension is a folder in ``extensions/``, the folder of its tests in ``tests/extensions/``, and a
line here. It is deleted by deleting these three: the rest does not import it, and passes its tests
(``python -m tools.extensions``). A line says which names the package and the engine have from it.
They are imported when they are first used.

An extension meets the kernel at a *seam*: an object that the kernel calls, of which there is a
plain class and the extension's. ``docs/design.md`` lists the seams.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_FOLDER = "fsdp_engine.extensions"


@dataclass(frozen=True)
class Extension:
    """One extension.

    Attributes:
        folder: of ``fsdp_engine/extensions/``.
        names: public names of the package that are imported from the folder.
        codecs: public names of ``fsdp_engine.codecs`` that are imported from the folder.
        methods: attributes of :class:`~.engine.Engine` that are imported from the folder: functions
            whose first argument is the engine, and properties.
        registers: the folder has a function ``register()``, which is called when the package is
            imported.
    """

    folder: str
    names: Sequence[str] = ()
    codecs: Sequence[str] = ()
    methods: Sequence[str] = ()
    registers: bool = False


EXTENSIONS = (
    Extension("checks", names=("GradientChecks",)),
    Extension("different_modules", methods=("together", "ranks_can_differ")),
    Extension(
        "fp8",
        names=("Float8",),
        codecs=("DecodingCodec", "Float8", "Float8Codec", "ScaledCodec", "ScaledEncoding"),
    ),
    Extension(
        "mean_loss",
        methods=("even_batches", "even_steps", "last_mean_loss", "mean_loss", "weighting_losses"),
    ),
    Extension("replicas", names=("ReplicaReduction",), methods=("set_replica_reduction",)),
    # Before "tensor_hooks": its tensor classes can have such hooks, too.
    Extension(
        "transformer_engine",
        codecs=("TransformerEngine", "TransformerEngineCodec"),
        registers=True,
    ),
    Extension("tensor_hooks", registers=True),
)

_FOLDER_OF_NAME = {name: each.folder for each in EXTENSIONS for name in each.names}
_FOLDER_OF_CODEC = {name: each.folder for each in EXTENSIONS for name in each.codecs}
_FOLDER_OF_METHOD = {name: each.folder for each in EXTENSIONS for name in each.methods}


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


def register() -> None:
    """Let extensions register what the kernel calls. Called when the package is imported."""
    for each in EXTENSIONS:
        if each.registers:
            importlib.import_module(f"{_FOLDER}.{each.folder}").register()


def _find(folders: dict[str, str], name: str) -> Any:
    folder = folders.get(name)
    return folder and getattr(importlib.import_module(f"{_FOLDER}.{folder}"), name)
