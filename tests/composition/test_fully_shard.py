"""``fully_shard`` over DTensor parameters, with tensor parallelism, gives the results of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import fsdp

from fsdp_engine import fsdp2
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for
from tests.pool import Ranks, on_ranks
from tests.reference import full


def made(api: Any, sizes: tuple[int, ...], device: str = "cpu", **options: Any) -> Any:
    """A model with seeded values, and the mesh of its data-parallel ranks."""
    torch.manual_seed(4)
    with torch.device(device):
        model: Any = Model(hidden=17)
    mesh = mesh_of(sizes, ("dp", "tp") if len(sizes) == 2 else ("outer", "dp", "tp"))
    data = mesh["dp"] if len(sizes) == 2 else mesh["outer", "dp"]
    cut(model, mesh["tp"], sequence=True)
    for block in model.blocks:
        api.fully_shard(block, mesh=data, **options)
    return api.fully_shard(model, mesh=data, **options), data


def trained(api: Any, sizes: tuple[int, ...], options: dict[str, Any]) -> tuple[list[float], Any]:
    """Losses and norms of two steps, and the weights after them."""
    model, data = made(api, sizes, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = []
    for step in range(2):
        loss = model(tokens_for(step, 0, sum(data.get_coordinate())))
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: full(param) for name, param in model.named_parameters()}


def both(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    (theirs, weights), (ours, found) = (trained(api, sizes, options) for api in (fsdp, fsdp2))
    assert ours == pytest.approx(theirs, rel=1e-5)
    torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_tensor_parallelism_under_fully_shard() -> None:
    for options in ({}, {"reshard_after_forward": False}):
        both((2, 2), options)


@pytest.mark.thorough
def test_tensor_parallelism_and_two_axes_under_fully_shard() -> None:
    # A pool of its own: torch's caches would confuse the "tp" dimensions of two meshes.
    pool = Ranks(8)
    try:
        pool.run(both, (2, 2, 2), {}, world_size=8)
    finally:
        pool.close()


@pytest.mark.parametrize("how", ["to_empty", "double"])
@on_ranks(4)
def test_conversions_keep_tensor_parallelism(how: str) -> None:
    tokens = tokens_for(0, 0, 0)
    model, _ = made(fsdp2, (2, 2), "meta" if how == "to_empty" else "cpu")
    torch.manual_seed(4)
    plain = Model(hidden=17)

    def assert_same_gradients() -> None:
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-4, atol=1e-6)

    if how == "to_empty":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                mine.copy_(theirs)
    else:
        for each in (plain, model):
            each(tokens).backward()
        plain, model = plain.double(), model.double()
        assert_same_gradients()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(mine), theirs.detach()), name
        assert mine.flat_placement.spread is not None, name
    loss, expected = model(tokens), plain(tokens)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()  # for "double", adds to the gradients of the first backward
    expected.backward()
    assert_same_gradients()
