"""Simulated rows on disk, in the user's cache folder.

[Note: What a cached row depends on]
A row is found by the digest of everything that is simulated: the modules of the model with all
their attributes, shapes, dtypes and functions, the shapes of the batch, the functions of the loss
and of the optimizer, the options of ``fe.shard``, the machine, the candidate, and the versions of
fsdp_engine, torch and Python. It also names the source files that were loaded when it was made, of
this package, the model and the libraries that it uses, with their sizes and times; if one of them
differs, its rows are not used. A process whose own sources were changed after it had started uses
no cache, and neither does a job that cannot be described: with functions or classes that were typed
into an interpreter, or objects that cannot be pickled.

Values that functions read while they run (the environment, a file, a module's variable that was
changed) are not part of it.
"""

from __future__ import annotations

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

from fsdp_engine.planner.outcome import Outcome

_STARTED_NS = time.time_ns()
_PACKAGE = Path(__file__).parent.parent
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_TORCH = Path(torch.__file__).parent
# An attribute of transformers' GenerationConfig: its hash, which differs between processes.
_HASH = "_original_object_hash"
# Files of jobs that are kept; the oldest are removed.
_MOST_JOBS = 100


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/fsdp_engine/plans``, else in ``~/.cache`` (XDG Base Directory
    Specification)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "fsdp_engine" / "plans"


class JobCache:
    """The cached rows of one job.

    Args:
        job: The digest of everything that its rows share.
        folder: Contains a file for each job.
    """

    def __init__(self, job: str, folder: Path) -> None:
        self._path = folder / f"{job}.json"
        self._rows: dict[str, Any] = {}
        try:
            content = json.loads(self._path.read_text())
            if content["files"] == _stats(content["files"]):
                self._rows = dict(content["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            self._rows = {}  # none, or of another version: it is written anew

    def get(self, row: str) -> Outcome | None:
        """The outcome of a row; None if it is unknown."""
        content = self._rows.get(row)
        return None if content is None else Outcome.from_plain(content)

    def put(self, row: str, outcome: Outcome) -> None:
        """Write the outcome of a row."""
        files = loaded_sources()
        if _is_changed_since_start(files):
            return
        self._rows[row] = asdict(outcome)
        try:
            self._write(json.dumps({"files": files, "rows": self._rows}))
        except OSError as error:
            warnings.warn(f"cache: rows are not kept: {error}", stacklevel=2)

    def _write(self, text: str) -> None:
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
            file.write(text)
        Path(file.name).replace(self._path)
        every = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in every[:-_MOST_JOBS]:
            path.unlink(missing_ok=True)


def cache_of(parts: Mapping[str, Any], folder: Path | None = None) -> JobCache | None:
    """Returns the cache of a job; None if the job cannot be described, or its sources have changed.

    Args:
        parts: Everything that its rows share, by name.
        folder: None: :func:`cache_folder`.
    """
    package = sys.modules[__name__.partition(".")[0]]
    versions = (package.__dict__["__version__"], torch.__version__, platform.python_version())
    described = digest({"versions": versions, **parts})
    if described is None or _is_changed_since_start(loaded_sources()):
        return None
    return JobCache(described, folder or cache_folder())


def compiler_settings(model: nn.Module, compiles: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the names of the model's compiled modules, which pickles of modules lack, and the
    settings of torch's compiler if it is used.

    Args:
        model: Before its sharding.
        compiles: Its blocks will be compiled.
    """
    names = [name for name, each in model.named_modules() if each._compiled_call_impl is not None]
    if not names and not compiles:
        return [], []
    from torch._dynamo import config as dynamo  # they load the compiler
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    # Not their `get_hash()`: that of dynamo depends on the order of sets, another in each process.
    configs = (dynamo, functorch, inductor)
    settings = [each.save_config_portable(ignore_private_configs=False) for each in configs]
    for each in settings:
        each.pop("debug_dir_root", None)  # in the working directory
    return names, settings


def digest(value: Any) -> str | None:
    """Returns the SHA-256 digest of a value with all that it contains; tensors by their shapes,
    functions by their code. None: a part of it has no description."""
    stream = io.BytesIO()
    try:
        _Describer(stream).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError):
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


class _Describer(pickle._Pickler):  # in Python, since the other does not pass sets to the override
    """Pickles objects for their digest alone."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)

    def reducer_override(self, value: Any) -> Any:
        """Describe tensors, functions, classes and sets."""
        if value is _described:
            return NotImplemented
        if isinstance(value, Tensor):
            shape = (tuple(value.shape), value.stride(), value.storage_offset())
            kind = (type(value).__qualname__, str(value.dtype), value.requires_grad)
            return _described, ("tensor", shape, kind)
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
            if "<locals>" in value.__qualname__:  # its functions may have values of their own
                functions = {
                    name: each
                    for name, each in vars(value).items()
                    if isinstance(each, types.FunctionType)
                }
                return _described, ("class", value.__qualname__, value.__bases__, functions)
            return _described, ("class", value.__module__, value.__qualname__)
        return NotImplemented


def _described(*_: object) -> None:
    """Never called: pickles are not read."""


def _check_source(value: Any) -> None:
    """Raises:
    PicklingError: a function or class has no source file.
    """
    if value.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise pickle.PicklingError(f"{value!r} has no source file")


def _parts_of(function: types.FunctionType) -> tuple[Any, ...]:
    # A cell that contains a class is that of `super()`, which would contain the function.
    cells = [each.cell_contents for each in function.__closure__ or ()]
    values = ["class" if isinstance(each, type) else each for each in cells]
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
    """Sizes and times of the source files of loaded modules, without the standard library and
    torch, whose versions are known, and of all files of this package, with tables of figures."""
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
            found[file] = [0, 0]  # within an archive, or removed
            continue
        found[file] = [stat.st_size, stat.st_mtime_ns]
    return found


def _is_changed_since_start(files: Mapping[str, list[int]]) -> bool:
    """Whether a file is newer than this process, whose code may then be another."""
    return any(time_ns > _STARTED_NS for _, time_ns in files.values())
