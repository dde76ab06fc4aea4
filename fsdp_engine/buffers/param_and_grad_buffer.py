"""Both towers of one homogeneous set of parameters, and the tensors that modules and users see.

*Homogeneous* means: one codec, the same dtypes, all trainable or all frozen, one gradient
divisor. Three kinds of tensor stand for one parameter:

- the **full** parameter, which modules compute with; plain, in the compute dtype;
- the **sharded** parameter, which users, optimizers and checkpoints see outside forward and
  backward: a ``FlatDTensor`` over this rank's slice of the main weights;
- the **gradient** of the sharded parameter, over this rank's slice of the reduced gradients.

Where nothing is cut and main weights are compute weights, full and sharded are one plain tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.gradients import GradTower
from fsdp_engine.buffers.sharded_buffer import Ladder, ShardedBuffer, flat_source
from fsdp_engine.buffers.shown_gradients import ShownGradients
from fsdp_engine.buffers.weights import WeightTower
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices import memory as mem
from fsdp_engine.devices.collectives import broadcast_
from fsdp_engine.devices.lanes import Lanes, Ticket
from fsdp_engine.devices.memory import Memory
from fsdp_engine.devices.mesh import DataMesh
from fsdp_engine.flat_dtensor import (
    FlatDTensor,
    FlatPlacement,
    accumulator_of,
    set_gradients,
)
from fsdp_engine.flat_dtensor.outside_reads import OutsideReads
from fsdp_engine.flat_dtensor.param_hooks import ParamHooks
from fsdp_engine.layout import Layout
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis, Role, Strategy

# Messages of gathers outside the schedule; buffers' own tags start above it.
MAIN_TAG = 1
FIRST_TAG = 16


@dataclass
class ParamRecord:
    """One parameter before it is sharded, with every place that refers to it.

    Attributes:
        name: its first fully qualified name.
        param: the user's parameter.
        sites: (module, attribute) pairs; several for a tied parameter.
        aliases: all its names, the first included.
    """

    name: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BufferKind:
    """What the parameters of one buffer have in common.

    ``codec`` names the encoding; ``extra_divisor`` divides gradients once more than the mean over
    all ranks does (a parameter's attribute ``gradient_divisor``). Experts are shared by ranks of
    their own. ``apart`` names a parameter that has to have a buffer for itself.
    """

    codec: str
    dtypes: ParamDtypes
    requires_grad: bool
    extra_divisor: float = 1.0
    is_expert: bool = False
    apart: str = ""


class ParamAndGradBuffer:
    """See the module docstring.

    Attributes:
        records: the parameters, in the layout's order.
        weights: the weight tower.
        grads: the gradient tower; None for frozen parameters.
        full_params: what modules compute with.
        sharded_params: what users see.
        hooks: that users put on its parameters.
        reads: of its parameters, outside their unit's forward.
    """

    def __init__(
        self,
        label: str,
        records: Sequence[ParamRecord],
        layout: Layout,
        kind: BufferKind,
        codec: ParamCodec,
        strategy: Strategy,
        ladder: Ladder,
        lanes: Lanes,
        memory: Memory,
        config: DistributedDataParallelConfig,
        tag: int,
        *,
        broadcast: bool = False,
    ) -> None:
        by_name = {record.name: record for record in records}
        self.label = label
        self.layout = layout
        self.kind = kind
        self.strategy = strategy
        self.records = [by_name[slot.name] for slot in layout.slots]
        self._ladder = ladder
        self._lanes = lanes
        self._optim_depth = strategy.depth(Role.OPTIM)
        reuses = config.reuse_grad_buf_for_mxfp8_param_ag and codec.num_planes > 1
        self.weights = WeightTower(
            label,
            [record.param for record in self.records],
            layout,
            ladder,
            lanes,
            memory,
            codec,
            kind.dtypes.main,
            kind.dtypes.compute,
            self._optim_depth,
            strategy.depth(Role.PARAM),
            tag,
            self._lend_gradients if reuses else None,
        )
        self.grads: GradTower | None = None
        if kind.requires_grad:
            self.grads = GradTower(
                label,
                layout,
                ladder,
                lanes,
                memory,
                kind.dtypes,
                self._optim_depth,
                strategy.depth(Role.GRAD),
                config,
                kind.extra_divisor,
                tag,
            )
        self.is_plain = codec.is_identity and self._optim_depth == 0
        self._load_initial_values(self.control_group if broadcast else None)
        self.full_params = [
            self.weights.bind(index, record.param) for index, record in enumerate(self.records)
        ]
        self.sharded_params = (
            self.full_params if self.is_plain else [self._sharded(i) for i in range(len(by_name))]
        )
        self._shown: ShownGradients | None = None
        if self.grads is not None:
            self._shown = ShownGradients(
                self.sharded_params,
                [record.name for record in self.records],
                self.grads,
                self._optim_depth,
                is_plain=self.is_plain,
            )
        for record, full, sharded in zip(
            self.records, self.full_params, self.sharded_params, strict=True
        ):
            if kind.requires_grad and kind.dtypes.optim_grad != kind.dtypes.main:
                sharded.grad_dtype = kind.dtypes.optim_grad
            # Marks that users put on their parameters (tensor parallel, experts, ...) stay.
            marks = codec.marks(record.param)
            full.__dict__.update(marks)
            sharded.__dict__.update(marks)
        names = [record.name for record in self.records]
        self.hooks = ParamHooks(names, [record.param for record in self.records])
        self.reads = OutsideReads(self.full_params, names, self.hooks)
        for index, sharded in enumerate(self.sharded_params):
            if isinstance(sharded, FlatDTensor):
                sharded._home = self.reads.home(index)

    def placement(self, index: int) -> FlatPlacement:
        """Which part of parameter ``index`` this rank's sharded tensor holds."""
        start, stop = self.layout.tensor_range(
            index, self._optim_depth, self._ladder.mesh.coordinate
        )
        return FlatPlacement(
            shape=torch.Size(self.layout.slots[index].shape),
            start=start,
            stop=stop,
            mesh=self.mesh.device_mesh if self._optim_depth else self.mesh.alone,
            split_groups=self.split_groups,
            num_cut_axes=self._num_cut_mesh_axes,
            name=self.records[index].name,
        )

    @property
    def shown(self) -> ShownGradients:
        """``.grad`` of the sharded parameters, which must be trainable."""
        assert self._shown is not None
        return self._shown

    @property
    def mesh(self) -> DataMesh:
        """The ranks that share these parameters."""
        return self._ladder.mesh

    @property
    def control_group(self) -> ProcessGroup | None:
        """All of them, as one group; None for one rank."""
        return self._ladder.mesh.control_group

    @property
    def split_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups over which main weights are cut, innermost first."""
        axes = (Axis.INNER, Axis.OUTER)[: self._optim_depth]
        comms = [self._ladder.comms[axis].gather for axis in axes]
        return tuple(comm.group for comm in comms if comm is not None)

    @property
    def _num_cut_mesh_axes(self) -> int:
        return min(self._optim_depth, self._ladder.mesh.device_mesh.ndim)

    def hook_gradients(
        self, on_grad: Callable[[int, Tensor], None], begin: Callable[[], None]
    ) -> None:
        """Call ``on_grad(index, parameter)`` whenever autograd has accumulated a gradient into a
        full parameter, and ``begin()`` before it accumulates into what users hold."""
        # Autograd's hold on a hook is invisible to the garbage collector: a hook that held the
        # buffer, and so the parameter, would keep all of them for ever.
        self._on_grad = on_grad
        listener = weakref.ref(on_grad)

        def listen(index: int) -> Callable[[Tensor], None]:
            def hook(param: Tensor) -> None:
                listening = listener()
                if listening is not None:
                    listening(index, param)

            return hook

        for index, param in enumerate(self.full_params):
            handle = param.register_post_accumulate_grad_hook(listen(index))
            if self.is_plain:
                self.hooks.own[index] = handle.id
        self._begin = begin
        buffer = weakref.ref(self)

        def precede(index: int) -> Callable[[tuple[Tensor | None, ...]], None]:
            def hook(grads: tuple[Tensor | None, ...]) -> None:
                preceding = buffer()
                if preceding is not None and grads[0] is not None:
                    preceding._begin()
                    preceding.shown.make_way(index)

            return hook

        # Autograd would add to `.grad` in place, unscaled.
        self._accumulators = [accumulator_of(param) for param in self.sharded_params]
        for index, node in enumerate(self._accumulators):
            node.register_prehook(precede(index))

    def follow_requires_grad(self) -> None:
        """Freeze and thaw full parameters as the user has the sharded ones since."""
        if self.is_plain:
            return
        for full, sharded in zip(self.full_params, self.sharded_params, strict=True):
            wanted = sharded.requires_grad
            if full.requires_grad is not wanted:
                full.requires_grad_(wanted)

    def begin_backward(self, *, reduced: bool) -> None:
        """See :meth:`ShownGradients.begin_backward`."""
        if self.is_plain:
            self.hooks.adopt(self.sharded_params)
        self.shown.begin_backward(reduced=reduced)

    def publish_gradients(self, used: Sequence[bool], *, reduced: bool) -> None:
        """See :meth:`ShownGradients.publish`."""
        self.shown.publish(used, reduced=reduced)

    def attach_main_grads(self) -> None:
        """Give parameters ``main_grad``, the full gradient that is accumulated, if there is one."""
        if self.grads is None or self.grads.writes_to_staging:
            return
        main = self.grads.main_grads()
        for index, params in enumerate(zip(self.full_params, self.sharded_params, strict=True)):
            for param in params:
                param.main_grad = main.full(index)  # type: ignore[attr-defined]

    def discard_gradients(self) -> None:
        """Forget what was accumulated; ``.grad`` becomes None."""
        if self._shown is not None:
            self._shown.discard()
            set_gradients([(param, None) for param in self.full_params])

    def gather_main(self) -> ShardedBuffer:
        """Full main weights in memory of their own (main's own where nothing is cut); waits.

        Collective: every rank of the mesh must call it.
        """
        main = self.weights.main
        if main.depth == 0:
            return main
        flat = mem.empty(self.layout.numel, main.tensor.dtype, main.tensor.device)
        target = ShardedBuffer(self.layout, main.at, 0, flat)
        ticket: Ticket | None = None
        for depth in range(main.depth - 1, -1, -1):
            source = main.tensor if depth == main.depth - 1 else None
            axis = AXIS_BELOW_DEPTH[depth]
            ticket = self._lanes.gather(axis).submit(
                f"all-gather of main weights of {self.label} over the {axis.value} axis",
                lambda depth=depth, source=source: self._ladder.climb(  # type: ignore[misc]
                    target, depth, source, MAIN_TAG
                ),
                after=[ticket] if ticket else [self._lanes.compute.record()],
                reads=[source if source is not None else target.narrow(depth + 1)],
                writes=[target.narrow(depth)],
            )
        assert ticket is not None
        self._lanes.compute.wait(ticket)
        return target

    def write_main(self, full: ShardedBuffer) -> None:
        """Take this rank's part of full main weights, as :meth:`gather_main` returned them."""
        if full is not self.weights.main:
            self.weights.main.tensor.copy_(full.narrow(self._optim_depth))

    def _lend_gradients(self, dtype: torch.dtype) -> Tensor | None:
        """The gradients' memory, while there are none in it."""
        if self.grads is None or not self.shown.are_cleared:
            return None
        return self.grads.lend(dtype)

    def _load_initial_values(self, group: ProcessGroup | None) -> None:
        """This rank's part of the user's values; those of the first rank of ``group``, if given."""
        at = self._ladder.mesh.coordinate
        initial_value = self.weights.codec.initial_value
        values: Iterable[Tensor] = (
            flat_source(initial_value(record.param)) for record in self.records
        )
        if group is not None:
            # One message for the whole buffer, whatever the number of parameters. The values of
            # the other ranks are not looked at: they may be on the meta device.
            main = self.weights.main.tensor
            flat = mem.zeros(self.layout.numel, main.dtype, main.device)
            places = [flat[slot.offset : slot.stop] for slot in self.layout.slots]
            if group.rank() == 0:
                for place, value in zip(places, values, strict=True):
                    place.copy_(value)
            broadcast_(flat, group)
            values = places
        for index, source in enumerate(values):
            start, stop = self.layout.tensor_range(index, self._optim_depth, at)
            self.weights.main.local(index, self._optim_depth).copy_(source[start:stop])

    def _sharded(self, index: int) -> nn.Parameter:
        local = self.weights.main.local(index, self._optim_depth)
        tensor = FlatDTensor.from_flat_local(local, self.placement(index))
        param = nn.Parameter(tensor, requires_grad=self.kind.requires_grad)
        return param
