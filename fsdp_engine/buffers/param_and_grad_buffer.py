"""The weights and gradients of a homogeneous group of parameters, for modules and for users.

*Homogeneous* means: one codec, the same dtypes, all trainable or all frozen, one gradient divisor,
and the same ranks. Each parameter has three tensors:

- The **full** parameter, which modules compute with: a plain tensor in the compute dtype.
- The **sharded** parameter, which users, optimizers and checkpoints see outside of forward and
  backward: a ``FlatDTensor`` over this rank's slice of the main weights.
- The **gradient** of the sharded parameter, over this rank's slice of the reduced gradients.

If nothing is sharded and main weights are compute weights, the full and the sharded parameter are
the same plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.gradients import Gradients
from fsdp_engine.buffers.placement import Placement
from fsdp_engine.buffers.published_gradients import (
    PublishedGradients,
)
from fsdp_engine.buffers.sharded_buffer import (
    BufferContext,
    flat_source,
)
from fsdp_engine.buffers.spec import BufferKind, BufferSpec, ParamRecord
from fsdp_engine.buffers.weights import make_weights
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.comm.collectives import broadcast_
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.flat_dtensor import (
    FlatDTensor,
    FlatPlacement,
    clear_gradients,
    gradients_of,
    requires_grad_of,
    set_contents,
    share_attributes,
)
from fsdp_engine.flat_dtensor.given_slices import watch_slice
from fsdp_engine.flat_dtensor.parameter_access import ParameterAccess, ParamHooks
from fsdp_engine.layout import Layout
from fsdp_engine.memory import allocator as mem
from fsdp_engine.options import Options
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Strategy

# The first tag of buffers. Smaller tags are for messages outside of the schedule.
FIRST_TAG = 16


class Allocation(Protocol):
    """The memory manager and the placement with which the tensors of a unit are allocated."""

    memory: mem.Memory
    placement: Placement


class GradientListener(Protocol):
    """The engine's hooks on a buffer's parameters (:class:`~.gradient_hooks.GradientHooks`)."""

    def follow(self) -> None:
        """Register hooks on the gradient accumulators of the current parameters."""
        ...

    def renew(self) -> None:
        """Register hooks on new gradient accumulators, after the current stream has changed."""
        ...

    def arrived(self, index: int, param: Tensor) -> None:
        """Process the gradient that autograd has accumulated into ``param``."""
        ...


class ParamAndGradBuffer:
    """The buffers and tensors of a homogeneous group of parameters. See the module docstring.

    Args:
        spec: The layout, the dtypes and the depths of the buffer.
        context: The communicators, the lanes and the memory of the engine.
        records: The parameters, in any order.
        codec: The codec of this buffer. Each buffer has a codec object of its own.
        options: The options of the engine, which determine how gradients are scaled.
        broadcast: Initialise the weights with the values of the first rank of the mesh.

    Attributes:
        spec, context: See the arguments.
        records: The parameters before they were sharded, in the layout's order.
        weights: The weights of the parameters.
        grads: The gradients of the parameters; None for frozen parameters.
        is_plain: Whether full and sharded parameters are the same tensors.
        full_params: The parameters that modules compute with.
        sharded_params: The parameters that users see.
        hooks: The hooks that users registered on the parameters.
        gradient_hooks: The hooks of the engine on gradients; None: the engine is not built yet.
        reads: The record of the user's accesses to sharded parameters outside of their unit's
            forward.
    """

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        records: Sequence[ParamRecord],
        codec: ParamCodec,
        options: Options,
        *,
        broadcast: bool = False,
    ) -> None:
        by_name = {record.name: record for record in records}
        self.spec = spec
        self.context = context
        self._options = options
        self._norms_are_dtensors = False
        self.records = [by_name[slot.name] for slot in spec.layout.slots]
        # For DTensors, these are this rank's shards: see [Note: Parameters that are DTensors].
        params = [record.shard for record in self.records]
        self.spreads = [record.spread for record in self.records]
        codec.belongs_to([record.holders[0][0] for record in self.records], self.mesh)
        pending = context.placement.make_pending_step(context.lanes.compute)
        self.weights = make_weights(spec, context, codec, params, pending)
        self.grads = Gradients(spec, context, options, pending) if spec.kind.requires_grad else None
        self.is_plain = codec.is_identity and spec.optim_depth == 0
        self._load_initial_values(params, self.control_group if broadcast else None)
        bound = [self.weights.bind(index, each) for index, each in enumerate(params)]
        self.full_params = list(map(self.as_parameter, range(len(params)), bound))
        self.sharded_params = (
            self.full_params if self.is_plain else [self._sharded(i) for i in range(len(params))]
        )
        names = [record.name for record in self.records]
        for param, full, sharded in zip(params, self.full_params, self.sharded_params, strict=True):
            # Keep attributes that users set on their parameters (tensor parallel, experts, ...).
            marks = codec.marks(param)
            full.__dict__.update(marks)
            sharded.__dict__.update(marks)
            share_attributes(full, sharded)
        self.hooks = ParamHooks(names, [record.param for record in self.records])
        self.reads = ParameterAccess(self.full_params, names, self.hooks)
        self._watch_changes()
        self._make_published()
        for index, sharded in enumerate(self.sharded_params):
            if isinstance(sharded, FlatDTensor):
                sharded.backref = self.reads.backref(index)
        self.gradient_hooks: GradientListener | None = None
        self.weights.belong_to(self)

    @property
    def label(self) -> str:
        """The name of the buffer in messages."""
        return self.spec.label

    @property
    def layout(self) -> Layout:
        """The offsets of the parameters in the buffer."""
        return self.spec.layout

    @property
    def kind(self) -> BufferKind:
        """The properties that all parameters of the buffer share."""
        return self.spec.kind

    @property
    def strategy(self) -> Strategy:
        """The levels of both axes."""
        return self.spec.strategy

    def placement(self, index: int) -> FlatPlacement:
        """Returns the range of parameter ``index`` that this rank's sharded tensor holds."""
        start, stop = self.layout.tensor_range(index, self.spec.optim_depth, self.mesh.coordinate)
        spread = self.spreads[index]
        return FlatPlacement(
            shape=torch.Size(self.layout.slots[index].shape) if spread is None else spread.shape,
            start=start,
            stop=stop,
            mesh=self.mesh.device_mesh if self.spec.optim_depth else self.mesh.alone,
            given_groups=self.split_groups,
            num_sharded_axes=self._num_cut_mesh_axes,
            name=self.records[index].name,
            spread=spread,
            is_written=self.records[index].is_written,
            num_rows=self._num_rows,
            norm_is_dtensor=self._norms_are_dtensors,
            boundary_multiple=self.layout.boundary_multiple(index),
            ranges=self.layout.ranges_of_ranks(index, self.spec.optim_depth),
        )

    def rename(self, index: int, name: str) -> None:
        """Change the name of parameter ``index``."""
        self.records[index].name = name
        if isinstance(sharded := self.sharded_params[index], FlatDTensor):
            sharded.flat_placement.rename(name)

    def give_norms_as_dtensors(self) -> None:
        """Make ``torch.nn.utils.clip_grad_norm_`` return DTensors for these parameters."""
        self._norms_are_dtensors = True
        for sharded in self.sharded_params:
            if isinstance(sharded, FlatDTensor):
                sharded.flat_placement.give_norms_as_dtensors()

    @property
    def mesh(self) -> DataMesh:
        """The ranks that share these parameters."""
        return self.context.mesh_communicators.mesh

    @property
    def control_group(self) -> ProcessGroup | None:
        """The group of all ranks of the mesh; None for one rank."""
        return self.mesh.control_group

    @property
    def split_groups(self) -> tuple[ProcessGroup, ...]:
        """The groups over which main weights are sharded, innermost first."""
        axes = AXIS_BELOW_DEPTH[: self.spec.optim_depth]
        comms = [self.context.mesh_communicators.comms[axis].gather for axis in axes]
        return tuple(comm.group for comm in comms if comm is not None)

    @property
    def _num_rows(self) -> int:
        """Number of inner groups, if the device mesh has one axis and main weights are sharded
        within each inner group; else 1."""
        has_rows = self.mesh.device_mesh.ndim == 1 and self.spec.optim_depth == 1
        return self.mesh.outer.size if has_rows else 1

    @property
    def _num_cut_mesh_axes(self) -> int:
        return min(self.spec.optim_depth, self.mesh.device_mesh.ndim)

    def rebuild(
        self, kind: BufferKind, codec: ParamCodec, resources: Allocation | None = None
    ) -> None:
        """Allocate weights and gradients in other dtypes. Full and sharded parameters stay the same
        objects, and weights keep their values, rounded to the new dtypes. No collective may be in
        flight. Not collective.

        Args:
            kind: The new kind, which differs from the present one only in dtypes.
            codec: A new codec for this buffer.
            resources: The memory and the placement, if the buffer was on the meta device until now
                and has no values. None: those of the present buffer.
        """
        self.spec = replace(self.spec, kind=kind)
        if resources is not None:
            self.context = replace(
                self.context, memory=resources.memory, placement=resources.placement
            )
        weights, pending = self.weights, self.weights.pending
        pending.finish()
        self.weights = make_weights(self.spec, self.context, codec, self.full_params, pending)
        if resources is None:
            self.weights.main.tensor.copy_(weights.main.tensor)
        weights.release()
        weights.unregister()
        self._watch_changes()
        if self.grads is not None:
            divisor = self.grads.divisor
            self.grads.abandon()
            self.grads = Gradients(self.spec, self.context, self._options, pending)
            self.grads.divide_by(divisor)
        for index, full in enumerate(self.full_params):
            bound = self.weights.bind(index, full)
            if bound is not full:
                set_contents(full, self.as_parameter(index, bound))
            if not self.is_plain:
                set_contents(self.sharded_params[index], self._flat(index))
        self._make_published(changed=True)
        if self.gradient_hooks is not None:
            self.gradient_hooks.follow()
        if self.reads.main_grad is not None:
            self.attach_main_grads()

    def follow_requires_grad(self) -> None:
        """Copy ``requires_grad`` of the sharded parameters to the full ones, if it has changed."""
        if self.is_plain or not self.reads.requires_grad_changed:
            return
        self.reads.requires_grad_changed = False
        wanted = requires_grad_of(self.sharded_params)
        if wanted != requires_grad_of(self.full_params):
            for full, requires_grad in zip(self.full_params, wanted, strict=True):
                full.requires_grad_(requires_grad)

    def begin_backward(self, *, reduced: bool) -> None:
        """See :meth:`PublishedGradients.begin_backward`."""
        if self.is_plain:
            self.hooks.adopt(self.sharded_params)
        self.published.begin_backward(reduced=reduced, hooked=self.hooks.hooked)

    def publish_gradients(self, used: Sequence[int], *, reduced: bool) -> None:
        """See :meth:`PublishedGradients.publish`."""
        self.published.publish(used, reduced=reduced)

    def name_of_unreduced(self, params: Collection[int]) -> str | None:
        """Returns the name of a parameter whose ``.grad`` is accumulated and not reduced; None:
        there is none.

        Args:
            params: The ``id`` of each parameter to look at.
        """
        assert self.grads is not None
        if not (self.grads.awaits_last_microbatch or self.hooks.hooked):
            return None
        found = gradients_of(self.sharded_params)
        for index, (param, grad) in enumerate(zip(self.sharded_params, found, strict=True)):
            # Gradients that the user has assigned need no reduction, and neither do zeros.
            if id(param) not in params or grad is None or grad is not self.published.tensor(index):
                continue
            if not self.is_plain or bool(grad.any()):
                return self.records[index].name
        return None

    def run_hooks(self) -> None:
        """Run users' hooks on published gradients, add *earlier* gradients
        ([Note: Gradients between backwards]) to the results, and run users' hooks on parameters.
        See :class:`ParamHooks`."""
        self.hooks.run_on_gradients(self.sharded_params)
        self.published.add_earlier()
        self.hooks.run_on_params(self.sharded_params)

    def attach_main_grads(self) -> None:
        """Provide ``main_grad``. For sharded parameters it is this rank's slice of the accumulated
        gradient (``FlatDTensor.main_grad``). For full parameters it is the full accumulated
        gradient; they have none where gradients are sharded."""
        if self.grads is None:
            return
        self.reads.main_grad = self.published.main_grad
        self.reads.set_main_grad = self.published.set_main_grad
        if self.grads.writes_to_staging:
            return
        tensors = self.grads.give_out()
        # Users may assign main_grad to .grad, so main_grad is the published tensor if there is one.
        if self.is_plain and tensors.optim is None:
            main_grads = tensors.publish(self.sharded_params, self.spec.optim_depth)
        else:
            main_grads = [tensors.accum.full(index) for index in range(len(self.full_params))]
        for param, grad in zip(self.full_params, main_grads, strict=True):
            param.main_grad = grad  # type: ignore[attr-defined]

    def discard_gradients(self, *, zero: bool = False) -> None:
        """Drop all gradients of sharded and full parameters. See
        :meth:`PublishedGradients.discard`."""
        if self.grads is not None:
            self.published.discard(zero=zero)
            clear_gradients(self.full_params)

    @property
    def has_dtensors(self) -> bool:
        """Whether a parameter is a DTensor over mesh dimensions other than the engine's."""
        return any(spread is not None for spread in self.spreads)

    def gradient_to_shard(self) -> Callable[[int, Tensor], Tensor] | None:
        """Returns a function that computes this rank's plain shard of the gradient of a full
        parameter, given its index and the gradient; None: all gradients are plain shards already.
        See :meth:`TensorParallelSpec.shard_of_gradient`."""
        plain = self.weights.codec.gradient()
        if plain is None and not self.has_dtensors:
            return None

        def shard_of(index: int, grad: Tensor) -> Tensor:
            spread = self.spreads[index]
            if spread is not None:
                return spread.shard_of_gradient(grad, self.records[index].name)
            return grad if plain is None else plain(grad)

        return shard_of

    @property
    def main_gradients(self) -> Tensor:
        """This rank's reduced gradients, 1-D, with zeros as padding between parameters."""
        assert self.grads is not None
        grads = self.grads.optim_grads
        assert grads is not None
        return grads

    def counted_gradients(self, num_ranks: int, num_others: int) -> list[tuple[Tensor, int]]:
        """Returns this rank's reduced gradients as 1-D tensors, each with the number of ranks that
        hold its elements. Empty if there are no gradients.

        Args:
            num_ranks: Number of all ranks of the model.
            num_others: ``num_ranks`` divided by the number of data-parallel ranks.
        """
        grads = self.grads.optim_grads if self.grads is not None else None
        if grads is None:
            return []
        # A DTensor is distributed over all ranks of the model. Any other parameter is sharded over
        # the mesh of this buffer only: for each rank of this mesh, `num_others` ranks of the model
        # hold the same shard.
        parts, sharing = self.layout.num_shards, self.mesh.size * num_others
        return [
            (grads[start:stop], num_ranks // (parts * shards) if shards else sharing // parts)
            for start, stop, shards in self._runs
        ]

    @cached_property
    def _runs(self) -> list[tuple[int, int, int]]:
        """Ranges (start, stop, n) of this rank's shard. Mesh dimensions other than the engine's
        divide the DTensors of the range into n shards; n is 0 if its parameters are plain tensors.
        A range may include padding, which is zero."""
        depth, at = self.spec.optim_depth, self.mesh.coordinate
        base, stop = self.layout.range(depth, at)
        if not self.has_dtensors:
            return [(0, stop - base, 0)]
        runs: list[tuple[int, int, int]] = []
        for index, spread in enumerate(self.spreads):
            low, high = self.layout.tensor_range(index, depth, at)
            first = self.layout.slots[index].offset - base
            shards = 0 if spread is None else spread.num_shards
            if low < high:
                if runs and runs[-1][2] == shards:
                    runs[-1] = (runs[-1][0], first + high, shards)
                else:
                    runs.append((first + low, first + high, shards))
        return runs

    def _load_initial_values(
        self, params: Sequence[nn.Parameter], group: ProcessGroup | None
    ) -> None:
        """Copy this rank's shard of the user's values into the main weights. If ``group`` is given,
        its first rank's values are used on all ranks."""
        at = self.mesh.coordinate
        initial_value = self.weights.codec.initial_value
        values: Iterable[Tensor] = (flat_source(initial_value(param)) for param in params)
        if group is not None:
            # One message for the whole buffer, regardless of the number of parameters. The values
            # of the other ranks are not read, since they may be on the meta device.
            main = self.weights.main.tensor
            flat = mem.zeros(self.layout.numel, main.dtype, self.context.memory.device)
            places = [flat[slot.offset : slot.stop] for slot in self.layout.slots]
            if group.rank() == 0:
                for place, value in zip(places, values, strict=True):
                    place.copy_(value)
            broadcast_(flat, group)
            values = places
        for index, source in enumerate(values):
            start, stop = self.layout.tensor_range(index, self.spec.optim_depth, at)
            self.weights.main.local(index, self.spec.optim_depth).copy_(source[start:stop])
        self.weights.main_shard.changed_on_host()

    def _watch_changes(self) -> None:
        self.reads.on_change = self.weights.main_shard.before_change

    def _make_published(self, *, changed: bool = False) -> None:
        if self.grads is None:
            return
        dtypes = self.kind.dtypes
        if changed or dtypes.optim_grad != dtypes.main:
            for sharded in self.sharded_params:
                sharded.grad_dtype = dtypes.optim_grad
        names = [record.name for record in self.records]
        reads = None if self.is_plain else self.reads.gradients
        self.published = PublishedGradients(self.sharded_params, names, self.grads, reads)
        self.reads.on_gradient = self.published.was_set

    def as_parameter(self, index: int, full: Tensor) -> nn.Parameter:
        """Returns ``full`` as parameter ``index`` of modules: wrapped into a DTensor if the user's
        parameter is one."""
        spread = self.spreads[index]
        if spread is not None:
            full = spread.wrap(full.detach())
        elif isinstance(full, nn.Parameter):
            return full
        return nn.Parameter(full, requires_grad=self.kind.requires_grad)

    def _flat(self, index: int) -> FlatDTensor:
        local = self.weights.main.local(index, self.spec.optim_depth)
        watch_slice(local, self.weights.mark_stale)
        return FlatDTensor.from_flat_local(local, self.placement(index))

    def _sharded(self, index: int) -> nn.Parameter:
        return nn.Parameter(self._flat(index), requires_grad=self.kind.requires_grad)
