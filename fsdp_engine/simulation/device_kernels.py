"""Functions that are one kernel on devices and several on the CPU.

Fake tensors take the CPU's kernels. Where those differ, what autograd keeps would be that of a CPU,
and so would be the bytes that are moved:

    attention with dropout   the CPU keeps the scores of all heads; devices draw them again
    dropout                  the CPU keeps a mask of the input's dtype; devices one of bytes
    rms_norm                 the CPU has functions in fp32 that keep their inputs; devices keep the
                             input and a number for each row, as ``layer_norm``, which is called in
                             its place (it keeps two, on the CPU of the input's dtype)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class DeviceKernels(TorchFunctionMode):
    """Mode in which functions have the kernels of devices."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function, or what stands for it."""
        kwargs = kwargs or {}
        stand_in = _STAND_INS.get(func)
        return func(*args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Without dropout, of which a kernel keeps the state of the random numbers alone."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)


def _dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return F.dropout(input, p, training, inplace)


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    # Devices have a kernel for one dtype, too.
    if weight is None or weight.dtype == input.dtype:
        return F.layer_norm(input, normalized_shape, weight, None, eps or _EPSILON)
    return F.rms_norm(input, normalized_shape, weight, eps)


# Of what tensors without values are divided by; any.
_EPSILON = 1e-6
_STAND_INS: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
