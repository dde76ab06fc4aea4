"""State of torchao's optimizers: tensors of a subclass with codes and scales.

[Note: Values of quantised state]
A state of torchao is one tensor of a subclass with codes and scales. ``state_dict()`` replaces it
by fp32 values, as for any Adam, and ``load_state_dict()`` quantises them. The saved values quantise
to exactly the same codes and scales:

- The scale of a block is its largest magnitude (fp8: divided by 448). A signed map of codes ranges
  from -0.993 (4 bits: -0.888) to 1. If the largest element of a block was negative, it was
  ``-scale``, so its saved value is ``-scale`` instead of ``-0.993 * scale``.
- fp8: ``(448 * scale) / 448`` may differ from ``scale`` in the last bit. Then the saved value of
  the largest element is a neighbour of ``448 * scale`` whose quotient is ``scale``.

torch converts loaded values to the parameter's dtype, which may be bf16. To lose no precision, the
state is quantised from the values before that conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.extensions.low_bit_state.block_state import TORCHAO, BlockState
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.flat_dtensor.elementwise import slice_of_distributed
from fsdp_engine.memory import allocator
from fsdp_engine.optim.shadow import Shadow, StepHook, step_hook_of

_SIGNED = "exp_avg"
_QUANTIZED = (_SIGNED, "exp_avg_sq", "max_exp_avg_sq")


def refuse_unsharded_step(optimizer: Optimizer) -> None:
    """Check an optimizer before its step, which would otherwise fail midway.

    Raises:
        RuntimeError: The optimizer holds sharded parameters and was not passed to
            :func:`~fsdp_engine.shard_optimizer`.
    """
    is_of_torchao = any(kind.__module__.startswith(TORCHAO) for kind in type(optimizer).__mro__)
    if not is_of_torchao or step_hook_of(optimizer, StepHook) is not None:
        return
    if any(isinstance(param, FlatDTensor) for param in _members(optimizer.param_groups)):
        raise RuntimeError(
            f"{type(optimizer).__name__}: expected fe.shard_optimizer(optimizer) before its first "
            "step, so that it steps on slices; found sharded parameters, which its step mixes with "
            "DTensors of its own"
        )


class TorchaoRules:
    """Mixin of a shadow: the state of a slice is quantised if that of the full parameter is."""

    __slots__ = ()

    param_of: Callable[[Tensor], Tensor]

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        param = self.param_of(p)
        make: Callable[[Tensor, bool], Tensor] = super()._new_buffer  # type: ignore[misc]
        if not isinstance(param, FlatDTensor):
            return make(p, signed)
        return _new_buffer(self, make, param.flat_placement, p, signed)


def _new_buffer(
    optimizer: Any,
    make: Callable[[Tensor, bool], Tensor],
    placement: FlatPlacement,
    local: Tensor,
    signed: bool,
) -> Tensor:
    """Returns zeros for the state of a slice; quantised if ``make`` quantises the full tensor's."""
    if not local.numel() or not _quantizes(make, placement, local.dtype, signed):
        return allocator.zeros(tuple(local.shape), local.dtype, local.device)
    made: Tensor = optimizer._subclass_zeros(local, signed, optimizer.block_size)
    return made


def _quantizes(
    make: Callable[[Tensor, bool], Tensor],
    placement: FlatPlacement,
    dtype: torch.dtype,
    signed: bool,
) -> bool:
    # Leave the fake mode of a simulation: torchao creates its maps of codes once and keeps them,
    # so they must not be fake.
    with unset_fake_temporarily():
        full = torch.empty(placement.sharded_shape, dtype=dtype, device="meta")
        return _is_subclass(make(full, signed))


class TorchaoState(BlockState):
    """The format of torchao. See :class:`StateFormat` and [Note: Values of quantised state]."""

    mixins = (TorchaoRules,)
    has_plain_tensors = False

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] = {}

    def is_elementwise(self, optimizer: Any, kind: type) -> bool:
        """See :class:`StateFormat`."""
        return kind.__module__.startswith(TORCHAO)

    def block_size(self, optimizer: Any, number: int, index: int) -> int:
        """See :class:`BlockState`."""
        param = optimizer.param_groups[number]["params"][index]
        return int(optimizer.block_size) if _has_codes(optimizer, param) else 0

    def register(self, optimizer: Any) -> None:
        """See :class:`StateFormat`."""
        optimizer.register_state_dict_post_hook(self._save_values)
        optimizer.register_load_state_dict_pre_hook(self._keep_values)
        optimizer.register_load_state_dict_post_hook(self._quantize_values)
        if getattr(optimizer, "bf16_stochastic_round", False):
            SeededRounding().register(optimizer)

    def _save_values(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            key: {name: _values_of(value) for name, value in state.items()}
            if isinstance(state, Mapping)
            else state
            for key, state in state_dict["state"].items()
        }
        # A rank without elements of a parameter has plain state in the parameter's dtype. Convert
        # it to fp32, which the other ranks save.
        keys = _members(state_dict["param_groups"])
        for key, param in zip(keys, _members(optimizer.param_groups), strict=True):
            if key not in states or not isinstance(param, FlatDTensor) or param.local.numel():
                continue
            if _has_codes(optimizer, param):
                state = states[key]
                state.update({k: state[k].float() for k in _QUANTIZED if k in state})
        return {**state_dict, "state": states}

    def _keep_values(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        self._loaded = state_dict

    @torch.no_grad()
    def _quantize_values(self, optimizer: Any) -> None:
        loaded, self._loaded = self._loaded, {}
        keys = _members(loaded["param_groups"])
        for key, param in zip(keys, _members(optimizer.param_groups), strict=True):
            values = loaded["state"].get(key, {})
            for name in _QUANTIZED:
                if isinstance(values.get(name), Tensor):
                    quantized = _quantized(optimizer, param, name, values[name])
                    if quantized is not None:
                        optimizer.state[param][name] = quantized


def _has_codes(optimizer: Any, param: FlatDTensor) -> bool:
    """Returns whether the optimizer quantises the state of a sharded parameter."""
    make = getattr(optimizer, "_new_buffer", None)
    return make is not None and _quantizes(make, param.flat_placement, param.dtype, True)


class SeededRounding:
    """Step hooks for torchao's optimizers with ``bf16_stochastic_round``. Ranks that hold the same
    elements draw the same random numbers, so that replicas stay equal.

    Within a step, random numbers are seeded with the number of steps and the ranges of elements
    that this rank holds. The user's random state is restored afterwards, unless the step raises.
    """

    def __init__(self) -> None:
        self._forked: AbstractContextManager[None] | None = None

    def register(self, optimizer: Optimizer) -> None:
        """Register the hooks of the optimizer."""
        optimizer.register_step_pre_hook(self._seed)
        optimizer.register_step_post_hook(self._restore)

    def _seed(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if isinstance(optimizer, Shadow):  # The step of a subclass calls its parent's step.
            return
        params: list[Tensor] = _members(optimizer.param_groups)
        steps = (state["step"] for state in optimizer.state.values() if "step" in state)
        flat = [param.flat_placement for param in params if isinstance(param, FlatDTensor)]
        held = tuple((placement.start, placement.stop) for placement in flat)
        device = params[0].device
        devices = [] if device.type == "cpu" else [device]
        self._forked = torch.random.fork_rng(devices, device_type=device.type)
        self._forked.__enter__()
        # The hash of a tuple of integers is the same in all processes.
        torch.manual_seed(hash((int(next(steps, 0)), held)))

    def _restore(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._forked is not None and not isinstance(optimizer, Shadow):
            self._forked.__exit__(None, None, None)
            self._forked = None


def _members(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


def _quantized(optimizer: Any, param: Any, name: str, value: Tensor) -> Tensor | None:
    """Returns a loaded value, quantised as in a step. None if it is not quantised, or has another
    shape, for which the next step raises."""
    placement = param.flat_placement if isinstance(param, FlatDTensor) else None
    local: Tensor | None = _values_of(value)
    if placement is not None:
        local, placement = _slice_of(_values_of(value), placement)
    elif value.shape != param.shape:
        return None
    if local is None:
        return None
    like = allocator.empty(tuple(local.shape), param.dtype, param.device)
    if placement is None:
        made = optimizer._new_buffer(like, name == _SIGNED)
    else:
        made = _new_buffer(optimizer, optimizer._new_buffer, placement, like, name == _SIGNED)
    if not _is_subclass(made):
        return None
    made.copy_(local.to(made.device, torch.float32))
    return made if placement is None else FlatDTensor.from_flat_local(made, placement)


def _slice_of(value: Tensor, placement: FlatPlacement) -> tuple[Tensor | None, FlatPlacement]:
    """Returns the plain slice of a loaded value (None if the shape differs), and its placement."""
    if isinstance(value, FlatDTensor):
        return value.local, value.flat_placement
    if isinstance(value, DTensor):
        return slice_of_distributed(value, placement), placement
    fits = value.ndim > 0 and value.shape == placement.shape
    return placement.slice_of_full(value) if fits else None, placement


def _values_of(value: Any) -> Any:
    """Returns the fp32 values of a quantised state; other values unchanged."""
    local = value._local_tensor if isinstance(value, FlatDTensor) else value
    if not isinstance(local, Tensor) or isinstance(local, DTensor) or not _is_subclass(local):
        return value
    exact = _exact_values(local)
    if isinstance(value, FlatDTensor):
        return FlatDTensor.from_flat_local(exact, value.flat_placement)
    return exact


@torch.no_grad()
def _exact_values(state: Any) -> Tensor:
    """Returns fp32 values that quantise to the same codes and scales. See [Note: Values of
    quantised state]."""
    values: Tensor = state.dequantize()
    blocks, scales = values.reshape(-1, state.block_size), state.scale.view(-1, 1)
    if not hasattr(state, "qmap"):
        largest = torch.finfo(state.codes.dtype).max
        is_largest = state.codes.float().abs().view_as(blocks) == largest
        magnitude = _divides_to(scales, largest)
        return torch.where(is_largest, magnitude.copysign(blocks), blocks).view_as(values)
    least = state.qmap.min()
    if least >= 0:
        return values
    lowest, at = blocks.min(1, keepdim=True)
    was_largest = (lowest == least * scales) & (blocks.amax(1, keepdim=True) < scales)
    return blocks.scatter(1, at, torch.where(was_largest, -scales, lowest)).view_as(values)


def _divides_to(quotients: Tensor, divisor: float) -> Tensor:
    """Returns numbers whose quotients by ``divisor``, rounded, are ``quotients``."""
    found = quotients * divisor
    for neighbour in (found.nextafter(found * 2), found.nextafter(found * 0)):
        is_better = (found / divisor != quotients) & (neighbour / divisor == quotients)
        found = torch.where(is_better, neighbour, found)
    return found


def _is_subclass(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter, FakeTensor)
