"""``fully_shard``: what is asked is checked, a unit is made, and modules change their class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_engine.devices import memory
from fsdp_engine.devices.mesh import DataMesh, ranks_that_meet
from fsdp_engine.devices.rendezvous import reporting
from fsdp_engine.fsdp2.errors import WrongUse
from fsdp_engine.fsdp2.fsdp_module import become_fsdp_module
from fsdp_engine.fsdp2.group import WHAT, Group, group_of, make_group
from fsdp_engine.fsdp2.outermost import await_first_call
from fsdp_engine.fsdp2.policies import check_offload, engine_policy
from fsdp_engine.sharding import keeps_after_forward
from fsdp_engine.strategies import Strategy

M = TypeVar("M", bound="nn.Module | list[nn.Module]")


@memory.ordinary_tensors()
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: fsdp.MixedPrecisionPolicy | None = None,
    offload_policy: fsdp.OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object = None,
    strategy: str = "optim_grads_params",
    outer_strategy: str = "no_shard",
) -> M:
    """Shard the parameters of ``module`` that no inner call has taken, at once; inner modules
    first, then what contains them. The module is changed in place: its class, and its parameters.
    Collective.

    Args:
        module: a module, or several that are gathered and reduced as one.
        mesh: data-parallel ranks: (inner,), or (outer, inner) for HSDP. None: all ranks.
        reshard_after_forward: whether full parameters go when forward is over, to be gathered again
            for backward. None: True, but the outermost module's stay if backward begins with it. A
            number of ranks to reshard to is taken as True, with a warning.
        shard_placement_fn: asked for each parameter, and what it returns is checked. Where elements
            lie is the engine's to decide all the same.
        mp_policy: dtypes of this unit, and what its modules' inputs and outputs are cast to.
        offload_policy: ``OffloadPolicy()``, which offloads nothing.
        ignored_params: stay as they are.
        dp_mesh_dims: None.
        strategy: level of the inner axis: "no_shard", "optim", "optim_grads" or
            "optim_grads_params", as of :func:`fsdp_engine.shard`.
        outer_strategy: level of the outer axis, at most ``strategy``.

    Returns:
        ``module``.

    Raises:
        ValueError: an argument, or how arguments of ranks differ; on all ranks,
            before anything is changed.
        TypeError, NotImplementedError: likewise.
        RuntimeError: a rank did not come; names it.
    """
    with reporting(WHAT, ranks_that_meet(mesh)):
        levels = Strategy.from_names(strategy, outer_strategy)
        modules = _outermost(module)
        if isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
            raise ValueError(
                "mesh: expected one axis or two, (outer, inner), since fully_shard expects a 1D or "
                f"2D DeviceMesh but got {mesh}"
            )
    data = DataMesh.create(mesh, what=WHAT)
    error: Exception | None = None
    policy, keeps = None, False
    try:
        policy = engine_policy(mp_policy if mp_policy is not None else fsdp.MixedPrecisionPolicy())
        check_offload(offload_policy if offload_policy is not None else fsdp.OffloadPolicy())
        if dp_mesh_dims is not None:
            raise NotImplementedError(
                "dp_mesh_dims: expected None; found other dimensions. Give the data-parallel part "
                "of the mesh as mesh=mesh['dp']"
            )
        keeps = keeps_after_forward(reshard_after_forward, data.inner.size, levels)
        _check_placements(shard_placement_fn, modules, ignored_params or (), data.inner.size)
    except Exception as caught:
        error = caught
    group = make_group(modules, data, levels, policy, ignored_params or (), error)
    group.unit.options.keeps_after_forward = keeps
    _move_buffers(group)
    for each in modules:
        become_fsdp_module(each)
    await_first_call(group)
    return module


# As torch's composable calls have it: what a call has made of a module.
fully_shard.state = group_of  # type: ignore[attr-defined]


def _outermost(module: object) -> list[nn.Module]:
    """The modules that are meant, without those within others."""
    given: Sequence[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in given:
        if not isinstance(each, nn.Module):
            raise TypeError(
                f"module: expected a torch.nn.Module or a list of them; found {type(each).__name__}"
            )
        # torch.compile() returns a module that has its forward as an attribute.
        if type(each).forward is nn.Module.forward and "forward" not in vars(each):
            raise ValueError(
                "module: expected one that is called, since fully_shard does not support "
                "containers that do not implement forward; found a "
                f"{type(each).__name__}. Call it on what is in there"
            )
    if not given:
        raise ValueError("module: expected at least one; found an empty list")
    unique = list(dict.fromkeys(given))
    inside = {id(inner) for each in unique for inner in each.modules() if inner is not each}
    return [each for each in unique if id(each) not in inside]


def _check_placements(
    asked: Callable[[nn.Parameter], Any] | None,
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    size: int,
) -> None:
    """Ask for the placement of each parameter, and check it."""
    if asked is None:
        return
    left_out = {id(param) for param in ignored}
    for module in modules:
        for name, param in module.named_parameters():
            if id(param) in left_out or isinstance(param, torch.distributed.tensor.DTensor):
                continue
            found = asked(param)
            if found is None:
                continue
            if not isinstance(found, Shard):
                raise NotImplementedError(
                    f"shard_placement_fn: expected Shard(dim) or None for {name}; found {found!r}. "
                    "For other ranks than those of mesh, call fully_shard() on the modules that "
                    "have such parameters, with their own mesh"
                )
            dim = found.dim + param.ndim if found.dim < 0 else found.dim
            if not 0 <= dim < max(param.ndim, 1):
                raise WrongUse(
                    f"shard_placement_fn: expected a dim of {name}, of shape {tuple(param.shape)}, "
                    f"since Shard dim {found.dim} is invalid for {param.ndim}D tensor; found "
                    f"{found!r}"
                )
            if dim and param.shape[dim] % size:
                raise NotImplementedError(
                    f"shard_placement_fn: expected dim {dim} of {name}, of shape "
                    f"{tuple(param.shape)}, to be a multiple of {size} ranks, since FSDP does not "
                    f"support uneven sharding on dim {dim}; found {param.shape[dim]}"
                )


def _move_buffers(group: Group) -> None:
    """Buffers of the group's modules go where its parameters are."""
    device = group.resources.memory.device
    for module in group.modules:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    inner._buffers[name] = buffer.to(device)
