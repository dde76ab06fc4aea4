"""Who calls the model, of those who do not tell: seen by their frames."""

from __future__ import annotations

import sys
from typing import NamedTuple

from torch.nn.utils.stateless import _functional_call


class Callers(NamedTuple):
    """See the module docstring.

    Attributes:
        functional_call: ``torch.func.functional_call`` is under way.
        stage: likewise a stage of ``torch.distributed.pipelining``.
    """

    functional_call: bool
    stage: bool


def callers() -> Callers:
    """Who calls the model."""
    functional_call = stage = False
    frame = sys._getframe().f_back
    while frame is not None:
        functional_call = functional_call or frame.f_code is _functional_call.__code__
        stage = stage or frame.f_code.co_name == "forward_maybe_with_nosync"
        frame = frame.f_back
    return Callers(functional_call, stage)
