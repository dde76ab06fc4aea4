"""Reads untrusted pickles as data, so that a pickle cannot change any existing object.

A pickle calls the callables that it names, and can set attributes of the objects that it names.
Here each class that a pickle may name is replaced by a stand-in class that is created for one call
of :func:`load`, so that a pickle can only change stand-ins. The caller converts instances of
stand-ins to objects and validates their values.

[Note: Indices and lengths]
CPython's unpickler allocates memory for the largest index of its memo, and for the length of a
string, before it reads the data. Both are numbers of four or eight bytes in the pickle, so that a
pickle of a few bytes can allocate GiBs. Therefore a first pass checks the opcodes: an index must be
below the number of bytes of the pickle, and a string must end within the pickle.

torch's restricted unpickler reads objects that ``torch.save`` wrote. It allows tensors, numbers,
strings, containers and dtypes. Arrays and numbers of NumPy, dates, paths and ``io.BytesIO`` are
allowed in addition. All other classes are refused; the error contains their names.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
import pickletools
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch


class RefusedError(ValueError):
    """A pickle names a class or function that could run code."""


class Record:
    """An instance of a stand-in class.

    Attributes:
        kind: The caller's name of the class.
        args: The arguments of the constructor.
        state: The state that the pickle sets; None if it sets none.
    """

    kind: str
    args: tuple[Any, ...]
    state: Any


def load(
    content: bytes,
    kinds: Mapping[tuple[str, str], str],
    constants: Mapping[tuple[str, str], Any],
    trust: bool = False,
) -> Any:
    """Unpickle ``content`` without running code.

    Args:
        content: The pickle; bytes after its end are ignored.
        kinds: The kind of each allowed class or function, by module and name. Their instances and
            results are :class:`Record` objects of this kind. Several may have the same kind.
        constants: Allowed immutable objects, by module and name.
        trust: Allow all other names, which are imported and called.

    Raises:
        RefusedError: A name is not allowed. The message is the name.
        Exception: The pickle is damaged. The exception can be of any type.
    """
    _check_numbers(content)
    stand_ins = {kind: _stand_in(kind) for kind in kinds.values()}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (kind := kinds.get((module, name))) is not None:
                return stand_ins[kind]
            if (module, name) in constants:
                return constants[module, name]
            if trust:
                return super().find_class(module, name)
            raise RefusedError(f"{module}.{name}")

    return Unpickler(io.BytesIO(content)).load()


def _stand_in(kind_: str) -> type[Record]:
    """Create a new class with new functions, because the pickle may change both."""

    class StandIn(Record):
        kind = kind_
        state = None

        def __new__(cls, *args: Any) -> StandIn:
            made = super().__new__(cls)
            made.args = args
            return made

        def __setstate__(self, state: Any) -> None:
            self.state = state

    return StandIn


_SIZES = {ord(each.code): 0 if each.arg is None else each.arg.n for each in pickletools.opcodes}
# Number of bytes of the length that precedes an argument. The unpickler refuses negative lengths.
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_COUNTED = {code: _LENGTH_BYTES[size] for code, size in _SIZES.items() if size in _LENGTH_BYTES}
_NUM_LINES = {code: 1 for code, size in _SIZES.items() if size == pickletools.UP_TO_NEWLINE}
_NUM_LINES |= {ord(pickle.GLOBAL): 2, ord(pickle.INST): 2}  # module and name
_PUT, _LONG_BINPUT, _STOP = ord(pickle.PUT), ord(pickle.LONG_BINPUT), ord(pickle.STOP)


def _run_of_fixed() -> re.Pattern[bytes]:
    """Returns a pattern of consecutive opcodes with arguments of fixed size. Nearly all opcodes of
    a pickle are of this kind, so the pattern skips them quickly."""
    codes: dict[int, bytes] = {}
    for code, size in _SIZES.items():
        if size >= 0 and code not in (_LONG_BINPUT, _STOP):
            codes[size] = codes.get(size, b"") + re.escape(bytes([code]))
    alternatives = (b"[%s].{%d}" % (each, size) for size, each in codes.items())
    return re.compile(b"(?:%s)*+" % b"|".join(alternatives), re.DOTALL)


_FIXED = _run_of_fixed()


def _check_numbers(content: bytes) -> None:
    """Check the indices and lengths in a pickle. See [Note: Indices and lengths].

    Raises:
        ValueError: An index or a length is out of bounds.
    """
    place, end = 0, len(content)
    while True:
        place = _FIXED.match(content, place).end()  # type: ignore[union-attr]
        if place >= end or (code := content[place]) == _STOP:
            return
        start, index = place + 1, 0
        if code in _COUNTED:
            place = start + _COUNTED[code]
            place += int.from_bytes(content[start:place], "little")
        elif code in _NUM_LINES:
            place = start
            for _ in range(_NUM_LINES[code]):
                place = content.find(b"\n", place) + 1 or end + 1
            index = int(content[start : place - 1]) if code == _PUT else 0
        elif code == _LONG_BINPUT:
            place = start + 4
            index = int.from_bytes(content[start:place], "little")
        else:
            raise ValueError(f"expected an opcode at byte {place}; found {code:#04x}")
        if place > end or index >= end:
            raise ValueError(
                f"expected an argument within {end} bytes, and an index below {end}; found an "
                f"argument that ends at byte {place}, and index {index}"
            )


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
    """Read an object of ``torch.save``, with tensors on the CPU.

    Args:
        file: A file that is open for reading bytes, at its start.
        where: The file and the entry in messages.
        trust: Allow objects of any class, which may run arbitrary code.

    Raises:
        ValueError: The object needs a class or function that is not allowed, or cannot be read.
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
                f"{where}: expected numbers, strings, tensors and containers; found a pickle "
                f"that needs {', '.join(names)}, which could run code. If you know who wrote it, "
                "and trust them, load it with trust=True (--trust)"
            ) from None
        raise ValueError(f"{where}: expected a readable object; found {_short(error)}") from error


def refused_names(content: bytes) -> list[str]:
    """Returns the classes and functions for which :func:`read_object` refuses ``content`` without
    ``trust``."""
    return _unknown(io.BytesIO(content), "")


def _unknown(content: io.BytesIO, message: str) -> list[str]:
    """Returns the names in a pickle that are not allowed."""
    try:
        with torch.serialization.safe_globals([*_ALLOWED, *_numpy()]):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(content)
    except Exception:  # damaged, or not in the format of torch.save
        names = []
    return sorted(names) or re.findall(r"(?:GLOBAL|global:?) `?([\w.]+\.\w+)", message)[:1]


def _numpy() -> list[Any]:
    """Returns the functions and classes in pickles of NumPy's arrays and numbers, if NumPy was
    imported."""
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
