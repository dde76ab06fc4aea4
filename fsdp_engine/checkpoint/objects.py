"""Reads objects that ``torch.save`` wrote into a checkpoint, without running code.

Objects are pickles, which can call any function. Therefore torch's restricted unpickler reads them,
which allows tensors, numbers, texts, containers and dtypes. Arrays and numbers of NumPy, dates,
paths and ``io.BytesIO`` are allowed in addition. Anything else is refused; the error contains its
name.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import re
import sys
from typing import Any

import torch

from fsdp_engine.checkpoint.inert_pickle import RefusedError

_ALLOWED: list[Any] = [
    io.BytesIO,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    pathlib.WindowsPath,
]


def read_object(file: Any, where: str, trust: bool = False) -> Any:
    """Read an object, tensors on the CPU.

    Args:
        file: opened for reading bytes, at its start.
        where: file and entry, for errors.
        trust: allow objects of any class, which may run arbitrary code.

    Raises:
        ValueError: the object needs a class or function that is not allowed, or cannot be read.
    """
    content = file if isinstance(file, io.BytesIO) else io.BytesIO(file.read())
    start = content.tell()
    try:
        if trust:
            return torch.load(content, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals([*_ALLOWED, *_numpy()]):
            return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises errors of any type
        content.seek(start)
        if not trust and (names := _unknown(content, str(error))):
            raise RefusedError(
                f"{where}: expected numbers, texts, tensors and containers of them; found a pickle "
                f"that needs {', '.join(names)}, which could run code. If you know who wrote it, "
                "and trust them, load it with trust=True (--trust)"
            ) from None
        raise ValueError(f"{where}: expected an object; found {_short(error)}") from error


def _unknown(content: io.BytesIO, message: str) -> list[str]:
    """Names in a pickle that are not allowed."""
    try:
        with torch.serialization.safe_globals([*_ALLOWED, *_numpy()]):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(content)
    except Exception:  # damaged, or not in the format of torch.save
        names = []
    return sorted(names) or re.findall(r"(?:GLOBAL|global:?) `?([\w.]+\.\w+)", message)[:1]


def _numpy() -> list[Any]:
    """Functions and classes in pickles of NumPy's arrays and numbers, if NumPy was imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    core = getattr(numpy, "_core", None) or numpy.core
    functions = [core.multiarray._reconstruct, core.multiarray.scalar]
    # NumPy 1 and 2 use different names in pickles.
    aliases = [
        (each, f"numpy.{name}.multiarray.{each.__name__}")
        for each in functions
        for name in ("core", "_core")
    ]
    kinds = "?bBhHiIlLqQefdgFDGSUMm"
    dtypes = dict.fromkeys(type(numpy.dtype(kind)) for kind in kinds)
    return [numpy.ndarray, numpy.dtype, *dtypes, *functions, *aliases]


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
