"""Parameters of tensor classes with FSDP2's all-gather hooks: ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``, e.g. torchao's float8 and int8 mixed-precision training.

The hooks expect that each rank's shard has complete rows, and the same number of them, but slices
in this engine are flat. So main weights are gathered in their own dtype, and the hooks run on the
full parameter, with a mesh that contains only this rank, which they support. At every level and for
any number of ranks, results equal those with a parameter that is not sharded.

    main[OPTIM] --gather--> full --pre hook--> encoded --post hook--> parameter that modules use

A class is supported if its elements define it completely: each of its inner tensors has the shape
and dtype of the parameter, and the same values. Main weights are these values, as a plain tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_engine.codecs.base import ParamCodec, Piece
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.extensions.tensor_hooks import POST, PRE
from fsdp_engine.memory import allocator
from fsdp_engine.precision import ParamDtypes

# Arguments of the pre hook: mesh, outer_size, outer_stride, module, mp_policy; formerly only mesh.
_ALL_ARGUMENTS = 5


def check_hooks(name: str, param: Tensor, *, is_in_dtensor: bool) -> None:
    """Check that the codec supports ``param``.

    Args:
        name: The name of the parameter.
        param: The parameter, or its shard on this rank.
        is_in_dtensor: Whether ``param`` is the shard of a DTensor.

    Raises:
        ValueError: The parameter is not supported; names the parameter.
    """
    kind = type(param).__name__
    missing = [each for each in (PRE, POST) if not hasattr(type(param), each)]
    if missing:
        raise ValueError(f"{name}: expected {PRE} and {POST}; found a {kind} without {missing[0]}")
    if is_in_dtensor:
        raise ValueError(
            f"{name}: expected a plain shard in a DTensor; found a {kind}, whose {POST} would "
            "have to write into the DTensor over it. Leave the module out of tensor parallelism, "
            "or convert it to the tensor class only where it is not parallel"
        )
    count = _num_pre_arguments(param)
    if count not in (1, _ALL_ARGUMENTS):
        raise ValueError(
            f"{name}: expected {PRE}(mesh) or {PRE}(mesh, outer_size, outer_stride, module, "
            f"mp_policy); found {count} parameters of {kind}"
        )
    inner = _inner_tensors(param)
    for attribute, tensor in inner.items():
        if tensor.shape != param.shape or tensor.dtype != param.dtype:
            raise ValueError(
                f"{name}: expected a {kind} whose inner tensors have its shape and dtype "
                f"({tuple(param.shape)}, {param.dtype}), so that optimizers can change its "
                f"elements in flat slices; found {attribute}: {tuple(tensor.shape)}, "
                f"{tensor.dtype}. Use a class that keeps weights in high precision (torchao's "
                "int8_mixed_precision_training or float8 training), dequantise it, or leave it out "
                "of the model's parameters"
            )
    values = list(inner.values())
    if not param.is_meta and any(not torch.equal(values[0], other) for other in values[1:]):
        raise ValueError(
            f"{name}: expected a {kind} whose inner tensors {list(inner)} have one value for each "
            "element, which is what a slice holds; found different ones. Make them parameters of "
            "their own"
        )


def tensor_hooks(
    name: str, param: Tensor, dtypes: ParamDtypes
) -> tuple[str, Callable[[], ParamCodec]] | None:
    """Returns the key and the factory of the codec for parameters whose class has the hooks."""
    kind = type(param)
    return f"hooks of {kind.__module__}.{kind.__qualname__}", lambda: TensorHooksCodec(dtypes)


def with_values(param: Tensor, values: Tensor) -> Tensor:
    """Returns a tensor of the class of ``param``, which may be on the meta device, with plain
    ``values`` of its shape. It shares memory with ``values`` if the class allows it."""
    with torch.no_grad():
        return _wrapped(_empty_like(param, values.dtype, values.device), values)


def marks_of(param: Tensor) -> dict[str, Any]:
    """Returns the attributes that users set on ``param``, without those of its class."""
    own = {"_is_param", *vars(param.detach())}
    return {name: value for name, value in vars(param).items() if name not in own}


def plain_values(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor of any class, as a plain tensor of its shape and dtype."""
    with torch.no_grad():
        plain = allocator.empty(tuple(tensor.shape), tensor.dtype, tensor.device)
        torch.ops.aten.copy_.default(plain, tensor.detach())
    return plain


class TensorHooksCodec(ParamCodec):
    """The codec of one buffer, which runs the hooks after each gather. See the module docstring.

    Args:
        dtypes: The dtypes of the parameters.
    """

    def __init__(self, dtypes: ParamDtypes) -> None:
        self.wire_dtype = dtypes.main
        self._dtypes = dtypes
        self._policy = MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduce)
        self._modules: Sequence[nn.Module] = ()
        self._mesh: DataMesh | None = None
        self._bound: dict[int, _Hooked] = {}  # by id of the parameter that modules use
        self._templates: list[Tensor] = []
        self._takes_all: list[bool] = []  # whether pre hooks take all arguments
        self._is_current = False

    def belongs_to(self, modules: Sequence[nn.Module], mesh: DataMesh) -> None:
        """See :class:`ParamCodec`."""
        self._modules, self._mesh = modules, mesh

    def converted(self, dtypes: ParamDtypes) -> TensorHooksCodec:
        """See :class:`ParamCodec`. The codec is reused when meta tensors are allocated."""
        return self if dtypes == self._dtypes else super().converted(dtypes)  # type: ignore

    def prepare(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        """See :class:`ParamCodec`."""
        if not self._templates:
            self._templates = [
                _empty_like(each, self._dtypes.main, self._device) for each in params
            ]
            self._takes_all = [_num_pre_arguments(each) == _ALL_ARGUMENTS for each in params]

    def initial_value(self, param: Tensor) -> Tensor:
        """See :class:`ParamCodec`."""
        return plain_values(param)

    def marks(self, param: Tensor) -> Mapping[str, Any]:
        """See :class:`ParamCodec`. Omits attributes of the class."""
        return marks_of(param)

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        """See :class:`ParamCodec`. Returns the result of the post hook. The hooks never get meta
        tensors: for a meta parameter the result is on the device of the mesh, and is bound again
        when its full values have memory."""
        hooked = self._bound.get(id(param))
        if hooked is None:
            hooked = _Hooked(self, len(self._bound), full[0], self._device, param.requires_grad)
            self._bound[id(hooked.param)] = hooked
        hooked.full = full[0]
        return hooked.param

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`. Copies main weights without a change."""
        (wire,) = wires
        wire.copy_(main)
        self._is_current = False
        yield from ()

    def gradient(self) -> Callable[[Tensor], Tensor]:
        """See :class:`ParamCodec`. Gradients may have the parameter's class."""
        return lambda grad: grad if type(grad) is Tensor else plain_values(grad)

    def after_gather(self) -> None:
        """See :class:`ParamCodec`. Runs the hooks once for each gather."""
        if not self._is_current:
            for hooked in self._bound.values():
                hooked.run()
            self._is_current = True

    def before_release(self) -> None:
        """See :class:`ParamCodec`. Frees the tensors that the hooks created, too."""
        self._is_current = False
        for hooked in self._bound.values():
            hooked.free()

    @property
    def _device(self) -> torch.device:
        assert self._mesh is not None
        return self._mesh.device

    def pre(self, index: int, values: Tensor) -> tuple[Sequence[Tensor], Any, Tensor]:
        """Returns the result of the pre hook of parameter ``index`` for plain ``values``, and the
        tensor of its class on which it is called."""
        assert self._mesh is not None
        shard: Any = _wrapped(self._templates[index], values)
        arguments: tuple[Any, ...] = (self._mesh.alone,)
        if self._takes_all[index]:
            arguments += (values.shape, values.stride(), self._modules[index], self._policy)
        inputs, metadata = shard.fsdp_pre_all_gather(*arguments)
        return inputs, metadata, shard

    def post(self, shard: Any, outputs: Sequence[Tensor], metadata: Any, out: Any = None) -> Any:
        """Returns the result of the post hook."""
        compute = self._dtypes.compute
        if out is None:
            return shard.fsdp_post_all_gather(tuple(outputs), metadata, compute)
        return shard.fsdp_post_all_gather(tuple(outputs), metadata, compute, out=out)


class _Hooked:
    """One parameter with the inputs and outputs of its hooks, whose memory can be freed.

    Attributes:
        param: The parameter that modules use.
        full: The full main weights, which the pre hook reads.
    """

    def __init__(
        self,
        codec: TensorHooksCodec,
        index: int,
        full: Tensor,
        device: torch.device,
        trains: bool,
    ) -> None:
        self.full = full
        self._codec, self._index = codec, index
        with torch.no_grad():
            zeros = allocator.zeros(tuple(full.shape), full.dtype, device)
            inputs, metadata, shard = codec.pre(index, zeros)
            self._outputs = [allocator.empty(tuple(t.shape), t.dtype, t.device) for t in inputs]
            for output, given in zip(self._outputs, inputs, strict=True):
                output.copy_(given)
            made, inner = codec.post(shard, self._outputs, metadata)
        self.param = nn.Parameter(made.detach(), requires_grad=trains)
        held = {t.untyped_storage()._cdata: t for t in (*self._outputs, *inner)}
        self._held = list(held.values())
        self._sizes = [t.untyped_storage().nbytes() for t in self._held]
        self.free()

    @torch.no_grad()
    def run(self) -> None:
        for tensor, size in zip(self._held, self._sizes, strict=True):
            allocator.resize_foreign(tensor, size)
        inputs, metadata, shard = self._codec.pre(self._index, self.full)
        # Hide writes from autograd: each gather writes the same weights again.
        plain = [each for each in self._held if type(each) is Tensor]
        with torch.autograd._unsafe_preserve_version_counter((*plain, self.param)):
            for output, given in zip(self._outputs, inputs, strict=True):
                output.copy_(given)
            self._codec.post(shard, self._outputs, metadata, self.param)

    def free(self) -> None:
        for tensor in self._held:
            allocator.resize_foreign(tensor, 0)


def _num_pre_arguments(param: Tensor) -> int:
    return len(inspect.signature(getattr(param, PRE)).parameters)


def _inner_tensors(param: Any) -> dict[str, Tensor]:
    """Returns the inner tensors by attribute; empty if the class does not declare them."""
    if not hasattr(param, "__tensor_flatten__"):
        return {}
    attributes, _ = param.__tensor_flatten__()
    return {name: getattr(param, name) for name in attributes}


def _wrapped(template: Any, values: Tensor) -> Tensor:
    """Returns a tensor of the class of ``template`` with plain ``values``. It shares memory with
    ``values`` if the class declares its inner tensors."""
    made = _over(template, values)
    if made is None:
        made = torch.ops.aten.new_zeros.default(template, list(values.shape))
        torch.ops.aten.copy_.default(made, values)
    return made


def _empty_like(param: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of the class of ``param`` without elements."""
    with torch.no_grad():
        shape = (0, *param.shape[1:])
        made = _over(param, allocator.empty(shape, dtype, device))
        if made is None:
            made = torch.ops.aten.new_zeros.default(
                param.detach(), shape, dtype=dtype, device=device
            )
        return made


def _over(template: Any, values: Tensor) -> Tensor | None:
    """Returns a tensor of the class of ``template`` whose inner tensors are ``values``. None if the
    class cannot be constructed from its inner tensors."""
    if not hasattr(template, "__tensor_flatten__"):
        return None
    attributes, context = template.__tensor_flatten__()
    unflatten = type(template).__tensor_unflatten__
    args = dict.fromkeys(attributes, values), context, values.shape, values.stride()
    try:
        inspect.signature(unflatten).bind(*args)
    except TypeError:
        return None  # The signature is not torch's: the class does not support torch.compile.
    made = unflatten(*args)
    return made if isinstance(made, type(template)) else None
