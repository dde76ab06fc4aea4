"""``FlatDTensor``: a DTensor whose local tensor is a flat slice.

Shape, dtype and device are those of the full parameter. The local tensor is the 1-D range
``[start, stop)`` of its row-major elements that this rank holds, possibly empty. Worked example: a
parameter of shape (4, 5) starts at offset 50 of its buffer, with shards of 64 elements over two
ranks. Rank 0 holds its elements [0, 14), and rank 1 holds [14, 20).

Optimizers, ``clip_grad_norm_``, ``state_dict``, EMA and ``torch.distributed.checkpoint`` work as on
any tensor. ``functions.py`` lists the supported functions; all others raise ValueError.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim import optimizer as _torch_optimizer
from torch.utils import _foreach_utils
from torch.utils.hooks import RemovableHandle

from fsdp_engine.callers import user_stacklevel
from fsdp_engine.comm.pending_steps import PENDING, finish_pending_steps
from fsdp_engine.flat_dtensor import flat_placement, functions, tensor_parallel_spec
from fsdp_engine.flat_dtensor.flat_placement import Box, FlatPlacement, FlatShard, _on_mesh
from fsdp_engine.flat_dtensor.given_slices import given_out
from fsdp_engine.flat_dtensor.parameter_access import ParameterBackref
from fsdp_engine.flat_dtensor.slices import (
    as_gradient,
    check_gradient,
    once_differentiable,
    refusal,
    unwrap,
)
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec

_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


class FlatDTensor(DTensor):
    """A row-major tensor of which this rank holds one flat slice. See the module docstring.

    The engine's attributes are slots. ``__dict__`` has the attributes that users and codecs set,
    which the full parameter shares.

    Attributes:
        takes_slices: Whether functions use the slice of full plain operands, such as the mask of a
            gradient, which must then be equal on all ranks. Results of elementwise functions
            inherit this.
        is_gradient: Whether functions of sharded tensors have computed this tensor in backward, so
            that it is not reduced. Results of elementwise functions inherit this, unless the slice
            of a full plain operand was used.
        backref: A reference to the engine's buffer. None: the tensor is not an engine's parameter.
    """

    # Slots that copies and pickles contain, besides the placement.
    _COPIED = ("_zeroed_at", "_whole", "_whole_at", "takes_slices", "is_gradient")
    __slots__: tuple[str, ...] = ("_flat", "_aliases", "backref", *_COPIED)

    _flat: FlatPlacement
    _zeroed_at: int | None
    _whole: Tensor | None
    _whole_at: int | None
    takes_slices: bool
    is_gradient: bool
    backref: ParameterBackref | None
    # Tensors over the same memory that ``.data`` and ``.detach()`` have returned.
    _aliases: list[weakref.ref[FlatDTensor]] | None

    # --- plain tensors ---

    @classmethod
    def from_flat_local(
        cls, local: Tensor, placement: FlatPlacement, requires_grad: bool = False
    ) -> FlatDTensor:
        """Returns a FlatDTensor that shares memory and version counter with ``local``.

        Args:
            local: A plain, contiguous tensor of shape ``(placement.stop - placement.start,)``.
            placement: The placement of the slice.
            requires_grad: Whether the result requires grad.

        Raises:
            ValueError: ``local`` has another shape, is not contiguous, or requires grad.
        """
        if local.shape != (placement.numel,) or not local.is_contiguous():
            raise ValueError(
                f"local: expected a contiguous tensor of shape ({placement.numel},); found shape "
                f"{tuple(local.shape)}, strides {local.stride()}"
            )
        if local.requires_grad:
            raise ValueError("local: expected one that does not require grad; found one that does")
        return _with_requires_grad(cls._wrap(local, placement), requires_grad)

    @classmethod
    def _wrap(cls, local: Tensor, flat: FlatPlacement) -> FlatDTensor:
        # DTensor.__init__ is not called: it does nothing and takes twice as long as this function.
        tensor: Any = cls.__new__(cls, local, flat.spec(local.dtype), requires_grad=False)
        tensor._flat = flat
        tensor._zeroed_at = tensor._whole = tensor._whole_at = None
        tensor._aliases = tensor.backref = None
        tensor.takes_slices = tensor.is_gradient = False
        result: FlatDTensor = tensor
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return functions.call(cls, func, args, {} if kwargs is None else kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a sum, cast or alias of gradients, which the autograd engine computes itself."""
        if func not in _AUTOGRAD_FUNCTIONS:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        slices = [each for each in args if isinstance(each, cls)]
        first = slices[0]
        for each in args:
            if isinstance(each, Tensor) and not isinstance(each, cls):
                check_gradient(cls, each, first._flat)
        locals_ = [each._local_tensor if isinstance(each, cls) else each for each in args]
        result = func(*locals_, **(kwargs or {}))
        gradient = first if result is first._local_tensor else cls._wrap(result, first._flat)
        gradient.is_gradient = all(each.is_gradient for each in slices)
        return gradient

    @property
    def flat_placement(self) -> FlatPlacement:
        """The placement of the slice."""
        return self._flat

    @property
    def placements(self) -> tuple[Placement, ...]:
        """``FlatShard()`` or ``Replicate()`` for each mesh axis."""
        return self._flat.placements

    @property
    def local(self) -> Tensor:
        """This rank's slice, of shape ``(stop - start,)``, without a copy."""
        return self._stepped()

    def _stepped(self) -> Tensor:
        """Returns the slice, after compute has waited for pending optimizer steps."""
        if PENDING:
            finish_pending_steps()
        return self._local_tensor

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns this rank's slice without a copy. It is differentiable if this tensor is.

        For a parameter it is a ``GivenSlice``, which may be passed to collectives.

        Raises:
            ValueError: ``grad_placements`` is neither None nor equal to the placements.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise ValueError(
                f"grad_placements: expected {self.placements} or None; found {grad_placements}"
            )
        self._stepped()
        return given_out(self._local_tensor, unwrap(self))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the full tensor, with the same bits on every rank. Collective, differentiable.

        The gradient of this tensor is the mean of the ranks' gradients, as for a parameter in
        forward. Ranks may use the result differently.

        Raises:
            ValueError: ``grad_placements`` is neither None nor all ``Replicate()``.
        """
        if not all(each == Replicate() for each in grad_placements or ()):
            raise ValueError(
                f"grad_placements: expected all Replicate() or None; found {grad_placements}"
            )
        local = self._stepped()
        if torch.is_grad_enabled() and self.requires_grad:
            if self.backref is not None:
                values = self._flat.gather_full(local)
                values_with_graph = self.backref.differentiable(values, self._flat.spread)
                if values_with_graph is not None:
                    return values_with_graph
            result: Tensor = _FullTensor.apply(self)  # type: ignore[no-untyped-call]
            return result
        return self._flat.gather_full(local)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Returns a replicated DTensor of the full tensor, or this tensor for equal placements.

        Raises:
            ValueError: The mesh or the placements are not supported, or an option is set.
        """
        mesh, target = device_mesh or self.device_mesh, tuple(placements or ())
        if mesh == self.device_mesh and not any(options.values()):
            if len(target) == mesh.ndim and all(each == Replicate() for each in target):
                return DTensor.from_local(self.full_tensor(), mesh, target)
            if target == self.placements:
                return self
        raise ValueError(
            f"redistribute: expected all Replicate() on {self.device_mesh}; found {target} on "
            f"{mesh}, {options}. Call .full_tensor() and distribute that"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        flat = self._flat
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"FlatDTensor(shape={tuple(flat.shape)}, elements [{flat.start}, {flat.stop}) here, "
            f"local={self._stepped()}{grad})"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    # --- properties that optimizers read thousands of times per step ---
    # Through __torch_function__ a read would take 1 us. With these properties it takes 0.05 to
    # 0.2 us.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the full tensor."""
        return self._flat.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the elements."""
        return self._local_tensor.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's slice."""
        return self._local_tensor.device

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Always False."""
        return False

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._local_tensor._version

    @property
    def zeroed(self) -> bool:
        """Whether the last modification was ``zero_()`` or ``torch._foreach_zero_``.

        ``optimizer.zero_grad(set_to_none=False)`` calls these. Code that modifies the memory
        without incrementing the version counter has to set this property to False.
        """
        return self._zeroed_at == self._local_tensor._version

    @zeroed.setter
    def zeroed(self, value: bool) -> None:
        self._zeroed_at = self._local_tensor._version if value else None

    @property
    def requires_grad(self) -> bool:
        """Whether this tensor requires grad."""
        with _NoTorchFunction():
            return bool(_get_requires_grad(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, a FlatDTensor of the same slice, or None.

        Raises:
            TypeError: A tensor that is not a FlatDTensor of the same slice is assigned.
        """
        backref = self.backref
        if backref is not None and backref.gradients.in_flight is not None:
            backref.gradients.wait()
        with _NoTorchFunction():
            grad: Tensor | None = _get_grad(self)
            if grad is not None and backref is not None:
                backref.gradients.were_accessed = True
            if type(grad) is DTensor:
                # The autograd engine has summed two gradients.
                grad = self._wrap(grad._local_tensor, self._flat)
                _set_grad(self, grad)
            return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not (
            isinstance(value, FlatDTensor) and self._flat.is_same_on_all_ranks(value._flat)
        ):
            found = f"a {type(value).__name__}"
            if isinstance(value, FlatDTensor):
                found = str(value._flat)
            raise TypeError(
                f"grad: expected None or a FlatDTensor of the slice of this tensor, {self._flat}; "
                f"found {found}"
            )
        with _NoTorchFunction():
            is_new = value is not None or _get_grad(self) is not None
            _set_grad(self, value)
        if is_new and self.backref is not None:
            self.backref.notify_grad_set(value is not None)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def main_grad(self) -> Tensor:
        """This rank's slice of the accumulated gradient of a ``DistributedDataParallel`` parameter.

        Equal to ``.grad`` if that is not None, and zeros if no gradient has been accumulated.

        Raises:
            AttributeError: The tensor is not such a parameter.
        """
        main_grad = self.backref.main_grad if self.backref is not None else None
        if main_grad is None:
            raise AttributeError("main_grad")
        return main_grad

    @main_grad.setter
    def main_grad(self, value: Tensor) -> None:
        """Copy ``value`` into the accumulated gradient, whose memory belongs to a flat buffer.

        Raises:
            ValueError: ``copy_`` does not accept ``value``, for example because of its shape.
            AttributeError: The tensor has no ``main_grad``.
        """
        if self.backref is None or not self.backref.set_main_grad(value):
            raise AttributeError("main_grad: expected a parameter of a DistributedDataParallel")

    @main_grad.deleter
    def main_grad(self) -> None:
        """Remove the attribute until a value is assigned. ``.grad`` does not change."""
        if self.backref is None or not self.backref.delete_main_grad():
            raise AttributeError("main_grad")

    @property
    def whole(self) -> Tensor | None:
        """The full value of a gradient that ``finish_grad_sync(force_all_reduce=True)`` gathered.

        None: the gradient was not gathered.

        Raises:
            RuntimeError: The slice was modified after the gather.
        """
        if self._whole is not None and self._whole_at != self._local_tensor._version:
            raise RuntimeError(
                "main_grad: expected no change since finish_grad_sync(force_all_reduce=True) "
                "gathered it; found one. Read it before the optimizer's step, and use "
                "fsdp_engine.finalize_model_grads to sum it over model-parallel ranks"
            )
        return self._whole

    @whole.setter
    def whole(self, value: Tensor | None) -> None:
        self._whole = value
        self._whole_at = None if value is None else self._local_tensor._version

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """Returns a copy in CPU memory. If ``whole`` is not None, this is a plain copy of it."""
        whole = self.whole
        if whole is not None:
            return whole.detach().cpu().clone(memory_format=memory_format)
        return super().cpu(memory_format=memory_format)

    @property
    def data(self) -> FlatDTensor:
        """This tensor without a graph. Unlike ``data`` of torch, it shares the version counter."""
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy ``value`` into this tensor, whose memory belongs to a flat buffer.

        Tensors that ``.data`` or ``.detach()`` have returned before keep the old values, as in
        torch.

        Raises:
            TypeError: ``value`` has another dtype or device.
            ValueError: ``copy_`` does not accept ``value``, for example because of its shape.
        """
        if value.dtype != self.dtype or value.device != self.device:
            raise TypeError(
                f"data: expected {self.dtype} on {self.device}; found {value.dtype} on "
                f"{value.device}. The memory of a sharded tensor belongs to a flat buffer: convert "
                "the entire model (model.to(dtype)), or set the compute dtype in mp_policy"
            )
        source = value.detach()
        if not (isinstance(source, FlatDTensor) and source._local_tensor is self._local_tensor):
            self._part_from_aliases()
        self.alias().copy_(source)

    def alias(self) -> FlatDTensor:
        """Returns a tensor without a graph, over the same memory until ``.data`` is set."""
        alias = self._wrap(self._local_tensor, self._flat)
        aliases = self._aliases
        if aliases is None:
            aliases = self._aliases = []
        aliases.append(weakref.ref(alias, aliases.remove))
        return alias

    def _part_from_aliases(self) -> None:
        """Give tensors that users hold over the same memory a copy of the current values."""
        shared = self._local_tensor
        held = [alias for ref in self._aliases or () if (alias := ref()) is not None]
        held = [alias for alias in held if alias._local_tensor is shared]
        if held:
            kept = self._stepped().clone()
            for alias in held:
                alias._local_tensor = kept

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register ``hook(gradient)``. A result other than None replaces the gradient.

        For a sharded parameter it runs once per step on the reduced gradient, a FlatDTensor.
        """
        if self.backref is None or not self.requires_grad:
            handle: RemovableHandle = super().register_hook(hook)  # type: ignore[no-untyped-call]
            return handle
        return self.backref.add_hook(hook, on_param=False)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register ``hook(param)``. The hook may run an optimizer's step.

        For a sharded parameter it runs once per step, after the reduction of its gradient.
        """
        if self.backref is None or not self.requires_grad:
            handle: RemovableHandle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            return handle
        return self.backref.add_hook(hook, on_param=True)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: this function is not supported.

        It is a method because torch does not call ``__torch_function__`` for it.

        Raises:
            ValueError: Always.
        """
        raise refusal(type(self), Tensor.set_, (self,), "replaces the memory of a flat buffer")

    # --- copies ---

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDTensor:
        if id(self) in memo:
            result: FlatDTensor = memo[id(self)]
            return result
        if not self.is_leaf:
            raise RuntimeError("deepcopy: expected a leaf; found a FlatDTensor with a graph")
        new = self._wrap(self._stepped().clone(), self._flat)
        memo[id(self)] = _with_requires_grad(new, self.requires_grad)
        _set_attributes(new, copy.deepcopy(self._copied_attributes(), memo))
        new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __copy__(self) -> FlatDTensor:
        rebuild, arguments = self._reduced()
        copied: FlatDTensor = rebuild(*arguments)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        flat = self._flat
        if flat.numel < math.prod(flat.sharded_shape):
            _warn_of_pickle(flat)
        return self._reduced()

    def _copied_attributes(self) -> dict[str, Any]:
        attributes = {name: getattr(self, name) for name in self._COPIED} | vars(self)
        # The full parameter's gradient, which belongs to a flat buffer.
        attributes.pop("main_grad", None)
        return attributes

    def _reduced(self) -> tuple[Callable[..., FlatDTensor], tuple[Any, ...]]:
        state = self._copied_attributes()
        return _rebuild, (type(self), self._stepped(), self._flat, self.requires_grad, state)

    @property
    def __tensor_flatten__(self) -> Any:
        # This hides DTensor's method. With it, torch.compile would rebuild a DTensor with other
        # elements instead of running functions of FlatDTensors eagerly, and module.to() would swap
        # parameters.
        raise AttributeError("__tensor_flatten__")

    # --- torch.distributed.checkpoint ---

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, Box]]:
        shape = self._flat.shape
        boxes = self._flat.boxes
        if not math.prod(shape):
            # A tensor without elements has to be listed in the checkpoint, too.
            boxes = (Box((0,) * len(shape), tuple(shape), 0, 0),)
        return [
            (ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), box)
            for box in boxes
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if not self._flat.is_written:
            return []
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self._flat.shape),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        first = self._flat.start
        for chunk, box in self._chunks():
            if chunk.offsets == index.offset:
                return self._stepped()[box.start - first : box.stop - first].view(box.sizes)
        raise ValueError(f"{index.fqn}: expected a chunk of {self}; found offset {index.offset}")


# Stagers of torch's checkpoints copy the attributes that ``__slots__`` lists, so it lists those of
# the base class, too.
FlatDTensor.__slots__ = (*DTensor.__slots__, *FlatDTensor.__slots__)

_aten = torch.ops.aten
_AUTOGRAD_FUNCTIONS = {
    *(_aten.add.Tensor, _aten.add_.Tensor, _aten._to_copy.default),
    *(_aten.detach.default, _aten.clone.default),
}

_tensor_class: Any = Tensor
_get_grad, _set_grad = _tensor_class.grad.__get__, _tensor_class.grad.__set__
_get_requires_grad = _tensor_class.requires_grad.__get__


def _with_requires_grad(tensor: FlatDTensor, requires_grad: bool) -> FlatDTensor:
    if requires_grad:
        tensor.requires_grad_()
    return tensor


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: FlatDTensor) -> Tensor:
        ctx.cls, ctx.flat = type(tensor), tensor._flat
        ctx.set_materialize_grads(False)
        return tensor._flat.gather_full(tensor._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:  # None on all ranks, for functions without a gradient (norm(p=0))
            return None
        from fsdp_engine.flat_dtensor.full_reductions import mean_over_mesh

        local = ctx.flat.slice_of_full(mean_over_mesh(grad, ctx.flat))
        # The slice is cloned, so that it does not keep the full gradient alive.
        return as_gradient(ctx.cls._wrap(local.clone(), ctx.flat))


_warned_of_pickle = False


def _warn_of_pickle(flat: FlatPlacement) -> None:
    """Warn, once in a process, that a pickle has this rank's slice only."""
    global _warned_of_pickle
    if _warned_of_pickle:
        return
    _warned_of_pickle = True
    warnings.warn(
        f"torch.save of {flat.name or 'a sharded tensor'}, or of optimizer state of it: only this "
        f"rank's elements [{flat.start}, {flat.stop}) of {math.prod(flat.sharded_shape)} are "
        "saved, and only a run with the same ranks and levels can load them. Save full weights "
        "with engine.full_state_dict(rank0_only=True), and checkpoints that any number of ranks "
        "loads with fe.Checkpointer; every rank must call these. This warning is shown once",
        stacklevel=user_stacklevel(),
    )


def _rebuild(
    cls: type[FlatDTensor],
    local: Tensor,
    flat: FlatPlacement,
    requires_grad: bool,
    state: dict[str, Any],
) -> FlatDTensor:
    tensor = _with_requires_grad(cls._wrap(local, flat), requires_grad)
    _set_attributes(tensor, state)
    return tensor


def _set_attributes(tensor: FlatDTensor, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(tensor, name, value)


# Files that were saved before version 0.1.0 refer to two modules by other names.
_BEFORE_0_1 = {"placement": flat_placement, "spread": tensor_parallel_spec}
sys.modules |= {f"fsdp_engine.flat_dtensor.{name}": each for name, each in _BEFORE_0_1.items()}

torch.serialization.add_safe_globals(
    [
        *(FlatDTensor, FlatShard, TensorParallelSpec, _rebuild, _on_mesh),
        (_on_mesh, "fsdp_engine.flat_dtensor.placement._on_mesh"),
        (FlatShard, "fsdp_engine.flat_dtensor.placement.FlatShard"),
        (TensorParallelSpec, "fsdp_engine.flat_dtensor.spread.Spread"),
    ]
)

# torch has DTensor in these lists, so that optimizers and clip_grad_norm_ use foreach functions.
for _types in (_foreach_utils._foreach_supported_types, _torch_optimizer._foreach_supported_types):
    if FlatDTensor not in _types:
        _types.append(FlatDTensor)
