"""A trial: the same call in plain torch and on a sharded model, and a verdict on the two outcomes.

plain torch    sharded                          verdict
a value        the same value                   right
a value        an error that says what to do    raises
an error       an error                         does not apply
anything       anything else                    WRONG
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine import FlatDTensor


class Verdict(IntEnum):
    """From harmless to harmful, so that the worst of several is their maximum."""

    DOES_NOT_APPLY = 0
    RIGHT = 1
    RAISES = 2
    WRONG = 3


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    note: str = ""  # the error, or what differs


class Difference(AssertionError):
    """Two values are not the same."""


# An error is clear where it is ours, with "expected" and "found", or one of
# torch's that speaks of the caller's argument and not of an inner one.
_CLEAR = (
    r"expected .*found",
    r"FlatDTensor",
    r"\bshard(ed)?\b",
    r"fe\.\w+|engine\.\w+\(",
    r"requires grad|require grad|requires_grad",
    r"leaf",
    r"invalid combination of arguments",  # names what it got, and what it takes
    r"only supports (a )?0-dimension",
    r"must be \w+, not",
    r"tensor subclass",
)
_UNCLEAR_TYPES = (AssertionError, KeyError, IndexError, UnboundLocalError, RecursionError)


def is_clear(error: BaseException) -> bool:
    """Whether a user can tell from ``error`` what to do instead."""
    if isinstance(error, _UNCLEAR_TYPES):
        return False
    return any(re.search(pattern, str(error), re.DOTALL) for pattern in _CLEAR)


def outcome_of(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What ``call`` returned, or the error that it raised."""
    try:
        return call(), None
    except Exception as error:  # whatever a user may meet
        return None, error


def judge(
    expected: tuple[Any, BaseException | None], found: tuple[Any, BaseException | None]
) -> Outcome:
    """The verdict on what plain torch did and what happened here."""
    (theirs, refused), (ours, error) = expected, found
    if refused is not None:
        if error is not None:
            return Outcome(Verdict.DOES_NOT_APPLY, f"torch: {_text(refused)}")
        return Outcome(Verdict.WRONG, f"accepted, where torch says: {_text(refused)}")
    if error is not None:
        if is_clear(error):
            return Outcome(Verdict.RAISES, _text(error))
        return Outcome(Verdict.WRONG, f"an unclear {_text(error)}")
    try:
        compare(ours, theirs)
    except Difference as difference:
        return Outcome(Verdict.WRONG, str(difference))
    return Outcome(Verdict.RIGHT)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def compare(found: Any, expected: Any, where: str = "result") -> None:
    """Raises Difference unless ``found`` is ``expected``, as far as this rank can see.

    Of a FlatDTensor this rank's slice is compared, which needs no communication.
    """
    if isinstance(expected, Tensor):
        _compare_tensors(found, expected, where)
    elif isinstance(expected, nn.Module):
        _same(isinstance(found, nn.Module), True, f"{where} is a module")
    elif isinstance(expected, Mapping):
        _same(isinstance(found, Mapping), True, f"{where} is a mapping")
        _same(list(map(str, found)), list(map(str, expected)), f"keys of {where}")
        for key, mine in zip(found, expected, strict=True):
            compare(found[key], expected[mine], f"{where}[{mine}]")
    elif isinstance(expected, list | tuple | set | Iterator):
        _same(isinstance(found, list | tuple | set | Iterator), True, f"{where} is a sequence")
        ours, theirs = list(found), list(expected)
        _same(len(ours), len(theirs), f"length of {where}")
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            compare(*pair, f"{where}[{index}]")
    elif isinstance(expected, float):
        _same(isinstance(found, float), True, f"{where} is a float")
        if not math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-6) and found == found:
            raise Difference(f"{where}: {found}, expected {expected}")
    elif isinstance(expected, FunctionType | MethodType):
        _same(callable(found), True, f"{where} can be called")
    elif isinstance(expected, int | str | bytes | bool | torch.dtype | torch.device | None):
        _same(found, expected, where)
    else:
        _same(type(found).__name__, type(expected).__name__, f"type of {where}")


def _same(found: Any, expected: Any, where: str) -> None:
    if found != expected:
        raise Difference(f"{where}: {found!r}, expected {expected!r}"[:300])


def _compare_tensors(found: Any, expected: Tensor, where: str) -> None:
    if not isinstance(found, Tensor):
        raise Difference(f"{where}: {found!r}, expected a tensor"[:300])
    _same(tuple(found.shape), tuple(expected.shape), f"shape of {where}")
    _same(found.dtype, expected.dtype, f"dtype of {where}")
    expected = expected.detach()
    _same(found.is_meta, expected.is_meta, f"device of {where}")
    if expected.is_meta:
        return
    if isinstance(found, FlatDTensor):
        flat = found.flat_placement
        expected = expected.reshape(-1)[flat.start : flat.stop]
        found = found.local
    elif isinstance(found, DTensor):
        found = found.full_tensor()
    found = found.detach()
    if expected.dtype == torch.bool or not expected.dtype.is_floating_point:
        alike = torch.equal(found, expected)
    else:
        alike = torch.allclose(found, expected, rtol=2e-4, atol=2e-6, equal_nan=True)
    if not alike:
        raise Difference(f"{where}: {_short(found)}, expected {_short(expected)}")


def _short(tensor: Tensor) -> str:
    values = [f"{value:.4g}" for value in tensor.reshape(-1)[:4].tolist()]
    return f"[{', '.join(values)}{', ...' if tensor.numel() > 4 else ''}]"
