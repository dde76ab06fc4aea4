"""Batched access to autograd attributes of parameters, sharded or plain.

The functions loop in C, because properties of ``FlatDTensor`` take host time and units may have
thousands of small parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine.flat_dtensor.slices import unwrap
from fsdp_engine.flat_dtensor.tensor import FlatDTensor

_NoTorchFunction = torch._C.DisableTorchFunctionSubclass
_tensor_class: Any = Tensor
_get_grad, _set_grad = _tensor_class.grad.__get__, _tensor_class.grad.__set__
_get_requires_grad = _tensor_class.requires_grad.__get__
_set_data = _tensor_class.data.__set__
_get_version = _tensor_class._version.__get__


def gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns ``.grad`` of each parameter."""
    with _NoTorchFunction():
        grads: list[Tensor | None] = list(map(_get_grad, params))
    if DTensor in set(map(type, grads)):  # see FlatDTensor.grad
        grads = [param.grad for param in params]
    return grads


def set_gradients(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set ``.grad`` of each parameter. Gradients must have the slice of their parameter."""
    with _NoTorchFunction():
        deque(map(_set_grad, params, grads), maxlen=0)


def clear_gradients(params: Iterable[Tensor]) -> None:
    """Set ``.grad`` of each parameter to None."""
    set_gradients(params, repeat(None))


def requires_grad_of(params: Sequence[Tensor]) -> list[bool]:
    """Returns ``requires_grad`` of each parameter."""
    with _NoTorchFunction():
        return list(map(_get_requires_grad, params))


def set_contents(param: Tensor, other: Tensor) -> None:
    """Set the memory, dtype, device and placement of ``param`` to those of ``other``.

    ``param`` remains the same object. Both have the same class. ``other`` must not be used
    afterwards, and the gradient of ``param`` must be None.
    """
    with _NoTorchFunction():
        if other.device.type == param.device.type:
            _set_data(param, other.detach())
        else:  # from the meta device: ``.data`` cannot be set to memory of another device type
            torch._C._swap_tensor_impl(param, other.requires_grad_(param.requires_grad))
    for name in ("_local_tensor", "_spec", "_flat"):
        if hasattr(other, name):
            setattr(param, name, getattr(other, name))


def share_attributes(param: nn.Parameter, other: nn.Parameter) -> None:
    """Give ``param`` the attributes that users set on ``other``, now and later, and conversely.

    It has no effect if ``param`` is of a class with attributes of its own.
    """
    if type(param) in (nn.Parameter, DTensor):
        param.__dict__ = other.__dict__


def any_requires_grad(params: Sequence[Tensor]) -> bool:
    """Returns whether any parameter requires grad."""
    with _NoTorchFunction():
        return any(map(_get_requires_grad, params))


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the version counter of each plain tensor."""
    return list(map(_get_version, tensors))


def accumulator_of(param: Tensor) -> Any:
    """Returns the AccumulateGrad node of ``param``, which exists as long as it is referenced.

    For a frozen parameter, it is the node that autograd uses once the parameter is trainable.
    """
    is_frozen = not param.requires_grad
    if is_frozen:
        param.requires_grad_(True)
    with torch.enable_grad():
        view = unwrap(param) if isinstance(param, FlatDTensor) else param.view_as(param)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    if is_frozen:
        param.requires_grad_(False)
    return node
