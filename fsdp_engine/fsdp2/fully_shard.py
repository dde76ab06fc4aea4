"""``fully_shard``: checks its arguments, builds a unit, and changes the class of the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_engine.comm.mesh import DataMesh, ranks_that_meet
from fsdp_engine.comm.rendezvous import reporting
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import find_module
from fsdp_engine.fsdp2.fsdp_module import make_fsdp_module
from fsdp_engine.fsdp2.param_group import WHAT, ParamGroup, UsageError, group_of, make_group
from fsdp_engine.fsdp2.root_module import build_engine_on_first_call
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import HOST
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.sharding import keeps_after_forward
from fsdp_engine.strategies import Strategy


def engine_policy(policy: object) -> MixedPrecisionPolicy:
    """Convert an ``mp_policy`` of FSDP2. Main weights and gradients have the parameter's dtype;
    reductions are in ``reduce_dtype``, or in ``param_dtype`` if ``reduce_dtype`` is None.

    Raises:
        TypeError: ``policy`` is not of FSDP2's class.
    """
    if not isinstance(policy, fsdp.MixedPrecisionPolicy):
        raise TypeError(
            "mp_policy: expected a torch.distributed.fsdp.MixedPrecisionPolicy (fsdp_engine.fsdp2 "
            f"also exports it); found {policy!r}"
        )
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        own_dtypes=True,
    )


def engine_extensions(policy: object) -> list[EngineExtension]:
    """Convert an ``offload_policy`` of FSDP2 to extensions of a unit. With ``CPUOffloadPolicy``
    parameters, gradients and optimizer state are in host memory, and optimizers step there.

    Raises:
        TypeError: ``policy`` is not of FSDP2's class.
        ValueError: The package does not contain the extension for offloading.
    """
    if not isinstance(policy, fsdp.OffloadPolicy):
        raise TypeError(
            "offload_policy: expected a torch.distributed.fsdp.OffloadPolicy (fsdp_engine.fsdp2 "
            f"also exports it); found {policy!r}"
        )
    if not isinstance(policy, fsdp.CPUOffloadPolicy):
        return []
    places = dict.fromkeys(("optimizer_state", "main_weights", "gradients", "step_on"), HOST)
    return [
        find_module("offload", needed_by="offload_policy").Offload(
            **places, pin_memory=policy.pin_memory
        )
    ]


M = TypeVar("M", bound="nn.Module | list[nn.Module]")


@allocator.ordinary_tensors()
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
    """Shard the parameters of ``module`` that no call on an inner module has sharded. Call it on
    inner modules first, then on the modules that contain them. Changes the module's class and
    parameters in place. Collective.

    Args:
        module: A module, or a list of modules that form one unit.
        mesh: Mesh of the data-parallel ranks: (inner,), or (outer, inner) for HSDP. None: all
            ranks.
        reshard_after_forward: Whether to free full parameters after forward and gather them again
            for backward. None: True. A module whose backward is the next use is not resharded. The
            number 1 has the effect of False, a greater number that of True. A greater number that
            is not the number of ranks that share a parameter also warns.
        shard_placement_fn: Function that is called for each parameter. Its result is checked but
            has no effect, since the engine assigns elements to ranks itself.
        mp_policy: Dtypes of this unit, and the dtypes to which its modules' inputs and outputs are
            cast.
        offload_policy: ``CPUOffloadPolicy()``: the unit's sharded parameters, gradients and
            optimizer state are in host memory, and optimizers step there. It has no effect on a
            CPU.
        ignored_params: Parameters not to shard.
        dp_mesh_dims: Must be None.
        strategy: Level of the inner axis: "no_shard", "optim", "optim_grads" or
            "optim_grads_params", as in :func:`fsdp_engine.shard`.
        outer_strategy: Level of the outer axis, at most ``strategy``.

    Returns:
        ``module``.

    Raises:
        ValueError: An argument is invalid, or arguments differ between ranks. All ranks raise,
            before anything is modified.
        TypeError, NotImplementedError: An argument has another type, or is not supported. All ranks
            raise, as above.
        RuntimeError: A rank did not make the call; the message names the rank.
    """
    with reporting(WHAT, ranks_that_meet(mesh)):
        levels = Strategy.from_names(strategy, outer_strategy)
        modules = _without_inner(module)
        if isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
            raise ValueError(
                "mesh: expected one axis or two, (outer, inner), since fully_shard expects a 1D or "
                f"2D DeviceMesh but got {mesh}"
            )
    data = DataMesh.create(mesh, what=WHAT)
    error: Exception | None = None
    policy, keeps, extensions = None, False, list[EngineExtension]()
    try:
        policy = engine_policy(mp_policy if mp_policy is not None else fsdp.MixedPrecisionPolicy())
        extensions = engine_extensions(
            offload_policy if offload_policy is not None else fsdp.OffloadPolicy()
        )
        if dp_mesh_dims is not None:
            raise NotImplementedError(
                f"dp_mesh_dims: expected None; found {dp_mesh_dims!r}. Pass the data-parallel part "
                "of the mesh instead: mesh=mesh['dp']"
            )
        keeps = keeps_after_forward(reshard_after_forward, data.inner.size, levels)
        _check_placements(shard_placement_fn, modules, ignored_params or (), data.inner.size)
    except Exception as caught:
        error = caught
    group = make_group(modules, data, levels, policy, extensions, ignored_params or (), error)
    group.unit.options.keeps_after_forward = keeps
    _move_buffers(group)
    for each in modules:
        make_fsdp_module(each)
    build_engine_on_first_call(group)
    return module


# torch's composable functions have this attribute, which returns the state of a module.
fully_shard.state = group_of  # type: ignore[attr-defined]


def _without_inner(module: object) -> list[nn.Module]:
    """Returns the given modules as a list, without those that are inside others of the list."""
    given: Sequence[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in given:
        if not isinstance(each, nn.Module):
            raise TypeError(
                f"module: expected a torch.nn.Module or a list of them; found {type(each).__name__}"
            )
        # torch.compile() returns a module whose instance, not its class, has ``forward``.
        if type(each).forward is nn.Module.forward and "forward" not in vars(each):
            raise ValueError(
                "module: expected one that is called, since fully_shard does not support "
                "containers that do not implement forward; found a "
                f"{type(each).__name__}. Call fully_shard() on the modules in it"
            )
    if not given:
        raise ValueError("module: expected at least one; found an empty list")
    unique = list(dict.fromkeys(given))
    inside = {id(inner) for each in unique for inner in each.modules() if inner is not each}
    return [each for each in unique if id(each) not in inside]


def _check_placements(
    placement_fn: Callable[[nn.Parameter], Any] | None,
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    size: int,
) -> None:
    """Check the placement that ``placement_fn`` returns for each parameter.

    Raises:
        NotImplementedError: A placement is not a ``Shard``, or names a dim other than 0 whose size
            is not a multiple of the number of ranks.
        UsageError: A placement names a dim that the parameter does not have.
    """
    if placement_fn is None:
        return
    ignored_ids = {id(param) for param in ignored}
    for module in modules:
        for name, param in module.named_parameters():
            if id(param) in ignored_ids or isinstance(param, torch.distributed.tensor.DTensor):
                continue
            found = placement_fn(param)
            if found is None:
                continue
            if not isinstance(found, Shard):
                raise NotImplementedError(
                    f"shard_placement_fn: expected Shard(dim) or None for {name}; found {found!r}. "
                    "To shard some parameters over other ranks, call fully_shard() on their "
                    "modules first, with a mesh of those ranks"
                )
            dim = found.dim + param.ndim if found.dim < 0 else found.dim
            if not 0 <= dim < max(param.ndim, 1):
                raise UsageError(
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


def _move_buffers(group: ParamGroup) -> None:
    """Move the buffers of the group's modules to the device of its parameters."""
    device = group.resources.memory.device
    for module in group.modules:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    inner._buffers[name] = buffer.to(device)
