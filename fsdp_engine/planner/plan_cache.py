"""Stores simulated rows on disk, in the user's cache folder.

[Note: What a cached row depends on]
A row is found by the digest of everything that is simulated: the modules of the model with all
their attributes, shapes, dtypes and functions, the shapes of the batch, the functions of the loss
and of the optimizer, the options of ``fe.shard``, the machine, the candidate, and the versions of
fsdp_engine, torch and Python. Values of tensors are part of it if a simulation may read them, as
those of a ``BlockMask``; the tensors of the batch are fake in a simulation and have no values. The
file also lists the source files that were loaded when its rows were written (of this package, of
the model and of the libraries that it uses), with their sizes and modification times; if one of
them differs, the rows are ignored. A process does not use the cache if its own sources changed
after it started, or if the job cannot be described because it has functions or classes defined in
an interpreter, or objects that cannot be pickled.

Values that functions read while they run (the environment, a file, a changed module variable) are
not part of the digest.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import pickle
import platform
import sys
import sysconfig
import tempfile
import time
import types
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_engine.planner.outcome import Outcome

_STARTED_NS = time.time_ns()
_PACKAGE = Path(__file__).parent.parent
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_TORCH = Path(torch.__file__).parent
# An attribute of transformers' GenerationConfig with a hash that differs between processes.
_HASH = "_original_object_hash"
# Number of job files to keep. The oldest are removed.
_MOST_JOBS = 100


def cache_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME/fsdp_engine/plans``, or the same folder in ``~/.cache`` (XDG Base
    Directory Specification)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "fsdp_engine" / "plans"


class JobCache:
    """The cached rows of one job.

    Args:
        job: The digest of everything that the rows share.
        folder: The folder of the cache, with a file for each job.
    """

    def __init__(self, job: str, folder: Path) -> None:
        self._path = folder / f"{job}.json"
        self._rows: dict[str, Any] = {}
        try:
            content = json.loads(self._path.read_text())
            if content["files"] == _stats(content["files"]):
                self._rows = dict(content["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            self._rows = {}  # no file, or a file of another version, which is overwritten

    def get(self, row: str) -> Outcome | None:
        """Returns the outcome of a row; None if the cache does not contain it."""
        content = self._rows.get(row)
        return None if content is None else Outcome.from_plain(content)

    def put(self, row: str, outcome: Outcome) -> None:
        """Write the outcome of a row to the cache, unless a source file has changed since this
        process started. If the file cannot be written, warn."""
        files = loaded_sources()
        if _is_changed_since_start(files):
            return
        self._rows[row] = asdict(outcome)
        try:
            self._write(json.dumps({"files": files, "rows": self._rows}))
        except OSError as error:
            warnings.warn(
                f"cache: expected a writable file; found {error}. Results are not cached",
                stacklevel=2,
            )

    def _write(self, text: str) -> None:
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
            new = Path(file.name)
            try:
                file.write(text)
                file.close()
                new.replace(self._path)
            finally:
                new.unlink(missing_ok=True)
        # A file that another process has deleted meanwhile has the time 0.
        times = _stats(map(str, folder.glob("*.json")))
        for path in sorted(times, key=lambda path: times[path][1])[:-_MOST_JOBS]:
            Path(path).unlink(missing_ok=True)


def cache_of(parts: Mapping[str, Any], folder: Path | None = None) -> JobCache | None:
    """Returns the cache of a job; None if the job cannot be described, or its sources have changed.

    Args:
        parts: Everything that the rows share, by name.
        folder: The folder of the cache. None: :func:`cache_folder`.
    """
    package = sys.modules[__name__.partition(".")[0]]
    versions = (package.__dict__["__version__"], torch.__version__, platform.python_version())
    described = digest({"versions": versions, **parts})
    if described is None or _is_changed_since_start(loaded_sources()):
        return None
    return JobCache(described, folder or cache_folder())


def compiler_settings(model: nn.Module, compiles: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the names of the model's compiled modules, which pickles of modules lack, and the
    settings of torch's compiler if the job uses it.

    Args:
        model: The model before it is sharded.
        compiles: Whether the model's blocks will be compiled.
    """
    names = [name for name, each in model.named_modules() if each._compiled_call_impl is not None]
    if not names and not compiles:
        return [], []
    from torch._dynamo import config as dynamo  # these imports load the compiler
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    # `get_hash()` of these modules is not used, since dynamo's hash depends on the order of sets,
    # which differs between processes.
    configs = (dynamo, functorch, inductor)
    settings = [each.save_config_portable(ignore_private_configs=False) for each in configs]
    for each in settings:
        each.pop("debug_dir_root", None)  # depends on the working directory
    return names, settings


def digest(value: Any) -> str | None:
    """Returns the SHA-256 digest of a value with everything that it contains. Tensors are described
    by their metadata and values, functions by their code. None: a part of the value cannot be
    described."""
    stream = io.BytesIO()
    try:
        _Describer(stream).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError):
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


def metadata_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the shape, layout in memory, type and dtype of a tensor."""
    layout: tuple[Any, ...] = (str(tensor.layout),)
    if tensor.layout == torch.strided:
        layout = tensor.stride(), tensor.storage_offset()
    kind = type(tensor).__qualname__, str(tensor.dtype), tensor.requires_grad
    return tuple(tensor.shape), layout, kind


class _Describer(pickle._Pickler):  # the pickler in C does not pass sets to the override
    """A pickler whose output is only used to compute a digest."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._local_classes: list[type] = []

    def reducer_override(self, value: Any) -> Any:
        """Describe tensors, functions, classes and sets, and leave other objects to pickle."""
        if value is _described:
            return NotImplemented
        if isinstance(value, Tensor):
            return _described, ("tensor", _values_of(value), metadata_of(value))
        if isinstance(value, set | frozenset):
            return _described, ("set", sorted(map(repr, value)))
        if _HASH in getattr(value, "__dict__", {}):
            attributes = {name: each for name, each in vars(value).items() if name != _HASH}
            return _described, ("object", type(value), attributes)
        if isinstance(value, types.FunctionType):
            _check_source(value)
            return _described, ("function", value.__qualname__, *_parts_of(value))
        if isinstance(value, types.MethodType):
            return _described, ("method", value.__self__, value.__func__)
        if isinstance(value, type):
            _check_source(value)
            if "<locals>" in value.__qualname__:
                return _described, ("class", value.__qualname__, *self._parts_of_class(value))
            return _described, ("class", value.__module__, value.__qualname__)
        return NotImplemented

    def _parts_of_class(self, value: type) -> tuple[Any, ...]:
        """Returns the bases and attributes of a local class, which may contain captured values. If
        its functions capture the class itself, as those that call ``super()`` do, they are
        described with a number in place of the class."""
        if value in self._local_classes:
            return (self._local_classes.index(value),)
        self._local_classes.append(value)
        attributes: dict[str, Any] = {}
        for name, each in vars(value).items():
            if isinstance(each, property):
                attributes[name] = each.fget, each.fset, each.fdel
            elif isinstance(each, staticmethod | classmethod):
                attributes[name] = type(each), each.__func__
            elif not isinstance(each, types.GetSetDescriptorType):  # `__dict__`, `__weakref__`
                attributes[name] = each
        return value.__bases__, attributes


def _values_of(tensor: Tensor) -> str | None:
    """Returns the digest of a tensor's values; None if it has no values.

    Raises:
        PicklingError: The tensor is of a subclass, or has no strides.
    """
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise pickle.PicklingError(f"the values of a {type(tensor).__name__} are not described")
    kept = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(ctypes.string_at(kept.data_ptr(), kept.nbytes)).hexdigest()


def _described(*_: object) -> None:
    """Placeholder for a described object in a pickle. It is never called, since pickles are not
    loaded."""


def _check_source(value: Any) -> None:
    """Check that a function or class has a source file.

    Raises:
        PicklingError: The function or class was defined in an interpreter.
    """
    if value.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise pickle.PicklingError(f"{value!r} has no source file")


def _parts_of(function: types.FunctionType) -> tuple[Any, ...]:
    values = [each.cell_contents for each in function.__closure__ or ()]
    return _code_parts(function.__code__), values, function.__defaults__, function.__kwdefaults__


def _code_parts(code: types.CodeType) -> tuple[Any, ...]:
    constants = [
        _code_parts(each)
        if isinstance(each, types.CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return code.co_code, constants, code.co_names, code.co_varnames


def loaded_sources() -> dict[str, list[int]]:
    """Returns the size and modification time of each source file: of loaded modules, except those
    of the standard library and of torch, whose versions are part of the digest; and of all files of
    this package, including tables of figures."""
    files = {str(path) for kind in ("*.py", "*.toml") for path in _PACKAGE.rglob(kind)}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not _is_known(file):
            files.add(str(Path(file).absolute()))
    return _stats(files)


@cache
def _is_known(file: str) -> bool:
    path = Path(file)
    in_library = path.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in path.parts
    return in_library or path.is_relative_to(_TORCH)


def _stats(files: Any) -> dict[str, list[int]]:
    found = {}
    for file in sorted(files):
        try:
            stat = Path(file).stat()
        except OSError:
            found[file] = [0, 0]  # inside an archive, or removed
            continue
        found[file] = [stat.st_size, stat.st_mtime_ns]
    return found


def _is_changed_since_start(files: Mapping[str, list[int]]) -> bool:
    """Returns whether a file is newer than this process, which may have loaded older code."""
    return any(time_ns > _STARTED_NS for _, time_ns in files.values())
