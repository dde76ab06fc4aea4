"""What kernels on the host return beside what their fake versions know of.

oneDNN's LSTM, which torch takes on CPUs, keeps a workspace for backward, and its fake version an
empty one. In training on fp32 it has these parts, each rounded up to pages, as read off what the
kernel returns for many sizes (``tests/simulation/test_memory.py`` asks it again):

    gates                              T x B x ld(4 H)
    states of layers, of iterations,
    and gradients of layers            3 times 2 x (T + 1) x B x ld(max(I, H))
    cells and their gradients          2 times 2 x (T + 1) x B x H
    outputs                            T x B x ld(H)

for T steps of B rows of I numbers and H hidden ones. ld is a row in multiples of 64 bytes, and one
multiple more where rows would lie multiples of 1,024 bytes apart.
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
    """``out`` of a fake operation ``func(*args)``, with what the kernel keeps."""
    if func is not torch.ops.aten.mkldnn_rnn_layer.default:
        return out
    steps, hidden, keeps = args[0], args[10], args[15]
    if not keeps or steps.dtype != torch.float32:
        return out
    workspace = memory.empty(lstm_workspace(steps, hidden), torch.uint8, steps.device)
    return (*out[:3], workspace)


def lstm_workspace(steps: Tensor, hidden: int) -> int:
    """Bytes for the input ``steps``, (steps, rows, numbers), and so many hidden numbers."""
    num_steps, rows, width = steps.shape
    states = 2 * (num_steps + 1) * rows
    parts = [num_steps * rows * _row(4 * hidden), num_steps * rows * _row(hidden)]
    parts += 3 * [states * _row(max(width, hidden))] + 2 * [states * hidden]
    return sum(-(-4 * part // _PAGE) * _PAGE for part in parts)


def _row(numbers: int) -> int:
    rounded = -(-numbers // _LINE) * _LINE
    return rounded + _LINE if rounded % 256 == 0 else rounded
