"""The extension ``fe.Offload``: its arguments, their checks, and its part in building an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp_engine import backend
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.offload.disk_memory import DiskFile
from fsdp_engine.extensions.offload.homed_gradients import homed_shards
from fsdp_engine.extensions.offload.homed_main import (
    bytes_of_main,
    can_leave_device,
    check_leaves_device,
    is_cast_at_home,
)
from fsdp_engine.extensions.offload.places import (
    DEVICE,
    DISK,
    HOST,
    OffloadPlaces,
    computes_elsewhere,
)
from fsdp_engine.extensions.offload.placing import place_state
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.units.build import EngineSetup, Resources
from fsdp_engine.units.plan import AxisPlans, Plan


class Offload(OffloadPlaces, EngineExtension):
    """Stores state in host memory or on a disk between its uses. See ``docs/internals/offload.md``.

    A place is "device"; "host": pinned memory, from which the shard of each unit is copied to the
    device and back; or "disk": a file. On a CPU all state is in host memory anyway.

    Args:
        optimizer_state: Place of the state of optimizers that are passed to ``shard_optimizer``.
        folder: A folder on a local disk, required for "disk". Its files have no names, so the
            operating system deletes them when the process ends.
        main_weights: Place of the main weights, which optimizers step, and from which gathers read
            this rank's shard. Main weights that are part of persistent compute weights cannot be
            offloaded: frozen weights stay on the device; for trainable weights on an accelerator
            ``fe.shard`` raises ValueError.
        gradients: Place of reduced gradients, which must be sharded: the inner level must be
            "optim_grads" or "optim_grads_params".
        pin_memory: Whether host memory is pinned. False: copies take longer, and the host waits for
            them.
        step_on: "host": optimizers step in host memory, with their own code. All three places must
            be "host".
        overlap_forward: Run steps concurrently with the next forward, whose gathers wait for the
            step of their unit. Requires ``optimizer_state="host"`` as the only offload, and has no
            effect on a CPU. Gradients are freed after that step. After ``step()``, do not use
            tensors that were taken from parameters and gradients before it: take them again.

    Raises:
        ValueError: A place is unknown, "disk" lacks a folder, or arguments contradict each other.
    """

    def signature(self) -> str:
        """See the base class. Omits the folder, which may differ between nodes."""
        return f"offload={self.places}, step_on={self.step_on}"

    def check(self, setup: EngineSetup) -> None:
        """See the base class. If a disk has too little space, this raises before ranks start to
        build buffers.

        Raises:
            ValueError: The levels, the codecs or the folder do not allow these places.
            OSError: There is too little space on the disk, or the folder cannot be written.
        """
        self.check_plan(setup.plan, setup.axis_plans, setup.data.device)
        if self.places:
            setup.kept[self] = self._take_files(setup)

    def check_plan(self, plan: Plan, axis_plans: AxisPlans, device: torch.device) -> None:
        """Check that the levels and the codecs of a plan allow these places.

        Args:
            plan: The plan of the model.
            axis_plans: The axes and the levels of its parameters.
            device: The device that computes.

        Raises:
            ValueError: A level or a codec does not allow a place, or the folder cannot be written.
        """
        if not self.places:
            return
        levels = axis_plans.data.strategy
        self.check_levels(shards_gradients=levels.shards(Role.GRAD, Axis.INNER))
        if computes_elsewhere(device):
            self.check_pair()
        self.check_folder()
        if self.main_weights != DEVICE and computes_elsewhere(device):
            for unit in plan.units:
                for part in unit.buffers:
                    if part.kind.requires_grad:
                        strategy, main = axis_plans.of(part.kind).strategy, part.kind.dtypes.main
                        check_leaves_device(strategy, part.make_codec(), main, f"of {unit.label}")

    def main_leaves(self, strategy: Strategy, codec: ParamCodec) -> bool:
        """Returns whether the main weights of a buffer are offloaded.

        Args:
            strategy: The levels of the buffer.
            codec: The codec of the buffer.
        """
        return self.main_weights != DEVICE and can_leave_device(strategy, codec)

    def is_cast_by_host(self, strategy: Strategy, codec: ParamCodec) -> bool:
        """Returns whether the host casts main weights to compute weights in host memory. The
        arguments are those of ``main_leaves``."""
        leaves = self.main_weights == HOST and can_leave_device(strategy, codec)
        return leaves and is_cast_at_home(strategy, codec)

    def _take_files(self, setup: EngineSetup) -> dict[str, DiskFile]:
        """Returns the files for main weights and gradients on a disk, by role, with the space that
        the buffers need already reserved."""
        sizes: dict[str, list[int]] = {
            role: [] for role in ("main_weights", "gradients") if self.places.get(role) == DISK
        }
        if not sizes or not backend.current().has_values:
            return {}
        for part in (part for unit in setup.plan.units for part in unit.buffers):
            strategy = setup.axis_plans.of(part.kind).strategy
            spec = BufferSpec("", part.layout, part.kind, strategy, 0)
            mesh = (setup.experts if part.kind.is_expert else None) or setup.data
            if "main_weights" in sizes and can_leave_device(strategy, part.make_codec()):
                sizes["main_weights"].append(bytes_of_main(spec, mesh.coordinate))
            for depth, dtype in homed_shards(spec) if part.kind.requires_grad else ():
                start, stop = part.layout.range(depth, mesh.coordinate)
                sizes.get("gradients", []).append((stop - start) * dtype.itemsize)
        assert self.folder is not None
        files = {role: DiskFile(Path(self.folder)) for role in sizes}
        for role, file in files.items():
            file.reserve(sizes[role])
        return files

    def prepare(self, setup: EngineSetup, resources: Resources) -> None:
        """See ``EngineExtension``."""
        place_state(resources, self, setup.kept.get(self, {}))

    def start(self, engine: Engine) -> None:
        """See ``EngineExtension``."""
        engine.extension(_Selected).offload = self


class _Selected:
    """Holds the ``Offload`` that ``fe.shard`` was called with."""

    def __init__(self, engine: Engine) -> None:
        self.offload = Offload()


def from_argument(value: object) -> list[Offload]:
    """Returns the extension that the deprecated argument ``offload`` of ``fe.shard`` selects.

    Raises:
        TypeError: ``value`` is not an ``Offload``.
    """
    if not isinstance(value, Offload):
        raise TypeError(f"offload: expected an fe.Offload or None; found {value!r}")
    return [value]


@property  # type: ignore[misc]
def offload(engine: Engine) -> Offload:
    """The places in which the engine stores state between its uses."""
    return engine.extension(_Selected).offload
