"""``fully_shard`` over DTensor parameters: with tensor parallelism, as FSDP2 trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import fsdp

from fsdp_engine import fsdp2
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for, whole
from tests.pool import Ranks


def trained(api: Any, sizes: tuple[int, ...], options: dict[str, Any]) -> tuple[list[float], Any]:
    """Losses and norms, and the weights after them."""
    torch.manual_seed(4)
    model: Any = Model(hidden=20)
    names = ("dp", "tp") if len(sizes) == 2 else ("outer", "dp", "tp")
    mesh = mesh_of(sizes, names)
    data = mesh["dp"] if len(sizes) == 2 else mesh["outer", "dp"]
    cut(model, mesh["tp"], sequence=True)
    for block in model.blocks:
        api.fully_shard(block, mesh=data, **options)
    api.fully_shard(model, mesh=data, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = []
    for step in range(2):
        rank = data.get_local_rank(0) if data.ndim == 1 else sum(data.get_coordinate() or ())
        loss = model(tokens_for(step, 0, rank))
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: whole(param) for name, param in model.named_parameters()}


def both(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    (theirs, weights), (ours, found) = (trained(api, sizes, options) for api in (fsdp, fsdp2))
    assert ours == pytest.approx(theirs, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_tensor_parallelism_under_fully_shard(ranks: Ranks) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        ranks.run(both, (2, 2), options)


@pytest.mark.thorough
def test_tensor_parallelism_and_two_axes_under_fully_shard() -> None:
    # Ranks of their own: torch's caches take the dimension "tp" of one mesh for that of another.
    pool = Ranks(8)
    try:
        pool.run(both, (2, 2, 2), {}, world_size=8)
    finally:
        pool.close()


def converted(how: str) -> None:
    """Conversions keep what tensor parallelism has made of parameters."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    torch.manual_seed(4)
    plain = Model(hidden=17)
    with torch.device("meta" if how == "to_empty" else "cpu"):
        torch.manual_seed(4)
        model: Any = Model(hidden=17)
    cut(model, mesh["tp"], sequence=True)
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh["dp"])
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    if how == "to_empty":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                mine.copy_(theirs)
    else:
        if how == "later":
            for each in (plain, model):
                each(tokens_for(0, 0, 0)).backward()
        plain, model = plain.double(), model.double()
        if how == "later":
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert whole(mine.grad).dtype == torch.float64
                torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-4, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.shape == theirs.shape, name
        assert torch.equal(whole(mine), theirs.detach()), name
        spread = mine.flat_placement.spread
        assert spread is not None, name
    loss, expected = model(tokens_for(0, 0, 0)), plain(tokens_for(0, 0, 0))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()  # in addition to the earlier ones
    expected.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["to_empty", "double", "later"])
def test_conversions_keep_tensor_parallelism(ranks: Ranks, how: str) -> None:
    ranks.run(converted, how)
