"""Functions that are one kernel on devices and several on the CPU.

Fake tensors take the CPU's kernels. Where those differ, what autograd keeps would be that of a CPU,
and so would be the bytes that are moved:

    attention with dropout   the CPU keeps the scores of all heads; devices draw them again
    dropout                  the CPU keeps a mask of the input's dtype; devices one of bytes
    rms_norm                 the CPU has functions in fp32 that keep their inputs; devices keep the
                             input and a number for each row, as ``layer_norm``, which is called in
                             its place (it keeps two, on the CPU of the input's dtype)

``flex_attention`` has no backward for the CPU, and no largest scores among its results. It checks
this itself, and no check is made of fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex


@contextmanager
def device_kernels() -> Iterator[None]:
    """Context in which these functions of torch have the kernels of devices for fake tensors. They
    are replaced where they are looked up: a mode for functions of torch would not see those that
    other functions call, as backward calls a checkpointed forward."""
    options = getattr(*_FLEX_OPTIONS)
    checks = {_FLEX_DEVICE: _any_device, _FLEX_OPTIONS: _with_largest_scores(options)}
    stand_ins = {place: for_fake_tensors(place, each) for place, each in _STAND_INS.items()}
    with replaced(stand_ins | checks):
        yield


@contextmanager
def torch_s_kernels() -> Iterator[None]:
    """Context without those of :func:`device_kernels`, for code that Dynamo traces: compilers fuse
    functions anyway."""
    with replaced({place: getattr(now, "__wrapped__", now) for place, now in _found().items()}):
        yield


# A module, and the name of a function in it.
Place = tuple[Any, str]


def _found() -> dict[Place, Callable[..., Tensor]]:
    return {(module, name): getattr(module, name) for module, name in _STAND_INS}


@contextmanager
def replaced(functions: Mapping[Place, Any]) -> Iterator[None]:
    """Context in which functions, or other values, of modules are replaced.

    Args:
        functions: By module and name.
    """
    before = {(module, name): getattr(module, name) for module, name in functions}
    try:
        for (module, name), function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)


def for_fake_tensors(place: Place, stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a place that calls ``stand_in``, with itself as the first argument,
    for fake tensors."""
    function = getattr(*place)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_fake = any(isinstance(each, FakeTensor) for each in (*args, *kwargs.values()))
        return stand_in(function, *args, **kwargs) if is_fake else function(*args, **kwargs)

    return call


def _attention(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Without dropout, of which a kernel keeps the state of the random numbers alone."""
    return function(query, key, value, attn_mask, 0.0, *args, **kwargs)


def _dropout(
    function: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return function(input, p, training, inplace)


def _rms_norm(
    function: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    # Devices have a kernel for one dtype, too.
    if weight is None or weight.dtype == input.dtype:
        return F.layer_norm(input, normalized_shape, weight, None, eps or _EPSILON)
    return function(input, normalized_shape, weight, eps)


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """In place of the check that attention on the CPU has no backward. Dynamo traces it."""
    del query, key, value


def _with_largest_scores(options: Callable[..., Any]) -> Callable[..., Any]:
    """``options``, which makes options of kernels, without its check that the CPU returns no
    largest scores. Dynamo traces it."""

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        return_lse: bool,
        kernel_options: Any,
        return_aux: Any = None,
    ) -> Any:
        if return_aux is None or not return_aux.max_scores:
            return options(query, key, value, return_lse, kernel_options, return_aux)
        others = return_aux._replace(max_scores=False)
        found = options(query, key, value, return_lse, kernel_options, others)
        return {**found, "OUTPUT_MAX": True}

    return call


# Of what tensors without values are divided by; any.
_EPSILON = 1e-6
# The checks of ``flex_attention``.
_FLEX_DEVICE: Place = (flex, "_validate_device")
_FLEX_OPTIONS: Place = (flex, "_apply_kernel_options")
# By the module and the name of what they stand for.
_STAND_INS: dict[Place, Callable[..., Tensor]] = {
    (F, "scaled_dot_product_attention"): _attention,
    (F, "dropout"): _dropout,
    (F, "rms_norm"): _rms_norm,
    (torch, "rms_norm"): _rms_norm,
}
