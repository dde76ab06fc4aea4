"""Shared by tests of streams: a receiver that depends only on the items that are sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.reference import rank_and_size
from tests.training import mesh_of


def sharded(model: nn.Module, pair: tuple[str, str], **options: Any) -> fe.Engine:
    """Shard over all ranks. With four ranks, the outer level applies, too."""
    inner, outer = pair
    if rank_and_size()[1] < 4:
        return fe.shard(model, strategy=inner, **options)
    return fe.shard(model, mesh_of(2, 2), strategy=inner, outer_strategy=outer, **options)


def of_all_ranks(items: Iterable[Any]) -> Iterator[Any]:
    """The items of all ranks, gathered on every rank."""
    # As bytes: torch does not pickle tensors of every dtype.
    mine = [
        tuple((x.dtype, x.reshape(-1).view(torch.uint8)) if isinstance(x, Tensor) else x for x in i)
        for i in items
    ]
    found: list[Any] = [mine]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    for each in found:
        for item in each:
            yield tuple(x[1].clone().view(x[0]) if isinstance(x, tuple) else x for x in item)


class Receiver:
    """A receiver's weights, at first with values that no model has, and counts of writes."""

    def __init__(self, like: dict[str, Tensor]) -> None:
        self.weights = {
            name: torch.full(each.shape, 113).to(each.dtype) for name, each in like.items()
        }
        self.num_written = {name: torch.zeros(each.shape) for name, each in like.items()}

    def take(self, items: Iterable[tuple[Any, ...]]) -> int:
        """Write items of any form; returns the number of written elements."""
        count = 0
        for item in items:
            if len(item) == 2:
                name, values = item
                places: Any = slice(None)
                values = values.reshape(-1)
            else:
                name, places, values = item
                assert values.ndim == 1
                if isinstance(places, int):
                    places = slice(places, places + values.numel())
            assert values.dtype == self.weights[name].dtype, name
            self.weights[name].view(-1)[places] = values
            self.num_written[name].view(-1)[places] += 1
            count += values.numel()
        return count

    def once(self) -> None:
        """Every element was written by exactly one rank."""
        for name, count in self.num_written.items():
            assert bool((count == 1).all()), name

    def check(self, expected: dict[str, Tensor], but: Collection[str] = ()) -> None:
        """The receiver has these weights, bit for bit."""
        assert self.weights.keys() == expected.keys()
        for name, value in expected.items():
            assert name in but or same_bits(self.weights[name], value), name


def received(items: Iterable[Any], expected: dict[str, Tensor], but: Collection[str] = ()) -> None:
    """A new receiver of these items has all values, and each element was written once."""
    receiver = Receiver(expected)
    receiver.take(items)
    receiver.once()
    receiver.check(expected, but)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same, NaN and signs of zeros included."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (first, second))
    return torch.equal(one, other)


def sent_state(engine: fe.Engine, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What a receiver must have: a tied weight once, floating-point tensors in ``dtype``, buffers
    of rank 0."""
    state = engine.full_state_dict()
    seen: dict[int, str] = {}
    found = {}
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if seen.setdefault(id(value), name) == name and isinstance(value, Tensor):
            full = state[name]
            found[name] = full.to(dtype) if dtype and full.is_floating_point() else full
    if dist.is_initialized():
        for name, _ in engine.model.named_buffers():
            if name in found:
                box = [found[name]]
                dist.broadcast_object_list(box)
                found[name] = box[0]
    return found


class Link:
    """A stream of a model's weights in a form (whole, pieces or changes), and its receiver."""

    def __init__(
        self, engine: fe.Engine, form: str = "changes", dtype: torch.dtype | None = torch.bfloat16
    ) -> None:
        self.engine, self.form, self.dtype = engine, form, dtype
        self.version = fe.WeightVersion() if form == "changes" else None
        self.stream = fe.weight_stream(engine, dtype, self.version, pieces=form == "pieces")
        self.receiver = Receiver(sent_state(engine, dtype))

    def take(self, items: Iterable[Any] | None = None) -> int:
        """Take items of all ranks, by default the whole stream; returns the number of elements."""
        items = self.stream if items is None else items
        return self.receiver.take(items if self.form == "whole" else of_all_ranks(items))

    def check(self) -> None:
        """The receiver's weights equal the trainer's, bit for bit."""
        self.receiver.check(sent_state(self.engine, self.dtype))


def edit(engine: fe.Engine, change: Callable[[Tensor], None]) -> None:
    """Change all weights in place, on all ranks alike."""
    with engine.unsharded(), torch.no_grad():
        for param in engine.model.parameters():
            change(param)
