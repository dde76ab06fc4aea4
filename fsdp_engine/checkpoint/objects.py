"""Objects of a checkpoint: what ``torch.save`` wrote, read without running code.

They are pickles, which can call whatever they name. So they are read by torch's own restricted
unpickler, which knows tensors, numbers, texts, containers and dtypes; here arrays and numbers of
NumPy, dates, paths and bytes in memory besides. Anything else is refused by its name.
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
    """An object as ``torch.save`` wrote it, tensors on the CPU.

    Args:
        file: opened for reading bytes, at its start.
        where: file and entry, for errors.
        trust: whoever wrote it may run code here: it may be of any class.

    Raises:
        ValueError: it names something that is not known to be harmless, or cannot be read.
    """
    content = file if isinstance(file, io.BytesIO) else io.BytesIO(file.read())
    start = content.tell()
    try:
        if trust:
            return torch.load(content, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals([*_ALLOWED, *_numpy()]):
            return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises whatever the bytes make it do
        content.seek(start)
        if not trust and (names := _unknown(content, str(error))):
            raise RefusedError(
                f"{where}: expected numbers, texts, tensors and containers of them; found a pickle "
                f"that needs {', '.join(names)}, which could run code. If you know who wrote it, "
                "and trust them, load it with trust=True (--trust)"
            ) from None
        raise ValueError(f"{where}: expected an object; found {_short(error)}") from error


def _unknown(content: io.BytesIO, message: str) -> list[str]:
    """What a pickle names that is not allowed."""
    try:
        with torch.serialization.safe_globals([*_ALLOWED, *_numpy()]):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(content)
    except Exception:  # it is damaged, or of a form of its own
        names = []
    return sorted(names) or re.findall(r"(?:GLOBAL|global:?) `?([\w.]+\.\w+)", message)[:1]


def _numpy() -> list[Any]:
    """What arrays and numbers of NumPy are made of, if anybody has imported it."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    core = getattr(numpy, "_core", None) or numpy.core
    made = [core.multiarray._reconstruct, core.multiarray.scalar]
    # NumPy 1 and 2 write them by different names.
    aliases = [
        (each, f"numpy.{name}.multiarray.{each.__name__}")
        for each in made
        for name in ("core", "_core")
    ]
    kinds = "?bBhHiIlLqQefdgFDGSUMm"
    dtypes = dict.fromkeys(type(numpy.dtype(kind)) for kind in kinds)
    return [numpy.ndarray, numpy.dtype, *dtypes, *made, *aliases]


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
