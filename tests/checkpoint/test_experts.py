"""Checkpoints of experts have global names and shapes, for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp_engine as fe
from tests.checkpoint.experts import NUM_EXPERTS, WIDTH, Model, built, own_part, stepped
from tests.checkpoint.scene import shared_folder
from tests.pool import Ranks, on_ranks


def by_global_name(engine: fe.Engine, optimizer: Any, rank: int, size: int) -> dict[str, Tensor]:
    """Weights and states of this rank. Experts in one tensor get an entry each."""

    def full(value: Tensor) -> Tensor:
        return (value.full_tensor() if isinstance(value, DTensor) else value).clone()

    found: dict[str, Tensor] = {}
    first = rank * NUM_EXPERTS // size
    for name, param in engine.model.named_parameters():
        values = {"": full(param.detach())}
        if optimizer is not None:
            values |= {key: full(value) for key, value in optimizer.state[param].items()}
        for key, value in values.items():
            if ".experts." in name:
                before, rest = name.split(".experts.")
                number, _, last = rest.partition(".")
                found[f"{before}.experts.{first + int(number)}.{last} {key}"] = value
            elif ".grouped." in name and value.ndim:
                parts = enumerate(value, first)
                found |= {f"{name}[{index}] {key}": part for index, part in parts}
            else:
                found[f"{name} {key}"] = value
    return found


def united(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Values of all ranks by name. If several ranks have a name, its values must be equal."""
    found: dict[str, Tensor] = {}
    for each in by_rank:
        for name, value in each.items():
            assert name not in found or torch.equal(found[name], value), name
        found |= each
    return found


def save(folder: str, size: int, level: str) -> dict[str, Tensor]:
    engine, rank = built(size, level, 1)
    optimizer = stepped(engine, 2)
    fe.save_checkpoint(folder, engine, optimizer)
    return by_global_name(engine, optimizer, rank, size)


def load(folder: str, size: int, level: str, steps: int) -> dict[str, Tensor]:
    engine, rank = built(size, level, 2)
    optimizer = stepped(engine, steps)
    fe.load_checkpoint(folder, engine, optimizer)
    return by_global_name(engine, optimizer, rank, size)


@pytest.mark.parametrize(
    ("saved", "level"),
    [
        (2, "optim_grads_params"),
        pytest.param(4, "optim", marks=pytest.mark.thorough),
        pytest.param(2, "no_shard", marks=pytest.mark.thorough),
        pytest.param(1, "optim_grads", marks=pytest.mark.thorough),
    ],
)
def test_experts_load_on_other_numbers_of_ranks(
    ranks: Ranks, tmp_path: Path, saved: int, level: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = united(ranks.run(save, folder, saved, level))
    assert len({name for name in expected if ".experts." in name}) == 2 * NUM_EXPERTS * 2 * 4
    for size, other, steps in ((4, "optim_grads_params", 1), (2, "no_shard", 0), (1, "optim", 0)):
        found = united(ranks.run(load, folder, size, other, steps))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{saved} to {size}: {name}"
    # One process that has all experts.
    for name, value in ranks.run(load, folder, 1, "optim_grads", 0, world_size=1)[0].items():
        assert torch.equal(value, expected[name]), name


@on_ranks(4)
def test_experts_on_the_meta_device_get_memory_alone_and_then_a_checkpoint() -> None:
    folder = shared_folder()
    fe.save_checkpoint(folder, built(1, "no_shard", 0)[0])
    torch.manual_seed(0)
    whole = Model(NUM_EXPERTS)
    for size, level in ((2, "optim_grads_params"), (4, "optim")):
        engine, rank = built(size, level, 1, on_meta=True, values="empty")
        grouped = engine.full_tensor("blocks.1.grouped.inner.weight")
        assert grouped.shape == (NUM_EXPERTS // size, WIDTH, WIDTH)
        assert grouped.isnan().all()
        fe.load_checkpoint(folder, engine)
        expected = dict(own_part(*each, rank, size) for each in whole.state_dict().items())
        for name, _ in engine.model.named_parameters():
            part = expected[name]
            assert part is not None
            assert torch.equal(engine.full_tensor(name), part), name


def from_meta(size: int) -> dict[str, Tensor]:
    engine, rank = built(size, "optim_grads_params", 7, on_meta=True)
    return by_global_name(engine, None, rank, size)


def test_experts_on_the_meta_device_start_with_values_of_their_own(ranks: Ranks) -> None:
    two, four = (united(ranks.run(from_meta, size)) for size in (2, 4))
    assert two.keys() == four.keys()
    experts = {name: value for name, value in two.items() if "expert" in name or "[" in name}
    for name, value in experts.items():
        assert torch.equal(four[name], value), name
    # All weights are different.
    weights = [value for value in experts.values() if value.ndim == 2]
    sums = {float(value.double().sum()) for value in weights}
    assert len(sums) == len(weights) == 2 * 2 * NUM_EXPERTS


@on_ranks(4)
def test_tensors_of_some_ranks_have_no_place_in_a_checkpoint() -> None:
    folder = shared_folder()
    engine, _ = built(2, "optim", 1)
    with pytest.raises(ValueError, match=r"experts\.[0-3]\.weight.*other ranks hold other experts"):
        fe.export_safetensors(engine, f"{folder}/weights")
    expert: Any = engine.model.get_submodule("blocks.1.experts.0")
    expert.register_buffer("count", torch.zeros(1))
    with pytest.raises(ValueError, match=r"blocks\.1\.experts\.0\.count"):
        fe.save_checkpoint(f"{folder}/checkpoint", engine)


class TensorParallelSpec(nn.Module):
    """A linear shared by all ranks, and experts in one tensor: a DTensor, or marked by
    ``allreduce``."""

    def __init__(self, experts: DeviceMesh, *, as_dtensor: bool) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        whole = torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / WIDTH
        part = whole.chunk(experts.size())[experts.get_local_rank()].clone()
        if as_dtensor:
            part = DTensor.from_local(part, experts, [Shard(0)])
        self.experts = nn.ParameterDict({"weight": nn.Parameter(part)})
        if not as_dtensor:
            self.experts["weight"].allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.experts["weight"]
        part = weight.to_local() if isinstance(weight, DTensor) else weight
        x = self.shared(x)
        return (x + torch.einsum("bi,eij->bj", x, part)).square().mean()


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@on_ranks(4)
def test_experts_as_dtensors_over_data_parallel_ranks(level: str) -> None:
    """Norms and weights equal those of marked experts; each form loads the other's checkpoint."""
    folder = shared_folder()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    runs = []
    for as_dtensor in (False, True):
        torch.manual_seed(3)
        model = TensorParallelSpec(mesh["experts"], as_dtensor=as_dtensor)
        engine = fe.shard(model, strategy=level, expert_mesh=mesh["copies"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        norms = []
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(3, WIDTH)).backward()
            norms.append(float(engine.clip_grad_norm_(0.01)))
            optimizer.step()
            optimizer.zero_grad()
        fe.save_checkpoint(f"{folder}/{as_dtensor}", engine, optimizer)
        runs.append((engine, optimizer, norms))
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-6)
    for (engine, optimizer, _), saved in zip(runs, (True, False), strict=True):
        weight = engine.model.get_parameter("experts.weight")
        before = [weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()]
        with torch.no_grad():
            weight.zero_()
            optimizer.state[weight]["exp_avg"].zero_()
        fe.load_checkpoint(f"{folder}/{saved}", engine, optimizer)
        after = [weight.detach(), optimizer.state[weight]["exp_avg"]]
        for mine, theirs in zip(after, before, strict=True):
            torch.testing.assert_close(local_of(mine), local_of(theirs), rtol=1e-5, atol=1e-6)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
