"""Functions that ``torch.compile`` does not trace."""

from __future__ import annotations

from typing import Any

from torch._C._dynamo import eval_frame

_frames: Any = eval_frame
_SKIP_ALL = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_SKIP_ONE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)


def not_compiled(function: Any) -> Any:
    """Let ``torch.compile`` break the graph at ``function`` and not trace it.

    This is ``torch.compiler.disable`` without an import of the compiler: a mark by which Dynamo
    does not inline the function, and a rule for its code by which neither the function nor its
    callees are traced when it runs.
    """
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    return function


def compiled_within(function: Any) -> Any:
    """As :func:`not_compiled`, but functions that ``function`` calls are compiled."""
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ONE)
    return function
