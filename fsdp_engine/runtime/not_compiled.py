"""Functions that ``torch.compile`` does not trace."""

from __future__ import annotations

from typing import Any

from torch._C._dynamo import eval_frame

_frames: Any = eval_frame
_SKIP_ALL = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_SKIP_ONE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)


def not_compiled(function: Any) -> Any:
    """Make ``torch.compile`` break the graph at ``function`` instead of tracing it.

    This has the effect of ``torch.compiler.disable`` without importing the compiler. An attribute
    of the function keeps Dynamo from inlining it. A rule for the function's code keeps Dynamo from
    tracing the function and its callees when they run.
    """
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    return function


def compiled_within(function: Any) -> Any:
    """Do the same as :func:`not_compiled`, except that the callees of ``function`` may be
    compiled."""
    function._torchdynamo_disable = True
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ONE)
    return function
