"""The arguments of the wrappers: our own, and those of Megatron-Core's three.

    ours                            module, config=None, mesh=None, ...
    DistributedDataParallel         config, ddp_config, module, disable_bucketing=False,
                                    pg_collection=None
    FullyShardedDataParallel        config, ddp_config, module, fsdp_unit_modules=None,
                                    disable_bucketing=False, device=None, pg_collection=None
    TorchFullyShardedDataParallel   config, ddp_config, module, sub_modules_to_wrap=...,
                                    disable_bucketing=False, process_group=None

Megatron-Core's ``config`` is the model's; ``ddp_config`` may be its own class or ours.
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

from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices.mesh import device_of, mesh_of_group, ranks_that_meet
from fsdp_engine.megatron.process_groups import CollectedGroups, collect_groups
from fsdp_engine.planning.assignment import UnitSelector
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.sharding import keeps_after_forward
from fsdp_engine.strategies import Strategy

# Keywords of older versions, and the config's fields of that meaning.
_OLDER_FIELDS = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "bucket_size": "bucket_size",
}
_OLDER_GROUP = "data_parallel_group"
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
# Fields of Megatron-Core's configs that one wrapper alone reads, and that wrapper.
_FIELD_OF_WRAPPER = {"reshard_after_forward": "TorchFullyShardedDataParallel"}


@dataclass(frozen=True)
class Wrapping:
    """What is to be wrapped, and how; see :class:`~.distributed_data_parallel`.

    Attributes:
        model_config: Megatron-Core's config of the model; None in our own shape.
        groups: its groups, where they are known.
        keeps_after_forward: full parameters are kept until their backward is over.
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
        """Whether gradients are sums over ranks, as of Megatron-Core's wrapper, and not means."""
        return bool(getattr(self.model_config, "calculate_per_token_loss", False))


# Reads the arguments of one of the wrappers. Raises ValueError where arguments contradict each
# other or a field of Megatron-Core's config without a meaning here is not at its default,
# TypeError where an argument is missing, unknown or of another type.
Shape = Callable[..., Wrapping]


def meant_mesh(shape: Shape, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DeviceMesh | None:
    """The mesh that is meant, whether or not the arguments are right; None: of all ranks."""
    given: Mapping[str, Any]
    try:
        given = inspect.signature(shape).bind_partial(*args, **kwargs).arguments
    except TypeError:  # raised again by the shape itself, where all ranks are told
        given = kwargs
    if shape is _ours:
        found = [given.get("older", {}).get(_OLDER_GROUP)]
    else:
        groups: Any = given.get("pg_collection")
        if groups is None:
            try:
                groups = collect_groups(None)
            except TypeError:  # raised again by the shape, as above
                groups = None
        names = ("dp_cp", "dp")
        found = [given.get("process_group"), *(getattr(groups, name, None) for name in names)]
    group = next((each for each in found if isinstance(each, ProcessGroup)), None)
    mesh: DeviceMesh | None = given.get("mesh")
    return mesh_of_group(group) if mesh is None and group is not None else mesh


def shape_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape:
    """The shape of a call of ``DistributedDataParallel``: ours or Megatron-Core's."""
    return _theirs if _is_theirs(args, kwargs) else _ours


def _is_theirs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if "ddp_config" in kwargs or "pg_collection" in kwargs:
        return True
    return len(args) > 1 and not isinstance(args[0], nn.Module) and _is_config(args[1])


def _is_config(found: object) -> bool:
    """Whether it has what both classes of that name have."""
    return dataclasses.is_dataclass(found) and hasattr(found, "overlap_grad_reduce")


def _ours(
    module: nn.Module,
    config: DistributedDataParallelConfig | None = None,
    mesh: DeviceMesh | None = None,
    *,
    expert_mesh: DeviceMesh | None = None,
    disable_bucketing: bool = False,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    **older: Any,
) -> Wrapping:
    mesh = _with_older_group(mesh, older)
    if config is not None:
        config = config_from(config, "config")
    config = _with_older_fields(config, older)
    return Wrapping(module, config, mesh, expert_mesh, disable_bucketing, units, mp_policy)


def _theirs(
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
) -> Wrapping:
    own = config_from(ddp_config, "ddp_config")
    if getattr(config, "gradient_accumulation_fusion", False):
        raise ValueError(
            "config.gradient_accumulation_fusion: expected False, since gradients are scaled as "
            "they are copied, and kernels must not add to main_grad themselves; found True"
        )
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
        # Also where expt_dp has the ranks of the data group: tensor ranks may hold other experts.
        expert_mesh = mesh_of_group(groups.expt_dp) if _has_experts(module) else None
    return Wrapping(
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


def megatron_fsdp_call(
    config: Any,
    ddp_config: Any,
    module: nn.Module,
    fsdp_unit_modules: Iterable[type[nn.Module] | str] | None = None,
    disable_bucketing: bool = False,
    device: torch.device | str | int | None = None,
    pg_collection: object | None = None,
    **ours: Any,
) -> Wrapping:
    """The shape of ``FullyShardedDataParallel``."""
    own = config_from(
        ddp_config,
        "ddp_config",
        read_by_wrapper=("fsdp_manual_registration",),
        use_megatron_fsdp=True,
        use_custom_fsdp=False,
    )
    if getattr(ddp_config, "fsdp_manual_registration", False) and not own.nccl_ub:
        raise ValueError(
            "ddp_config.fsdp_manual_registration: expected nccl_ub=True beside it; found "
            "nccl_ub=False"
        )
    if fsdp_unit_modules is not None and isinstance(module, nn.Module):
        name = "fsdp_unit_modules"
        classes = [_class_of(each, name) for each in _several(fsdp_unit_modules, name)]
        ours["units"] = _modules_of(module, classes)
        if classes and not ours["units"]:
            raise _none_found(name, classes, module)
    call = _theirs(config, own, module, disable_bucketing, pg_collection, **ours)
    _check_device(device, call.mesh)
    return call


def torch_fsdp_call(
    config: Any,
    ddp_config: Any,
    module: nn.Module,
    sub_modules_to_wrap: Iterable[type[nn.Module] | str] | None = None,
    disable_bucketing: bool = False,
    process_group: ProcessGroup | None = None,
    *,
    pg_collection: object | None = None,
    mesh: DeviceMesh | None = None,
    **ours: Any,
) -> Wrapping:
    """The shape of ``TorchFullyShardedDataParallel``."""
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
            raise _none_found(name, classes, module)
        ours["units"] = units or None
    call = _theirs(config, own, module, disable_bucketing, pg_collection, mesh=mesh, **ours)
    asked = getattr(ddp_config, "reshard_after_forward", True)
    size = _inner_size(call.mesh, own.num_distributed_optimizer_instances)
    keeps = keeps_after_forward(asked, size, Strategy.from_names(*own.level_names))
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
            raise ValueError(
                f"ddp_config.{field}: expected its default, since TorchFullyShardedDataParallel "
                f"is level {_TORCH_FSDP_LEVEL!r}; found {value!r}"
            )


def _inner_size(mesh: DeviceMesh | None, num_rows: int) -> int:
    """Ranks that share a parameter."""
    if mesh is not None and mesh.ndim == 2:
        return mesh.size(1)
    return len(ranks_that_meet(mesh)) // num_rows


def _several(given: object, name: str) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected module classes in a list; found {given!r}")
    return list(given)


def _class_of(given: object, name: str) -> type[nn.Module]:
    """A class, or that of a dotted path."""
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
    """The modules of these classes that have parameters, in module order."""
    wanted = tuple(classes)
    return [
        module
        for module in model.modules()
        if isinstance(module, wanted) and next(module.parameters(), None) is not None
    ]


def _none_found(name: str, classes: Iterable[type[nn.Module]], model: nn.Module) -> ValueError:
    listed = ", ".join(each.__name__ for each in classes)
    return ValueError(
        f"{name}: expected classes of modules with parameters; found {listed or 'no class'}, "
        f"and no such module in {type(model).__name__}"
    )


def _torch_fsdp_classes(
    config: Any, model: nn.Module, given: object, name: str
) -> list[type[nn.Module]]:
    """The classes of modules that become units, with those of ``_fsdp_modules`` attributes."""
    more = [each for module in model.modules() for each in getattr(module, "_fsdp_modules", ())]
    if given is None and not more:
        return []  # the engine's default units, which are layers, too
    if given is None:
        loaded = [(sys.modules.get(path), attribute) for path, attribute in _TORCH_FSDP_UNITS]
        classes = [getattr(module, attribute) for module, attribute in loaded if module]
    else:
        classes = [_class_of(each, name) for each in _several(given, name)]
    if getattr(config, "transformer_impl", None) == "local":
        # Its transformer layers consist of them.
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
    """A config of ours from one of ours or of Megatron-Core's class, which later assignments to
    ``given`` do not change.

    Args:
        read_by_wrapper: fields of Megatron-Core's class that the caller reads itself.
        **changes: fields of ours that have these values, not those of ``given``.

    Raises:
        ValueError: a field that has no meaning here is not at its default, or fields contradict
            each other.
        TypeError: it is neither.
    """
    if isinstance(given, DistributedDataParallelConfig):
        return dataclasses.replace(given, **changes) if changes else given.checked()
    if isinstance(given, type) or not _is_config(given):
        raise TypeError(
            f"{name}: expected a DistributedDataParallelConfig, ours or Megatron-Core's; "
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


def _with_older_group(mesh: DeviceMesh | None, older: dict[str, Any]) -> DeviceMesh | None:
    group = older.pop(_OLDER_GROUP, None)
    if group is None:
        return mesh
    if mesh is not None:
        raise ValueError(f"{_OLDER_GROUP}, mesh: expected one of them; found both")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"{_OLDER_GROUP}: expected a ProcessGroup; found {group!r}")
    return mesh_of_group(group)


def _with_older_fields(
    config: DistributedDataParallelConfig | None, older: dict[str, Any]
) -> DistributedDataParallelConfig:
    unknown = sorted(older.keys() - _OLDER_FIELDS.keys())
    if unknown:
        known = ", ".join([_OLDER_GROUP, *_OLDER_FIELDS])
        raise TypeError(
            f"DistributedDataParallel: expected keywords of {known}; found {', '.join(unknown)}"
        )
    given = {_OLDER_FIELDS[name]: value for name, value in older.items() if value is not None}
    if config is None:
        return DistributedDataParallelConfig(**given)
    for name, value in older.items():
        said = getattr(config, _OLDER_FIELDS[name])
        if value is not None and value != said:
            raise ValueError(
                f"{name}: expected {said!r}, as the config's {_OLDER_FIELDS[name]} says; "
                f"found {value!r}"
            )
    return config
