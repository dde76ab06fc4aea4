"""Creates the shards of an engine's buffers at homes, and registers them for offloaded steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.placement import GradientShard, MainShard, Placement
from fsdp_engine.buffers.sharded_buffer import BufferContext
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.comm.lanes import Lane
from fsdp_engine.comm.pending_steps import PendingStep
from fsdp_engine.engine import Engine
from fsdp_engine.extensions.offload.disk_memory import DiskFile
from fsdp_engine.extensions.offload.home import Homes
from fsdp_engine.extensions.offload.homed_gradients import HomedShard
from fsdp_engine.extensions.offload.homed_main import HomedMain, can_leave_device, is_cast_at_home
from fsdp_engine.extensions.offload.offloaded_step import OffloadedBuffer, offload_state
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.extensions.offload.places import HOST, ROLES, OffloadPlaces
from fsdp_engine.extensions.offload.step_beside_forward import StepBesideForward
from fsdp_engine.runtime.gradient_observer import GradientObserver
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.units.build import Resources


class _Returns(GradientObserver):
    """Observer that waits for copies of gradients to their homes when a program waits for
    reductions."""

    def __init__(self, offloading: Offloading) -> None:
        self._offloading = offloading

    def waited(self) -> None:
        """See :class:`GradientObserver`."""
        self._offloading.wait()


class OffloadPlacement(Placement):
    """Places shards of buffers at homes.

    Args:
        offloading: The object that moves the state.
    """

    def __init__(self, offloading: Offloading) -> None:
        self._offloading = offloading
        self._main, self._gradients = map(self._homes, ("main_weights", "gradients"))

    def _homes(self, role: str) -> Homes | None:
        return self._offloading.homes(role) if self._offloading.moves(role) else None

    def make_main(self, spec: BufferSpec, context: BufferContext, codec: ParamCodec) -> MainShard:
        """See :class:`Placement`."""
        if self._main is None or not can_leave_device(spec.strategy, codec):
            return super().make_main(spec, context, codec)
        # Compute weights have a home in host memory only: on a disk, they would need more writes.
        is_on_host = self._offloading.offload.main_weights == HOST
        is_cast = is_on_host and is_cast_at_home(spec.strategy, codec)
        return HomedMain(spec, context, codec, self._main, is_cast=is_cast)

    def device_of_main(self, device: torch.device) -> torch.device:
        """See :class:`Placement`."""
        return device if self._main is None else torch.device("cpu")

    def make_gradients(
        self, spec: BufferSpec, context: BufferContext, depth: int, dtype: torch.dtype
    ) -> GradientShard:
        """See :class:`Placement`."""
        if self._gradients is None:
            return super().make_gradients(spec, context, depth, dtype)
        return HomedShard(spec, context, depth, dtype, self._gradients, self._offloading.lanes)

    def make_pending_step(self, compute: Lane) -> PendingStep:
        """See :class:`Placement`."""
        kind = StepBesideForward if self._offloading.overlaps_forward else PendingStep
        return kind(compute)

    def start(self, engine: Engine) -> None:
        """See :class:`Placement`."""
        engine.parts.append(self._offloading)
        if self._gradients is not None:
            engine.reductions.wait_for_each_backward()
            engine.reductions.observers.append(_Returns(self._offloading))
        mains = [buffer.weights.main_shard for buffer in engine.buffers]
        end_gathers, before_changes = engine.lanes.drain_gathers, engine.scheduler.before_changes
        # Gathers read host memory that users may change, so they must finish before changes.
        is_read = any(main.before_change is not None for main in mains)
        if is_read and end_gathers not in before_changes:
            before_changes.append(end_gathers)
        for unit in engine.units:
            self.rebuilt(engine, unit)

    def rebuilt(self, engine: Engine, unit: Unit) -> None:
        """See :class:`Placement`. Registers ``unit`` again, so steps use its current homes."""
        if not self._offloading.steps_on_host:
            buffers = [_offloaded(each) for each in unit.trainable]
            size = engine.extension(_elements_of_a_chunk)
            offload_state(self._offloading, unit.label, buffers, size)


def place_state(
    resources: Resources, offload: OffloadPlaces, files: Mapping[str, DiskFile]
) -> None:
    """Let ``resources`` build buffers whose shards are at the places of ``offload``. Equal
    ``offload`` share one placement.

    Args:
        resources: The resources to build with.
        offload: The places of state.
        files: Existing files on a disk, by role.
    """
    if not any(offload.moves(role, resources.memory.device) for role in ROLES):
        return
    placements = resources.placements
    if offload not in placements:
        lane, memory = resources.lanes.compute, resources.memory
        placements[offload] = OffloadPlacement(Offloading(offload, memory, lane, files))
    resources.placement = placements[offload]


def _offloaded(buffer: ParamAndGradBuffer) -> OffloadedBuffer:
    main, grads = buffer.weights.main_shard, buffer.grads
    shard = None if grads is None else grads.shard
    return OffloadedBuffer(
        buffer.sharded_params,
        main.home if isinstance(main, HomedMain) else None,
        shard.part_at(buffer.spec.optim_depth) if isinstance(shard, HomedShard) else None,
        buffer.weights.pending,
    )


def _elements_of_a_chunk(engine: Engine) -> int:
    """Returns the mean number of elements per unit in this rank's shards of trainable parameters.
    With chunks of half that size, copies are short, and take 5 % longer in all (simulated step of a
    model with 8B parameters on 64 H100s)."""
    units = [unit for unit in engine.units if unit.trainable]
    slices = (each.weights.main.tensor.numel() for unit in units for each in unit.trainable)
    return sum(slices) // max(len(units), 1)
