"""What ``.grad`` of one buffer's parameters are, made once; and whether users hold them.

Each has a version counter of its own, which counts users' changes only.

A gradient that is cleared by ``.grad = None`` may be held by somebody: its tensor, its slice, a
view of it, or a graph that saved it. Torch and Python count all of that, so it is found by
comparing counts with what they were when nobody but the engine had the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from sys import getrefcount

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.gradients import Gradients
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.devices.memory import alias
from fsdp_engine.flat_dtensor import FlatDTensor, versions_of
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec

_zeroed_at = attrgetter("_zeroed_at")
_NEVER = {None}


class GradientViews:
    """See the module docstring.

    Args:
        gradients: where gradients are.
        params: what users see: sharded parameters, or plain ones where nothing is cut.

    Attributes:
        tensors: one for each parameter.
    """

    def __init__(self, gradients: Gradients, params: Sequence[Tensor]) -> None:
        self._gradients = gradients
        self._locals = _slices(gradients.for_optimizer(), params, gradients.optim_depth)
        self.tensors = [
            like(param, local) for local, param in zip(self._locals, params, strict=True)
        ]
        # A plain tensor does not tell that it was zeroed.
        self._are_plain = not isinstance(params[0], FlatDTensor)
        self._nobody = self._count()

    def versions(self) -> list[int]:
        """The version counter of each."""
        return versions_of(self._locals)

    def local(self, index: int) -> Tensor:
        """This rank's slice of one."""
        return self._locals[index]

    def zeroed(self, found: Sequence[Tensor | None]) -> list[int]:
        """Which of them users have zeroed, and left as ``.grad``, which is ``found``. They are not
        zeroed any more."""
        if self._are_plain or _NEVER.issuperset(map(_zeroed_at, self.tensors)):
            return []
        places = [
            index
            for index, (tensor, grad) in enumerate(zip(self.tensors, found, strict=True))
            if grad is tensor and isinstance(tensor, FlatDTensor) and tensor.zeroed
        ]
        self.forget_zeroed()
        return places

    def forget_zeroed(self) -> None:
        """Count none of them as zeroed: other gradients are about to lie there."""
        if self._are_plain or _NEVER.issuperset(map(_zeroed_at, self.tensors)):
            return
        for tensor in self.tensors:
            if isinstance(tensor, FlatDTensor):
                tensor.zeroed = False

    def are_held(self) -> bool:
        """Whether anybody holds any of them; none of them is ``.grad`` of a parameter now."""
        return self._count() != self._nobody

    def _count(self) -> tuple[int, list[int], list[int]]:
        tensors, slices = map(getrefcount, self.tensors), map(getrefcount, self._locals)
        return self._gradients.num_uses, list(tensors), list(slices)


def like(param: Tensor, local: Tensor) -> Tensor:
    """The tensor over ``local`` that lies as ``param`` does."""
    if isinstance(param, FlatDTensor):
        return FlatDTensor.from_flat_local(local, param.flat_placement)
    return TensorParallelSpec.of(param).wrap(local) if isinstance(param, DTensor) else local


def _slices(main: ShardedBuffer, params: Sequence[Tensor], depth: int) -> list[Tensor]:
    return [
        alias(main.local(index, depth) if isinstance(param, FlatDTensor) else main.full(index))
        for index, param in enumerate(params)
    ]
