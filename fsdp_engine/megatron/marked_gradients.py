"""All-reduces the gradients of marked parameters over a group, as local slices in a flat buffer.

    | slices to sum ... | slices to average ... | one flag per gradient |

[Note: Equal slices]
Sums over tensor or pipeline ranks are independent of data parallelism: each rank has a slice of a
gradient, and the other ranks of the group must have the same slice of their gradient. No gradient
is gathered, and a rank sends only its own slices. The ranks compare the slices' ranges once, before
the first all-reduce.

A flag is 1 if the rank has the gradient and 0 if ``.grad`` is None. If no rank of the group has a
gradient, ``.grad`` remains None on all ranks; if any rank has one, all ranks get the sum, since
replicas would diverge otherwise. Only a rank with a missing gradient reads the flags, which is a
host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.collectives import all_reduce_, gather_objects
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.memory import allocator


@dataclass(frozen=True)
class MarkedGrad:
    """The gradient of one parameter, to be reduced over a group.

    Attributes:
        name: The name of the parameter.
        places: (buffer, index) of the parameter and of its replicas in other chunks of this rank.
        average: Whether the sum is divided by the size of the group.
    """

    name: str
    places: tuple[tuple[ParamAndGradBuffer, int], ...]
    average: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradient. It is defined even if ``.grad`` is None."""
        return self.places[0][0].kind.dtypes.main_grad

    @property
    def numel(self) -> int:
        """Number of elements of this rank's slice."""
        buffer, index = self.places[0]
        param = buffer.sharded_params[index]
        return (param.local if isinstance(param, FlatDTensor) else param).numel()

    def descriptions(self) -> list[str]:
        """Returns the shape, slice, dtype and reduction of each place, which must be equal on all
        ranks."""
        return [self._describe(buffer, index) for buffer, index in self.places]

    def slices(self) -> list[Tensor]:
        """Returns this rank's slices of the gradients that exist, 1-D."""
        return [_local(grad) for grad in self._grads() if grad is not None]

    def publish(self) -> list[Tensor]:
        """Publish missing gradients, with uninitialized values, and return this rank's slice of
        each place's gradient, 1-D."""
        return [
            _local(buffer.published.publish_one(index) if grad is None else grad)
            for (buffer, index), grad in zip(self.places, self._grads(), strict=True)
        ]

    def _grads(self) -> list[Tensor | None]:
        return [buffer.sharded_params[index].grad for buffer, index in self.places]

    def _describe(self, buffer: ParamAndGradBuffer, index: int) -> str:
        param = buffer.sharded_params[index]
        start, stop = 0, param.numel()
        if isinstance(param, FlatDTensor):
            start, stop = param.flat_placement.start, param.flat_placement.stop
        return (
            f"shape {tuple(param.shape)}, elements [{start}, {stop}), "
            f"{buffer.kind.dtypes.main_grad}, {'average' if self.average else 'sum'}"
        )


def check_equal_over_group(
    what: str, names: Sequence[str], descriptions: Sequence[str], group: ProcessGroup
) -> None:
    """Raise on all ranks of the group unless their ``descriptions`` are the same. Collective.

    Args:
        what: The start of the error message.
        names: The names of the described objects; they may differ between ranks.
        descriptions: The description of each named object.
        group: The ranks whose descriptions are compared.

    Raises:
        ValueError: Descriptions differ. The message contains the first difference between two
            ranks.
    """
    own = list(zip(names, descriptions, strict=True))
    per_rank: list[Any] = gather_objects(own, group)
    for rank, other in enumerate(per_rank):
        for first, second in zip_longest(per_rank[0], other, fillvalue=("nothing", "")):
            if first[1] != second[1]:
                raise ValueError(
                    f"{what}: expected the same, in the same order, on all ranks of the group; "
                    f"found {_format(first)} on its rank 0 and {_format(second)} on its rank {rank}"
                )


def sum_over_group(
    marked: Sequence[MarkedGrad], group: ProcessGroup | None, device: torch.device
) -> None:
    """Sum (or average) gradients over the group and over the replicas of each rank, in place.

    One all-reduce, in fp32, or in fp64 if any gradient is fp64. Collective.

    Args:
        marked: The gradients.
        group: The group. None: this rank only.
        device: The device of the gradients.
    """
    ordered = sorted(marked, key=lambda each: each.average)
    sizes = [each.numel for each in ordered]
    total = sum(sizes)
    wide = any(each.dtype == torch.float64 for each in ordered)
    dtype = torch.float64 if wide else torch.float32
    buffer = allocator.empty(total + len(ordered), dtype, device)
    values, flags = buffer[:total], buffer[total:]
    pieces = values.split(sizes)
    is_any_missing = _pack(ordered, pieces, flags)
    all_reduce_(buffer, group)
    num_averaged = sum(size for size, each in zip(sizes, ordered, strict=True) if each.average)
    if num_averaged and group is not None:
        values[total - num_averaged :].div_(group.size())
    has_grads = flags.tolist() if is_any_missing else [1.0] * len(ordered)
    sources, targets = [], []
    for each, piece, has_grad in zip(ordered, pieces, has_grads, strict=True):
        if has_grad:
            grads = each.publish()
            sources += [piece] * len(grads)
            targets += grads
    _copy(targets, sources)


def _pack(ordered: Sequence[MarkedGrad], pieces: Sequence[Tensor], flags: Tensor) -> bool:
    """Fill the buffer. Returns whether some parameter has no gradient in any of its places."""
    flags.fill_(1.0)
    sources, targets, replicas, absent = [], [], [], []
    for index, (each, piece) in enumerate(zip(ordered, pieces, strict=True)):
        grads = each.slices()
        if grads:
            sources.append(grads[0])
            targets.append(piece)
            replicas += [(piece, grad) for grad in grads[1:]]
        else:
            absent.append(index)
    _copy(targets, sources)
    for piece, grad in replicas:
        piece.add_(grad)
    for index in absent:
        pieces[index].zero_()
        flags[index].zero_()
    return bool(absent)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _local(grad: Tensor) -> Tensor:
    return grad.local if isinstance(grad, FlatDTensor) else grad.view(-1)


def _format(described: tuple[str, str]) -> str:
    name, description = described
    return f"[{name}: {description}]" if description else f"[{name}]"
