"""Functions that ``torch.compile`` does not trace."""

from __future__ import annotations

from typing import Any

from torch._C._dynamo import eval_frame

_frames: Any = eval_frame
_SKIP_ALL = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_SKIP_ONE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)


def not_compiled(function: Any) -> Any:
    """Make ``torch.compile`` break the graph at ``function`` instead of tracing it.

    This has the effect of ``torch.compiler.disable`` without importing the compiler: an attribute
    tells Dynamo not to inline the function, and a rule for its code prevents that the function and
    its callees are traced when they run.
    """
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    return function


def compiled_within(function: Any) -> Any:
    """As :func:`not_compiled`, but functions that ``function`` calls may be compiled."""
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ONE)
    return function
