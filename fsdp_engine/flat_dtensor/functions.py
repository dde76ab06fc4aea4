"""The torch functions that FlatDTensor supports, with the implementation of each kind.

    =============  ===========================================  ==================================
    kind           examples                                     implementation
    =============  ===========================================  ==================================
    elementwise    ``add_``, ``lerp``, ``clone``, ``zeros_like``,  run on the slice, wrap the result
                   ``_foreach_mul_``, ``_fused_adamw_``
    reductions     ``sum``, ``mean``, ``vector_norm``, ``max``  reduce the slice, then the scalar
                                                                over the ranks; a plain tensor
    random         ``normal_``, ``uniform_``                    draw the full tensor, keep the slice
    metadata       ``size``, ``requires_grad_``, ``grad``       read from the wrapper
    gathered       ``p @ x``, ``p[0]``, ``norm(dim=1)``         run on the full tensor; a plain
                                                                result (``gathered_functions.py``)
    =============  ===========================================  ==================================

All other functions raise ValueError. Functions are listed by name, because torch's tag for
pointwise functions is set for ``equal`` and ``rrelu``, but not for ``subtract`` and in-place
comparisons (2.11 to 2.13).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from fsdp_engine.comm.pending_steps import PENDING, finish_pending_steps
from fsdp_engine.flat_dtensor.elementwise import convert, copy_, elementwise, foreach, set_masked
from fsdp_engine.flat_dtensor.slices import (
    DRAWS,
    Args,
    Function,
    Handler,
    Kwargs,
    as_gradient,
    check_inplace,
    refuse,
    refuse_random,
    refuses,
    with_full_parameters,
    words,
)

# Each name also stands for `name_`, `special_name`, `_foreach_name` and `_foreach_name_`.
_ELEMENTWISE = words(
    """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip conj_physical copysign
    cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expit expm1 fill fix
    float_power floor floor_divide fmax fmin fmod frac gcd ge gelu greater greater_equal gt
    hardsigmoid hardswish hardtanh heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf
    isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum
    mish mul multiply nan_to_num ne neg negative nextafter not_equal polygamma positive pow rad2deg
    reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc
    sinh softplus softshrink sqrt square sub subtract tan tanh tanhshrink threshold true_divide
    trunc where xlogy
    """
)
# Each name stands for `__name__`, `__rname__` and `__iname__`.
_OPERATORS = words(
    """
    add sub mul div truediv floordiv mod pow and or xor lshift rshift eq ne lt le gt ge neg pos abs
    invert
    """
)
_MAKE_ANOTHER = words(
    """
    clone contiguous float half double bfloat16 int long short byte char bool cpu cuda pin_memory
    zeros_like ones_like empty_like full_like resolve_conj resolve_neg record_stream
    """
)
_FOREACH = words(
    "_foreach_copy_ _foreach_clone _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
)
_METADATA = words(
    """
    size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex is_signed
    element_size get_device untyped_storage retain_grad
    register_hook register_post_accumulate_grad_hook is_same_size is_inference is_conj is_neg
    is_pinned is_shared dim_order _is_view __len__ detach_
    """
)
_RANDOM = words(
    """
    bernoulli rand_like randn_like randint_like dropout alpha_dropout feature_dropout native_dropout
    rrelu
    """
)
_RESHAPING_PROPERTIES = words("T mT H mH real imag")

_call_base = torch._C._disabled_torch_function_impl
_handlers: dict[Function, Handler] = {}


def call(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call ``func`` with arguments that include a tensor of class ``cls``.

    Raises:
        ValueError: ``func`` is not defined for slices.
        RuntimeError: ``func`` needs the full tensor and is called in an optimizer's step.
    """
    handler = handler_of(func)
    if PENDING and handler not in _READ_NO_ELEMENTS:
        finish_pending_steps()
    try:
        return handler(cls, func, args, kwargs)
    except ValueError as error:
        if not refuses(error):
            raise
        full = with_full_parameters(cls, func, args, kwargs)
        if full is None:
            from fsdp_engine.flat_dtensor.gathered_functions import run_gathered

            return run_gathered(cls, func, args, kwargs, error)
    return func(*full[0], **full[1])


def gathers(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Raise the error of :func:`refuse`, which makes :func:`call` run ``func`` on full tensors."""
    refuse(cls, func, args, kwargs)


def handler_of(func: Function) -> Handler:
    """Returns the implementation of ``func``, which is found by name once and then cached."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _classify(func)
    return handler


def _classify(func: Function) -> Handler:
    name = getattr(func, "__name__", "")
    if name in {"__get__", "__set__"}:
        property_name = func.__self__.__name__  # type: ignore[attr-defined]
        if property_name in _RESHAPING_PROPERTIES:
            return gathers
        if property_name == "grad" and name == "__get__":
            return _gradient
        return _metadata if name == "__get__" else _set_metadata
    if name in _SPECIAL:
        return _SPECIAL[name]
    for module, names in _LOADED_LATER.items():
        if name in names:
            loaded = import_module(f"fsdp_engine.flat_dtensor.{module}")
            later: dict[str, Handler] = loaded.HANDLERS
            return later[name]
    if name in _METADATA:
        return _metadata
    if name in _RANDOM:
        return refuse_random
    if name in _MAKE_ANOTHER or name.removeprefix("special_").removesuffix("_") in _ELEMENTWISE:
        return elementwise
    if name in _FOREACH or _foreach_stem(name) in _ELEMENTWISE:
        return foreach
    if name.startswith("__") and name.endswith("__"):
        operator = name[2:-2]
        if operator in _OPERATORS or (operator[0] in "ri" and operator[1:] in _OPERATORS):
            return elementwise
    from fsdp_engine.flat_dtensor import gathered_functions

    return gathers if name in gathered_functions.NAMES else refuse


def _foreach_stem(name: str) -> str:
    return name.removeprefix("_foreach_").removesuffix("_") if name.startswith("_foreach_") else ""


def _metadata(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    return _call_base(func, (cls,), args, kwargs)


def _set_metadata(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    result = _call_base(func, (cls,), args, kwargs)
    if isinstance(args[0], cls) and args[0].backref is not None:
        args[0].backref.notify_attribute_set()
    return result


def _detach(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    detached = args[0].alias()
    return as_gradient(detached) if args[0].is_gradient else detached


def _zero_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    check_inplace(func, args[0])
    args[0]._local_tensor.zero_()
    args[0].zeroed = True  # valid until the next change of the version counter
    return args[0]


def _foreach_zero_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    foreach(cls, func, args, kwargs)
    for tensor in args[0]:
        if isinstance(tensor, cls):
            tensor.zeroed = True


def _where(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``where``. For a condition alone it returns the indices of the full tensor."""
    if len(args) + len(kwargs) == 1:
        (condition,) = (*args, *kwargs.values())
        return torch.nonzero(condition, as_tuple=True)
    return elementwise(cls, func, args, kwargs)


def _gradient(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``Tensor.grad.__get__`` by the property of FlatDTensor."""
    return args[0].grad


def _takes_data(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Returns True, so that ``module.to()`` sets ``.data``, which copies or raises an error."""
    return True


def _no_address(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> int:
    """Returns 0, as for any DTensor, because the wrapper has no memory.

    torch would return the offset of the slice in its flat buffer, which DCP's stager would use as
    an address.
    """
    return 0


# Handlers that do not wait for pending optimizer steps.
_READ_NO_ELEMENTS = {_metadata, _set_metadata, _detach, _gradient, _takes_data, _no_address}

_SPECIAL: dict[str, Handler] = {
    **dict.fromkeys(("to", "type", "type_as"), convert),
    **dict.fromkeys(("detach", "alias"), _detach),
    **dict.fromkeys(("data_ptr", "storage_offset"), _no_address),
    "requires_grad_": _set_metadata,
    "_has_compatible_shallow_copy_type": _takes_data,
    "copy_": copy_,
    "zero_": _zero_,
    "_foreach_zero_": _foreach_zero_,
    "__setitem__": set_masked,
    "where": _where,
}
# Names of functions by the module that implements them. It is imported at the first call.
_LOADED_LATER = {
    "full_reductions": words(
        """
        sum nansum mean count_nonzero max min amax amin any all norm linalg_vector_norm linalg_norm
        _foreach_norm _foreach_max equal allclose _amp_foreach_non_finite_check_and_unscale_
        """
    ),
    "random_values": DRAWS | {"constant_"},
    "special_functions": words(
        """
        view view_as reshape reshape_as expand expand_as flatten ravel view_as_real view_as_complex
        conj new_empty new_zeros new_ones new_full new_tensor item is_nonzero __bool__ __nonzero__
        __float__ __int__ __long__ __index__ __complex__ backward grad
        """
    ),
}
