"""``torch.save`` and ``torch.load`` of states, each rank its own file."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.flat_dtensor import FlatDTensor
from tests import reference
from tests.pool import Ranks, on_ranks
from tests.promises.everywhere import Place, everywhere


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return fe.shard_optimizer(adamw(model))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def after_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@everywhere
def test_states_of_each_rank_resume_a_run(place: Place) -> None:
    alone = make()
    optimizer = adamw(alone)
    for seed in range(3):
        step(alone, optimizer, seed)
    makers: list[Callable[[nn.Module], torch.optim.Optimizer]] = [adamw, sharded_adamw]
    for make_optimizer in makers:
        for assign in (False, True):
            model = make()
            place.shard(model)
            optimizer = make_optimizer(model)
            for seed in range(2):
                step(model, optimizer, seed)
            saved = after_torch_save((model.state_dict(), optimizer.state_dict()))

            model = make()
            place.shard(model)
            optimizer = make_optimizer(model)
            model.load_state_dict(saved[0], assign=assign)
            optimizer.load_state_dict(saved[1])
            step(model, optimizer, 2)
            reference.assert_same_weights(model, alone)


@everywhere
def test_what_was_loaded_can_be_gathered(place: Place) -> None:
    model = make()
    place.shard(model)
    for name, tensor in after_torch_save(model.state_dict()).items():
        assert torch.equal(reference.full(tensor), make().state_dict()[name])


@on_ranks(world_size=4)
def test_what_was_loaded_can_be_gathered_within_rows_of_a_mesh() -> None:
    model = make()
    config = fe.DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads",
        num_distributed_optimizer_instances=2,
    )
    engine = fe.shard(model, config=config)
    assert (engine.mesh.outer.size, engine.mesh.inner.size) == (2, 2)
    for name, tensor in after_torch_save(model.state_dict()).items():
        assert torch.equal(reference.full(tensor), make().state_dict()[name])


def save_to(folder: Path) -> None:
    model = make()
    fe.shard(model)
    torch.save(model.state_dict(), folder / f"{dist.get_rank()}.pt")


def test_a_process_without_groups_loads_slices(ranks: Ranks) -> None:
    whole = make().state_dict()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks.run(save_to, folder, world_size=2)
        parts = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for key, expected in whole.items():
        pieces: list[Tensor] = [part[key] for part in parts]
        first = pieces[0]
        if not isinstance(first, FlatDTensor):
            assert torch.equal(first, expected)
            continue
        values = torch.cat([p.to_local() for p in pieces if isinstance(p, FlatDTensor)])
        assert torch.equal(values.view(expected.shape), expected)
        with pytest.raises(RuntimeError, match=rf"^{key}: expected the process groups of"):
            first.full_tensor()


def saved_by_rank(folder: Path) -> None:
    model = make()
    fe.shard(model)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    torch.save(optimizer.state_dict(), folder / f"{dist.get_rank()}.pt")


def step_with_state_of_two_ranks(folder: Path) -> str:
    model = make()
    fe.shard(model)
    optimizer = adamw(model)
    optimizer.load_state_dict(torch.load(folder / "0.pt", weights_only=True))
    with pytest.raises(ValueError, match="mixes two different slices") as caught:
        step(model, optimizer, 1)
    return str(caught.value)


def test_state_of_other_ranks_is_refused(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as name:
        ranks.run(saved_by_rank, Path(name), world_size=2)
        message = ranks.run(step_with_state_of_two_ranks, Path(name), world_size=1)[0]
    expected = r"elements \[0, 35\) of shape \(7, 5\) over 2 ranks and elements .* over 1 rank "
    assert re.search(expected, message), message


def use_slices_of(folder: Path, num_ranks: int) -> None:
    model = make()
    fe.shard(model)
    weights = model.state_dict()
    path = folder / f"{num_ranks}-{dist.get_rank() % num_ranks}.pt"
    for name, tensor in torch.load(path, weights_only=True).items():
        if not isinstance(tensor, FlatDTensor):
            continue
        uses: list[Callable[[], Any]] = [
            tensor.full_tensor,
            lambda t=tensor, n=name: weights[n].copy_(t),
            lambda t=tensor, n=name: weights[n].lerp_(t, 0.5),
            lambda t=tensor, n=name: torch._foreach_add_([weights[n]], [t]),
        ]
        for use in uses:
            with pytest.raises((RuntimeError, ValueError), match=r"process groups|mixes"):
                use()
    reference.assert_same_weights(model, make())


def save_weights_of(folder: Path) -> None:
    model = make()
    fe.shard(model)
    torch.save(model.state_dict(), folder / f"{dist.get_world_size()}-{dist.get_rank()}.pt")


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1), (2, 4)])
def test_slices_of_other_ranks_are_not_taken(
    ranks: Ranks, tmp_path: Path, saved: int, loaded: int
) -> None:
    ranks.run(save_weights_of, tmp_path, world_size=saved)
    ranks.run(use_slices_of, tmp_path, saved, world_size=loaded)
