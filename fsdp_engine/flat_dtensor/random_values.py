"""Random values in place: those that one process would draw, of which each rank keeps its slice.

A rank draws the whole tensor from its own generator, as one process would, so that values do not
depend on the number of ranks, and all generators are alike afterwards, if they were before. Whether
they were is checked by a small message: slices of different draws would be one tensor of no
distribution. Memory for one whole tensor at a time.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.devices import memory
from fsdp_engine.flat_dtensor.full_reductions import reduce_over
from fsdp_engine.flat_dtensor.placement import FlatPlacement
from fsdp_engine.flat_dtensor.slices import Args, Function, Kwargs, check_inplace, refusal


def draw_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``tensor.normal_()`` and its kind, and what ``torch.nn.init`` hands over whole.

    Collective: every rank must call, with its generator in the same state.

    Raises:
        ValueError: generators of ranks differ, or an argument is a tensor too.
    """
    of_init = "tensor" in kwargs
    target = kwargs["tensor"] if of_init else args[0]
    others = [*args[1:], *(value for key, value in kwargs.items() if key != "tensor")]
    if not isinstance(target, cls) or any(isinstance(value, Tensor) for value in others):
        raise refusal(cls, func, (args, kwargs), "draws by the values of another tensor")
    if not of_init:
        check_inplace(func, target)
    flat: FlatPlacement = target._flat
    local: Tensor = target._local_tensor
    _check_generators(func, kwargs.get("generator"), local.device, flat)
    with torch.no_grad():
        whole = memory.empty(tuple(flat.shape), local.dtype, local.device)
        if of_init:
            func(**{**kwargs, "tensor": whole})
        else:
            func(whole, *args[1:], **kwargs)
        local.copy_(flat.part_of(whole))
    return target


def constant_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``torch.nn.init.constant_``."""
    with torch.no_grad():
        return kwargs["tensor"].fill_(kwargs["val"])


def _check_generators(
    func: Function, generator: torch.Generator | None, device: torch.device, flat: FlatPlacement
) -> None:
    if not flat.groups or device.type == "meta":
        return
    if generator is None:
        on_cuda = device.type == "cuda"
        state = torch.cuda.get_rng_state(device) if on_cuda else torch.get_rng_state()
    else:
        state = generator.get_state()
    digest = hashlib.sha256(bytes(state.tolist())).digest()
    value = int.from_bytes(digest[:7], "big")
    extremes = torch.tensor([value, -value], device=device)
    reduce_over(extremes, flat.groups, "max")
    highest, lowest = extremes.tolist()
    if highest != -lowest:
        raise ValueError(
            f"{func.__name__}: expected the random generators of all ranks in one state, since "
            "each keeps its slice of what one process would draw; found different ones, for a "
            f"FlatDTensor of shape {tuple(flat.shape)}. Call torch.manual_seed(seed) on all ranks "
            "before, or give a generator that is alike on all"
        )
