"""Functions that are one kernel on devices and several kernels on the CPU.

Fake tensors use the CPU's kernels. Where these differ from a device's kernels, autograd would save
the tensors that a CPU saves, and the simulation would count the bytes that a CPU accesses:

    attention with dropout   the CPU keeps the scores of all heads; devices compute them again
    dropout                  the CPU keeps a mask of the input's dtype; devices keep one of bytes
    rms_norm                 the CPU runs several functions in fp32, which keep their inputs;
                             devices keep the input and one number for each row. The simulation
                             runs ``layer_norm`` instead, which keeps two numbers for each row (on
                             the CPU in the input's dtype)

On the CPU ``flex_attention`` has no backward and does not return the largest scores. It checks that
neither is requested; simulations of devices skip these checks.
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
    """Use the kernels of devices for fake tensors in this context. The functions are replaced in
    their modules, since a torch function mode would not see all calls, for example those of a
    checkpointed forward in backward."""
    options = getattr(*_FLEX_OPTIONS)
    checks = {_FLEX_DEVICE: _any_device, _FLEX_OPTIONS: _with_largest_scores(options)}
    stand_ins = {place: for_fake_tensors(place, each) for place, each in _STAND_INS.items()}
    with replaced(stand_ins | checks):
        yield


@contextmanager
def torch_s_kernels() -> Iterator[None]:
    """Undo :func:`device_kernels` in this context, for code that Dynamo traces. Compilers fuse
    these functions on the CPU, too."""
    with replaced({place: getattr(now, "__wrapped__", now) for place, now in _found().items()}):
        yield


# A module, and the name of a function in it.
Place = tuple[Any, str]


def _found() -> dict[Place, Callable[..., Tensor]]:
    return {(module, name): getattr(module, name) for module, name in _STAND_INS}


@contextmanager
def replaced(functions: Mapping[Place, Any]) -> Iterator[None]:
    """Replace functions or other values of modules in this context.

    Args:
        functions: The replacements, by module and name.
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
    """Returns the function at ``place``, wrapped. For fake tensors, the wrapper calls ``stand_in``
    with the function as the first argument."""
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
    """Call attention without dropout, since a device's kernel saves only the generator's state for
    dropout."""
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
    # If dtypes differ, devices run several kernels, too.
    if weight is None or weight.dtype == input.dtype:
        return F.layer_norm(input, normalized_shape, weight, None, eps or _EPSILON)
    return function(input, normalized_shape, weight, eps)


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Accept any device, instead of the check that refuses a backward on the CPU. Dynamo traces
    this function."""
    del query, key, value


def _with_largest_scores(options: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``options``, torch's function that makes kernel options, without its check that
    refuses the largest scores on the CPU. Dynamo traces the returned function."""

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


# Any positive number. Without values the result does not matter.
_EPSILON = 1e-6
# The checks of ``flex_attention`` that are replaced.
_FLEX_DEVICE: Place = (flex, "_validate_device")
_FLEX_OPTIONS: Place = (flex, "_apply_kernel_options")
# Replacements, by the module and name of the original.
_STAND_INS: dict[Place, Callable[..., Tensor]] = {
    (F, "scaled_dot_product_attention"): _attention,
    (F, "dropout"): _dropout,
    (F, "rms_norm"): _rms_norm,
    (torch, "rms_norm"): _rms_norm,
}
