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

All other functions raise ValueError. Functions are listed by name because torch's tag for pointwise
functions includes ``equal`` and ``rrelu``, and lacks ``subtract`` and every in-place comparison
(2.11 to 2.13).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fsdp_engine.comm.pending_steps import PENDING, finish_pending_steps
from fsdp_engine.flat_dtensor import full_reductions
from fsdp_engine.flat_dtensor.elementwise import convert, copy_, elementwise, foreach, set_masked
from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement
from fsdp_engine.flat_dtensor.parameter_access import check_leads_to_slices
from fsdp_engine.flat_dtensor.random_values import DRAWS, constant_, draw_
from fsdp_engine.flat_dtensor.slices import (
    Args,
    Function,
    Handler,
    Kwargs,
    as_gradient,
    check_gradient,
    check_inplace,
    refusal,
    refuse,
    refuse_random,
    refuses,
    rewrap,
    unwrap,
    with_full_parameters,
    words,
)

# Including the forms `name_`, `special_name`, `_foreach_name` and `_foreach_name_`.
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
# Each as `__name__`, `__rname__`, `__iname__`.
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
    """Call ``func`` with arguments of which at least one is a ``cls``.

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
    """Raises like :func:`refuse`; :func:`call` then runs the function on full tensors."""
    refuse(cls, func, args, kwargs)


def handler_of(func: Function) -> Handler:
    """The implementation of ``func``; looked up by name once, then by the function itself."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _classify(func)
    return handler


def _classify(func: Function) -> Handler:
    name = getattr(func, "__name__", "")
    if name in {"__get__", "__set__"}:
        owner = func.__self__.__name__  # type: ignore[attr-defined]
        if owner in _RESHAPING_PROPERTIES:
            return gathers
        if owner == "grad" and name == "__get__":
            return _gradient
        return _metadata if name == "__get__" else _set_metadata
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name in _METADATA:
        return _metadata
    if name in DRAWS:
        return draw_
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
    args[0].zeroed = True  # after the change: valid until the next change
    return args[0]


def _foreach_zero_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    foreach(cls, func, args, kwargs)
    for tensor in args[0]:
        if isinstance(tensor, cls):
            tensor.zeroed = True


def _view(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``view``, ``reshape`` etc. to the same shape; ``view(dtype)`` of equal item size."""
    tensor, *target = args
    if not isinstance(tensor, cls):  # plain.view_as(flat)
        return getattr(tensor, func.__name__.removesuffix("_as"))(*(t.shape for t in target))
    shape = tuple(tensor._flat.shape)
    target = [*target, *kwargs.values()]
    if target and isinstance(target[0], torch.dtype):
        if target[0].itemsize != tensor.dtype.itemsize:
            raise refusal(cls, func, args, "changes the number of elements")
        return elementwise(cls, func, args, kwargs)
    if func.__name__.endswith("_as"):
        if target[0] is tensor and tensor.is_leaf and tensor.requires_grad:
            # torch finds the AccumulateGrad node this way, but no backward reaches this one.
            why = "looks for this parameter in the graph, which contains the full parameter"
            instead = "register_post_accumulate_grad_hook, or fsdp_engine.pipelining.PipelineStage"
            raise refusal(cls, func, args, f"{why} (use {instead})")
        target = list(target[0].shape)
    elif len(target) == 1 and not isinstance(target[0], int | Tensor):
        target = list(target[0])
    if func.__name__ in {"flatten", "ravel"}:
        target = [-1]
    if func.__name__ in {"expand", "expand_as"} and len(target) == len(shape):
        target = [mine if size == -1 else size for size, mine in zip(target, shape, strict=True)]
    elif -1 in target and math.prod(shape):
        known = math.prod(size for size in target if size != -1)
        target = [math.prod(shape) // known if size == -1 else size for size in target]
    if tuple(target) != shape:
        raise refusal(cls, func, args, f"changes the shape to {tuple(target)}")
    return tensor.contiguous() if tensor.requires_grad else _detach(cls, func, args, kwargs)


def _view_as_real(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Views complex elements as pairs of real ones, as optimizers do."""
    (tensor,) = (*args, *kwargs.values())
    return rewrap(cls, func(unwrap(tensor)).reshape(-1), tensor._flat.of_parts)


def _view_as_complex(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    (tensor,) = (*args, *kwargs.values())
    flat: FlatPlacement | None = tensor._flat.of_numbers
    if flat is None:
        raise refusal(cls, func, tensor, "would combine components of one number from two ranks")
    return rewrap(cls, func(unwrap(tensor).view(-1, 2)), flat)


def _conj(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A copy: the conjugate flag of a slice would not be visible on the FlatDTensor."""
    return elementwise(cls, torch.conj_physical, args, kwargs)


def _new(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``new_zeros`` etc.: a FlatDTensor for the same shape, else a plain tensor."""
    tensor, *rest = args
    local, flat = tensor._local_tensor, tensor._flat
    size = kwargs.pop("size", None)
    if size is None and func.__name__ == "new_full":
        size, *rest = rest
    elif size is None:
        size, rest = (
            (rest, []) if not rest or isinstance(rest[0], int | Tensor) else (rest[0], rest[1:])
        )
    if tuple(size) != tuple(flat.shape):
        return func(local, tuple(size), *rest, **kwargs)
    return cls._wrap(func(local, (flat.numel,), *rest, **kwargs), flat)


def _gradient(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``Tensor.grad.__get__``: calls the property of FlatDTensor instead."""
    return args[0].grad


def _takes_data(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Lets ``module.to()`` set ``.data``, which copies, or raises an error."""
    return True


def _no_address(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> int:
    """Returns 0, as for any DTensor: the wrapper has no memory. torch would return the offset of
    the slice in its flat buffer, which DCP's stager would use as an address."""
    return 0


def _new_tensor(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], cls) and any(isinstance(each, cls) for each in args[1:]):
        raise refusal(cls, func, args)  # it would read element by element
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _item(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``item``, ``bool()`` etc. of a tensor of one element. Collective."""
    if math.prod(args[0]._flat.shape) != 1:
        raise refusal(cls, func, args, "needs a tensor of one element")
    return func(args[0].full_tensor(), *args[1:], **kwargs)


def _backward(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> None:
    inputs = kwargs.get("inputs")
    flat = [
        each
        # torch 2.11 passes on what the caller gave: a tensor or any sequence; torch 2.13 a tuple.
        for each in ((inputs,) if isinstance(inputs, Tensor) else inputs or ())
        if isinstance(each, cls)
    ]
    if flat:
        # Modules compute with full parameters; the graph contains none of these tensors.
        names = ", ".join(each._flat.name or str(tuple(each.shape)) for each in flat[:4])
        raise ValueError(
            f"backward: expected no sharded parameters in inputs=; found {names}. Omit inputs= "
            "and call requires_grad_(False) on parameters that need no gradient"
        )
    tensor, *rest = args
    if not isinstance(tensor, cls):  # torch.autograd.backward, of one tensor or several
        tensors = (tensor,) if isinstance(tensor, Tensor) else tuple(tensor)
        if len(tensors) != 1 or not isinstance(tensors[0], cls):
            raise refusal(cls, func, args, "of several tensors (sum the losses)")
        tensor, kwargs = tensors[0], dict(kwargs)
        gradients = kwargs.pop("grad_tensors", None) or (rest[0] if rest else None)
        rest = [gradients[0] if isinstance(gradients, list | tuple) else gradients]
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
    gradient = rest[0] if rest else kwargs.get("gradient")
    if gradient is None and tensor._flat.shape:
        raise refusal(
            cls, func, args, "needs a gradient argument, since the tensor is not a scalar"
        )
    if gradient is not None and not isinstance(gradient, cls):
        raise refusal(cls, func, args, "needs a gradient of the same slice")
    local = unwrap(tensor)
    seed = torch.scalar_tensor(1.0, dtype=local.dtype, device=local.device).expand_as(local)
    rest = [seed if gradient is None else gradient._local_tensor, *rest[1:]]
    kwargs = {key: value for key, value in kwargs.items() if key != "gradient"}
    local.backward(*rest, **kwargs)


def _grad(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad``. ``grad_outputs`` of sharded outputs are gradients of slices."""
    outputs = args[0] if args else kwargs["outputs"]
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    backrefs = [
        value.backref for value in inputs if isinstance(value, cls) and value.backref is not None
    ]
    check_leads_to_slices((outputs,) if isinstance(outputs, Tensor) else outputs, backrefs)
    seeds = (*args[2:3], kwargs.get("grad_outputs"))
    for seed in tree_leaves(seeds):
        if isinstance(seed, cls):
            seed.is_gradient = True
    grads = _call_base(func, (cls,), args, kwargs)
    for grad, wrt in zip(grads, inputs, strict=True):
        if grad is not None and isinstance(wrt, cls):
            check_gradient(cls, grad, wrt._flat)
    return grads


# Pending steps are not waited for by these.
_READ_NO_ELEMENTS = {_metadata, _set_metadata, _detach, _gradient, _takes_data, _no_address}

_SPECIAL: dict[str, Handler] = {
    **full_reductions.HANDLERS,
    **dict.fromkeys(("to", "type", "type_as"), convert),
    **dict.fromkeys(("detach", "alias"), _detach),
    **dict.fromkeys(("view", "view_as", "reshape", "reshape_as"), _view),
    **dict.fromkeys(("expand", "expand_as", "flatten", "ravel"), _view),
    "view_as_real": _view_as_real,
    "view_as_complex": _view_as_complex,
    "conj": _conj,
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
    **dict.fromkeys(("item", "is_nonzero", "__bool__", "__nonzero__", "__float__"), _item),
    **dict.fromkeys(("__int__", "__long__", "__index__", "__complex__"), _item),
    **dict.fromkeys(("data_ptr", "storage_offset"), _no_address),
    "requires_grad_": _set_metadata,
    "_has_compatible_shallow_copy_type": _takes_data,
    "new_tensor": _new_tensor,
    "copy_": copy_,
    "constant_": constant_,
    "zero_": _zero_,
    "_foreach_zero_": _foreach_zero_,
    "__setitem__": set_masked,
    "backward": _backward,
    "grad": _grad,
}
