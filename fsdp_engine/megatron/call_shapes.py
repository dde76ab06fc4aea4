"""What ``DistributedDataParallel`` is called with, in either shape.

    ours            module, config=None, mesh=None, ...
    Megatron-Core   config, ddp_config, module, disable_bucketing=False, pg_collection=None

Its ``config`` is the model's; ``ddp_config`` may be its own class or ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices.mesh import mesh_of_group
from fsdp_engine.megatron.process_groups import CollectedGroups, collect_groups
from fsdp_engine.planning.assignment import UnitSelector
from fsdp_engine.precision import MixedPrecisionPolicy

# Keywords of older versions, and the config's fields of that meaning.
_OLDER_FIELDS = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "bucket_size": "bucket_size",
}
_OLDER_GROUP = "data_parallel_group"


@dataclass(frozen=True)
class Wrapping:
    """What is to be wrapped, and how; see :class:`~.distributed_data_parallel`.

    Attributes:
        model_config: Megatron-Core's config of the model; None in our own shape.
        groups: its groups, where they are known.
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

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are sums over ranks, as of Megatron-Core's wrapper, and not means."""
        return bool(getattr(self.model_config, "calculate_per_token_loss", False))


def meant_mesh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DeviceMesh | None:
    """The mesh that is meant, whether or not the arguments are right; None: of all ranks."""
    mesh = kwargs.get("mesh")
    if _is_theirs(args, kwargs):
        collection = kwargs.get("pg_collection", args[4] if len(args) > 4 else None)
        groups: Any = collection
        if collection is None:
            try:
                groups = collect_groups(None)
            except TypeError:  # to be raised where it is told to all ranks
                groups = None
        found = [getattr(groups, name, None) for name in ("dp_cp", "dp")]
    else:
        mesh = args[2] if len(args) > 2 else mesh
        found = [kwargs.get(_OLDER_GROUP)]
    group = next((each for each in found if isinstance(each, ProcessGroup)), None)
    return mesh_of_group(group) if mesh is None and group is not None else mesh


def read_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Wrapping:
    """What the arguments say.

    Raises:
        ValueError: arguments contradict each other, or a field of Megatron-Core's config that has
            no meaning here is not at its default.
        TypeError: an argument is missing, unknown or of another type.
    """
    return (_theirs if _is_theirs(args, kwargs) else _ours)(*args, **kwargs)


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


def _has_experts(module: object) -> bool:
    return isinstance(module, nn.Module) and any(
        not getattr(param, "allreduce", True) for param in module.parameters()
    )


def config_from(given: Any, name: str) -> DistributedDataParallelConfig:
    """A config of ours from one of ours or of Megatron-Core's class, which later assignments to
    ``given`` do not change.

    Raises:
        ValueError: a field that has no meaning here is not at its default, or fields contradict
            each other.
        TypeError: it is neither.
    """
    if isinstance(given, DistributedDataParallelConfig):
        return given.checked()
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
        elif value != field.default:
            raise ValueError(
                f"{name}.{field.name}: expected its default, {field.default!r}, since it has no "
                f"meaning for this engine; found {value!r}"
            )
    return DistributedDataParallelConfig(**values)


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
