"""Reads untrusted pickles as data, so that they cannot change any existing object.

A pickle calls the callables that it names, and sets attributes on them. Here each class that it may
name is replaced by a stand-in class that is created for one call, so that a pickle can only change
stand-ins. The caller converts instances of stand-ins to objects, and validates their values.

[Note: Indices and lengths]
CPython's unpickler allocates memory for the largest index of its memo, and for the length of a
string, before it reads the data. Both are numbers of four or eight bytes, so that a pickle of a few
bytes can allocate GiBs. Therefore a first pass checks the opcodes: an index must be below the
number of bytes of the pickle, and a string must end within it.

Objects that ``torch.save`` wrote are read by torch's restricted unpickler, which allows tensors,
numbers, texts, containers and dtypes. Arrays and numbers of NumPy, dates, paths and ``io.BytesIO``
are allowed in addition. Anything else is refused; the error contains its name.
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
    """A pickle names something that could run code."""


class Record:
    """Instance of a stand-in class.

    Attributes:
        kind: the caller's name of the class.
        args: arguments of the constructor.
        state: set by the pickle; None if it sets none.
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
    """Unpickle ``content``.

    Args:
        content: the pickle; bytes after its end are ignored.
        kinds: allowed classes and functions, by module and name; instances and results are
            :class:`Record` objects of this kind. Several may have the same kind.
        constants: allowed immutable objects.
        trust: allow all other names, which are imported and called.

    Raises:
        RefusedError: a name is not allowed; the message is the name.
        Exception: of any type, if the pickle is damaged.
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
    """Create a class with its own functions, because the pickle may change both."""

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
# Bytes of the length that precedes an argument. A negative one fails in the unpickler.
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
    """Pattern of consecutive opcodes with arguments of fixed size: nearly all of a pickle."""
    codes: dict[int, bytes] = {}
    for code, size in _SIZES.items():
        if size >= 0 and code not in (_LONG_BINPUT, _STOP):
            codes[size] = codes.get(size, b"") + re.escape(bytes([code]))
    alternatives = (b"[%s].{%d}" % (each, size) for size, each in codes.items())
    return re.compile(b"(?:%s)*+" % b"|".join(alternatives), re.DOTALL)


_FIXED = _run_of_fixed()


def _check_numbers(content: bytes) -> None:
    """See [Note: Indices and lengths].

    Raises:
        ValueError: an index or a length is out of bounds.
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
            raise ValueError(f"expected lengths and indices up to {end} bytes")


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
