"""Checks of an offload before an engine is built, and the space that its state takes on a disk."""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp_engine import backend
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.extensions.offload.homed_gradients import homed_shards
from fsdp_engine.extensions.offload.homed_main import (
    bytes_of_main,
    can_leave_device,
    check_leaves_device,
)
from fsdp_engine.memory.disk_memory import DiskFile
from fsdp_engine.offload import DEVICE, DISK, Offload, computes_elsewhere
from fsdp_engine.strategies import Axis, Role
from fsdp_engine.units.plan import AxisPlans, Plan


def check_homes(plan: Plan, axis_plans: AxisPlans, offload: Offload, device: torch.device) -> None:
    """Check that weights, gradients and state of ``plan`` can lie where ``offload`` says.

    Raises:
        ValueError: see :meth:`.Offload.check_device`, :func:`.check_leaves_device`.
    """
    shards_gradients = axis_plans.data.strategy.shards(Role.GRAD, Axis.INNER)
    offload.check_device(device, shards_gradients=shards_gradients)
    if offload.main_weights == DEVICE or not computes_elsewhere(device):
        return
    for unit in plan.units:
        for part in unit.buffers:
            if part.kind.requires_grad:
                strategy, main = axis_plans.of(part.kind).strategy, part.kind.dtypes.main
                check_leaves_device(strategy, part.make_codec(), main, f"of {unit.label}")


def take_files(
    plan: Plan, axis_plans: AxisPlans, offload: Offload, data: DataMesh, experts: DataMesh | None
) -> dict[str, DiskFile]:
    """Files for main weights and gradients on a disk, by role, with the space that building takes:
    a rank that finds too little says so before others build.

    Raises:
        OSError: there is too little, or the folder cannot be written.
    """
    sizes: dict[str, list[int]] = {
        role: [] for role in ("main_weights", "gradients") if offload.places.get(role) == DISK
    }
    if not sizes or not backend.current().has_values:
        return {}
    for part in (part for unit in plan.units for part in unit.buffers):
        strategy = axis_plans.of(part.kind).strategy
        spec = BufferSpec("", part.layout, part.kind, strategy, 0)
        at = (experts if part.kind.is_expert and experts is not None else data).coordinate
        if "main_weights" in sizes and can_leave_device(strategy, part.make_codec()):
            sizes["main_weights"].append(bytes_of_main(spec, at))
        for depth, dtype in homed_shards(spec) if part.kind.requires_grad else ():
            start, stop = part.layout.range(depth, at)
            sizes.get("gradients", []).append((stop - start) * dtype.itemsize)
    assert offload.folder is not None
    files = {role: DiskFile(Path(offload.folder)) for role in sizes}
    for role, file in files.items():
        file.reserve(sizes[role])
    return files
