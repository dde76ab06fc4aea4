"""What the tests of streams share: a receiver that knows nothing but what it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe


def mesh_for(pair: tuple[str, str]) -> Any:
    """Two rows for a pair with an outer axis, where there are four ranks."""
    if dist.is_initialized() and dist.get_world_size() == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return None


def sharded(model: nn.Module, pair: tuple[str, str], **options: Any) -> fe.Engine:
    """Over all ranks; by pair where there are four."""
    mesh = mesh_for(pair)
    if mesh is None:
        return fe.shard(model, strategy=pair[0], **options)
    return fe.shard(model, mesh, strategy=pair[0], outer_strategy=pair[1], **options)


def of_all_ranks(items: Iterable[Any]) -> Iterator[Any]:
    """What all ranks have got, on every rank."""
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
    """Weights elsewhere. They begin as something that no model has.

    Attributes:
        weights: by name.
        num_written: how often each element was written.
    """

    def __init__(self, shapes: dict[str, torch.Size], dtypes: dict[str, torch.dtype]) -> None:
        self.weights = {
            name: torch.full(shape, 113).to(dtypes[name]) for name, shape in shapes.items()
        }
        self.num_written = {name: torch.zeros(shape) for name, shape in shapes.items()}

    @classmethod
    def of(cls, full: dict[str, Tensor]) -> Receiver:
        """For tensors like these."""
        return cls(
            {name: each.shape for name, each in full.items()},
            {name: each.dtype for name, each in full.items()},
        )

    def take(self, items: Iterable[tuple[Any, ...]]) -> int:
        """Items of any form; returns how many elements came."""
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


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same, NaN and signs of zeros included."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return first.contiguous().view(-1).view(torch.uint8).tolist() == (
        second.contiguous().view(-1).view(torch.uint8).tolist()
    )


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


def check_equal(receiver: Receiver, engine: fe.Engine, dtype: torch.dtype | None) -> None:
    """The receiver has what the trainer has, bit for bit."""
    expected = sent_state(engine, dtype)
    assert receiver.weights.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(receiver.weights[name], value), name


def edit(engine: fe.Engine, change: Callable[[Tensor], None]) -> None:
    """Change all weights in place, on all ranks alike."""
    with engine.unsharded(), torch.no_grad():
        for param in engine.model.parameters():
            change(param)
