"""Optimizers of torchao, bitsandbytes and pytorch_optimizer that quantise their state in blocks.

A block is ``block_size`` consecutive elements of a parameter (256; torchao's 4 bits: 128) with one
scale. No shard boundary divides a block ([Note: Blocks] in ``layout/placement.py``), so the
package's own step on a slice computes the codes and scales of the full parameter, on any number of
ranks and at any level:

    full     | block 0 | block 1 | block 2 | block 3 | b4|
    rank 0   | block 0 | block 1 |
    rank 1                       | block 2 | block 3 | b4|

Both packages quantise the state of tensors of at least 4,096 elements only. A shadow
([Note: Shadow optimizer] in ``sharded_step.py``) has slices as parameters, so a mixin decides for
each slice as the package does for the full parameter.

[Note: Values of quantised state]
A state of torchao is one tensor of a subclass with codes and scales. ``state_dict()`` replaces it
by fp32 values, as for any Adam, and ``load_state_dict()`` quantises them. The values quantise to
the codes and scales that they came from, bit for bit:

- The scale of a block is its largest magnitude (fp8: divided by 448). A signed map of codes goes
  from -0.993 (4 bits: -0.888) to 1. If the largest element of a block was negative, it was
  ``-scale``, and its value is ``-scale`` instead of ``-0.993 * scale``.
- fp8: ``(448 * scale) / 448`` may differ from ``scale`` in the last bit. The value of the largest
  element is then a neighbour of ``448 * scale`` that does not.

torch converts loaded values to the parameter's dtype, which may be bf16. To lose no precision, they
are quantised from the values as they were before.

State of bitsandbytes and of pytorch_optimizer's FlashAdamW is one tensor for codes and one for
scales. They are saved as they are, under the package's names, as slices of the tensors of one
process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.flat_dtensor.elementwise import slice_of_distributed
from fsdp_engine.memory import allocator
from fsdp_engine.optim.shadow import Shadow

_TORCHAO = ("torchao.optim.", "torchao.prototype.low_bit_optim.")
_BITSANDBYTES = "bitsandbytes.optim."
_SIGNED = "exp_avg"
_QUANTIZED = (_SIGNED, "exp_avg_sq", "max_exp_avg_sq")
_BITSANDBYTES_BLOCK = 256
_ELEMENTWISE_OF_BITSANDBYTES = ("adam", "ademamix", "adagrad", "lion", "momentum", "rmsprop")
# State of bitsandbytes: scales, one for each block; maps of codes, the same for all parameters.
_SCALES = ("absmax1", "absmax2")
_MAPS = ("qmap1", "qmap2")
# FlashAdamW of pytorch_optimizer has a scale for each 32 elements of every parameter; all shard
# boundaries are multiples of 64.
_PYTORCH_OPTIMIZER = "pytorch_optimizer."
_FLASH_SCALES, _FLASH_BLOCK = "::scales", 32
# State dicts of bitsandbytes have these and codes in a dict within a parameter's state.
_WITHIN = "__bnb_optimizer_quant_state__"


def is_blockwise(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is one of torchao's that quantise their state, or a subclass."""
    return any(map(is_blockwise_class, type(optimizer).__mro__))


def is_blockwise_class(kind: type) -> bool:
    """Whether a class is that of such an optimizer in torchao, not a subclass."""
    return kind.__module__.startswith(_TORCHAO)


def is_of_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is one of bitsandbytes with state of its own, or a subclass."""
    return hasattr(optimizer, "get_config") and any(
        kind.__module__.startswith(_BITSANDBYTES) for kind in type(optimizer).__mro__
    )


def is_elementwise_of_bitsandbytes(optimizer: Any) -> bool:
    """Whether ``optimizer`` is one of bitsandbytes', no subclass, that updates elements by
    themselves or in blocks: not LARS and LAMB, and without clipping by norms of parameters."""
    if not (type(optimizer).__module__.startswith(_BITSANDBYTES) and is_of_bitsandbytes(optimizer)):
        return False
    args = getattr(optimizer, "args", None)
    # The last two were options of version 0.48 and earlier.
    return (
        getattr(optimizer, "optimizer_name", "") in _ELEMENTWISE_OF_BITSANDBYTES
        and not getattr(args, "max_unorm", 0)
        and getattr(args, "percentile_clipping", 100) == 100
        and getattr(args, "block_wise", True)
    )


def is_quantized_state(value: object) -> bool:
    """Whether a tensor, or the slice of a FlatDTensor, is a quantised tensor subclass."""
    local = value._local_tensor if isinstance(value, FlatDTensor) else value
    return isinstance(local, Tensor) and not isinstance(local, DTensor) and _is_subclass(local)


# --- which state is quantised ---


class TorchaoRules:
    """Mixin of a shadow of torchao's: the state of a slice is quantised if that of the full
    parameter is."""

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
    """Zeros for a state of a slice, quantised if ``make`` quantises that of the full tensor."""
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
    # In a simulation, too: torchao reads the values of its maps of codes once, and keeps them.
    with unset_fake_temporarily():
        full = torch.empty(placement.sharded_shape, dtype=dtype, device="meta")
        return _is_subclass(make(full, signed))


class BitsandbytesRules:
    """Mixin of a shadow of bitsandbytes': a slice has the configuration of its parameter, and its
    state is quantised if that of the full parameter is."""

    __slots__ = ()

    state: Mapping[Any, dict[str, Any]]

    def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
        original = _unsharded(self)
        config: dict[str, Any] = original.get_config(gindex, pindex, group)
        param = original.param_groups[gindex]["params"][pindex]
        if isinstance(param, FlatDTensor):
            is_large = _numel(param.flat_placement) >= config["min_8bit_size"]
            config["min_8bit_size"] = 0 if is_large else sys.maxsize
        return config

    def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        if p.numel():
            super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
        else:  # kernels cannot be launched for no element
            self.state[p]["step"] += 1

    def check_overrides(self) -> None:
        # They are of parameters of modules, which are no slices.
        _unsharded(self).check_overrides()


def _unsharded(shadow: Any) -> Any:
    """The shadow with the optimizer's own parameters in its groups."""
    original: Any = object.__new__(type(shadow).__bases__[-1])
    original.__dict__ = shadow.__dict__
    return original


def slice_rules(optimizer: Optimizer) -> tuple[type, ...]:
    """Mixins for the class of the optimizer's shadow."""
    if is_blockwise(optimizer):
        return (TorchaoRules,)
    return (BitsandbytesRules,) if is_of_bitsandbytes(optimizer) else ()


def check_blocks(optimizer: Any) -> None:
    """Check that no shard boundary divides a block of quantised state.

    Raises:
        ValueError: one does; on all ranks.
    """
    if not (is_blockwise(optimizer) or is_of_bitsandbytes(optimizer)):
        return
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if not isinstance(param, FlatDTensor):
                continue
            placement = param.flat_placement
            multiple, size = placement.boundary_multiple, _block_size(optimizer, number, index)
            if size and multiple is not None and multiple % size:
                raise ValueError(
                    f"{placement.name or 'a parameter'}: expected shard boundaries on multiples of "
                    f"{size} elements, the blocks in which {type(optimizer).__name__} quantises "
                    f"its state; found multiples of {multiple}. Return a multiple of {size} from "
                    "fe.shard's granule for this parameter"
                )


def _block_size(optimizer: Any, number: int, index: int) -> int:
    """Elements of a block of a sharded parameter's state; 0: it is not quantised."""
    group = optimizer.param_groups[number]
    param = group["params"][index]
    placement = param.flat_placement
    if is_blockwise(optimizer):
        return int(optimizer.block_size) if _has_codes(optimizer, param) else 0
    config = optimizer.get_config(number, index, group)
    quantized = config["optim_bits"] == 8 and _numel(placement) >= config["min_8bit_size"]
    return _BITSANDBYTES_BLOCK if quantized else 0


def _has_codes(optimizer: Any, param: FlatDTensor) -> bool:
    """Whether torchao's optimizer quantises the state of a sharded parameter."""
    make = getattr(optimizer, "_new_buffer", None)
    return make is not None and _quantizes(make, param.flat_placement, param.dtype, True)


def _numel(placement: FlatPlacement) -> int:
    return placement.sharded_shape.numel()


def state_placement(optimizer: Optimizer) -> Callable[[Any, FlatPlacement], FlatPlacement | None]:
    """Returns a function of a state's name and its parameter's placement: the placement of the
    state, None if each rank holds all of it."""
    if is_of_bitsandbytes(optimizer):
        return _placement_in_bitsandbytes
    return _placement_in_flash if _is_flash(optimizer) else _placement_of_param


def _placement_of_param(name: Any, placement: FlatPlacement) -> FlatPlacement | None:
    return placement


def _placement_in_bitsandbytes(name: Any, placement: FlatPlacement) -> FlatPlacement | None:
    if name in _SCALES and placement.spread is None:
        return placement.of_blocks(_BITSANDBYTES_BLOCK)
    return None if name in (*_SCALES, *_MAPS) else placement


def _is_flash(optimizer: Optimizer) -> bool:
    return any(
        kind.__module__.startswith(_PYTORCH_OPTIMIZER) and kind.__name__ == "FlashAdamW"
        for kind in type(optimizer).__mro__
    )


def _placement_in_flash(name: Any, placement: FlatPlacement) -> FlatPlacement | None:
    if not str(name).endswith(_FLASH_SCALES):
        return placement
    return placement.of_blocks(_FLASH_BLOCK) if placement.spread is None else None


# --- stochastic rounding ---


class SeededRounding:
    """Step hooks of torchao's optimizers with ``bf16_stochastic_round``: ranks that hold the same
    elements draw the same random numbers, so that replicas stay equal.

    Within a step random numbers are seeded with the number of steps and with the elements that this
    rank holds. The step does not change the user's random numbers. If it raises, they stay seeded.
    """

    def __init__(self) -> None:
        self._forked: AbstractContextManager[None] | None = None

    def register(self, optimizer: Optimizer) -> None:
        """Hook it to its optimizer."""
        optimizer.register_step_pre_hook(self._seed)
        optimizer.register_step_post_hook(self._restore)

    def _seed(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if isinstance(optimizer, Shadow):  # a subclass's step calls its parent's
            return
        params: list[Tensor] = _members(optimizer.param_groups)
        steps = (state["step"] for state in optimizer.state.values() if "step" in state)
        flat = [param.flat_placement for param in params if isinstance(param, FlatDTensor)]
        held = tuple((placement.start, placement.stop) for placement in flat)
        device = params[0].device
        devices = [] if device.type == "cpu" else [device]
        self._forked = torch.random.fork_rng(devices, device_type=device.type)
        self._forked.__enter__()
        # Of tuples of integers, the hash is the same in all processes.
        torch.manual_seed(hash((int(next(steps, 0)), held)))

    def _restore(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._forked is not None and not isinstance(optimizer, Shadow):
            self._forked.__exit__(None, None, None)
            self._forked = None


# --- state dicts ---


def flattened(name: str, param: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """State of a parameter in a state dict, without bitsandbytes' dict within it.

    Args:
        name: of the parameter, for messages.
        param: the parameter.
        state: its state.

    Raises:
        ValueError: a tensor of quantised state is another part of the parameter's state on each
            rank, and no FlatDTensor.
    """
    within = state.get(_WITHIN, {})
    parts = {key: within[key] for key in within if key not in _MAPS}
    parts |= {key: state[key] for key in state if str(key).endswith(_FLASH_SCALES)}
    for key, value in parts.items():
        is_part = isinstance(value, Tensor) and value.ndim and not isinstance(value, FlatDTensor)
        if is_part and isinstance(param, FlatDTensor):
            raise ValueError(
                f"optimizer: expected state of {name} in its shape, or a scale for each block of "
                f"its elements; found {key!r} of shape {tuple(value.shape)}, which differs between "
                "ranks. Save optimizer.state_dict() on each rank"
            )
    return {**{key: state[key] for key in state if key != _WITHIN}, **within}


class ValueStateDicts:
    """Hooks of ``state_dict()`` and ``load_state_dict()`` of an optimizer of torchao. See
    [Note: Values of quantised state]."""

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] = {}

    def register(self, optimizer: Optimizer) -> None:
        """Hook it to its optimizer."""
        optimizer.register_state_dict_post_hook(self._save_values)
        optimizer.register_load_state_dict_pre_hook(self._keep_values)
        optimizer.register_load_state_dict_post_hook(self._quantize_values)

    def _save_values(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            key: {name: _values_of(value) for name, value in state.items()}
            if isinstance(state, Mapping)
            else state
            for key, state in state_dict["state"].items()
        }
        # A rank without elements of a parameter has plain state, in the parameter's dtype.
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


def _members(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


def _quantized(optimizer: Any, param: Any, name: str, value: Tensor) -> Tensor | None:
    """A loaded value, quantised as a step has it; None if it is not quantised, or of another
    shape, where the next step raises."""
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
    """The plain slice of a loaded value, and its placement; None for a slice of another shape."""
    if isinstance(value, FlatDTensor):
        return value.local, value.flat_placement
    if isinstance(value, DTensor):
        return slice_of_distributed(value, placement), placement
    fits = value.ndim > 0 and value.shape == placement.shape
    return placement.slice_of_full(value) if fits else None, placement


def _values_of(value: Any) -> Any:
    if not is_quantized_state(value):
        return value
    if isinstance(value, FlatDTensor):
        return FlatDTensor.from_flat_local(_exact_values(value._local_tensor), value.flat_placement)
    return _exact_values(value)


@torch.no_grad()
def _exact_values(state: Any) -> Tensor:
    """The fp32 values that quantise to the same codes and scales. See [Note: Values of quantised
    state]."""
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
    """Numbers whose quotients by ``divisor`` are, rounded, the given ones."""
    found = quotients * divisor
    for neighbour in (found.nextafter(found * 2), found.nextafter(found * 0)):
        is_better = (found / divisor != quotients) & (neighbour / divisor == quotients)
        found = torch.where(is_better, neighbour, found)
    return found


def _is_subclass(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter, FakeTensor)
