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

from fsdp_engine import memory as mem
from fsdp_engine.buffer import Ladder, ShardedBuffer, flat_source
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.collectives import broadcast_
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.flat_dtensor import (
    FlatDTensor,
    FlatPlacement,
    gradients_of,
    set_gradients,
)
from fsdp_engine.grad_tower import GradTower
from fsdp_engine.lanes import Lanes, Ticket
from fsdp_engine.layout import Layout
from fsdp_engine.memory import Memory
from fsdp_engine.mesh import DataMesh
from fsdp_engine.outside_reads import OutsideReads
from fsdp_engine.param_hooks import ParamHooks
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis, Role, Strategy
from fsdp_engine.weight_tower import WeightTower

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
        used: per parameter: a gradient came on this rank since gradients were last cleared.
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
        self.used = [False] * len(self.records)
        self._is_accumulating = False  # what nobody has seen yet
        self._grad_views: list[Tensor] = []
        self._load_initial_values(self.control_group if broadcast else None)
        self.full_params = [
            self.weights.bind(index, record.param) for index, record in enumerate(self.records)
        ]
        self.sharded_params = (
            self.full_params if self.is_plain else [self._sharded(i) for i in range(len(by_name))]
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

    def hook_gradients(self, on_grad: Callable[[int, Tensor], None]) -> None:
        """Call ``on_grad(index, parameter)`` whenever autograd has accumulated a gradient."""
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

    def follow_requires_grad(self) -> None:
        """Freeze and thaw full parameters as the user has the sharded ones since."""
        if self.is_plain:
            return
        for full, sharded in zip(self.full_params, self.sharded_params, strict=True):
            wanted = sharded.requires_grad
            if full.requires_grad is not wanted:
                full.requires_grad_(wanted)

    def stale_gradient(self) -> str | None:
        """Name of a parameter that still holds a reduced gradient; None if all are cleared."""
        for index, grad in enumerate(gradients_of(self.sharded_params)):
            if grad is not None and not self._is_zeroed(index, grad):
                return self.records[index].name
        return None

    def begin_backward(self) -> None:
        """Find out which gradients the user has cleared: those are overwritten, not added to."""
        assert self.grads is not None
        if self.is_plain:
            self.hooks.adopt(self.sharded_params)
        self._is_accumulating = True
        fresh, used = self.grads.fresh, self.used
        for index, grad in enumerate(gradients_of(self.sharded_params)):
            if grad is None:
                fresh[index], used[index] = True, False
                continue
            if self._is_zeroed(index, grad):
                fresh[index], used[index] = True, False
                if isinstance(grad, FlatDTensor):
                    grad.zeroed = False
            if self.is_plain:
                # Autograd would add to it in place, unscaled.
                self.sharded_params[index].grad = None

    def note_used(self) -> None:
        """Before a reduction: which parameters got a gradient in this backward."""
        assert self.grads is not None
        if self.grads.num_touched == len(self.used):
            self.used = [True] * len(self.used)
        else:
            self.used = [a or b for a, b in zip(self.used, self.grads.touched, strict=True)]

    def publish_gradients(self, used: Sequence[bool]) -> None:
        """Make ``.grad`` of the sharded parameters that were used what was accumulated."""
        self._is_accumulating = False
        views, params = self._make_grad_views(), self.sharded_params
        changes: list[tuple[Tensor, Tensor | None]] = []
        for param, grad, view, has_grad in zip(
            params, gradients_of(params), views, used, strict=True
        ):
            if not has_grad:
                if grad is view:  # from an earlier microbatch
                    changes.append((param, None))
            elif grad is not view:
                if grad is not None and not self.is_plain:
                    # Autograd's own: a penalty on the sharded parameter itself, say.
                    view.add_(grad)
                changes.append((param, view))
        set_gradients(changes)

    def attach_main_grads(self) -> None:
        """Give parameters ``main_grad``, the full gradient that is accumulated, if there is one."""
        if self.grads is None or self.grads.writes_to_staging:
            return
        main = self.grads.main_grads()
        for index, params in enumerate(zip(self.full_params, self.sharded_params, strict=True)):
            for param in params:
                param.main_grad = main.full(index)  # type: ignore[attr-defined]

    def publish_gradient(self, index: int) -> Tensor:
        """Make ``.grad`` of one parameter its place among the gradients, which the caller fills.

        For a gradient that came about outside backward; the next backward adds to it.
        """
        assert self.grads is not None
        view = self._make_grad_views()[index]
        self.sharded_params[index].grad = view
        self.used[index], self.grads.fresh[index] = True, False
        return view

    def discard_gradients(self) -> None:
        """Forget what was accumulated; ``.grad`` becomes None."""
        self._is_accumulating = False
        if self.grads is not None:
            self.grads.discard()
            self.used = [False] * len(self.used)
            params = (*self.sharded_params, *self.full_params)
            set_gradients([(param, None) for param in params])

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
        if self.grads is None or self._is_accumulating or self.stale_gradient() is not None:
            return None
        return self.grads.lend(dtype)

    def _is_zeroed(self, index: int, grad: Tensor) -> bool:
        if isinstance(grad, FlatDTensor):
            return grad.zeroed
        return not bool(grad.any())

    def _make_grad_views(self) -> list[Tensor]:
        if not self._grad_views:
            assert self.grads is not None
            main = self.grads.for_optimizer()
            if self.is_plain:
                self._grad_views = [main.full(i) for i in range(len(self.records))]
            else:
                locals_ = (main.local(i, self._optim_depth) for i in range(len(self.records)))
                self._grad_views = [
                    FlatDTensor.from_flat_local(local, param.flat_placement)
                    for local, param in zip(locals_, self.sharded_params, strict=True)
                    if isinstance(param, FlatDTensor)
                ]
        return self._grad_views

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
