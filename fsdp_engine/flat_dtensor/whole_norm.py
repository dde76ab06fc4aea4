"""Norms of sharded tensors: plain values, which also answer what DTensors are asked.

Where a DTensor's norm is partial, or has placements, scripts ask it for ``full_tensor()`` before
they log it. Ours is that of the whole tensor already, the same on all ranks, and says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What makes one norm of many (``torch.nn.utils.get_total_norm``); everything else gives plain ones.
_KEEPS = (torch.stack, torch.linalg.vector_norm, Tensor.to)


class WholeNorm(Tensor):
    """See the module docstring."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain_kwargs = {key: _plain(value) for key, value in (kwargs or {}).items()}
        result = func(*map(_plain, args), **plain_kwargs)
        return whole(result) if func in _KEEPS and type(result) is Tensor else result

    def full_tensor(self) -> Tensor:
        """The value: it is the whole tensor's."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _plain(value: Any) -> Any:
    if isinstance(value, WholeNorm):
        return value.full_tensor()
    if isinstance(value, (list, tuple)) and any(isinstance(each, WholeNorm) for each in value):
        return type(value)(map(_plain, value))
    return value


def whole(norm: Tensor) -> Tensor:
    """``norm``, with the same memory and graph, as one that answers."""
    return norm.as_subclass(WholeNorm)
