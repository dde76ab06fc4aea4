"""``Pieces`` give the results of plain tensors after any sequence of operations."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_engine.checkpoint.pieces import MOST_BOXES, Pieces, flat_parts

Both = tuple[Tensor, Pieces]


def stored(shape: tuple[int, ...], first: int) -> Both:
    count = torch.Size(shape).numel()
    tensor = torch.arange(first, first + count).view(shape)
    return tensor, Pieces.of(tensor, shape, tensor.dtype)


def read(pieces: Pieces, first: int, last: int) -> Tensor:
    """Row-major elements ``first`` to before ``last``, from the stored tensors."""
    found = torch.full((last - first,), -1)
    for box, steps in flat_parts(pieces, first, last):
        source = box.stored.reshape(box.shape)
        for dim, (start, length) in enumerate(zip(box.starts, box.lengths, strict=True)):
            source = source.narrow(dim, start, length)
        own = [dim for dim in box.dims if dim != -1]
        rest = [dim for dim in range(len(box.shape)) if dim not in own]
        source = source.permute(*own, *rest).reshape([box.length(d) for d in range(pieces.ndim)])
        offset = sum(at * step for at, step in zip(box.at, steps, strict=True)) - first
        found.as_strided(source.shape, steps, offset).copy_(source)
    return found


def check(tensor: Tensor, pieces: Pieces) -> None:
    assert pieces.shape == tensor.shape
    assert read(pieces, 0, tensor.numel()).tolist() == tensor.flatten().tolist()
    for _ in range(3):
        first = random.randrange(tensor.numel() + 1)
        last = random.randrange(first, tensor.numel() + 1)
        assert read(pieces, first, last).tolist() == tensor.flatten()[first:last].tolist()


def changed(both: Both, other: Both) -> Both:
    """Apply one random operation to the tensor and to the pieces."""
    tensor, pieces = both
    dim = random.randrange(tensor.ndim) if tensor.ndim else 0
    size = tensor.shape[dim] if tensor.ndim else 1
    kind = random.choice(["transpose", "cut", "join", "narrow", "cat", "stack", "chunk", "permute"])
    if kind == "transpose":
        to = random.randrange(tensor.ndim)
        return tensor.transpose(dim, to), torch.transpose(pieces, dim, to)  # type: ignore[call-overload, no-any-return]
    if kind == "cut":
        rows = random.choice([n for n in range(1, size + 1) if size % n == 0])
        shape = [*tensor.shape[:dim], rows, size // rows, *tensor.shape[dim + 1 :]]
        return tensor.reshape(shape), pieces.view(shape)
    if kind == "join" and dim + 1 < tensor.ndim:
        return tensor.flatten(dim, dim + 1), pieces.flatten(dim, dim + 1)
    if kind == "narrow" and size > 1:
        start = random.randrange(size)
        length = random.randrange(1, size - start + 1)
        return tensor.narrow(dim, start, length), pieces.narrow(dim, start, length)
    if kind == "chunk":
        count = random.randrange(1, 4)
        parts = torch.chunk(pieces, count, dim=dim)  # type: ignore[arg-type]
        index = random.randrange(len(parts))
        return tensor.chunk(count, dim)[index], parts[index]  # type: ignore[return-value]
    if kind == "permute":
        order = random.sample(range(tensor.ndim), tensor.ndim)
        return tensor.permute(order), pieces.permute(*order)
    if kind in ("cat", "stack"):
        function: Any = getattr(torch, kind)
        count = tensor.numel()
        if other[0].numel() >= count:
            more = other[0].flatten()[:count].view(tensor.shape)
            piece = other[1].reshape(-1).narrow(0, 0, count).reshape(tuple(tensor.shape))
            return function([tensor, more], dim=dim), function([pieces, piece], dim=dim)
    return both


def test_chains_of_operations() -> None:
    for seed in range(150):
        random.seed(seed)
        shape = tuple(random.choice([1, 2, 3, 4, 6]) for _ in range(random.randrange(1, 4)))
        both = stored(shape, 0)
        for number in range(random.randrange(1, 7)):
            both = changed(both, stored((12, 12), 10_000 * (number + 1)))
            check(*both)


def test_fused_experts_are_one_box_each() -> None:
    experts = [[stored((4, 3), 100 * e + 20 * k)[1] for k in range(2)] for e in range(5)]
    gates, ups = (torch.stack([expert[k] for expert in experts]) for k in range(2))  # type: ignore[misc]
    fused: Any = torch.cat([gates, ups], dim=1)
    assert fused.shape == (5, 8, 3)
    assert len(fused.boxes) == 10
    # The elements of one expert are those of two stored tensors: its gate and its up weight.
    assert len(list(flat_parts(fused, 24, 48))) == 2


def test_what_is_no_reindexing_is_refused() -> None:
    _, pieces = stored((2, 2), 0)
    with pytest.raises(NotImplementedError, match=r"expected a reindexing .* found torch.exp"):
        torch.exp(pieces)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reshape: expected 4 elements"):
        pieces.reshape(3, 2)
    with pytest.raises(ValueError, match="cat: expected shape"):
        torch.cat([pieces, stored((3, 3), 0)[1]])  # type: ignore[list-item]
    tensor, rows = stored((4, 2), 0)
    check(tensor.narrow(0, -3, 2), rows.narrow(0, -3, 2))
    for start, length in ((3, 2), (-5, 2), (0, -1)):
        with pytest.raises(ValueError, match="narrow: expected a range within dim 0 of size 4"):
            rows.narrow(0, start, length)
    _, wide = stored((2, MOST_BOXES + 1), 0)
    with pytest.raises(ValueError, match=r"at most 65536 boxes; found 65537"):
        wide.t().reshape(-1)
