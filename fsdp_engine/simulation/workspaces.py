"""Workspaces that CPU kernels return and their fake versions do not.

oneDNN's LSTM, which torch uses on CPUs, returns a workspace for backward; its fake version returns
an empty one. In training in fp32 the workspace has these parts, each rounded up to pages. They were
determined from the kernel's results for many sizes (``tests/simulation/test_memory.py`` compares):

    gates                              T x B x ld(4 H)
    states of layers, of iterations,
    and gradients of layers            3 times 2 x (T + 1) x B x ld(max(I, H))
    cells and their gradients          2 times 2 x (T + 1) x B x H
    outputs                            T x B x ld(H)

for T steps, batch size B, input size I and hidden size H. ld is the size of a row rounded up to
64 bytes, plus 64 bytes if the result is a multiple of 1,024 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.devices import memory

_PAGE = 4096
_LINE = 16  # numbers of fp32 in 64 bytes


def as_returned(func: Any, args: Sequence[Any], out: Any) -> Any:
    """The result ``out`` of a fake operation ``func(*args)``, with the kernel's workspace."""
    if func is not torch.ops.aten.mkldnn_rnn_layer.default:
        return out
    steps, hidden, keeps = args[0], args[10], args[15]
    if not keeps or steps.dtype != torch.float32:
        return out
    workspace = memory.empty(lstm_workspace(steps, hidden), torch.uint8, steps.device)
    return (*out[:3], workspace)


def lstm_workspace(steps: Tensor, hidden: int) -> int:
    """Bytes of the workspace for an input of shape (T, B, I) and a hidden size."""
    num_steps, rows, width = steps.shape
    states = 2 * (num_steps + 1) * rows
    parts = [num_steps * rows * _padded_row(4 * hidden), num_steps * rows * _padded_row(hidden)]
    parts += 3 * [states * _padded_row(max(width, hidden))] + 2 * [states * hidden]
    return sum(-(-4 * part // _PAGE) * _PAGE for part in parts)


def _padded_row(numbers: int) -> int:
    rounded = -(-numbers // _LINE) * _LINE
    return rounded + _LINE if rounded % 256 == 0 else rounded
