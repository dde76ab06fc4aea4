"""In-place random functions: each rank draws the full tensor and keeps its slice.

A rank draws the full tensor from its own generator, as a single process would. Values therefore do
not depend on the number of ranks, and generators with equal states before have equal states
afterwards. A small all-reduce compares the states first. If they differ, slices of different draws
would not be a sample of the distribution. All ranks then draw from the first rank's generator
state, and the generators of the other ranks are restored. One full tensor at a time is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.comm.collectives import broadcast_
from fsdp_engine.flat_dtensor.flat_placement import FlatPlacement
from fsdp_engine.flat_dtensor.full_reductions import reduce_over
from fsdp_engine.flat_dtensor.slices import (
    DRAWS,
    Args,
    Function,
    Handler,
    Kwargs,
    check_inplace,
    refusal,
)
from fsdp_engine.memory import allocator


def draw_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``tensor.normal_()`` and the like, or a function of ``torch.nn.init``. Collective.

    Raises:
        ValueError: Another argument is a tensor.
    """
    of_init = "tensor" in kwargs
    target = kwargs["tensor"] if of_init else args[0]
    others = [*args[1:], *(value for key, value in kwargs.items() if key != "tensor")]
    if not isinstance(target, cls) or any(isinstance(value, Tensor) for value in others):
        raise refusal(cls, func, (args, kwargs), "draws values that depend on another tensor")
    with torch.no_grad() if of_init else nullcontext():  # torch.nn.init allows leaves
        check_inplace(func, target)
    flat: FlatPlacement = target._flat
    local: Tensor = target._local_tensor
    with one_generator(kwargs.get("generator"), local.device, flat), torch.no_grad():
        full = allocator.empty(tuple(flat.shape), local.dtype, local.device)
        if of_init:
            func(**{**kwargs, "tensor": full})
        else:
            func(full, *args[1:], **kwargs)
        local.copy_(flat.slice_of_full(full))
    return target


def constant_(cls: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run ``torch.nn.init.constant_``."""
    with torch.no_grad():
        return kwargs["tensor"].fill_(kwargs["val"])


@contextmanager
def one_generator(
    generator: torch.Generator | None, device: torch.device, flat: FlatPlacement
) -> Iterator[None]:
    """Context in which the generator has the same state on all ranks, replicas included."""
    groups = () if device.type == "meta" else _groups_of_all_axes(flat)
    if not groups:
        yield
        return
    get_state, set_state = _access(generator, device)
    own = get_state()
    digest = hashlib.sha256(bytes(own.tolist())).digest()
    value = int.from_bytes(digest[:7], "big")
    extremes = torch.tensor([value, -value], device=device)
    reduce_over(extremes, groups, "max")
    highest, lowest = extremes.tolist()
    if highest == -lowest:
        yield
        return
    first = own.to(device, copy=True)
    for group in groups:
        broadcast_(first, group)
    state = first.cpu()
    if torch.equal(state, own):
        yield
        return
    set_state(state)
    try:
        yield
    finally:
        set_state(own)


def _groups_of_all_axes(flat: FlatPlacement) -> tuple[ProcessGroup, ...]:
    """Returns the groups of all mesh axes with several ranks, innermost first. The axes of
    ``spread`` come last."""
    meshes = [flat.mesh] if flat.spread is None else [flat.mesh, flat.spread.mesh]
    return tuple(
        mesh.get_group(axis)
        for mesh in meshes
        for axis in reversed(range(mesh.ndim))
        if mesh.size(axis) > 1
    )


def _access(
    generator: torch.Generator | None, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
    """Returns functions that get and set the state of a generator.

    If ``generator`` is None, this is the default generator of ``device``.
    """
    if generator is not None:
        return generator.get_state, generator.set_state
    if is_accelerator(device):
        module = module_of(device)
        return partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    return torch.get_rng_state, torch.set_rng_state


HANDLERS: dict[str, Handler] = {**dict.fromkeys(DRAWS, draw_), "constant_": constant_}
