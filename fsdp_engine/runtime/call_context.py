"""Detection of functions that call the model, by the frames of the call stack."""

from __future__ import annotations

import sys
from typing import NamedTuple

from torch.autograd.function import BackwardCFunction
from torch.nn.utils.stateless import _functional_call


class CallContext(NamedTuple):
    """The functions within which the model is called.

    Attributes:
        functional_call: Whether the call is within ``torch.func.functional_call``.
        stage: Whether the call is within the forward of a stage of torch.distributed.pipelining.
    """

    functional_call: bool
    stage: bool


def call_context() -> CallContext:
    """Returns the context of the current call, which is read from the frames of its callers."""
    functional_call = stage = False
    frame = sys._getframe().f_back
    while frame is not None:
        functional_call = functional_call or frame.f_code is _functional_call.__code__
        stage = stage or frame.f_code.co_name == "forward_maybe_with_nosync"
        frame = frame.f_back
    return CallContext(functional_call, stage)


def in_function_of_autograd() -> bool:
    """Returns whether the current call is within the backward of a ``torch.autograd.Function``."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                return True
        frame = frame.f_back
    return False
