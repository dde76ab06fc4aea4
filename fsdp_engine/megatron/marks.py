"""Sums of marked parameters' gradients over a group: on local slices, in one flat message.

    | slices to sum ... | slices to average ... | one flag for each |

[Note: Equal slices]
Sums over tensor or pipeline ranks run beside data parallelism: each rank has a slice of a
gradient, and its partners must have the same slice of theirs. So nothing is gathered, and a rank
sends only what it holds. Whether slices are equal is compared once, before the first message.

A flag is 1 where the rank has a gradient and 0 where ``.grad`` is None. If none of a group had
one, it stays None on all; if any had one, all get the sum, or replicas would drift apart. Only a
rank that misses a gradient reads its flags, which waits for the device; the others do not.
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
from fsdp_engine.devices import memory
from fsdp_engine.devices.collectives import all_reduce_, gather_objects
from fsdp_engine.flat_dtensor import FlatDTensor


@dataclass(frozen=True)
class MarkedGrad:
    """The gradient of one parameter that a group shares.

    Attributes:
        name: of the parameter.
        places: (buffer, index) of the parameter, and of its replicas in other chunks of this rank.
        average: divide the sum by the size of the group.
    """

    name: str
    places: tuple[tuple[ParamAndGradBuffer, int], ...]
    average: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gradient, also where there is none."""
        return self.places[0][0].kind.dtypes.main_grad

    @property
    def numel(self) -> int:
        """Elements of this rank's slice."""
        buffer, index = self.places[0]
        param = buffer.sharded_params[index]
        return (param.local if isinstance(param, FlatDTensor) else param).numel()

    def lines(self) -> list[str]:
        """For each place what must be the same on all ranks of the group, without its name."""
        return [self._line(buffer, index) for buffer, index in self.places]

    def slices(self) -> list[Tensor]:
        """This rank's slice of each place's gradient, 1-D, where there is one."""
        return [_local(grad) for grad in self._grads() if grad is not None]

    def publish(self) -> list[Tensor]:
        """This rank's slice of each place's gradient; a place that has none gets one, unfilled."""
        return [
            _local(buffer.published.publish_one(index) if grad is None else grad)
            for (buffer, index), grad in zip(self.places, self._grads(), strict=True)
        ]

    def _grads(self) -> list[Tensor | None]:
        return [buffer.sharded_params[index].grad for buffer, index in self.places]

    def _line(self, buffer: ParamAndGradBuffer, index: int) -> str:
        param = buffer.sharded_params[index]
        start, stop = 0, param.numel()
        if isinstance(param, FlatDTensor):
            start, stop = param.flat_placement.start, param.flat_placement.stop
        return (
            f"shape {tuple(param.shape)}, elements [{start}, {stop}), "
            f"{buffer.kind.dtypes.main_grad}, {'average' if self.average else 'sum'}"
        )


def compare_over(
    what: str, names: Sequence[str], lines: Sequence[str], group: ProcessGroup
) -> None:
    """Raise on all ranks of the group unless their ``lines`` are the same. Collective.

    Args:
        what: begins the error.
        names: of the things that the lines are about; they may differ.
        lines: one for each name.

    Raises:
        ValueError: names the first thing that differs, and what it is on two ranks.
    """
    own = [(name, line) for name, line in zip(names, lines, strict=True)]
    everywhere: list[Any] = gather_objects(own, group)
    for rank, other in enumerate(everywhere):
        for mine, theirs in zip_longest(everywhere[0], other, fillvalue=("nothing", "")):
            if mine[1] != theirs[1]:
                raise ValueError(
                    f"{what}: expected the same, in one order, on all ranks of the group; found "
                    f"{_shown(mine)} on its rank 0 and {_shown(theirs)} on its rank {rank}"
                )


def sum_over(
    marked: Sequence[MarkedGrad], group: ProcessGroup | None, device: torch.device
) -> None:
    """Sum (or average) gradients over the group, and over the replicas of each rank, in place.

    One all-reduce, in fp32, or fp64 if there is such a gradient. None: one rank. Collective.
    """
    ordered = sorted(marked, key=lambda each: each.average)
    sizes = [each.numel for each in ordered]
    total = sum(sizes)
    wide = any(each.dtype == torch.float64 for each in ordered)
    dtype = torch.float64 if wide else torch.float32
    message = memory.empty(total + len(ordered), dtype, device)
    values, flags = message[:total], message[total:]
    pieces = values.split(sizes)
    missing = _pack(ordered, pieces, flags)
    all_reduce_(message, group)
    num_averaged = sum(size for size, each in zip(sizes, ordered, strict=True) if each.average)
    if num_averaged and group is not None:
        values[total - num_averaged :].div_(group.size())
    came = [1.0] * len(ordered)
    if missing:
        came = flags.tolist()
    sources, targets = [], []
    for each, piece, has_grad in zip(ordered, pieces, came, strict=True):
        if has_grad:
            grads = each.publish()
            sources += [piece] * len(grads)
            targets += grads
    _copy(targets, sources)


def _pack(ordered: Sequence[MarkedGrad], pieces: Sequence[Tensor], flags: Tensor) -> bool:
    """Fill the message; returns whether a gradient is missing altogether."""
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


def _shown(named: tuple[str, str]) -> str:
    name, line = named
    return f"[{name}: {line}]" if line else f"[{name}]"
