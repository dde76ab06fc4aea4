"""Parses the arguments of the wrappers: this package's own and those of Megatron-Core's three.

    own                             module, config=None, mesh=None, ...
    DistributedDataParallel         config, ddp_config, module, disable_bucketing=False,
                                    pg_collection=None, full_param_layout=None
    FullyShardedDataParallel        config, ddp_config, module, fsdp_unit_modules=None,
                                    disable_bucketing=False, device=None, pg_collection=None
    TorchFullyShardedDataParallel   config, ddp_config, module, sub_modules_to_wrap=...,
                                    disable_bucketing=False, process_group=None

Megatron-Core's ``config`` is the model's; ``ddp_config`` may be Megatron-Core's class or this
package's.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.comm.mesh import device_of, mesh_of_group, ranks_that_meet
from fsdp_engine.megatron.config import DistributedDataParallelConfig
from fsdp_engine.megatron.process_groups import CollectedGroups, collect_groups
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.sharding import keeps_after_forward
from fsdp_engine.strategies import Strategy
from fsdp_engine.units.assignment import UnitSelector

# Keywords of previous versions, with the config's fields that replaced them.
_LEGACY_FIELDS = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "bucket_size": "bucket_size",
}
_LEGACY_GROUP = "data_parallel_group"
# The modules that Megatron-Core's TorchFullyShardedDataParallel wraps by default.
_TORCH_FSDP_UNITS = (
    ("megatron.core.transformer.transformer_layer", "TransformerLayer"),
    (
        "megatron.core.models.common.embeddings.language_model_embedding",
        "LanguageModelEmbedding",
    ),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear"),
)
_TORCH_FSDP_LEVEL = "optim_grads_params"
_UNSUPPORTED_WEIGHT_SHARDS = "the engine does not reduce gradients over groups of weight shards"
# Fields of Megatron-Core's TransformerConfig that are not supported, with the only accepted value
# and the reason.
_UNSUPPORTED_FIELDS: dict[str, tuple[object, str]] = {
    "gradient_accumulation_fusion": (
        False,
        "gradients are scaled as they are copied, and kernels must not add to main_grad themselves",
    ),
    "gtp_weight_remat_size": (1, _UNSUPPORTED_WEIGHT_SHARDS),
    "expert_gtp_weight_remat_size": (1, _UNSUPPORTED_WEIGHT_SHARDS),
    "flextron": (
        False,
        "finalize_model_grads does not sum Flextron routers' gradients over stages",
    ),
}
# Fields of Megatron-Core's configs that only one wrapper reads, with the wrapper's name.
_FIELD_OF_WRAPPER = {"reshard_after_forward": "TorchFullyShardedDataParallel"}


@dataclass(frozen=True)
class WrapperArguments:
    """The parsed arguments of a wrapper; see ``distributed_data_parallel.py``.

    Attributes:
        model_config: Megatron-Core's config of the model; None with this package's own arguments.
        groups: Megatron-Core's groups; None if there are none.
        keeps_after_forward: Whether gathered parameters are kept until their backward.
    """

    module: nn.Module
    config: DistributedDataParallelConfig
    mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None
    disable_bucketing: bool
    units: UnitSelector | Iterable[UnitSelector] | None
    mp_policy: MixedPrecisionPolicy | None
    model_config: Any = None
    groups: CollectedGroups | None = None
    keeps_after_forward: bool = False

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are sums over ranks instead of means, as in Megatron-Core."""
        return bool(getattr(self.model_config, "calculate_per_token_loss", False))


# Parses the arguments of one wrapper. Raises ValueError if arguments contradict each other or an
# unsupported field of Megatron-Core's config is not at its default, and TypeError if an argument
# is missing, unknown or of another type.
ParseArguments = Callable[..., WrapperArguments]


def requested_mesh(
    parse: ParseArguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DeviceMesh | None:
    """Returns the mesh that the arguments select, even if other arguments are invalid; None: all
    ranks."""
    given: Mapping[str, Any]
    try:
        given = inspect.signature(parse).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
    except TypeError:  # raised again by the parser, on all ranks
        given = kwargs
    if parse is _parse_own:
        found = [given.get("legacy", {}).get(_LEGACY_GROUP)]
    else:
        groups: Any = given.get("pg_collection")
        if groups is None:
            try:
                groups = collect_groups(None)
            except TypeError:  # raised again by the parser, as above
                groups = None
        names = ("dp_cp", "dp")
        found = [given.get("process_group"), *(getattr(groups, name, None) for name in names)]
    group = next((each for each in found if isinstance(each, ProcessGroup)), None)
    mesh: DeviceMesh | None = given.get("mesh")
    return mesh_of_group(group) if mesh is None and group is not None else mesh


def parser_for(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParseArguments:
    """Returns the parser for a call of ``DistributedDataParallel``: this package's or
    Megatron-Core's."""
    return _parse_megatron if _is_megatron_call(args, kwargs) else _parse_own


def _is_megatron_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if "ddp_config" in kwargs or "pg_collection" in kwargs:
        return True
    return len(args) > 1 and not isinstance(args[0], nn.Module) and _is_config(args[1])


def _is_config(found: object) -> bool:
    """Returns whether ``found`` is a config of this package or of Megatron-Core."""
    return dataclasses.is_dataclass(found) and hasattr(found, "overlap_grad_reduce")


def _parse_own(
    module: nn.Module,
    config: DistributedDataParallelConfig | None = None,
    mesh: DeviceMesh | None = None,
    *,
    expert_mesh: DeviceMesh | None = None,
    disable_bucketing: bool = False,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    **legacy: Any,
) -> WrapperArguments:
    mesh = _with_legacy_group(mesh, legacy)
    if config is not None:
        config = config_from(config, "config")
    config = _with_legacy_fields(config, legacy)
    return WrapperArguments(module, config, mesh, expert_mesh, disable_bucketing, units, mp_policy)


def _parse_megatron(
    config: Any,
    ddp_config: Any,
    module: nn.Module,
    disable_bucketing: bool = False,
    pg_collection: object | None = None,
    *,
    mesh: DeviceMesh | None = None,
    expert_mesh: DeviceMesh | None = None,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    full_param_layout: object | None = None,
) -> WrapperArguments:
    # full_param_layout is the layout of Megatron-Core's buffers (0.19); the engine has its own.
    own = config_from(ddp_config, "ddp_config")
    for name, (is_off, why) in _UNSUPPORTED_FIELDS.items():
        value = getattr(config, name, is_off)
        if value is not None and value != is_off:
            raise ValueError(f"config.{name}: expected {is_off}, since {why}; found {value!r}")
    if own.average_in_collective and getattr(config, "calculate_per_token_loss", False):
        raise ValueError(
            "ddp_config.average_in_collective: expected False, since gradients are summed with "
            "config.calculate_per_token_loss; found True"
        )
    if mesh is not None and pg_collection is not None:
        raise ValueError("mesh, pg_collection: expected one of them; found both")
    groups = collect_groups(pg_collection)
    if mesh is None and groups is not None and groups.data is not None:
        mesh = mesh_of_group(groups.data)
    if expert_mesh is None and groups is not None and groups.expt_dp is not None:
        # The mesh is needed even if expt_dp has the same ranks as the data group, because tensor
        # ranks may hold different experts.
        expert_mesh = mesh_of_group(groups.expt_dp) if _has_experts(module) else None
    return WrapperArguments(
        module,
        own,
        mesh,
        expert_mesh,
        disable_bucketing,
        units,
        mp_policy,
        model_config=config,
        groups=groups,
    )


def parse_megatron_fsdp(
    config: Any,
    ddp_config: Any,
    module: nn.Module,
    fsdp_unit_modules: Iterable[type[nn.Module] | str] | None = None,
    disable_bucketing: bool = False,
    device: torch.device | str | int | None = None,
    pg_collection: object | None = None,
    **kwargs: Any,
) -> WrapperArguments:
    """Parse the arguments of ``FullyShardedDataParallel``."""
    own = config_from(
        ddp_config,
        "ddp_config",
        read_by_wrapper=("fsdp_manual_registration",),
        use_megatron_fsdp=True,
        use_custom_fsdp=False,
    )
    if getattr(ddp_config, "fsdp_manual_registration", False) and not own.nccl_ub:
        raise ValueError(
            "ddp_config.fsdp_manual_registration: expected nccl_ub=True as well; found "
            "nccl_ub=False"
        )
    if fsdp_unit_modules is not None and isinstance(module, nn.Module):
        name = "fsdp_unit_modules"
        classes = [_class_of(each, name) for each in _as_list(fsdp_unit_modules, name)]
        kwargs["units"] = _modules_of(module, classes)
        if classes and not kwargs["units"]:
            raise _no_modules_error(name, classes, module)
    call = _parse_megatron(config, own, module, disable_bucketing, pg_collection, **kwargs)
    _check_device(device, call.mesh)
    return call


def parse_torch_fsdp(
    config: Any,
    ddp_config: Any,
    module: nn.Module,
    sub_modules_to_wrap: Iterable[type[nn.Module] | str] | None = None,
    disable_bucketing: bool = False,
    process_group: ProcessGroup | None = None,
    *,
    pg_collection: object | None = None,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> WrapperArguments:
    """Parse the arguments of ``TorchFullyShardedDataParallel``."""
    own = config_from(
        ddp_config,
        "ddp_config",
        read_by_wrapper=("reshard_after_forward",),
        use_megatron_fsdp=True,
        use_custom_fsdp=False,
        data_parallel_sharding_strategy=_TORCH_FSDP_LEVEL,
    )
    _check_names_no_other_level(ddp_config)
    if process_group is not None:
        if not isinstance(process_group, ProcessGroup):
            raise TypeError(f"process_group: expected a ProcessGroup; found {process_group!r}")
        if mesh is not None or pg_collection is not None:
            raise ValueError(
                "process_group, mesh, pg_collection: expected one of them; found several"
            )
        mesh = mesh_of_group(process_group)
    if isinstance(module, nn.Module):
        name = "sub_modules_to_wrap"
        classes = _torch_fsdp_classes(config, module, sub_modules_to_wrap, name)
        units = _modules_of(module, classes)
        if not units and sub_modules_to_wrap is not None:
            raise _no_modules_error(name, classes, module)
        kwargs["units"] = units or None
    call = _parse_megatron(
        config, own, module, disable_bucketing, pg_collection, mesh=mesh, **kwargs
    )
    reshard = getattr(ddp_config, "reshard_after_forward", True)
    size = _inner_size(call.mesh, own.num_distributed_optimizer_instances)
    keeps = keeps_after_forward(reshard, size, Strategy.from_names(*own.level_names))
    return dataclasses.replace(call, keeps_after_forward=keeps)


def _check_names_no_other_level(ddp_config: Any) -> None:
    found = {
        field: getattr(ddp_config, field, False)
        for field in ("use_distributed_optimizer", "use_megatron_fsdp", "use_custom_fsdp")
    }
    level = getattr(ddp_config, "data_parallel_sharding_strategy", _TORCH_FSDP_LEVEL)
    if level not in (
        _TORCH_FSDP_LEVEL,
        DistributedDataParallelConfig.data_parallel_sharding_strategy,
    ):
        found["data_parallel_sharding_strategy"] = level
    for field, value in found.items():
        if value:
            default = False if isinstance(value, bool) else "no_shard"
            raise ValueError(
                f"ddp_config.{field}: expected its default, {default!r}, since "
                f"TorchFullyShardedDataParallel is level {_TORCH_FSDP_LEVEL!r}; found {value!r}"
            )


def _inner_size(mesh: DeviceMesh | None, num_rows: int) -> int:
    """Returns the number of ranks over which a parameter is sharded."""
    if mesh is not None and mesh.ndim == 2:
        return mesh.size(1)
    return len(ranks_that_meet(mesh)) // num_rows


def _as_list(given: object, name: str) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected module classes in a list; found {given!r}")
    return list(given)


def _class_of(given: object, name: str) -> type[nn.Module]:
    """Returns a module class, imported if a dotted path is given."""
    found = given
    if isinstance(given, str):
        path, _, attribute = given.rpartition(".")
        try:
            found = getattr(importlib.import_module(path), attribute, None)
        except (ImportError, ValueError):
            found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(
            f"{name}: expected classes of modules, or their paths as 'package.module.Class'; "
            f"found {given!r}"
        )
    return found


def _modules_of(model: nn.Module, classes: Iterable[type[nn.Module]]) -> list[nn.Module]:
    """Returns the modules of these classes that have parameters, in module order."""
    wanted = tuple(classes)
    return [
        module
        for module in model.modules()
        if isinstance(module, wanted) and next(module.parameters(), None) is not None
    ]


def _no_modules_error(
    name: str, classes: Iterable[type[nn.Module]], model: nn.Module
) -> ValueError:
    listed = ", ".join(each.__name__ for each in classes)
    return ValueError(
        f"{name}: expected classes of modules with parameters; found {listed or 'no class'}, "
        f"and no such module in {type(model).__name__}"
    )


def _torch_fsdp_classes(
    config: Any, model: nn.Module, given: object, name: str
) -> list[type[nn.Module]]:
    """Returns the classes of modules that become units, including those that ``_fsdp_modules``
    attributes list."""
    more = [each for module in model.modules() for each in getattr(module, "_fsdp_modules", ())]
    if given is None and not more:
        return []  # the engine's default units, which are also layers
    if given is None:
        loaded = [(sys.modules.get(path), attribute) for path, attribute in _TORCH_FSDP_UNITS]
        classes = [getattr(module, attribute) for module, attribute in loaded if module]
    else:
        classes = [_class_of(each, name) for each in _as_list(given, name)]
    if getattr(config, "transformer_impl", None) == "local":
        # In the local implementation, modules of this class are inside of transformer layers, which
        # are units by default.
        classes = [each for each in classes if each.__name__ != "ColumnParallelLinear"]
    return classes + more


def _check_device(device: torch.device | str | int | None, mesh: DeviceMesh | None) -> None:
    if device is None:
        return
    expected = device_of(mesh)
    found = torch.device(device)
    if found.type != expected.type or found.index not in (None, expected.index):
        raise ValueError(f"device: expected this rank's {expected} or None; found {found}")


def _has_experts(module: object) -> bool:
    return isinstance(module, nn.Module) and any(
        not getattr(param, "allreduce", True) for param in module.parameters()
    )


def config_from(
    given: Any, name: str, *, read_by_wrapper: Collection[str] = (), **changes: Any
) -> DistributedDataParallelConfig:
    """Returns this package's config with the values of ``given``, which may be of Megatron-Core's
    class. Later assignments to ``given`` have no effect on it.

    Args:
        given: The config.
        name: The name of the argument, for errors.
        read_by_wrapper: Fields of Megatron-Core's class that the caller reads itself.
        **changes: Values of fields that override those of ``given``.

    Raises:
        ValueError: An unsupported field is not at its default, or fields contradict each other.
        TypeError: ``given`` is of neither class.
    """
    if isinstance(given, DistributedDataParallelConfig):
        return dataclasses.replace(given, **changes) if changes else given.checked()
    if isinstance(given, type) or not _is_config(given):
        raise TypeError(
            f"{name}: expected a DistributedDataParallelConfig, fsdp_engine's or Megatron-Core's; "
            f"found {given!r}"
        )
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    values = {}
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name in known:
            values[field.name] = value
        elif field.name in read_by_wrapper:
            continue
        elif field.name in _FIELD_OF_WRAPPER:
            raise ValueError(
                f"{name}: expected a DistributedDataParallelConfig; found {type(given).__name__}, "
                f"which has {field.name}. Wrap by fsdp_engine.megatron."
                f"{_FIELD_OF_WRAPPER[field.name]}"
            )
        elif value != field.default:
            raise ValueError(
                f"{name}.{field.name}: expected its default, {field.default!r}, since it has no "
                f"meaning for this engine; found {value!r}"
            )
    return DistributedDataParallelConfig(**{**values, **changes})


def _with_legacy_group(mesh: DeviceMesh | None, legacy: dict[str, Any]) -> DeviceMesh | None:
    group = legacy.pop(_LEGACY_GROUP, None)
    if group is None:
        return mesh
    if mesh is not None:
        raise ValueError(f"{_LEGACY_GROUP}, mesh: expected one of them; found both")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"{_LEGACY_GROUP}: expected a ProcessGroup; found {group!r}")
    return mesh_of_group(group)


def _with_legacy_fields(
    config: DistributedDataParallelConfig | None, legacy: dict[str, Any]
) -> DistributedDataParallelConfig:
    unknown = sorted(legacy.keys() - _LEGACY_FIELDS.keys())
    if unknown:
        known = ", ".join([_LEGACY_GROUP, *_LEGACY_FIELDS])
        raise TypeError(
            f"DistributedDataParallel: expected keywords of {known}; found {', '.join(unknown)}"
        )
    given = {_LEGACY_FIELDS[name]: value for name, value in legacy.items() if value is not None}
    if config is None:
        return DistributedDataParallelConfig(**given)
    for name, value in legacy.items():
        configured = getattr(config, _LEGACY_FIELDS[name])
        if value is not None and value != configured:
            raise ValueError(
                f"{name}: expected {configured!r}, the config's {_LEGACY_FIELDS[name]}; "
                f"found {value!r}"
            )
    return config
